"""Records to rows and back."""

from typing import Any

import msgspec
from msgspec import structs
from sqlalchemy import RowMapping

from fulmen.schema.codec import (
    from_json,
    pack_floats,
    pack_tokens,
    to_json,
    unpack_floats,
    unpack_tokens,
)
from fulmen.schema.records import Call, Reward, Rollout, Span


def rollout_row(rollout: Rollout) -> dict[str, Any]:
    """A row of `rollouts`, queued."""
    return {
        "id": rollout.id,
        "step": rollout.step,
        "split": rollout.split,
        "status": "queued",
        "attempt": 0,
        "record": to_json(rollout),
    }


def call_row(call: Call) -> dict[str, Any]:
    """A row of `calls`; the token arrays are binary columns, not JSON."""
    bare = structs.replace(call, prompt_ids=(), completion_ids=(), logprobs=())
    return {
        "id": call.id,
        "rollout_id": call.rollout_id,
        "attempt": call.attempt,
        "position": call.index,
        "choice": call.choice,
        "prompt_ids": pack_tokens(call.prompt_ids),
        "completion_ids": pack_tokens(call.completion_ids),
        "logprobs": pack_floats(call.logprobs),
        "record": to_json(bare),
    }


def call_of(row: RowMapping) -> Call:
    """The inverse of `call_row`."""
    return structs.replace(
        from_json(Call, row["record"]),
        prompt_ids=unpack_tokens(row["prompt_ids"]),
        completion_ids=unpack_tokens(row["completion_ids"]),
        logprobs=unpack_floats(row["logprobs"]),
    )


def span_row(span: Span) -> dict[str, Any]:
    """A row of `spans`."""
    return {
        "id": span.id,
        "rollout_id": span.rollout_id,
        "attempt": span.attempt,
        "record": to_json(span),
    }


def reward_row(reward: Reward) -> dict[str, Any]:
    """A row of `rewards`."""
    return {
        "rollout_id": reward.rollout_id,
        "attempt": reward.attempt,
        "name": reward.name,
        "source": reward.source,
        "target": reward.call_id or reward.span_id or "",
        "value": reward.value,
        "record": to_json(reward),
    }


def pack_value(value: int | bytes) -> bytes:
    """A value of `meta`."""
    return msgspec.msgpack.encode(value)


def unpack_value(data: bytes) -> Any:  # noqa: ANN401 - int or bytes, as it was packed
    """The inverse of `pack_value`."""
    return msgspec.msgpack.decode(data)
