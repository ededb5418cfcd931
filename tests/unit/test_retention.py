"""A run that lets old calls and spans go learns the same, and goes on as exactly as any other."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fulmen.schema.errors import ConfigError
from fulmen.schema.records import Task
from fulmen.trainer import collect
from small_runs import score, settings, shape, train

VAL = [Task(id=f"v{n}", input=n) for n in range(2)]
CONFIG = settings(
    steps=6, tasks_per_step=2, checkpoint_every=2, keep_checkpoints=1, dynamic_sampling=False
).model_copy(update={"eval_every": 1})
LEAN = CONFIG.model_copy(update={"keep_rollouts": 1})


@pytest.fixture(autouse=True)
def _no_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_GATHER_S", 0)


def judged_by_calls(task: Any, rollout: Any) -> float | None:
    """A grader that cannot do without the calls."""
    assert rollout.calls, f"{rollout.rollout.id} was graded without its calls"
    return score(task, rollout)


def steps_with_calls(path: Path) -> dict[str, set[int]]:
    """By split: the steps that have calls in the store."""
    query = """
        SELECT json_extract(r.record, '$.split'), r.step FROM calls JOIN rollouts r
        ON r.id = calls.rollout_id
    """
    found: dict[str, set[int]] = {"train": set(), "eval": set()}
    with closing(sqlite3.connect(path / "run.db")) as db:
        for split, step in db.execute(query):
            found[split].add(step)
    return found


async def test_calls_of_older_steps_are_let_go_and_nothing_else_changes(tmp_path):
    whole = await train(tmp_path / "whole", CONFIG, val=VAL)
    lean = await train(tmp_path / "lean", LEAN, val=VAL)
    assert shape(lean) == shape(whole)
    assert steps_with_calls(tmp_path / "whole")["train"] == {1, 2, 3, 4, 5, 6}
    assert steps_with_calls(tmp_path / "lean")["train"] == {6}
    assert max(steps_with_calls(tmp_path / "lean")["eval"]) == 6


async def test_a_resumed_run_measures_again_from_calls_that_were_kept_for_that(tmp_path):
    whole = await train(tmp_path / "whole", CONFIG, val=VAL)
    path = tmp_path / "cut"
    lean = await train(path, LEAN, val=VAL, stop_after=5, grader=judged_by_calls)
    assert lean.history.step == 5
    for done in (path / "checkpoints").iterdir():
        assert done.name == "step-000005"
    assert steps_with_calls(path) == {"train": {5}, "eval": {4, 5}}
    # As if the process had been killed before the last step's checkpoint and evaluation.
    resumed = await train(path, LEAN, val=VAL, resume=True, grader=judged_by_calls)
    assert shape(resumed) == shape(whole)
    assert steps_with_calls(path)["train"] == {6}


async def test_a_run_that_is_given_a_limit_later_lets_everything_older_go(tmp_path):
    path = tmp_path / "run"
    await train(path, CONFIG.model_copy(update={"steps": 4}), val=VAL)
    await train(path, LEAN, val=VAL, resume=True)
    assert steps_with_calls(path)["train"] == {6}


def test_the_setting_keeps_one_step_at_least():
    with pytest.raises(ConfigError, match="keep_rollouts"):
        settings(keep_rollouts=0)
