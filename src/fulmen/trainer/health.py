"""Rules that turn the numbers of a run into sentences, and stop it when it cannot learn."""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, pvariance

from fulmen.schema.errors import AgentError
from fulmen.trainer.events import Note
from fulmen.trainer.grading import Graded

_FEW = 0.1
"""Share of rollouts whose failure is no reason for alarm."""


def refuse_hopeless(graded: Sequence[Graded]) -> None:
    """Stop a run whose very first rollouts show that nothing can be learned from this agent.

    Raises:
        AgentError: every rollout failed in the agent, none of them came to an end or called the
            model, or the gateway refused all that they asked.
    """
    failed = [item for item in graded if item.result.outcome.failure == "agent"]
    if graded and len(failed) == len(graded):
        raise AgentError(
            f"the agent failed on all {len(graded)} tasks: {failed[0].result.outcome.error}",
            hint="run it on one task by hand first",
        )
    lost = [item for item in graded if item.result.outcome.failure in ("infrastructure", "timeout")]
    if graded and len(lost) == len(graded):
        kinds = Counter(item.excluded for item in lost)
        raise AgentError(
            f"none of {len(graded)} rollouts came to an end: {reasons_in_words(kinds)}"
            + _most_often(lost),
            hint="run the agent on one task by hand; see deadline_s, retry_on and max_attempts",
        )
    ended = [item for item in graded if item.result.outcome.failure is None]
    calls = [call for item in graded for call in item.result.calls]
    if calls and all(call.status >= 400 for call in calls):
        raise AgentError(
            f"all {len(calls)} requests of the agent were refused, the first with "
            f"{calls[0].status}: {json.dumps(calls[0].response, ensure_ascii=False)[:300]}"
        )
    if ended and not calls:
        raise AgentError(
            f"the agent never called the model: {len(ended)} rollouts ended without one request "
            "to the gateway",
            hint="let it take base URL and key from OPENAI_BASE_URL and OPENAI_API_KEY",
        )


def refuse_unselected(metrics: Mapping[str, float], train: str) -> None:
    """Stop a run in whose first step `train` selected no call that can be trained.

    Raises:
        AgentError: with the names of the agents that were there.
    """
    shares = {
        name.removeprefix("agent/").removesuffix("/selected"): share
        for name, share in metrics.items()
        if name.startswith("agent/") and name.endswith("/selected")
    }
    if shares and not any(shares.values()):
        raise AgentError(
            f"train = {train!r} selects no call that can be trained; agents seen: "
            + ", ".join(sorted(shares)),
            hint="docs/credit.md says where agents get their names from",
        )


def step_notes(metrics: Mapping[str, float]) -> Iterator[Note]:
    """What is odd about a step, in words: no signal, disagreement, truncation."""
    groups = metrics.get("groups/with_signal")
    if groups == 0:
        mean = metrics.get("reward/mean", 0.0)
        cause = "too hard" if mean < 0.5 else "too easy"
        yield _warn(
            "no-signal",
            f"every advantage is 0, as where all rollouts of a group score the same (mean "
            f"{mean:.2f}, {cause}?): nothing to learn in this step; try a larger group_size, "
            "other tasks, or partial credit",
        )
    if (gap := max(_of_all(metrics, "learn", "gap_mean"), default=0.0)) > 0.05:
        yield _warn(
            "gap",
            f"engine and learner disagree by {gap:.3f} nats a token on the same weights; "
            "expected in bfloat16 up to about 0.03, in float32 under 0.001",
        )
    if skipped := sum(_of_all(metrics, "learn", "skipped_updates")):
        yield _warn(
            "not-finite",
            f"{skipped:.0f} update(s) had a gradient that is not finite and were not made; lower "
            "the learning rate, or look at a loss or an advantage of your own",
        )
    if empty := sum(_of_all(metrics, "learn", "empty_updates")):
        yield _warn(
            "empty",
            f"{empty:.0f} update(s) had a gradient of exactly 0 and were not made: no token had a "
            "say; see learn/unusable_tokens (log-probabilities that are missing) and what the "
            "correction or the loss leaves out",
        )
    if (share := metrics.get("collect/truncated", 0.0)) > 0.2:
        yield _warn(
            "truncated",
            f"{share:.0%} of the completions were cut at max_tokens or the end of the context",
        )


