"""What the store carries: rollouts per second through HTTP, and what its single verbs take.

    python bench/store.py [throughput enqueue claim completion growth] [--agents 32 100 300 1000]
                          [--seconds 15] [--peer PYTHON]

Throughput: simulated agents (`store_load.py`) in two processes, the store with its file and its
HTTP server in a third. The ideal is agents ÷ mean busy time: a store that costs nothing. The peer,
Agent Lightning's in-memory store behind its own server and client, has the same load; PYTHON is an
interpreter that has it. The rest runs inside this process. Some five minutes with the peer.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table

import store_micro
from results import result
from store_load import MEAN_BUSY_S, WARM_UP_S, Crowd

HERE = Path(__file__).resolve().parent
PARTS = ("enqueue", "claim", "completion", "growth", "throughput")
PROCESSES = 2
PEER = "agentlightning 0.3.0, in memory"
_ANSWER_S = 300.0


@dataclass(frozen=True, slots=True)
class Measured:
    """One store under the load of so many agents."""

    rollouts_per_s: float
    ideal_per_s: float
    server_ms: float
    """CPU of the server per rollout."""
    client_ms: float
    """CPU of the agents' processes per rollout, the agents' own included."""

    @property
    def share(self) -> float:
        """Of the ideal."""
        return self.rollouts_per_s / self.ideal_per_s


class Process:
    """A process of the benchmark, which says and is told lines."""

    def __init__(self, python: str, script: str, what: str, argument: str, errors: IO[str]) -> None:
        self._errors = errors
        self._child = subprocess.Popen(
            [python, str(HERE / script), what, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )

    def facts(self) -> dict[str, Any]:
        """The next line of JSON among all that it prints."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith('{"'):
                return json.loads(line)
        self._errors.seek(0)
        raise SystemExit(f"{self._child.args} ended:\n{self._errors.read()[-3000:]}")

    def tell(self) -> None:
        """Go on."""
        assert self._child.stdin is not None
        self._child.stdin.write("\n")
        self._child.stdin.flush()

    def end(self) -> None:
        """Close its input, and wait."""
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(20)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


@contextmanager
def _process(python: str, script: str, what: str, argument: str) -> Iterator[Process]:
    with tempfile.TemporaryFile("w+") as errors:
        process = Process(python, script, what, argument, errors)
        try:
            yield process
        finally:
            process.end()


def throughput(python: str, script: str, agents: int, seconds: float) -> Measured:
    """A store under the load of so many agents."""
    queued = int(1.3 * agents / MEAN_BUSY_S * (WARM_UP_S + seconds)) + 4 * agents
    share = agents // PROCESSES
    with _process(python, script, "serve", str(queued)) as server:
        at = server.facts()
        crowds = [
            Crowd(at["url"], at["key"], first=share * place, agents=share, seconds=seconds)
            for place in range(PROCESSES)
        ]
        with (
            _process(python, script, "agents", json.dumps(asdict(crowds[0]))) as one,
            _process(python, script, "agents", json.dumps(asdict(crowds[1]))) as other,
        ):
            for client in (one, other):
                client.facts()
            for client in (one, other):
                client.tell()
            said = [client.facts() for client in (one, other)]
        server.tell()
        kept = server.facts()
    done, rounds = (sum(part[name] for part in said) for name in ("finished", "rounds"))
    if kept["succeeded"] < done or kept["spans"] < rounds:
        raise SystemExit(f"{script} lost something: {done} rollouts, {rounds} spans, kept {kept}")
    counted = sum(part["counted"] for part in said)
    return Measured(
        rollouts_per_s=sum(part["counted"] / part["seconds"] for part in said),
        ideal_per_s=agents * done / sum(part["slept_s"] for part in said),
        server_ms=1e3 * kept["cpu_s"] / done,
        client_ms=1e3 * sum(part["cpu_s"] for part in said) / counted,
    )


def _throughputs(options: argparse.Namespace, console: Console) -> None:
    measured: list[tuple[int, Measured, Measured | None]] = []
    for agents in options.agents:
        ours = throughput(sys.executable, "store_fulmen.py", agents, options.seconds)
        console.print(f"{agents} agents: {_said(ours)}")
        peer = None
        if options.peer:
            peer = throughput(options.peer, "store_agentlightning.py", agents, options.seconds)
            console.print(f"{agents} agents, {PEER}: {_said(peer)}")
        measured.append((agents, ours, peer))
    table = Table(
        "agents", "rollouts/s", "of the ideal", "peer, rollouts/s", "of the ideal", "ratio"
    )
    for agents, ours, peer in measured:
        result(
            f"store.rollouts_per_s.a{agents}",
            ours.rollouts_per_s,
            "rollouts/s",
            peer=PEER if peer else None,
            peer_value=peer.rollouts_per_s if peer else None,
        )
        result(f"store.share_of_ideal.a{agents}", ours.share, "")
        row = [str(agents), f"{ours.rollouts_per_s:.1f}", f"{ours.share:.2f}"]
        if peer:
            result(f"peer.rollouts_per_s.a{agents}", peer.rollouts_per_s, "rollouts/s")
            ratio = ours.rollouts_per_s / peer.rollouts_per_s
            row += [f"{peer.rollouts_per_s:.1f}", f"{peer.share:.2f}", f"{ratio:.1f}"]
        table.add_row(*row)
    console.print(table)


def _said(one: Measured) -> str:
    return (
        f"{one.rollouts_per_s:.1f} rollouts/s, {one.share:.2f} of the ideal; CPU of a rollout "
        f"{one.server_ms:.2f} ms in the server, {one.client_ms:.2f} ms in the agents' processes"
    )


def _growth() -> None:
    """A script of its own, because it measures its own memory."""
    subprocess.run([sys.executable, str(HERE / "store_growth.py")], check=True)


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What the store carries.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; all")
    parser.add_argument("--agents", nargs="+", type=int, default=[32, 100, 300, 1000])
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that has agentlightning")
    parser.add_argument("--seconds", type=float, default=15.0, help="measured, for each number")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"no part: {', '.join(sorted(unknown))} (there are {', '.join(PARTS)})")
    if any(number < PROCESSES for number in options.agents):
        parser.error(f"there are {PROCESSES} processes of agents, so at least {PROCESSES} agents")
    options.parts = options.parts or PARTS
    return options


def main(arguments: Sequence[str]) -> None:
    """Measure the parts that are asked for."""
    options, console = _options(arguments), Console()
    if "enqueue" in options.parts:
        taken = asyncio.run(store_micro.enqueue_s(console.print))
        result("store.enqueue_100k_s", taken, "s")
    if "claim" in options.parts:
        p99 = asyncio.run(store_micro.claim_p99_ms(console.print))
        result("store.claim_ms.p99", p99, "ms")
    if "completion" in options.parts:
        p99 = asyncio.run(store_micro.completion_p99_ms(console.print))
        result("store.completion_ms.p99", p99, "ms")
    if "growth" in options.parts:
        _growth()
    if "throughput" in options.parts:
        _throughputs(options, console)


if __name__ == "__main__":
    main(sys.argv[1:])
