"""Stores with anything in them, and what is in a store."""

import asyncio
from typing import Any

from hypothesis import strategies as st
from sqlalchemy import select

from fulmen.schema.records import (
    Call,
    FailureKind,
    Lease,
    Outcome,
    Reward,
    Rollout,
    Span,
    StepRecord,
    Task,
    VersionSpan,
)
from fulmen.store import tables
from fulmen.store.open import open_database, open_store
from fulmen.store.transfer import CARRIED

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2)
    ),
    max_leaves=4,
)
TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4)
FLOATS = st.lists(st.floats(width=32), max_size=4)
# PostgreSQL keeps no NUL in texts; in JSON it is escaped.
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6)
ENDINGS = st.sampled_from([None, "agent", "infrastructure", "cancelled", "queued", "running"])


@st.composite
def plans(draw: st.DrawFn) -> list[dict[str, Any]]:
    """What is done with each rollout of a store."""
    plan = st.fixed_dictionaries(
        {
            "step": st.integers(0, 3),
            "split": st.sampled_from(["train", "eval"]),
            "input": JSON,
            "ending": ENDINGS,
            "tokens": TOKENS,
            "logprobs": FLOATS,
            "drift": st.none() | NAMES,
            "request": JSON,
            "agent": NAMES,
            "ended": st.none() | st.floats(0, 2e9),
            "reward": st.floats(-1e300, 1e300),
        }
    )
    return draw(st.lists(plan, max_size=6))


async def follow(where: str, plans: list[dict[str, Any]]) -> None:
    """Make a store in which these things happened."""
    store = open_store(where, new=True)
    asked = [
        Rollout(
            id=f"r{n}",
            task=Task(id="t", input=plan["input"]),
            group="g",
            step=plan["step"],
            split=plan["split"],
        )
        for n, plan in enumerate(plans)
    ]
    # The last comes first, so that ids and places in the queue are not in the same order.
    await store.enqueue(asked[::-1])
    for lease in await store.claim("w", limit=len(asked)):
        plan = plans[int(lease.rollout.id[1:])]
        if plan["ending"] != "queued":
            await _happen(store, lease, plan)
    used = tuple(
        one.rollout.id
        for one in await store.results([rollout.id for rollout in asked])
        if one.rollout.split == "train"
    )
    await store.commit_step(
        StepRecord(step=1, version=1, consumed=used, metrics={"x": float("nan")})
    )
    await store.discard_after(2)
    await store.close()


async def _happen(store: Any, lease: Lease, plan: dict[str, Any]) -> None:
    of = {"rollout_id": lease.rollout.id, "attempt": lease.attempt}
    call = Call(
        **of,
        id="c1",
        index=0,
        protocol="chat",
        agent=plan["agent"],
        prompt_ids=tuple(plan["tokens"]),
        completion_ids=tuple(plan["tokens"][::-1]),
        logprobs=tuple(plan["logprobs"]),
        versions=(VersionSpan(start=0, version=1),),
        temperature=1.0,
        top_p=1.0,
        finish_reason="stop",
        drift=plan["drift"],
        request=plan["request"],
        started=0.1,
        ended=1e9 + 1 / 3,
    )
    await store.record_calls([call])
    span = Span(**of, id="s", name="tool", attributes={"x": plan["request"]}, ended=plan["ended"])
    await store.record_spans([span])
    await store.add_rewards([Reward(**of, value=plan["reward"], source="grader")])
    ending: FailureKind | None = plan["ending"]
    if plan["ending"] != "running":
        await store.finish(lease, Outcome(failure=ending, output=plan["input"]))


def contents(where: str) -> dict[str, list[tuple[Any, ...]]]:
    """Every row of every table that belongs to the run."""
    database = open_database(where)
    engine = database.reading or database.writing
    with engine.begin() as connection:
        found = {
            table.name: sorted(
                (tuple(map(_plain, row)) for row in connection.execute(select(table))), key=repr
            )
            for table in CARRIED
        }
    database.close()
    return found


def _plain(value: Any) -> Any:
    return bytes(value) if isinstance(value, memoryview) else value


def secret_of(where: str) -> bytes:
    store = open_store(where, new=False)
    asyncio.run(store.close())
    return store.secret


__all__ = ["contents", "follow", "plans", "secret_of", "tables"]
