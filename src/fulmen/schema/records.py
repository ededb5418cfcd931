"""The vocabulary as data: what is asked, tried, sampled and judged.

Every record is frozen, typed and round-trips through JSON and msgpack (`fulmen.schema.codec`).
Token arrays are tuples of int in memory and little-endian binary at rest.
"""

import math
from typing import Any, Literal, TypeAlias

import msgspec

JSON: TypeAlias = Any
"""Any JSON value. Not spelled out as a recursive union, which msgspec cannot check."""

Split = Literal["train", "eval"]

FailureKind = Literal["agent", "timeout", "infrastructure", "cancelled"]
"""Why an attempt failed. `agent` is the agent's own doing (an exception, a non-zero exit) and may
be a lesson; the others say nothing about the policy: they are retried, then left out."""


RetriedFailure = Literal["infrastructure", "timeout", "agent"]
"""A failure that another attempt may follow; a cancellation is final."""

LONGEST_PAUSE_S = 3600.0
"""No rollout waits longer for its next attempt."""


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of every record."""


class Task(Record, frozen=True, kw_only=True):
    """One input for the agent.

    >>> Task(id="t1", input={"question": "1+1?"}, metadata={"answer": 2}).for_grader()
    {'question': '1+1?', 'answer': 2}
    """

    id: str
    input: JSON
    """What the agent is given."""
    metadata: dict[str, JSON] = {}
    """What only the grader sees: the expected answer, say."""

    def for_grader(self) -> JSON:
        """Input and metadata in one dict; the input alone where it is no dict."""
        if isinstance(self.input, dict):
            return {**self.input, **self.metadata}
        return {"input": self.input, **self.metadata} if self.metadata else self.input


class Sampling(Record, frozen=True, kw_only=True):
    """How the engine samples for one rollout. A value that is set wins over the agent's request."""

    temperature: float | None = None
    """0 is greedy decoding; None leaves the choice to the agent."""
    top_p: float | None = None
    max_tokens: int | None = None
    """Upper bound of one completion, tokens; the agent may ask for less, never for more."""


class Retry(Record, frozen=True, kw_only=True):
    """Which failures of a rollout are followed by another attempt, how often, and how soon.

    >>> Retry(attempts=4, pause_s=1.0).after("timeout", begun=3)
    4.0
    >>> Retry(attempts=3).after("timeout", begun=3), Retry().after("agent", begun=1)
    (None, None)
    """

    on: tuple[RetriedFailure, ...] = ("infrastructure", "timeout")
    attempts: int = 3
    """How many may be started, the first included; the first always is."""
    pause_s: float = 0.0
    """Between the end of the first attempt and the start of the second, seconds; it doubles."""
    longest_pause_s: float = 60.0
    """What the doubling ends at, an hour at most."""

    def after(self, failure: FailureKind, *, begun: int) -> float | None:
        """Seconds until the next attempt may start; None if there is none.

        `begun`: attempts begun so far, the failed one included.
        """
        if failure not in self.on or begun >= self.attempts:
            return None
        doublings = min(begun - 1, 60)  # beyond it any pause is longer than the longest
        pause = min(self.pause_s * 2.0**doublings, self.longest_pause_s, LONGEST_PAUSE_S)
        return max(pause, 0.0)


class Rollout(Record, frozen=True, kw_only=True):
    """One request to run the agent on one task; the unit of queueing and of reward."""

    id: str
    task: Task
    group: str
    """Rollouts with the same group are compared with each other (GRPO's group)."""
    step: int
    split: Split = "train"
    seed: int = 0
    """Every call's sampling seed is derived from it, so that a rollout can be repeated."""
    sampling: Sampling = Sampling()
    deadline_s: float = 300.0
    """An attempt that runs longer, seconds, is stopped, and ends as `timeout`."""
    retry: Retry = Retry()


class Lease(Record, frozen=True, kw_only=True):
    """The right of one worker to execute one attempt of a rollout, until it expires."""

    rollout: Rollout
    attempt: int
    """1, 2, …; only the highest number of a rollout may write."""
    worker: str
    key: str
    """The rollout key: authorises LLM calls for this attempt and nothing else."""
    expires: float
    """Unix time, seconds; renewed by heartbeats."""


class Outcome(Record, frozen=True, kw_only=True):
    """How an attempt ended."""

    failure: FailureKind | None = None
    """None: the agent came to its end."""
    output: JSON = None
    """What the agent returned: an answer for the grader, or a number (its own reward)."""
    error: str = ""
    """One line for people; empty when nothing failed."""
    log: str = ""
    """What the agent printed, and its traceback if it raised; the last part if long."""


class VersionSpan(Record, frozen=True, kw_only=True):
    """The policy version that sampled the tokens from `start` on, until the next span."""

    start: int
    version: int


