"""The experiments' scripts: what they read from a run, when they end one, and what they report."""

import importlib
import json
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def load(scripts):
    """Import a script by name."""
    return importlib.import_module


@pytest.fixture
def trial(load):
    return load("trial")


@pytest.fixture
def ablation(load):
    return load("ablation")


def write(run: Path, *lines: dict) -> None:
    run.mkdir(parents=True, exist_ok=True)
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def steps(*success: float) -> list[dict]:
    return [{"step": n, "reward/success": value} for n, value in enumerate(success, start=1)]


def test_the_goal_is_reached_when_the_mean_of_the_last_ten_steps_reaches_it(trial):
    rising = [0.0] * 10 + [1.0] * 10
    assert trial.steps_to(rising, 0.5) == 15
    assert trial.steps_to(rising, 0.51) == 16
    assert trial.steps_to([0.5] * 10, 0.5) == 10
    assert trial.steps_to([1.0] * 9, 0.5) is None
    assert trial.steps_to([0.4] * 200, 0.5) is None


def test_the_curve_is_the_mean_of_ten_steps_and_begins_at_the_tenth(trial):
    assert trial.moving_mean([0.0] * 10 + [1.0, 1.0]) == [0.0, 0.1, 0.2]
    assert trial.moving_mean([1.0] * 9) == []


def test_training_success_leaves_evaluations_out_and_counts_a_step_without_rewards_as_none(trial):
    metrics = [{"eval": "greedy", "step": 0, "success": 0.9}, *steps(0.25), {"step": 2}]
    assert trial.train_success(metrics) == [0.25, 0.0]


def test_a_line_that_is_being_written_is_not_read_yet(trial, tmp_path):
    write(tmp_path, *steps(0.25, 0.5))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/suc')
    assert trial.train_success(trial.read_metrics(tmp_path)) == [0.25, 0.5]


def test_a_run_that_has_written_nothing_has_no_metrics(trial, tmp_path):
    assert trial.read_metrics(tmp_path / "not-made-yet") == []


def test_a_run_started_again_takes_the_next_number(trial, tmp_path):
    out = tmp_path / "calc-air-seed1"
    assert trial.free(out) == out
    for made in ("calc-air-seed1", "calc-air-seed1-2", "calc-air-seed10"):
        (tmp_path / made).mkdir()
    assert [folder.name for folder in trial.folders(out)] == ["calc-air-seed1", "calc-air-seed1-2"]
    assert trial.free(out).name == "calc-air-seed1-3"


@pytest.mark.parametrize("name", ["calc", "sql", "rag"])
def test_a_variant_changes_credit_alone(trial, name):
    assert trial.variants(name) == {
        "identical": {},
        "air": {"air": EXAMPLES / name / "air.toml"},
        "discounted": {"credit": "discounted"},
        "turn-group": {"credit": "turn-group"},
        "turn-group-undiscounted": {"credit": "turn-group", "discount": 1.0},
    }
    assert (EXAMPLES / name / "air.toml").is_file()


def test_settings_become_flags_of_fulmen_train(trial):
    command = trial.command({"learning-rate": 1e-3, "train": "writer,rewriter"}, Path("runs/x"))
    assert command[-7:] == [
        "train",
        *("--learning-rate", "0.001"),
        *("--train", "writer,rewriter"),
        *("--out", "runs/x"),
    ]


def test_an_experiment_reads_back_both_ways_of_measuring(load, tmp_path):
    write(
        tmp_path,
        {"eval": "greedy", "step": 0, "success": 0.1},
        {"eval": "sampled", "step": 0, "success": 0.2},
        *steps(0.25),
        {"eval": "greedy", "step": 1, "success": 0.5},
        {"eval": "sampled", "step": 1, "success": 0.4},
    )
    (tmp_path / "summary.json").write_text('{"train_seconds": 12.5, "peak_mb": 640.0}')
    experiment = load("experiment")
    assert experiment.read(tmp_path, seed=3) == experiment.Curve(
        seed=3,
        greedy=[(0, 0.1), (1, 0.5)],
        sampled=[(0, 0.2), (1, 0.4)],
        train=[0.25],
        seconds=12.5,
        peak_mb=640.0,
    )


def test_a_run_is_over_at_its_goal_or_at_its_last_step(ablation):
    assert not ablation.over([0.4] * 10, 0.5, 200)
    assert ablation.over([0.6] * 10, 0.5, 200)
    assert ablation.over([0.4] * 200, 0.5, 200)


def test_an_interrupted_run_counts_as_none_and_one_that_was_over_is_found_again(ablation, tmp_path):
    out = tmp_path / "calc-air-seed0"
    assert ablation.finished(out, 0.5, 200) is None
    write(out, *steps(*[0.4] * 10))
    assert ablation.finished(out, 0.5, 200) is None
    write(tmp_path / "calc-air-seed0-2", *steps(*[0.6] * 11))
    assert ablation.finished(out, 0.5, 200) == [0.6] * 11


def test_the_table_has_the_median_of_the_seeds_and_each_of_them(ablation):
    def result(name: str, variant: str, seed: int, reached: int | None):
        quick = 10 if reached is None else reached
        last = 0.0 if reached is None else 1.0
        return ablation.Result(name, variant, seed, [0.0] * (quick - 10) + [last] * 10, 200)

    found = [
        result("sql", "identical", 0, 70),
        result("calc", "identical", 0, 30),
        result("calc", "air", 0, 40),
        result("sql", "identical", 1, None),
        result("calc", "identical", 1, None),
        result("calc", "identical", 2, 21),
    ]
    # Mean of ten at the goal: 0.56 six steps after the first success, 0.77 eight steps after it.
    assert ablation.table(found) == (
        "| variant | sql (goal 0.56) | calc (goal 0.77) |\n"
        "| --- | --- | --- |\n"
        "| identical | never (200): 66, never (200) | **28**: 28, never (200), 19 |\n"
        "| air |  | **38**: 38 |\n"
    )


def test_every_run_has_its_result_line_and_one_without_success_has_no_value(ablation, capsys):
    ablation.report(ablation.Result("rag", "air", 1, [0.0] * 5 + [0.5] * 10, 80))
    ablation.report(ablation.Result("rag", "air", 2, [0.0] * 80, 80))
    lines = [
        json.loads(line.removeprefix("RESULT ")) for line in capsys.readouterr().out.splitlines()
    ]
    name = "ablation.rag.air.steps_to_goal"
    assert lines == [
        {"name": name, "value": 12, "unit": "steps", "seed": 1},
        {"name": name, "value": None, "unit": "steps", "seed": 2},
    ]


def test_the_picture_has_a_panel_for_each_experiment(ablation, tmp_path):
    results = [
        ablation.Result(name, variant, seed, [0.1] * 12, 200)
        for name in ("calc", "rag")
        for variant in ("identical", "turn-group")
        for seed in (0, 1)
    ]
    picture = tmp_path / "ablation.png"
    ablation.draw(picture, results)
    data = picture.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1100, 440)
