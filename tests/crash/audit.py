"""Afterwards: is every rollout accounted for exactly once, and as its agent says?"""

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sqlalchemy import select

from crash.ledger import Entry, Ledger, read_ledger
from crash.scene import SECRET, Scene, asked_in
from crash.trainer import WEIGHTS
from fulmen.schema.records import RolloutResult, StepRecord
from fulmen.store import tables
from fulmen.store.open import open_store
from fulmen.store.sql import SqlStore


@dataclass
class Findings:
    """What came out of it."""

    steps: int = 0
    rollouts: int = 0
    attempts: int = 0
    excluded: int = 0
    """Rollouts that failed for good without fault of their agent."""
    refused: dict[str, int] = field(default_factory=dict)
    lost: list[str] = field(default_factory=list)
    """In words: what is not there."""
    duplicated: list[str] = field(default_factory=list)
    """In words: what is there twice."""
    wrong: list[str] = field(default_factory=list)
    """In words: what is there, but is not what the agent says."""


async def audit(scene: Scene) -> Findings:
    """Compare store, ledger and checkpoint of a run that has ended in order."""
    ledger = read_ledger(scene.ledgers)
    store = open_store(scene.place, secret=SECRET)
    try:
        found = Findings(attempts=len(ledger))
        records = await store.steps()
        await _steps(store, records, found)
        names = [name for record in records for name in record.consumed]
        results = {result.rollout.id: result for result in await store.results(names)}
        found.rollouts = len(results)
        for result in results.values():
            entry = ledger.get((result.rollout.id, result.attempt))
            found.excluded += result.outcome.failure not in (None, "agent")
            for problem in _differences(result, entry):
                whose = f"rollout {result.rollout.id}, attempt {result.attempt}"
                found.wrong.append(f"{whose}: {problem}; the ledger says {entry}")
        if records:
            _learned(scene, records[-1], results, found)
    finally:
        await store.close()
    _numbers(ledger, found)
    return found


async def _steps(store: SqlStore, records: Sequence[StepRecord], found: Findings) -> None:
    """Each step is there, with all that it asked for, finished, and nothing is left over."""
    found.steps = len(records)
    if not records:
        found.lost.append("no step is on record")
    if [record.step for record in records] != list(range(1, len(records) + 1)):
        found.lost.append(f"steps are {[record.step for record in records]}")
    for record in records:
        asked = {rollout.id for rollout in asked_in(record.step)}
        found.lost += [f"step {record.step} lacks {name}" for name in asked - set(record.consumed)]
    times = Counter(name for record in records for name in record.consumed)
    found.duplicated += [f"{name} is consumed {n} times" for name, n in times.items() if n > 1]
    finished = {result.rollout.id for result in await store.results(list(times))}
    found.lost += [f"{name} is consumed, but not finished" for name in set(times) - finished]
    engine = store._database.reading
    assert engine is not None
    with engine.connect() as connection:
        rows = list(connection.execute(select(tables.consumed)))
        stored = list(connection.execute(select(tables.rollouts.c.id, tables.rollouts.c.status)))
    taken = {(row.rollout_id, row.step) for row in rows}
    said = {(name, record.step) for record in records for name in record.consumed}
    found.wrong += [f"consumed on one record only: {one}" for one in taken ^ said]
    found.lost += [f"{row.id} is {row.status}, of no step" for row in stored if row.id not in times]
    counts = await store.counts()
    found.refused = {name: n for name, n in counts.items() if name.startswith("refused_")}


def _differences(result: RolloutResult, entry: Entry | None) -> Iterator[str]:
    """How a rollout's last attempt differs from what its agent wrote down."""
    failure = result.outcome.failure
    if entry is None:
        if failure in (None, "agent"):
            yield "it ended, and no agent knows of it"
        return
    received = [call.id for call in result.calls if call.id in entry.calls]
    spans = {span.id: span.ended for span in result.spans}
    given = {x.name: x.value for x in result.rewards if x.source == "agent" and x.name != "reward"}
    final = [x.value for x in result.rewards if x.name == "reward"]
    if failure not in (None, "agent"):
        return  # excluded: of its last attempt nothing but its end is promised
    if failure is None and (entry.ended is None or result.outcome.output != entry.ended):
        yield f"the store has the answer {result.outcome.output!r}"
    if failure == "agent" and not entry.raised:
        yield f"the store says that it failed: {result.outcome.error}"
    if received != entry.calls:
        yield f"the store has the calls {[call.id for call in result.calls]}"
    if lost := [name for name in entry.spans if spans.get(name) is None]:
        yield f"the store lacks the spans {lost}"
    if sum(given.values()) != sum(entry.rewards) or len(given) != len(entry.rewards):
        yield f"the store has the rewards {given}"
    if final != [float(entry.ended) if entry.ended is not None else -1.0]:
        yield f"the store has the final reward {final}"


def _learned(
    scene: Scene, last: StepRecord, results: dict[str, RolloutResult], found: Findings
) -> None:
    """The last checkpoint holds each consumed rollout's calls once."""
    if last.checkpoint is None or not (scene.run / last.checkpoint / WEIGHTS).exists():
        found.lost.append(f"step {last.step} ended the run without a checkpoint ({last})")
        return
    weights = json.loads((scene.run / last.checkpoint / WEIGHTS).read_text())
    if weights["version"] != last.step:
        found.wrong.append(f"step {last.step}'s checkpoint is of version {weights['version']}")
    learned = Counter((rollout, call) for rollout, call in weights["learned"])
    found.duplicated += [f"call {one} was learned {n} times" for one, n in learned.items() if n > 1]
    for name, result in results.items():
        if result.outcome.failure in (None, "agent"):
            calls = [call for call in result.calls if not call.superseded and call.status < 400]
            missing = {(name, call.id) for call in calls} - set(learned)
            found.lost += [f"call {one} was never learned" for one in missing]
    strangers = {name for name, _ in learned} - set(results)
    found.wrong += [f"learned from {name}, which no step has consumed" for name in strangers]


def _numbers(ledger: Ledger, found: Findings) -> None:
    for (name, attempt), entry in ledger.items():
        if entry.began > 1:
            found.duplicated.append(f"attempt {attempt} of {name} was begun {entry.began} times")
