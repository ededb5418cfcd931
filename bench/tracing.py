"""What watching costs: wall time of a rollout with and without tracing.

A calculator agent of each framework that trains in this repository: two calls and a tool in
between, one rollout after another, in a real worker process on a real store and gateway. The
scripted policy answers after 300 ms, as a small model would, and then at once, which no model
does. Medians of pairs, traced and untraced in turns:

    PYTHONPATH=tests python bench/tracing.py
"""

import asyncio
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from frameworks.rollouts import Rig, rig, rollout
from frameworks.run import python_of
from results import result

BASE = Path(__file__).resolve().parents[1] / "examples" / "calc" / "base"
AGENTS = {  # by the name of the environment that each runs in
    "langgraph": "langgraph_agent.py:solve",
    "openai-agents": "openai_agents_agent.py:solve",
    "autogen": "autogen_agent.py:solve",
}
SETTINGS = {"": (0.3, 5), ".no-latency": (0.0, 20)}
"""By the end of the figure's name: seconds before an answer, rollouts in a measurement."""
PAIRS = 9


async def measure(working: Rig, name: str, delay_s: float, count: int) -> float:
    """Seconds of one rollout."""
    working.engine.delay_s = delay_s
    rollouts = [rollout(f"{name}-{number}", f"{number + 11}*7") for number in range(count)]
    begun = time.perf_counter()
    done = await working.run(rollouts)
    taken = time.perf_counter() - begun
    for each in done:
        assert each.outcome.failure is None, each.outcome
        assert len(each.calls) == 2
    return taken / count


async def compare(framework: str, tokenizer: Any, folder: Path) -> None:
    """Print the figures of one framework."""
    async with AsyncExitStack() as stack:
        rigs = []
        for name, hint in (("traced", print), ("untraced", None)):
            (folder / name).mkdir()
            agent = AGENTS[framework]
            python = python_of(framework)
            one = rig(folder / name, agent, tokenizer, workers=1, python=python, trace=hint)
            rigs.append(await stack.enter_async_context(one))
        for ending, (delay_s, count) in SETTINGS.items():
            times: tuple[list[float], list[float]] = ([], [])
            for pair in range(-1, PAIRS):  # the first one warms up
                for which in (0, 1) if pair % 2 else (1, 0):
                    taken = await measure(rigs[which], f"{ending}{pair}", delay_s, count)
                    if pair >= 0:
                        times[which].append(taken)
            report(framework + ending, *times)


def report(name: str, traced: list[float], untraced: list[float]) -> None:
    """Print what it takes, and what part of it is tracing."""
    middle = statistics.median(traced), statistics.median(untraced)
    result(
        f"tracing.rollout.{name}",
        1000 * middle[0],
        "ms",
        peer="without tracing",
        peer_value=1000 * middle[1],
        higher_is_better=False,
    )
    ratios = [ours / theirs for ours, theirs in zip(traced, untraced, strict=True)]
    result(f"tracing.overhead.{name}", 100 * (statistics.median(ratios) - 1), "%")


def main(frameworks: list[str]) -> None:
    """Measure the frameworks named, or all."""
    tokenizer = AutoTokenizer.from_pretrained(BASE)
    for framework in frameworks or AGENTS:
        with tempfile.TemporaryDirectory() as folder:
            asyncio.run(compare(framework, tokenizer, Path(folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
