"""What a store is asked, and what it answers, as records: for those who ask from another machine.

Each verb is a method of `fulmen.store.base.Store`, `ends` stands for `on_attempt_end`, and
`give_back` undoes a claim whose answer nobody received.
"""

from typing import Literal, TypeAlias

import msgspec

from fulmen.schema.errors import DataError
from fulmen.schema.packing import text_of_extension
from fulmen.schema.records import (
    Call,
    Lease,
    Outcome,
    Record,
    Reward,
    Rollout,
    RolloutResult,
    Span,
    Split,
    StepRecord,
    Task,
)
from fulmen.store.base import Status


class Ask(Record, frozen=True, kw_only=True, tag_field="verb"):
    """Base of every question."""


class Held(Record, frozen=True, kw_only=True):
    """A lease without its rollout: enough to say which one is meant."""

    rollout_id: str
    attempt: int
    worker: str
    key: str
    expires: float

    def lease(self) -> Lease:
        """As a store takes it; of the rollout it has the id alone."""
        rollout = Rollout(id=self.rollout_id, task=Task(id="", input=None), group="", step=0)
        return Lease(
            rollout=rollout,
            attempt=self.attempt,
            worker=self.worker,
            key=self.key,
            expires=self.expires,
        )


def held(lease: Lease) -> Held:
    """The lease as it is sent back."""
    return Held(
        rollout_id=lease.rollout.id,
        attempt=lease.attempt,
        worker=lease.worker,
        key=lease.key,
        expires=lease.expires,
    )


class Claimant(Record, frozen=True, kw_only=True):
    """A worker that claims."""

    worker: str
    limit: int = 1


class Enqueue(Ask, frozen=True, kw_only=True, tag="enqueue"):
    """Answered with the number of new ones."""

    rollouts: tuple[Rollout, ...]


class Claim(Ask, frozen=True, kw_only=True, tag="claim"):
    """Answered with leases, each of one of the workers."""

    workers: tuple[Claimant, ...]
    wait_s: float = 0.0
    lease_s: float = 60.0


class GiveBack(Ask, frozen=True, kw_only=True, tag="give_back"):
    """Leases that nobody has seen."""

    leases: tuple[Held, ...]


class Heartbeat(Ask, frozen=True, kw_only=True, tag="heartbeat"):
    """Answered with rollout id and attempt of those that are lost."""

    leases: tuple[Held, ...]
    lease_s: float = 60.0


class ExpireLeases(Ask, frozen=True, kw_only=True, tag="expire_leases"):
    """Answered with rollout ids."""

    now: float | None = None


class RecordCalls(Ask, frozen=True, kw_only=True, tag="record_calls"):
    """A promise: answered before it is on disk."""

    calls: tuple[Call, ...]


class SupersedeCalls(Ask, frozen=True, kw_only=True, tag="supersede_calls"):
    """A promise: answered before it is on disk."""

    rollout_id: str
    attempt: int
    ids: tuple[str, ...]


class RecordSpans(Ask, frozen=True, kw_only=True, tag="record_spans"):
    """A promise: answered before it is on disk."""

    spans: tuple[Span, ...]


class Finish(Ask, frozen=True, kw_only=True, tag="finish"):
    """Answered with the status of the rollout."""

    lease: Held
    outcome: Outcome


class Cancel(Ask, frozen=True, kw_only=True, tag="cancel"):
    """Answered with the number of those that were not finished."""

    rollout_ids: tuple[str, ...]


class WaitFinished(Ask, frozen=True, kw_only=True, tag="wait_finished"):
    """Answered with the finished ones."""

    rollout_ids: tuple[str, ...]
    wait_s: float


class Results(Ask, frozen=True, kw_only=True, tag="results"):
    """Answered with the finished ones and what was recorded."""

    rollout_ids: tuple[str, ...]


class AddRewards(Ask, frozen=True, kw_only=True, tag="add_rewards"):
    """Answered when they are on disk."""

    rewards: tuple[Reward, ...]


