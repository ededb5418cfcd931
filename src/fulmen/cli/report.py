"""The end of a run: what it came to, and what to do with it."""

import json
import math
import shlex
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from fulmen.cli.plot import plot
from fulmen.schema.training import TrainConfig
from fulmen.trainer.events import EvalDone, RunFinished, Sample
from fulmen.trainer.health import reasons_in_words

_SHORT = 160
"""Characters of a task or an answer that are shown."""


def final_report(done: RunFinished) -> RenderableType:
    """Curve, before and after, and samples."""
    parts: list[RenderableType] = []
    if done.rewards:
        caption = f"training reward, step 1 to {done.steps}"
        parts += [Text(f"\n{caption}", style="bold"), Text(plot(done.rewards, width=64))]
    if done.evals:
        parts += ["", before_after(done.evals)]
    for title, style, samples in (("won", "green", done.won), ("lost", "red", done.lost)):
        if samples:
            parts += [Text(f"\n{title}", style=f"bold {style}"), sample_table(samples)]
    return Group(*parts)


def closing_lines(done: RunFinished, config: TrainConfig) -> list[str]:
    """Time, memory, and the commands that go on from here: never wrapped, so that they can be
    copied."""
    minutes, seconds = divmod(round(done.train_seconds), 60)
    lines = [
        "",
        f"{'stopped' if done.stopped else 'finished'} after {done.steps} steps, "
        f"{minutes} min {seconds:02d} s of training; at most {done.peak_mb:,.0f} MiB of memory",
    ]
    if done.plot:
        lines.append(f"curve     {done.plot}")
    return lines + [f"{name:<9} {line}" for name, line in next_commands(done, config)]


def before_after(evals: Sequence[EvalDone]) -> Table:
    """First and last measurement of each mode."""
    table = Table(title="held-out tasks", title_style="bold", title_justify="left")
    for name in ("decoding", "before", "after", "change"):
        table.add_column(name, justify="left" if name == "decoding" else "right")
    for mode in ("greedy", "sampled"):
        found = [e for e in evals if e.mode == mode]
        if not found:
            continue
        first, last = found[0], found[-1]
        later = last.step > first.step
        change = f"{last.reward - first.reward:+.3f}" if later else ""
        table.add_row(mode, interval(first), interval(last) if later else "", change)
    return table


def interval(done: EvalDone) -> str:
    """Mean reward with its 95 % interval."""
    return f"{done.reward:.3f} [{done.low:.3f} – {done.high:.3f}]".replace("[", "(").replace(
        "]", ")"
    )


def excluded_in_words(done: EvalDone) -> str:
    """What took no part, and why, as the end of a sentence; empty if all did."""
    return f"; {done.excluded} excluded: {reasons_in_words(done.reasons)}" if done.excluded else ""


def sample_table(samples: Sequence[Sample]) -> Table:
    """A few rollouts: task, answer, reward."""
    table = Table(show_header=False, box=None, padding=(0, 1))
    for sample in samples:
        table.add_row(
            f"{sample.reward:.2f}", Text(shorten(sample.task)), Text(shorten(sample.output))
        )
    return table


def shorten(value: object) -> str:
    """One line of at most `_SHORT` characters."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    text = " ".join(text.split())
    return text if len(text) <= _SHORT else text[: _SHORT - 1] + "…"


def next_commands(done: RunFinished, config: TrainConfig) -> list[tuple[str, str]]:
    """Ready commands: serve the model, evaluate it, go on with the run."""
    commands = [("policy", f"{name}: {folder}") for name, folder in done.policies.items()]
    if done.checkpoint:
        commands.append(("serve", command("serve", model=done.checkpoint)))
        tasks = config.val or config.tasks
        commands.append(
            (
                "evaluate",
                command(
                    "eval",
                    agent=config.agent,
                    tasks=tasks,
                    grader=config.grader,
                    model=done.checkpoint,
                    policy=[f"{name}={folder}" for name, folder in done.policies.items()],
                    max_tokens=config.max_tokens,
                ),
            )
        )
    commands.append(("continue", resume_command(done.run, config, done.stopped)))
    return commands


def resume_command(run: str, config: TrainConfig, stopped: bool) -> str:
    """How to go on: to the planned end, or half as far again."""
    steps = config.steps if stopped else config.steps + math.ceil(config.steps / 2)
    return command("train", config=f"{run}/config.toml", out=run, steps=steps) + " --resume"


def command(name: str, **flags: object) -> str:
    """A command line, quoted for a shell.

    >>> command("serve", model="my model", port=None)
    "fulmen serve --model 'my model'"
    >>> command("eval", policy=["a=x", "b=y"])
    'fulmen eval --policy a=x --policy b=y'
    """
    given = [
        f"--{key.replace('_', '-')} {shlex.quote(str(value))}"
        for key, values in flags.items()
        for value in (values if isinstance(values, list) else [values])
        if value is not None
    ]
    return " ".join(["fulmen", name, *given])


def print_eval(
    console: Console, done: EvalDone, won: Sequence[Sample], lost: Sequence[Sample]
) -> None:
    """The result of `fulmen eval`."""
    console.print(f"{done.mode}: mean reward {interval(done)}, success {done.success:.1%}")
    console.print(f"{done.rollouts} rollouts in {done.seconds:.1f} s{excluded_in_words(done)}")
    for title, style, samples in (("won", "green", won), ("lost", "red", lost)):
        if samples:
            console.print(Text(f"\n{title}", style=f"bold {style}"))
            console.print(sample_table(samples))
