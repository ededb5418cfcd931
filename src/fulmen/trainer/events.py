"""What a run says while it works. The trainer emits; whoever shows it (terminal, JSON) listens."""

from collections.abc import Callable
from typing import Literal, TypeAlias

from msgspec import field

from fulmen.schema.records import JSON, Record


class RunStarted(Record, frozen=True, kw_only=True, tag="run_started"):
    """Everything is loaded; the first agents are about to start."""

    run: str
    """Folder of the run."""
    model: str
    """Its name; of several, all names with commas."""
    parameters: int
    """Trainable weights, of all models together."""
    agent: str
    train_tasks: int
    val_tasks: int
    first_step: int
    """1, or the step after the checkpoint that a resumed run goes on from."""
    steps: int
    """The last step."""
    rollouts_per_step: int
    gateway: str
    """Base URL that the agents are given."""


class Progress(Record, frozen=True, kw_only=True, tag="progress"):
    """Where the current phase stands; sent several times a second at most."""

    phase: Literal["eval", "collect", "learn", "save"]
    step: int
    done: int
    total: int
    running: int = 0
    failed: int = 0
    retried: int = 0
    reward: float | None = None
    """Mean reward of what is done and scored in this phase."""


class StepDone(Record, frozen=True, kw_only=True, tag="step_done"):
    """One step of training is committed."""

    step: int
    metrics: dict[str, float]
    eta_s: float
    """Estimated seconds to the end of the run."""


class EvalDone(Record, frozen=True, kw_only=True, tag="eval_done"):
    """The held-out tasks were measured."""

    step: int
    """Steps learned before; 0 is the model as it came."""
    mode: Literal["greedy", "sampled"]
    rollouts: int
    """How many counted; those without a reward are left out."""
    reward: float
    """Mean reward."""
    low: float
    high: float
    """95 % confidence interval of the mean."""
    success: float
    """Share with a reward of at least 0.5."""
    excluded: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    """How many were excluded for each reason."""
    seconds: float = 0.0


class Note(Record, frozen=True, kw_only=True, tag="note"):
    """A sentence the user should read: what is odd, where, and what to do."""

    level: Literal["info", "warning"]
    code: str
    """Short name of the finding, equal for equal findings: shown once, counted after."""
    text: str


class Sample(Record, frozen=True, kw_only=True):
    """One rollout worth looking at."""

    task: JSON
    output: JSON
    reward: float
    messages: tuple[JSON, ...] = ()


class RunFinished(Record, frozen=True, kw_only=True, tag="run_finished"):
    """The end of a run, with what a reader wants to know."""

    run: str
    checkpoint: str | None
    """Folder of the trained model, loadable by transformers."""
    steps: int
    """Steps done in all."""
    stopped: bool
    """True if Ctrl-C ended it early; it can be resumed."""
    train_seconds: float
    """From the first step's start to the last step's end, evaluations in between included."""
    peak_mb: float
    """Most memory that all processes together held, MiB (proportional set size)."""
    evals: tuple[EvalDone, ...]
    """All measurements, in order."""
    rewards: tuple[float, ...]
    """Mean training reward per step."""
    won: tuple[Sample, ...] = ()
    lost: tuple[Sample, ...] = ()
    plot: str | None = None
    """The reward curve as PNG."""
    policies: dict[str, str] = field(default_factory=dict)
    """Folders of the trained policies that agents have of their own, by name."""


Event: TypeAlias = RunStarted | Progress | StepDone | EvalDone | Note | RunFinished
Listener: TypeAlias = Callable[[Event], None]