def failure_notes(graded: Sequence[Graded]) -> Iterator[Note]:
    """Why rollouts take no part, and how often the agent failed, with what was said most often."""
    out = [item for item in graded if item.excluded]
    if out:
        reasons = reasons_in_words(Counter(item.excluded for item in out))
        text = f"{len(out)} of {len(graded)} rollouts take no part: {reasons}"
        yield Note(
            level="warning" if len(out) > _FEW * len(graded) else "info",
            code="excluded",
            text=text + _most_often(out),
        )
    failed = [item for item in graded if item.source == "failure"]
    if len(failed) > _FEW * len(graded):
        text = f"the agent failed in {len(failed)} of {len(graded)} rollouts"
        yield _warn("agent-errors", text + _most_often(failed))


def reasons_in_words(reasons: Mapping[str, float]) -> str:
    """How many for each reason, the most frequent first.

    >>> reasons_in_words({"agent": 1, "timeout": 2})
    '2 timeout, 1 agent'
    """
    ordered = sorted(reasons.items(), key=lambda pair: (-pair[1], pair[0]))
    return ", ".join(f"{count:.0f} {name}" for name, count in ordered)


def _most_often(graded: Sequence[Graded]) -> str:
    """The error that was told most often, as the end of a sentence."""
    errors = Counter(item.result.outcome.error for item in graded if item.result.outcome.error)
    if not errors:
        return ""
    ((error, times),) = errors.most_common(1)
    return f"; {times} × {error[:300]!r}" if times > 1 else f"; {error[:300]!r}"


def _of_all(metrics: Mapping[str, float], room: str, name: str) -> list[float]:
    """A number of each policy.

    >>> _of_all({"learn/writer/loss": 0.5, "learn/re*/loss": 0.25}, "learn", "loss")
    [0.5, 0.25]
    """
    return [v for k, v in metrics.items() if k.startswith(f"{room}/") and k.endswith(f"/{name}")]


def hacking_notes(
    finals: Sequence[float], intermediates: Sequence[float], window: int = 20
) -> Iterator[Note]:
    """Whether the policy learns to earn intermediate rewards instead of solving the tasks.

    Looks at the end of every `window` steps, so that nothing is said twice: there the mean
    intermediate reward rose, against the window before, by more than two standard errors, and the
    mean final reward did not rise by more than one.

    Args:
        finals: mean final reward per step, from the first on; NaN where there was none.
        intermediates: mean intermediate reward per step.
        window: steps in one window.

    >>> [note.text[:47] for note in hacking_notes([0.5] * 4, [0.0, 0.0, 0.3, 0.3], window=2)]
    ['intermediate rewards rose from 0.000 to 0.300 (']
    """
    if len(finals) < 2 * window or len(finals) % window:
        return
    change, final = _change(intermediates, window), _change(finals, window)
    if change is None or final is None:
        return
    (gain, error, old, new), (final_gain, final_error, final_old, final_new) = change, final
    if gain > max(2 * error, 1e-6) and final_gain <= final_error:
        yield _warn(
            "reward-hacking",
            f"intermediate rewards rose from {old:.3f} to {new:.3f} (means of {window} steps) "
            f"while the final reward went from {final_old:.3f} to {final_new:.3f}: the policy may "
            "be earning them instead of solving tasks; lower their weights or cap them",
        )


def _change(values: Sequence[float], window: int) -> tuple[float, float, float, float] | None:
    """From the window before the last to the last: gain, its standard error, both means.

    None if one of them has no number in it.
    """
    before = [v for v in values[-2 * window : -window] if not math.isnan(v)]
    after = [v for v in values[-window:] if not math.isnan(v)]
    if not before or not after:
        return None
    old, new = fmean(before), fmean(after)
    error = math.sqrt(pvariance(before) / len(before) + pvariance(after) / len(after))
    return new - old, error, old, new


def _warn(code: str, text: str) -> Note:
    return Note(level="warning", code=code, text=text)
