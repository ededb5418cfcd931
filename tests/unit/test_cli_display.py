"""What people see: live on a terminal, plain lines elsewhere, JSON for programs."""

import io
import json
import re

import pytest
from msgspec import structs
from rich.console import Console

from fulmen.cli.console import JsonDisplay, LiveDisplay, PlainDisplay, event_line, metrics_line
from fulmen.cli.plot import plot, sparkline
from fulmen.cli.report import closing_lines, final_report
from fulmen.schema.config import make_config
from fulmen.schema.training import TrainConfig
from fulmen.trainer.events import (
    EvalDone,
    Note,
    Progress,
    RunFinished,
    RunStarted,
    Sample,
    StepDone,
)
from fulmen.trainer.figure import draw_rewards

STARTED = RunStarted(
    run="runs/x",
    model="base",
    parameters=1000,
    agent="a.py:f",
    train_tasks=10,
    val_tasks=5,
    first_step=1,
    steps=20,
    rollouts_per_step=8,
    gateway="http://127.0.0.1:1",
)
METRICS = {"reward/mean": 0.25, "groups/with_signal": 0.5, "time/step_s": 2.0}
STEP = StepDone(step=3, metrics=METRICS, eta_s=95.0)
BEFORE = EvalDone(step=0, mode="greedy", rollouts=10, reward=0.1, low=0.05, high=0.2, success=0.1)
AFTER = EvalDone(step=20, mode="greedy", rollouts=10, reward=0.8, low=0.7, high=0.9, success=0.8)
NOTE = Note(level="warning", code="no-signal", text="all the same")
WORKING = Progress(
    phase="collect", step=4, done=5, total=8, running=3, failed=1, retried=2, reward=0.5
)
EVENTS = (STARTED, BEFORE, WORKING, STEP, NOTE, NOTE, AFTER)
DONE = RunFinished(
    run="runs/x y",
    checkpoint="runs/x y/checkpoints/step-000020",
    steps=20,
    stopped=False,
    train_seconds=75.0,
    peak_mb=1500.0,
    evals=(BEFORE, AFTER),
    rewards=(0.1, 0.4, 0.8),
    won=(Sample(task={"q": "1+1?"}, output="2", reward=1.0),),
    lost=(Sample(task={"q": "[b]2+2?[/b]"}, output="x" * 500, reward=0.0),),
    plot="runs/x y/reward.png",
)
CONFIG = make_config(TrainConfig, {"agent": "a.py:f", "tasks": "t.jsonl", "model": "m"})


def shown(terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, width=80, force_terminal=terminal)
    with LiveDisplay(console) if terminal else PlainDisplay(console, clock=lambda: 0.0) as display:
        for event in EVENTS:
            display.show(event)
    return out.getvalue()


def test_plain_output_has_no_control_characters_and_a_line_an_event():
    text = shown(terminal=False)
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)
    lines = text.splitlines()
    assert lines[0].startswith("run runs/x: a.py:f on 10 tasks (5 held out)")
    assert lines[1] == "held out after step 0, greedy: 0.100 (0.050 – 0.200) in 0.0 s"
    assert lines[2].startswith("step 3: reward 0.250")
    assert lines[2].endswith("ETA 1 min 35 s")
    assert [line for line in lines if "all the same" in line] == ["warning: all the same"]


def test_rollouts_that_dynamic_sampling_left_out_are_shown_where_there_are_any():
    counts = {"collect/rollouts": 40.0, "collect/left_out": 0.0}
    assert metrics_line(METRICS | counts) == "signal 50%  s 2.0"
    counts["collect/left_out"] = 16.0
    assert metrics_line(METRICS | counts) == "left out 16 of 40  signal 50%  s 2.0"


def test_what_was_excluded_is_shown_with_its_reasons():
    counts = {"collect/rollouts": 40.0, "collect/excluded": 3.0}
    counts |= {"excluded/agent": 1.0, "excluded/timeout": 2.0}
    assert metrics_line(METRICS | counts) == "excluded 3 (2 timeout, 1 agent)  signal 50%  s 2.0"
    done = structs.replace(AFTER, excluded=2, reasons={"infrastructure": 2})
    assert event_line(done) == (
        "held out after step 20, greedy: 0.800 (0.700 – 0.900) in 0.0 s; "
        "2 excluded: 2 infrastructure"
    )


def test_plain_output_tells_progress_only_now_and_then():
    now = [0.0]
    out = io.StringIO()
    display = PlainDisplay(Console(file=out, width=80), clock=lambda: now[0])
    for now[0] in range(25):
        display.show(WORKING)
    assert out.getvalue().count("collect: 5/8, 3 at work, reward 0.500") == 2


def test_the_live_display_shows_where_the_run_is_within_eighty_columns():
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown(terminal=True))
    for expected in ("3/20", "ETA 1 min 35 s", "5/8", "3 at work, 2 retried, 1 failed"):
        assert expected in text
    assert "note (×2): all the same" in text
    assert "greedy 0.80 (start 0.10)" in text
    assert max(map(len, text.splitlines())) <= 120


def test_json_output_is_one_event_a_line(capsys):
    with JsonDisplay() as display:
        for event in EVENTS:
            display.show(event)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["type"] for line in lines] == [
        "run_started",
        "eval_done",
        "progress",
        "step_done",
        "note",
        "note",
        "eval_done",
    ]


def test_the_report_compares_before_with_after_and_shows_wins_and_losses():
    out = io.StringIO()
    Console(file=out, width=80).print(final_report(DONE))
    text = out.getvalue()
    assert "0.100 (0.050 – 0.200)" in text
    assert "0.800 (0.700 – 0.900)" in text
    assert "+0.700" in text
    assert "[b]2+2?[/b]" in text, "what users wrote is never read as markup"
    assert "xxx" in text
    assert "x" * 200 not in text


def test_the_closing_commands_can_be_pasted_into_a_shell():
    text = "\n".join(closing_lines(DONE, CONFIG))
    assert "fulmen serve --model 'runs/x y/checkpoints/step-000020'" in text
    assert "fulmen eval --agent a.py:f --tasks t.jsonl" in text
    assert (
        "fulmen train --config 'runs/x y/config.toml' --out 'runs/x y' --steps 150 --resume" in text
    )
    assert "finished after 20 steps, 1 min 15 s of training; at most 1,500 MiB" in text


@pytest.mark.parametrize("values", [[], [float("nan")], [0.5], [0.1] * 300, [0.0, 1.0]])
def test_curves_of_any_length_can_be_drawn(values, tmp_path):
    assert len(sparkline(values, 10)) <= 10
    assert all(len(line) <= 67 for line in plot(values, width=60).splitlines())
    if values:
        draw_rewards(tmp_path / "curve.png", values, [BEFORE, AFTER])
        assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
