"""Seconds of training to a held-out reward, beside TRL's `GRPOTrainer`: `make bench-trl`.

Calc-mini twice: the same base model, tasks in the same order, calculator, groups, samples a step,
loss, learning rate and schedule. Fulmen trains as `make demo` does, but the agent is the example's
over the standard library's HTTP, unwatched: programs in worker processes that call the gateway. TRL
has the tool in its own loop, in the trainer's process, and generates with `transformers` there.
Rollouts are the same token for token: prompts, tool calls as read, and what the tool says
(`training_trl.py` tells what differs).

TRL runs twice: `trl` in an environment in which nothing is set, as a user has it who installed it,
and `trl_tuned` with what Fulmen sets for itself about memory and waiting, on one thread or two,
whichever was faster in a few steps.

What is counted: wall time from the start of the first step to the end of the step whose checkpoint
is the first to reach the target, checkpoints included. What is not: imports, loading, starting
workers, and evaluation, which is `fulmen eval`, greedy, on all 256 held-out tasks, for every
checkpoint of either that is not hopeless. It happens while TRL waits, and after Fulmen's run has
ended.

    python bench/training.py PYTHON [--seeds 3] [--target 0.77] [--cap 3600]

PYTHON is the interpreter of an environment that has TRL. With `--crowded` a few steps of all three
are timed instead, while as many other programs as there are cores compute beside them: what a user
sees whose machine has more to do.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fulmen.trainer.tasks import read_tasks, task_order
from results import result
from training_runs import EXAMPLE, RECIPE, Plan, Run, as_installed, fulmen, trl, tuned

PROBE_STEPS = 6
CROWDED_STEPS = 10
"""Of each; the first is not counted."""
PEERS = {"trl": "as installed", "trl_tuned": "with Fulmen's settings of memory and threads"}


def make_plan(options: argparse.Namespace, seed: int, folder: Path) -> Plan:
    """Everything of one seed in a folder of its own."""
    folder.mkdir()
    tasks = read_tasks(str(RECIPE["tasks"]))
    order = task_order(tasks, seed)
    return Plan(
        folder=folder,
        tasks=[next(order) for _ in tasks],
        steps=options.steps,
        every=options.every,
        seed=seed,
        target=options.target,
        cap_s=options.cap,
        val=EXAMPLE / "val.jsonl",
    )


def faster_threads(options: argparse.Namespace, folder: Path) -> int:
    """1 or 2, whichever makes TRL's steps shorter under Fulmen's settings."""
    plan = make_plan(options, 0, folder / "threads")
    taken = {
        threads: trl(plan, f"{threads}", options.python, tuned(threads), PROBE_STEPS).step_s()
        for threads in (1, 2)
    }
    print(f"trl_tuned: {taken[1]:.2f} s a step with one thread, {taken[2]:.2f} s with two")
    return min(taken, key=lambda threads: taken[threads])


def tell(run: Run, seed: int, target: float) -> None:
    """A line about a run that has ended."""
    there = run.reached(target)
    when = "not reached" if there is None else f"{there:.1f} s"
    curve = ", ".join(f"{step}: {success:.3f}" for step, success in run.held_out.items())
    last = run.steps[-1]
    print(
        f"{run.name}, seed {seed}: {target} after {when}; "
        f"{last.step} steps in {last.seconds:.0f} s, {run.step_s():.2f} s each; held out {curve}"
    )


def middle(runs: Sequence[Run], figure: Callable[[Run], float]) -> float:
    """Median over seeds."""
    return statistics.median(figure(run) for run in runs)


def report(ours: Sequence[Run], peers: Sequence[Run], name: str, who: str, target: float) -> None:
    """The figures of one comparison."""
    late = sum(run.reached(target) is None for run in peers)
    if late:
        who += f"; {late} of {len(peers)} runs did not get there and count as long as they took"

    def to_reward(run: Run) -> float:
        return run.reached(target) or run.steps[-1].seconds

    for figure, unit, of, higher in (
        ("seconds_to_reward", "s", to_reward, False),
        ("seconds_per_step", "s", Run.step_s, False),
        ("sample_tokens_per_s", "tok/s", Run.sample_rate, True),
        ("train_tokens_per_s", "tok/s", Run.learn_rate, True),
    ):
        result(
            f"{name}.{figure}",
            middle(ours, of),
            unit,
            peer=who,
            peer_value=middle(peers, of),
            higher_is_better=higher,
        )


@contextmanager
def busy(programs: int) -> Iterator[None]:
    """So many programs compute beside what runs in the context, each in a session of its own."""
    line = [sys.executable, "-c", "while True: pass"]
    beside = [subprocess.Popen(line, start_new_session=True) for _ in range(programs)]
    try:
        yield
    finally:
        for program in beside:
            program.kill()
            program.wait()


def crowded(options: argparse.Namespace, folder: Path) -> None:
    """Seconds a step of all three on a machine that has more to do."""
    plan = make_plan(options, 0, folder / "crowded")
    with busy(os.cpu_count() or 1):
        ours = fulmen(plan, steps=CROWDED_STEPS)
        for name, environment in (("trl", as_installed()), ("trl_tuned", tuned(1))):
            theirs = trl(plan, name, options.python, environment, CROWDED_STEPS)
            result(
                f"{name}.seconds_per_crowded_step",
                ours.step_s(),
                "s",
                peer=f"{version(options.python)}, {PEERS[name]}",
                peer_value=theirs.step_s(),
                higher_is_better=False,
            )


def version(python: str) -> str:
    """TRL's, as the figures name it."""
    script = "import importlib.metadata as m; print(m.version('trl'))"
    found = subprocess.check_output([python, "-c", script], text=True).strip()
    return f"TRL {found} GRPOTrainer"


def compare(options: argparse.Namespace, folder: Path) -> None:
    """All seeds, in turns; then the figures."""
    threads = faster_threads(options, folder)
    environments = {"trl": as_installed(), "trl_tuned": tuned(threads)}
    runs: dict[str, list[Run]] = {"fulmen": [], **{name: [] for name in PEERS}}
    for seed in range(options.seeds):
        plan = make_plan(options, seed, folder / f"seed{seed}")
        runs["fulmen"].append(fulmen(plan))
        tell(runs["fulmen"][-1], seed, options.target)
        for name, environment in environments.items():
            runs[name].append(trl(plan, name, options.python, environment))
            tell(runs[name][-1], seed, options.target)
    if any(run.reached(options.target) is None for run in runs["fulmen"]):
        raise SystemExit(f"a run of Fulmen did not reach {options.target}: nothing to compare")
    for name, how in PEERS.items():
        who = f"{version(options.python)}, {how}"
        report(runs["fulmen"], runs[name], name, who, options.target)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train Calc-mini with Fulmen and with TRL.")
    parser.add_argument("python", help="interpreter of an environment with TRL")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each")
    parser.add_argument("--target", type=float, default=0.77, help="held-out greedy success")
    parser.add_argument("--steps", type=int, default=RECIPE["steps"], help="of the schedule")
    parser.add_argument("--every", type=int, default=5, help="steps between checkpoints")
    parser.add_argument("--cap", type=float, default=3600.0, help="seconds of a run")
    parser.add_argument("--keep", type=Path, help="folder for the runs; default: not kept")
    parser.add_argument("--crowded", action="store_true", help="time steps on a busy machine")
    options = parser.parse_args()
    run = crowded if options.crowded else compare
    if options.keep is not None:
        options.keep.mkdir(parents=True)
        run(options, options.keep)
        return
    with tempfile.TemporaryDirectory() as folder:
        run(options, Path(folder))


if __name__ == "__main__":
    main()
