"""Records to table rows and back.

JSON values go through the standard library's encoder, because what is read must be what was
written: faster ones turn NaN into null, or refuse integers beyond 64 bits.
"""

import json
import math
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import msgspec

from fulmen.schema.codec import pack_floats, pack_tokens, unpack_floats, unpack_tokens
from fulmen.schema.errors import DataError
from fulmen.schema.records import JSON, Call, Record, Reward, Rollout, Span, VersionSpan

R = TypeVar("R", bound=Record)

Row: TypeAlias = dict[str, object]
"""Column names to values, as an INSERT takes them."""

Columns: TypeAlias = Mapping[str, JSON]
"""Column names to values, as a SELECT gives them; their types are those of the table."""


_encode = json.JSONEncoder(separators=(",", ":")).encode


def to_text(value: JSON, owner: str) -> str:
    """A record or JSON value as JSON text; NaN and infinities are written by name.

    Raises:
        DataError: something in it is no JSON; `owner` ("the outcome of …") begins the message.
    """
    try:
        return _encode(msgspec.to_builtins(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{owner} holds what is no JSON: {error}",
            hint="use only dict, list, str, int, float, bool and None",
        ) from error


def from_text(kind: type[R], text: str) -> R:
    """The record that `to_text` wrote.

    Raises:
        DataError: the text holds another record, or none.
    """
    try:
        return msgspec.convert(json.loads(text), kind)
    except (msgspec.ValidationError, json.JSONDecodeError) as error:
        raise DataError(f"the store holds no {kind.__name__} where it must: {error}") from error


def rollout_row(rollout: Rollout) -> Row:
    """Without status and attempt, which depend on what the store knows; raises DataError."""
    return {
        "id": rollout.id,
        "step": rollout.step,
        "record": to_text(rollout, f"rollout {rollout.id}"),
    }


def call_row(call: Call) -> Row:
    """Raises DataError if request or response are no JSON."""
    owner = f"call {call.id} of rollout {call.rollout_id}"
    return {
        "rollout_id": call.rollout_id,
        "attempt": call.attempt,
        "id": call.id,
        "choice": call.choice,
        "index": call.index,
        "parent": call.parent,
        "protocol": call.protocol,
        "agent": call.agent,
        "span_id": call.span_id,
        "policy": call.policy,
        "status": call.status,
        "prompt_ids": pack_tokens(call.prompt_ids),
        "completion_ids": pack_tokens(call.completion_ids),
        "logprobs": pack_floats(call.logprobs),
        "grammar": call.grammar,
        "versions": to_text(call.versions, owner),
        "temperature": call.temperature,
        "top_p": call.top_p,
        "finish_reason": call.finish_reason,
        "superseded": call.superseded,
        "drift": call.drift,
        "request": to_text(call.request, owner),
        "response": to_text(call.response, owner),
        "started": call.started,
        "ended": call.ended,
    }


def call_of(row: Columns) -> Call:
    """The inverse of `call_row`."""
    packed = {
        "prompt_ids": unpack_tokens(row["prompt_ids"]),
        "completion_ids": unpack_tokens(row["completion_ids"]),
        "logprobs": unpack_floats(row["logprobs"]),
        "versions": msgspec.convert(json.loads(row["versions"]), tuple[VersionSpan, ...]),
        "request": json.loads(row["request"]),
        "response": json.loads(row["response"]),
    }
    return Call(**{**row, **packed})


def span_row(span: Span) -> Row:
    """Raises DataError if an attribute is no JSON."""
    return {
        "rollout_id": span.rollout_id,
        "attempt": span.attempt,
        "id": span.id,
        "record": to_text(span, f"span {span.id} of rollout {span.rollout_id}"),
    }


def span_of(row: Columns) -> Span:
    """The inverse of `span_row`; raises DataError as `from_text` does."""
    return from_text(Span, row["record"])


def reward_row(reward: Reward) -> Row:
    """Raises DataError if the value is NaN or infinite: nothing can be learned from it."""
    if not math.isfinite(reward.value):
        raise DataError(
            f"reward {reward.name!r} of rollout {reward.rollout_id} is {reward.value}",
            hint="return a finite number, or None where the grader does not apply",
        )
    return {
        "rollout_id": reward.rollout_id,
        "attempt": reward.attempt,
        "name": reward.name,
        "source": reward.source,
        "call_id": reward.call_id or "",
        "span_id": reward.span_id or "",
        "agent": reward.agent or "",
        "value": reward.value,
    }


def reward_of(row: Columns) -> Reward:
    """The inverse of `reward_row`."""
    return Reward(
        **{**row, **{name: row[name] or None for name in ("call_id", "span_id", "agent")}}
    )
