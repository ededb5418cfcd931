"""One measured number, said the same way by every benchmark."""

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence


def result(
    name: str,
    value: float,
    unit: str,
    *,
    peer: str | None = None,
    peer_value: float | None = None,
    higher_is_better: bool = True,
) -> None:
    """Print `RESULT {…}`, one line of JSON.

    `ratio` compares with the peer and is above 1 where ours is better; null without a peer.
    """
    ratio = None
    if peer_value is not None:
        ratio = value / peer_value if higher_is_better else peer_value / value
    line = {
        "name": name,
        "value": _short(value),
        "unit": unit,
        "peer": peer,
        "peer_value": None if peer_value is None else _short(peer_value),
        "ratio": None if ratio is None else _short(ratio),
    }
    print("RESULT " + json.dumps(line), flush=True)


def seconds(action: Callable[[], object]) -> float:
    """Wall time of one call, seconds."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def alternate(
    ours: Callable[[int], object], peer: Callable[[int], object], *, pairs: int = 3
) -> tuple[float, float]:
    """Median seconds of ours and of the peer, taken in turns so that neighbours' load hits both.

    Each is called with the number of the pair. The order swaps from pair to pair; a pair −1 before
    the first is not counted.
    """
    times: tuple[list[float], list[float]] = ([], [])
    contestants: Sequence[tuple[list[float], Callable[[int], object]]] = (
        (times[0], ours),
        (times[1], peer),
    )
    for pair in range(-1, pairs):
        for kept, action in contestants if pair % 2 else tuple(reversed(contestants)):
            taken = seconds(lambda action=action, pair=pair: action(pair))
            if pair >= 0:
                kept.append(taken)
    return statistics.median(times[0]), statistics.median(times[1])


def together(
    contestants: Mapping[str, Callable[[], object]], *, rounds: int = 3
) -> dict[str, float]:
    """Median CPU seconds of this process for each, all taken in turns; the first round is not
    counted, and the order turns round every time.

    For work of one thread that waits for nothing this is its wall time on a machine of its own:
    short steps could not be told apart by wall time where other work is interspersed.
    """
    times: dict[str, list[float]] = {name: [] for name in contestants}
    forward = list(contestants)
    for number in range(rounds + 1):
        for name in forward if number % 2 else forward[::-1]:
            started = time.process_time()
            contestants[name]()
            if number:
                times[name].append(time.process_time() - started)
    return {name: statistics.median(kept) for name, kept in times.items()}


def _short(value: float) -> float:
    return float(f"{value:.4g}")
