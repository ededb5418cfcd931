"""The next step's agents start while the policy learns, and nothing of a run changes by that."""

import contextlib
from pathlib import Path

import pytest

from fulmen.schema.records import Rollout, Task
from fulmen.store.open import open_store
from fulmen.trainer import ahead, collect
from fulmen.trainer.ahead import Ahead
from fulmen.trainer.loop import Parts
from small_runs import TASKS, Fuse, PowerCut, Run, settings, shape, train

CONFIG = settings(steps=4, tasks_per_step=2, dynamic_sampling=False, eval_every=0)


@pytest.fixture(autouse=True)
def _no_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_GATHER_S", 0)


class Diary:
    """Notes, in order, when rollouts are asked for, when the gate is held, and what is learned."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def keep(self, parts: Parts) -> None:
        enqueue, learn = parts.store.enqueue, parts.learners.learn

        async def noted(rollouts):
            new = await enqueue(rollouts)
            kind = "eval" if rollouts[0].split == "eval" else f"step {rollouts[0].step}"
            self.lines.append(f"{kind}: {new} new")
            return new

        def learned(credited):
            self.lines.append("learn")
            return learn(credited)

        @contextlib.asynccontextmanager
        async def hold():
            self.lines.append("hold")
            yield
            self.lines.append("open")

        parts.store.enqueue, parts.learners.learn = noted, learned
        parts.ahead._hold = hold


async def test_the_next_rollouts_are_asked_for_while_requests_wait_for_new_weights(tmp_path):
    diary = Diary()
    await train(tmp_path / "run", CONFIG, change=diary.keep)
    first = ["step 1: 4 new", "hold", "learn", "open", "step 2: 4 new"]
    assert diary.lines[:5] == first, "how long learning takes is known after the first step"
    assert diary.lines[5:] == [
        *("hold", "step 3: 4 new", "learn", "open", "step 3: 0 new"),
        *("hold", "step 4: 4 new", "learn", "open", "step 4: 0 new"),
        *("hold", "learn", "open"),
    ]


async def test_nothing_is_asked_ahead_of_an_evaluation(tmp_path):
    diary = Diary()
    config = settings(steps=4, tasks_per_step=2, dynamic_sampling=False, eval_every=2)
    await train(tmp_path / "run", config, val=[Task(id="v", input=0)], change=diary.keep)
    behind = dict(zip(diary.lines, diary.lines[1:], strict=False))
    assert behind["hold"] == "learn"
    assert "step 3: 4 new" in diary.lines


async def test_nothing_is_asked_ahead_of_learning_that_takes_long(tmp_path, monkeypatch):
    monkeypatch.setattr(ahead, "_LONGEST_S", 0.0)
    diary = Diary()
    await train(tmp_path / "run", CONFIG, change=diary.keep)
    assert "step 3: 0 new" not in diary.lines


async def test_a_run_that_is_told_to_stop_ends_what_it_has_asked_ahead(tmp_path):
    await train(tmp_path / "run", CONFIG, stop_after=2)
    store = open_store(tmp_path / "run" / "run.db")
    try:
        counts = await store.counts()
    finally:
        await store.close()
    assert counts["succeeded"] == 8, "of two steps"
    assert sum(counts[name] for name in ("queued", "running", "cancelled", "failed")) == 0


async def test_a_run_that_is_interrupted_at_any_write_goes_on_as_if_it_had_not_been(tmp_path):
    fuse = Fuse()
    whole = await train(tmp_path / "whole", CONFIG, change=fuse.guard)
    for last in range(1, fuse.spent + 1):
        path = tmp_path / f"cut-{last}"
        with contextlib.suppress(PowerCut):
            await train(path, CONFIG, change=Fuse(last).guard)
        again = await train(path, CONFIG, resume=True)
        assert shape(again) == shape(whole), last


async def test_every_task_is_drawn_in_order_whatever_a_step_leaves_out(tmp_path):
    def tasks(run: Run) -> list[str]:
        return [name for step in run.tasks for name in step]

    run = await train(tmp_path / "run", settings(steps=4))
    asked = [name.rpartition("-")[0] for record in run.steps for name in record.consumed]
    assert len(set(asked)) == len(tasks(run)), "no task is asked for twice, none is passed over"


async def test_nothing_is_asked_ahead_whose_deadline_might_pass_at_the_gate(tmp_path: Path):
    store = open_store(tmp_path / "run.db")
    try:
        asking = Ahead(store, contextlib.nullcontext)
        async with asking.asking([]):
            pass
        hasty = Rollout(id="r1", task=TASKS[0], group="g", step=2, deadline_s=1e-9)
        async with asking.asking([hasty]):
            assert (await store.counts())["queued"] == 0
    finally:
        await store.close()


async def test_rollouts_asked_ahead_are_forgotten_when_their_step_does_not_come(tmp_path: Path):
    store = open_store(tmp_path / "run.db")
    try:
        asking = Ahead(store, contextlib.nullcontext)
        async with asking.asking([]):
            pass  # now it is known that learning is short
        rollout = Rollout(id="r1", task=TASKS[0], group="g", step=2)
        async with asking.asking([rollout]):
            assert (await store.counts())["queued"] == 1
        await asking.withdraw(1)
        assert set((await store.counts()).values()) == {0}
    finally:
        await store.close()
