"""The crash harness itself: its audit finds what it is there to find."""

import json
import shutil
from pathlib import Path

import pytest

from crash.audit import Findings, audit
from crash.ledger import read_ledger
from crash.scene import SECRET, Scene, asked_in
from crash.trainer import WEIGHTS
from fulmen.schema.records import Call, Outcome, Reward, Span, StepRecord
from fulmen.store.open import open_store


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    return Scene("http+sqlite", tmp_path, str(tmp_path / "run.db"), 0, 0, 0)


async def run_a_step(scene: Scene) -> None:
    """One step as it should be: in the store, in the ledger, and in the checkpoint."""
    store = open_store(scene.place, secret=SECRET)
    asked = asked_in(1)
    await store.enqueue(asked)
    lines, learned = [], []
    for lease in await store.claim("w", limit=len(asked)):
        name = lease.rollout.id
        call = Call(
            id=f"call-{name}",
            rollout_id=name,
            attempt=1,
            index=0,
            protocol="chat",
            prompt_ids=(1,),
            completion_ids=(2,),
            logprobs=(-0.5,),
            versions=(),
            temperature=1.0,
            top_p=1.0,
            finish_reason="stop",
        )
        await store.record_calls([call])
        span = Span(id=f"span-{name}", rollout_id=name, attempt=1, name="tool", ended=1.0)
        await store.record_spans([span])
        given = {"turn-0": ("agent", 5.0), "reward": ("agent", 7.0)}
        await store.add_rewards(
            [
                Reward(rollout_id=name, attempt=1, name=what, value=value, source="agent")
                for what, (_, value) in given.items()
            ]
        )
        await store.finish(lease, Outcome(output=7))
        whose = {"rollout": name, "attempt": 1}
        noted = [("began", None), ("span", span.id), ("call", call.id), ("reward", 5), ("ended", 7)]
        lines += [{**whose, "what": what, "value": value} for what, value in noted]
        learned.append((name, call.id))
    folder = scene.run / "checkpoints" / "step-000001"
    folder.mkdir(parents=True)
    (folder / WEIGHTS).write_text(json.dumps({"version": 1, "learned": learned}))
    consumed = tuple(rollout.id for rollout in asked)
    checkpoint = str(folder.relative_to(scene.run))
    record = StepRecord(step=1, version=1, consumed=consumed, metrics={}, checkpoint=checkpoint)
    await store.commit_step(record)
    await store.close()
    scene.ledgers.mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (scene.ledgers / "1.jsonl").write_text(text + '{"cut off')


def words(found: Findings) -> list[str]:
    return [*found.lost, *found.duplicated, *found.wrong]


async def test_a_run_in_order_has_no_findings(scene):
    await run_a_step(scene)
    found = await audit(scene)
    assert words(found) == []
    assert (found.steps, found.rollouts, found.attempts) == (1, 8, 8)


@pytest.mark.parametrize(
    ("said", "instead", "finding"),
    [
        ('"reward", "value": 5', '"reward", "value": 6', "the store has the rewards"),
        ('"call", "value": "call-', '"call", "value": "other-', "the store has the calls"),
        ('"span", "value": "span-', '"span", "value": "other-', "the store lacks the spans"),
        ('"ended", "value": 7', '"ended", "value": 8', "the store has the answer 7"),
        ('"what": "span"', '"what": "began"', "was begun 2 times"),
        ('"attempt": 1', '"attempt": 2', "it ended, and no agent knows of it"),
    ],
)
async def test_what_the_ledger_says_otherwise_is_found(scene, said, instead, finding):
    await run_a_step(scene)
    ledger = scene.ledgers / "1.jsonl"
    ledger.write_text(ledger.read_text().replace(said, instead))
    assert len(read_ledger(scene.ledgers)) == 8
    assert any(finding in one for one in words(await audit(scene)))


async def test_rollouts_that_no_step_has_are_lost(scene):
    await run_a_step(scene)
    store = open_store(scene.place, secret=SECRET)
    await store.enqueue(asked_in(2))
    await store.close()
    found = await audit(scene)
    assert len(found.lost) == 8
    assert "is queued, of no step" in found.lost[0]


async def test_what_was_learned_twice_or_never_is_found(scene):
    await run_a_step(scene)
    file = scene.run / "checkpoints" / "step-000001" / WEIGHTS
    weights = json.loads(file.read_text())
    weights["learned"] = [*weights["learned"][1:], weights["learned"][1]]
    file.write_text(json.dumps(weights))
    found = await audit(scene)
    assert ["was never learned" in one for one in found.lost] == [True]
    assert ["was learned 2 times" in one for one in found.duplicated] == [True]
    shutil.rmtree(scene.run)
    assert "without a checkpoint" in (await audit(scene)).lost[0]
