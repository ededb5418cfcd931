"""A run that loses its process at any moment goes on, and its record has everything once."""

import json
from pathlib import Path
from typing import Any

import pytest

from fulmen.schema.records import Task
from fulmen.trainer import collect
from small_runs import CLOCK, Fuse, PowerCut, Run, settings, shape, train

VAL = [Task(id=f"v{n}", input=n) for n in range(2)]
CONFIG = settings(
    steps=3,
    tasks_per_step=2,
    checkpoint_every=2,
    keep_checkpoints=1,
    eval_every=1,
    dynamic_sampling=False,
)


@pytest.fixture(autouse=True)
def _no_gathering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collect, "_GATHER_S", 0)


def lines(path: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says."""
    found = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.endswith(CLOCK)} for line in found]


def order(path: Path) -> list[tuple[int, str]]:
    return [(line["step"], line.get("eval", "")) for line in lines(path)]


WHOLE = [
    *((0, "greedy"), (0, "sampled")),
    *((1, ""), (1, "greedy"), (2, ""), (2, "greedy")),
    *((3, ""), (3, "greedy"), (3, "sampled")),
]


async def test_wherever_a_run_is_interrupted_its_record_has_every_line_once(tmp_path):
    fuse = Fuse()
    whole = await train(tmp_path / "whole", CONFIG, val=VAL, change=fuse.guard)
    assert order(tmp_path / "whole") == WHOLE
    cut = 0
    for last in range(1, fuse.spent + 1):
        path = tmp_path / f"cut-{last}"
        # How many writes it takes to keep rewards depends on which agents end together.
        try:
            await train(path, CONFIG, val=VAL, change=Fuse(last).guard)
        except PowerCut:
            cut += 1
        again = await train(path, CONFIG, val=VAL, resume=True)
        assert lines(path) == lines(tmp_path / "whole"), last
        assert same(again, whole), last
        assert [folder.name for folder in (path / "checkpoints").iterdir()] == ["step-000003"]
    assert cut > 30, "that many moments, the last of them after everything"


def same(one: Run, other: Run) -> bool:
    def told(run: Run) -> list[Any]:
        evals = [(e.step, e.mode, e.reward) for e in run.history.evals]
        return [shape(run), evals, run.history.rewards, run.history.step, run.history.drawn]

    return told(one) == told(other)


async def test_a_run_that_is_interrupted_again_and_again_comes_to_its_end(tmp_path):
    await train(tmp_path / "whole", CONFIG, val=VAL)
    for last in (9, 1, 12, 2, 3):
        fuse, resume = Fuse(last), (tmp_path / "run").exists()
        with pytest.raises(PowerCut):
            await train(tmp_path / "run", CONFIG, val=VAL, resume=resume, change=fuse.guard)
    await train(tmp_path / "run", CONFIG, val=VAL, resume=True)
    assert lines(tmp_path / "run") == lines(tmp_path / "whole")


async def test_lines_that_were_lost_or_cut_off_are_there_again_after_a_resume(tmp_path):
    path = tmp_path / "run"
    await train(path, CONFIG, val=VAL)
    whole, text = lines(path), (path / "metrics.jsonl").read_text().splitlines()
    for damaged in ("\n".join(text[:7]), "\n".join(text[:-2]) + text[-2][:20], ""):
        (path / "metrics.jsonl").write_text(damaged)
        await train(path, CONFIG, val=VAL, resume=True)
        steps = [line for line in whole if "eval" not in line]
        assert [line for line in lines(path) if "eval" not in line] == steps
        assert lines(path)[-3:] == whole[-3:], "the last step, and what was measured after it"


async def test_a_finished_run_that_is_given_more_steps_keeps_what_was_measured(tmp_path):
    path = tmp_path / "run"
    await train(path, CONFIG, val=VAL)
    more = CONFIG.model_copy(update={"steps": 4})
    run = await train(path, more, val=VAL, resume=True)
    assert order(path) == [*WHOLE, (4, ""), (4, "greedy"), (4, "sampled")]
    seconds = [record.seconds for record in run.steps]
    assert seconds == sorted(seconds)
    assert seconds[0] > 0


async def test_a_checkpoint_whose_step_is_not_on_record_is_not_kept_for_one(tmp_path):
    path = tmp_path / "run"
    config = CONFIG.model_copy(update={"checkpoint_every": 1})
    await train(path, config, val=VAL, stop_after=2)
    (path / "checkpoints" / "step-000009").mkdir()
    await train(path, config, val=VAL, resume=True)
    assert [folder.name for folder in (path / "checkpoints").iterdir()] == ["step-000003"]
