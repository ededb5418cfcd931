"""What a run shows while it works: a live display on a terminal, plain lines elsewhere, or JSON."""

import math
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, Self

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fulmen.cli.plot import sparkline
from fulmen.cli.report import excluded_in_words, interval
from fulmen.trainer.events import (
    EvalDone,
    Event,
    Note,
    Progress,
    RunStarted,
    StepDone,
)
from fulmen.trainer.health import reasons_in_words

_PHASES = {"eval": "evaluate", "collect": "collect", "learn": "learn", "save": "save"}
_PLAIN_EVERY_S = 10.0
"""Off a terminal, progress is told this often."""


class Display(Protocol):
    """Shows events until it is left."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...

    def show(self, event: Event) -> None:
        """Take an event."""
        ...


class JsonDisplay:
    """One event a line."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Nothing to clear."""

    def show(self, event: Event) -> None:
        print(msgspec.json.encode(event).decode(), flush=True)


class PlainDisplay(JsonDisplay):
    """Lines for logs: no control characters, nothing redrawn."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._clock = console, clock
        self._last_progress = clock()
        self._notes: set[str] = set()

    def show(self, event: Event) -> None:
        line = None
        if isinstance(event, Progress):
            if self._clock() - self._last_progress >= _PLAIN_EVERY_S:
                self._last_progress = self._clock()
                line = progress_line(event)
        elif isinstance(event, Note):
            if event.code not in self._notes:
                self._notes.add(event.code)
                line = f"{event.level}: {event.text}"
        else:
            line = event_line(event)
        if line:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)


class LiveDisplay:
    """Redrawn four times a second at most: where the run is, how it learns, what is odd."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, refresh_per_second=4, transient=True)
        self._started: RunStarted | None = None
        self._progress: Progress | None = None
        self._step: StepDone | None = None
        self._rewards: list[float] = []
        self._evals: dict[str, tuple[EvalDone, EvalDone]] = {}
        self._notes: dict[str, tuple[Note, int]] = {}

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._live.stop()

    def show(self, event: Event) -> None:
        match event:
            case RunStarted():
                self._started = event
                self._console.print(event_line(event), markup=False, highlight=False)
            case Progress():
                self._progress = event
            case StepDone():
                self._step = event
                self._rewards.append(event.metrics.get("reward/mean", math.nan))
            case EvalDone():
                first = self._evals.get(event.mode, (event, event))[0]
                self._evals[event.mode] = (first, event)
                self._console.print(event_line(event), markup=False, highlight=False)
            case Note():
                self._notes[event.code] = (event, self._notes.get(event.code, (event, 0))[1] + 1)
            case _:
                return
        self._live.update(self._picture())

    def _picture(self) -> Group:
        lines: list[Text | Table] = []
        if self._started is not None:
            lines.append(self._step_bar(self._started))
        if self._progress is not None:
            lines.append(_phase_bar(self._progress))
        if self._rewards:
            lines.append(self._reward_line())
        if self._step is not None:
            lines.append(Text(metrics_line(self._step.metrics), style="dim"))
        for note, times in self._notes.values():
            count = f" (×{times})" if times > 1 else ""
            lines.append(Text(f"note{count}: {note.text}", style="yellow"))
        lines.append(Text("Ctrl-C finishes this step and saves", style="dim"))
        return Group(*lines)

    def _step_bar(self, started: RunStarted) -> Table:
        done = self._step.step if self._step else started.first_step - 1
        left = f"ETA {duration(self._step.eta_s)}" if self._step else ""
        return _bar("step", done, started.steps, left)

    def _reward_line(self) -> Text:
        evals = "   ".join(
            f"{mode} {last.reward:.2f} (start {first.reward:.2f})"
            for mode, (first, last) in self._evals.items()
        )
        curve = sparkline(self._rewards, 24)
        return Text(f"reward   {curve} {self._rewards[-1]:.2f}   {evals}")


def make_display(*, as_json: bool) -> Display:
    """JSON if asked for, live on a terminal, plain lines elsewhere."""
    if as_json:
        return JsonDisplay()
    console = Console(file=sys.stdout)
    return LiveDisplay(console) if console.is_terminal else PlainDisplay(console)


def _bar(name: str, done: int, total: int, rest: str) -> Table:
    table = Table.grid(padding=(0, 1))
    bar = ProgressBar(total=max(1, total), completed=done, width=24)
    table.add_row(f"{name:<8}", bar, f"{done}/{total}", Text(rest))
    return table


def _phase_bar(progress: Progress) -> Table:
    rest = []
    if progress.phase in ("eval", "collect"):
        rest.append(f"{progress.running} at work")
    if progress.retried:
        rest.append(f"{progress.retried} retried")
    if progress.failed:
        rest.append(f"{progress.failed} failed")
    if progress.reward is not None:
        rest.append(f"reward {progress.reward:.2f}")
    return _bar(_PHASES[progress.phase], progress.done, progress.total, ", ".join(rest))


def progress_line(progress: Progress) -> str:
    """Progress in words."""
    reward = "" if progress.reward is None else f", reward {progress.reward:.3f}"
    return (
        f"  {_PHASES[progress.phase]}: {progress.done}/{progress.total}, "
        f"{progress.running} at work{reward}"
    )


def event_line(event: Event) -> str | None:
    """Any other event in one line."""
    match event:
        case RunStarted():
            start = "" if event.first_step == 1 else f", from step {event.first_step}"
            return (
                f"run {event.run}: {event.agent} on {event.train_tasks} tasks "
                f"({event.val_tasks} held out), {event.model} with {event.parameters:,} weights, "
                f"{event.steps} steps of {event.rollouts_per_step} rollouts{start}"
            )
        case StepDone():
            mean = event.metrics.get("reward/mean")
            reward = "none" if mean is None else f"{mean:.3f}"
            eta = duration(event.eta_s)
            return f"step {event.step}: reward {reward}   {metrics_line(event.metrics)}   ETA {eta}"
        case EvalDone():
            return (
                f"held out after step {event.step}, {event.mode}: {interval(event)} "
                f"in {event.seconds:.1f} s{excluded_in_words(event)}"
            )
        case _:
            return None


def metrics_line(metrics: dict[str, float]) -> str:
    """The numbers most worth watching."""
    shown = (
        ("signal", "groups/with_signal", "{:.0%}"),
        ("entropy", "learn/entropy", "{:.3f}"),
        ("clip", "learn/clip_fraction", "{:.1%}"),
        ("grad", "learn/grad_norm", "{:.2f}"),
        ("len", "collect/completion_tokens", "{:.0f}"),
        ("s", "time/step_s", "{:.1f}"),
    )
    line = [f"{name} {form.format(metrics[key])}" for name, key, form in shown if key in metrics]
    if excluded := metrics.get("collect/excluded"):
        begin = "excluded/"
        reasons = {k.removeprefix(begin): v for k, v in metrics.items() if k.startswith(begin)}
        line.insert(0, f"excluded {excluded:.0f} ({reasons_in_words(reasons)})")
    if left_out := metrics.get("collect/left_out"):
        line.insert(0, f"left out {left_out:.0f} of {metrics['collect/rollouts']:.0f}")
    return "  ".join(line)


def duration(seconds: float) -> str:
    """Seconds for people.

    >>> [duration(s) for s in (8, 95, 7300)]
    ['8 s', '1 min 35 s', '2 h 01 min']
    """
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