class Call(Record, frozen=True, kw_only=True):
    """One LLM request seen by the gateway, with exactly the tokens that were sampled."""

    id: str
    """Also the id of the response (`chatcmpl-…`): a span that carries it can be joined."""
    rollout_id: str
    attempt: int
    index: int
    """0, 1, … in order of arrival within the attempt."""
    choice: int = 0
    """Which of the `n` completions of one request."""
    parent: str | None = None
    """The call whose prompt and completion this prompt extends, token for token."""
    protocol: str
    agent: str = ""
    """Who asked, as far as the gateway was told; `fulmen.credit.observe` finds out the rest."""
    span_id: str | None = None
    """The span that was open in the agent's process when it asked."""
    policy: str = ""
    """Name of the policy that answered; another model's call has no tokens and is not trained."""
    status: int = 200
    """HTTP status of the answer; one of 400 and more has no tokens, and its error as response."""
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Log-probability (nats) of each completion token under the sampling distribution."""
    grammar: str = ""
    """What the completion was forced to match (Lark, llguidance's dialect); empty: nothing."""
    versions: tuple[VersionSpan, ...]
    temperature: float
    top_p: float
    finish_reason: str
    superseded: bool = False
    """The agent never received it: it went away first, or asked again."""
    drift: str | None = None
    """Why the conversation could not be continued token for token; None: it was, or it is new."""
    request: JSON = None
    """The body as it came."""
    response: JSON = None
    """The assistant message as it went out."""
    started: float = 0.0
    ended: float = 0.0
    """Unix time, seconds."""

    @property
    def version(self) -> int:
        """The policy version of the first sampled token; -1 if nothing was sampled."""
        return self.versions[0].version if self.versions else -1


class Span(Record, frozen=True, kw_only=True):
    """One OpenTelemetry span of an attempt, normalised to the GenAI semantic conventions."""

    id: str
    rollout_id: str
    attempt: int
    parent: str | None = None
    name: str
    attributes: dict[str, JSON] = {}
    """By the names of `fulmen.schema.semconv`; what has no name there stays as it came."""
    status: Literal["unset", "ok", "error"] = "unset"
    """As it was set; "unset" says nothing about how the work ended."""
    started: float = 0.0
    ended: float | None = None
    """None: it never ended, so its outcome is unknown."""


ToolOutcome = Literal["ok", "error", "timeout", "unknown"]
"""`unknown`: it never ended, or nobody said how."""


class ToolUse(Record, frozen=True, kw_only=True):
    """One use of a tool in an attempt, from its span, from what the model was told, or both."""

    name: str
    arguments: str = ""
    """As the model wrote them: JSON text, mostly."""
    result: str | None = None
    """What came back, as text; None if nothing is known of it."""
    outcome: ToolOutcome = "unknown"
    tool_call_id: str | None = None
    call_id: str | None = None
    """The call that asked for it."""
    span_id: str | None = None
    agent: str = ""
    """Who asked for it."""
    started: float | None = None
    ended: float | None = None
    """Unix time, seconds; None where no span was seen, or it never ended."""


class Reward(Record, frozen=True, kw_only=True):
    """A named scalar given to a rollout, an agent, a call or a span."""

    rollout_id: str
    attempt: int
    name: str = "reward"
    value: float
    source: Literal["grader", "agent", "rule", "failure"]
    call_id: str | None = None
    span_id: str | None = None
    agent: str | None = None
    """With none of the three, it is the whole rollout's."""


class RolloutResult(Record, frozen=True, kw_only=True):
    """A finished rollout as the trainer sees it: its last attempt and everything recorded."""

    rollout: Rollout
    attempt: int
    outcome: Outcome
    calls: tuple[Call, ...] = ()
    """Of the last attempt, by index."""
    spans: tuple[Span, ...] = ()
    """Of the last attempt, by start."""
    rewards: tuple[Reward, ...] = ()


class Transition(Record, frozen=True, kw_only=True):
    """One call made trainable: input tokens, output tokens, return."""

    rollout_id: str
    call_id: str
    agent: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    temperature: float
    grammar: str = ""
    """As in `Call`: sampled tokens had no rivals but those it allowed."""
    policy: str = ""
    """Name of the policy that sampled it, as in `Call`."""
    version: int
    """Of that policy."""
    reward: float = 0.0
    """Intermediate reward of this call itself, beside the final one of its rollout."""
    state: str = ""
    """Names what the model was shown since it last spoke: equal names, equal situations."""
    trained: bool = True
    """False: its agent is not trained; it is there for the order of things only."""


class Trajectory(Record, frozen=True, kw_only=True):
    """The ordered transitions of one attempt, with the reward of its rollout."""

    rollout_id: str
    group: str
    transitions: tuple[Transition, ...]
    reward: float
    """Final reward of the rollout."""
    intermediate: float = 0.0
    """Intermediate rewards given to the rollout as a whole, on the way to the final one."""
    kind: str = ""
    """Of its task, where tasks of several kinds are trained together."""

    @property
    def total(self) -> float:
        """All its rewards, final and intermediate, added up."""
        own = (transition.reward for transition in self.transitions)
        return math.fsum((self.reward, self.intermediate, *own))


class Credited(Record, frozen=True, kw_only=True):
    """A transition with the advantage that multiplies its gradient."""

    transition: Transition
    advantage: float
    """Of the call as a whole."""
    token_advantages: tuple[float, ...] = ()
    """One for each completion token, from a critic, instead of `advantage`; empty: none."""
    returns: tuple[float, ...] = ()
    """What a critic should have foreseen before each completion token; empty: no critic."""
    group: str = ""
    """Of the rollout; what some normalisers divide by."""
    kind: str = ""
    """Of the rollout's task; advantages may be whitened within it."""


class StepRecord(Record, frozen=True, kw_only=True):
    """One turn of the training loop, as it is written to the store and to metrics.jsonl."""

    step: int
    version: int
    """Policy version after the step; of several policies, that of the first."""
    versions: dict[str, int] = {}
    """Of each policy, by name."""
    consumed: tuple[str, ...]
    """Rollout ids trained on, counted in a baseline or left out; each belongs to exactly one
    step."""
    metrics: dict[str, float]
    checkpoint: str | None = None
    """Folder of the checkpoint written with the step, relative to the run."""
    seconds: float = 0.0
    """What the run has taken up to its end: all steps, and evaluations between them."""
    finished: float = 0.0
