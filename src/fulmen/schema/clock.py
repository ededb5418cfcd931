"""A clock that never jumps."""

import time

_BEGAN = time.time() - time.monotonic()


def steady_time() -> float:
    """Unix time, seconds, as it was when the process began, carried on by a clock that never jumps.

    What ends at a time must end so many seconds later, whatever is done to the system's clock.
    """
    return _BEGAN + time.monotonic()
