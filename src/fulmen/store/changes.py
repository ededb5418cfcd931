"""What each writing method of the store does to its tables, as functions of a connection.

Portable SQL only, so that any database can hold a store. They run in the writer's transaction, one
after another, and hold the rollouts that they decide on (in SQLite only one process writes anyway):
nothing changes between what one of them reads and what it writes.
"""

from collections.abc import Mapping, Sequence

from msgspec import structs
from sqlalchemy import (
    Connection,
    Table,
    and_,
    delete,
    insert,
    select,
    update,
)

from fulmen.schema.errors import LeaseLost, StoreError
from fulmen.schema.records import Reward, StepRecord
from fulmen.store import rows, tables
from fulmen.store.base import FINISHED
from fulmen.store.database import Change
from fulmen.store.inserts import insert_new, replace
from fulmen.store.reads import parts, states


def enqueue(connection: Connection, new: Mapping[str, rows.Row]) -> Change[int]:
    """Add rollouts, by id, that are not known yet; returns how many those are."""
    known = states(connection, new)
    wanted = [row for name, row in new.items() if name not in known]
    d = tables.discarded.c
    before: dict[str, int] = {}
    for part in parts([str(row["id"]) for row in wanted]):
        for row in connection.execute(select(tables.discarded).where(d.rollout_id.in_(part))):
            before[row.rollout_id] = row.attempt
    for row in wanted:
        begun = before.get(str(row["id"]), 0)
        row |= {"status": "queued", "attempt": begun, "attempts_before": begun}
    added = insert_new(connection, tables.rollouts, wanted)
    return Change(added, queued=added)


def keep(
    connection: Connection, new_of: Sequence[Sequence[rows.Row]], *, table: Table, counter: str
) -> list[Change[None]]:
    """Keep calls or spans of current attempts; those of others are counted."""
    new = [row for part in new_of for row in part]
    found = states(connection, (str(row["rollout_id"]) for row in new), hold=True)
    running = {(name, row.attempt) for name, row in found.items() if row.status == "running"}
    kept = [row for row in new if (row["rollout_id"], row["attempt"]) in running]
    replace(connection, table, kept)
    if len(kept) < len(new):
        count(connection, counter, len(new) - len(kept))
    return [Change(None)] * len(new_of)


def supersede(
    connection: Connection, rollout_id: str, attempt: int, call_ids: Sequence[str]
) -> Change[None]:
    """Mark calls that the agent did not receive; those of other attempts are left as they are."""
    c = tables.calls.c
    for part in parts(call_ids):
        which = and_(c.rollout_id == rollout_id, c.attempt == attempt, c.id.in_(part))
        connection.execute(update(tables.calls).where(which).values(superseded=True))
    return Change(None)


def add_rewards(connection: Connection, rewards: Sequence[Reward]) -> Change[None]:
    """Keep rewards of latest attempts, finished or not.

    Raises:
        StoreError: there is no such attempt; nothing is written.
        LeaseLost: another attempt has begun; nothing is written.
    """
    found = states(connection, (reward.rollout_id for reward in rewards), hold=True)
    for reward in rewards:
        row = found.get(reward.rollout_id)
        whose = f"rollout {reward.rollout_id}, attempt {reward.attempt}"
        if row is None or not row.attempts_before < reward.attempt <= row.attempt:
            raise StoreError(f"{whose}: a reward for an attempt that never began")
        if reward.attempt < row.attempt:
            raise LeaseLost(f"{whose}: a reward came after attempt {row.attempt} had begun")
    replace(connection, tables.rewards, [rows.reward_row(reward) for reward in rewards])
    return Change(None)


def commit_step(connection: Connection, step: StepRecord, text: str) -> Change[None]:
    """Record a step and what it consumed.

    Raises:
        StoreError: the step exists, or a rollout is not there to be consumed; nothing is written.
    """
    c = tables.consumed.c
    same = select(tables.steps.c.step).where(tables.steps.c.step == step.step)
    if connection.scalar(same) is not None:
        raise StoreError(f"step {step.step} was committed before")
    if len(set(step.consumed)) < len(step.consumed):
        raise StoreError(f"step {step.step} consumes a rollout twice")
    found = states(connection, step.consumed, hold=True)
    for name in step.consumed:
        if name not in found or found[name].status not in FINISHED:
            what = found[name].status if name in found else "not in the store"
            raise StoreError(f"step {step.step} consumes rollout {name}, which is {what}")
    for part in parts(step.consumed):
        query = select(c.rollout_id, c.step).where(c.rollout_id.in_(part)).limit(1)
        for name, earlier in connection.execute(query):
            raise StoreError(f"step {step.step}: rollout {name} was consumed by step {earlier}")
    connection.execute(insert(tables.steps), {"step": step.step, "record": text})
    if step.consumed:
        taken = [{"rollout_id": name, "step": step.step} for name in step.consumed]
        connection.execute(insert(tables.consumed), taken)
    return Change(None)


def add_checkpoint(connection: Connection, step: int, folder: str) -> Change[None]:
    """Note where the weights of a committed step are. Raises StoreError if it was not committed."""
    c = tables.steps.c
    text = connection.scalar(select(c.record).where(c.step == step).with_for_update())
    if text is None:
        raise StoreError(f"step {step} was never committed")
    record = structs.replace(rows.from_text(StepRecord, text), checkpoint=folder)
    changed = update(tables.steps).where(c.step == step)
    connection.execute(changed.values(record=rows.to_text(record, f"step {step}")))
    return Change(None)


def discard_after(connection: Connection, step: int) -> Change[int]:
    """Forget later steps and their rollouts, but never an attempt number that was given out."""
    r, c = tables.rollouts.c, tables.consumed.c
    connection.execute(delete(tables.consumed).where(c.step > step))
    connection.execute(delete(tables.steps).where(tables.steps.c.step > step))
    # A rollout asked ahead of time may have been consumed by a step that stays.
    kept = select(c.rollout_id)
    gone = and_(r.step > step, r.id.not_in(kept))
    query = select(r.id, r.attempt, r.status).where(gone).order_by(r.id)
    found = connection.execute(query.with_for_update()).all()
    fences: list[rows.Row] = [
        {"rollout_id": row.id, "attempt": row.attempt} for row in found if row.attempt
    ]
    replace(connection, tables.discarded, fences)
    connection.execute(delete(tables.rollouts).where(gone))
    ended = tuple((row.id, row.attempt) for row in found if row.status == "running")
    return Change(len(found), ended=ended)


def count(connection: Connection, name: str, by: int) -> None:
    c = tables.counters.c
    connection.execute(update(tables.counters).where(c.name == name).values(value=c.value + by))