class CommitStep(Ask, frozen=True, kw_only=True, tag="commit_step"):
    """Answered when it is on disk."""

    step: StepRecord


class AddCheckpoint(Ask, frozen=True, kw_only=True, tag="add_checkpoint"):
    """Answered when it is on disk."""

    step: int
    folder: str


class Steps(Ask, frozen=True, kw_only=True, tag="steps"):
    """Answered with all steps."""


class DiscardAfter(Ask, frozen=True, kw_only=True, tag="discard_after"):
    """Answered with the number of deleted rollouts."""

    step: int


class Forget(Ask, frozen=True, kw_only=True, tag="forget"):
    """Answered with the number of rollouts concerned."""

    split: Split
    first: int
    last: int


class Counts(Ask, frozen=True, kw_only=True, tag="counts"):
    """Answered with numbers by name."""


class Ends(Ask, frozen=True, kw_only=True, tag="ends"):
    """Which attempts have ended since. Answered with `Heard`."""

    epoch: str = ""
    """Of the last answer; empty: from now on."""
    after: int = 0
    """Number of the last end that is known."""
    wait_s: float = 0.0


class Heard(Record, frozen=True, kw_only=True):
    """Attempts that ended."""

    epoch: str
    """Names the list that the numbers are of; another one when the server has started anew."""
    last: int
    """Number of the last end."""
    ended: tuple[tuple[str, int], ...] = ()
    """Rollout id and attempt."""
    missed: bool = False
    """There were others, of which nothing is known: look again."""


class Refusal(Record, frozen=True, kw_only=True):
    """Why something was not done."""

    kind: Literal["LeaseLost", "RunOver", "StoreError", "DataError", "ConfigError"]
    message: str
    hint: str = ""


Question: TypeAlias = (
    Enqueue
    | Claim
    | GiveBack
    | Heartbeat
    | ExpireLeases
    | RecordCalls
    | SupersedeCalls
    | RecordSpans
    | Finish
    | Cancel
    | WaitFinished
    | Results
    | AddRewards
    | CommitStep
    | AddCheckpoint
    | Steps
    | DiscardAfter
    | Forget
    | Counts
    | Ends
)

_ANSWERS: dict[type[Ask], object] = {
    Enqueue: int,
    Claim: list[Lease],
    GiveBack: None,
    Heartbeat: list[tuple[str, int]],
    ExpireLeases: list[str],
    RecordCalls: None,
    SupersedeCalls: None,
    RecordSpans: None,
    Finish: Status,
    Cancel: int,
    WaitFinished: list[str],
    Results: list[RolloutResult],
    AddRewards: None,
    CommitStep: None,
    AddCheckpoint: None,
    Steps: list[StepRecord],
    DiscardAfter: int,
    Forget: int,
    Counts: dict[str, int],
    Ends: Heard,
}

WAITING: tuple[type[Ask], ...] = (WaitFinished, Ends)
"""Those that are answered late. So are claims with `wait_s`."""


def verb_of(kind: type[Ask]) -> str:
    """The name of a verb.

    >>> verb_of(RecordSpans)
    'record_spans'
    """
    return str(kind.__struct_config__.tag)


VERBS: dict[str, type[Ask]] = {verb_of(kind): kind for kind in _ANSWERS}

_questions = msgspec.msgpack.Decoder(Question, ext_hook=text_of_extension)
_answers = {
    kind: msgspec.msgpack.Decoder(answer, ext_hook=text_of_extension)
    for kind, answer in _ANSWERS.items()
}


def read_question(data: bytes | msgspec.Raw) -> Question:
    """Decode and check.

    Raises:
        DataError: a field is missing, unknown or of the wrong type, or there is no such verb.
    """
    try:
        return _questions.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DataError(f"not a question to a store: {error}") from error


def read_answer(kind: type[Ask], data: bytes | msgspec.Raw) -> object:
    """Decode and check what answers a question of this kind; raises DataError."""
    try:
        return _answers[kind].decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise DataError(f"not an answer to {verb_of(kind)}: {error}") from error
