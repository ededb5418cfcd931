"""How much memory a run takes, all its processes together; and what of it stays to the end."""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

import psutil


@contextmanager
def settled() -> Iterator[None]:
    """The garbage collector leaves alone what is there now, as long as the context is open.

    PyTorch and transformers are half a million objects that stay for good. To look through them
    again takes a quarter of a second each time, in which no thread of the process goes on.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


class PeakMemory:
    """`with PeakMemory() as peak:` watches this process and its descendants from a thread.

    Proportional set size: a page shared by n processes counts 1/n for each, so that the sum is
    what the machine really gives. Short peaks between two looks can be missed.
    """

    def __init__(self, every_s: float = 2.0) -> None:
        self.mb = 0.0
        """Highest sum seen so far, MiB."""
        self._every_s = every_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="peak-memory", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        while True:
            self.mb = max(self.mb, _tree_mb())
            if self._stop.wait(self._every_s):
                return


def _tree_mb() -> float:
    own = psutil.Process()
    total = 0.0
    for process in [own, *own.children(recursive=True)]:
        total += _pss_mb(process.pid)
    return total


def _pss_mb(pid: int) -> float:
    """Proportional set size, MiB; 0 if the process has ended, resident size off Linux."""
    try:
        with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
            for line in file:
                if line.startswith("Pss:"):
                    return int(line.split()[1]) / 1024
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        try:
            return psutil.Process(pid).memory_info().rss / 2**20
        except psutil.Error:
            return 0.0
    return 0.0
