"""Whole runs: the Calc agent, real worker processes, gateway, store, engine and learner."""

import asyncio
import json
import math
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from fulmen.launch.api import evaluate
from fulmen.launch.train import train
from fulmen.schema.config import make_config
from fulmen.schema.place import without_schema
from fulmen.schema.records import RolloutResult
from fulmen.schema.training import TrainConfig
from fulmen.store.open import open_store
from fulmen.trainer.events import Event, Progress, RunFinished, RunStarted, StepDone

pytestmark = pytest.mark.e2e

TIMED = ("seconds", "_per_s", "_s", "time/")
"""Metrics that measure the clock, which no seed repeats."""


def settings(calc: Path, out: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "agent": f"{calc}/plain_agent.py:solve",
        "tasks": f"{calc}/train.jsonl",
        "grader": f"{calc}/grader.py:score",
        "model": f"{calc}/base",
        "out": str(out),
        "steps": 2,
        "tasks_per_step": 3,
        "group_size": 4,
        "learning_rate": 1e-3,
        "max_tokens": 48,
        "workers": 1,
        "seed": 5,
    }
    return make_config(TrainConfig, values | changes)


def run(config: TrainConfig, listen=None, stop=None) -> RunFinished:
    return train(config, listen=listen or (lambda _: None), stop=stop)


def results(out: Path, names: list[str]) -> list[RolloutResult]:
    async def read():
        store = open_store(out / "run.db")
        try:
            return await store.results(names)
        finally:
            await store.close()

    return asyncio.run(read())


def curve(out: Path) -> list[dict[str, float]]:
    """Metrics of every step, without those of the clock."""
    return [line for line in record(out) if "eval" not in line]


def step_names(step: int, tasks: int, group: int) -> list[str]:
    return [f"{step:06d}-{t:04d}-{s:03d}" for t in range(tasks) for s in range(group)]


def test_an_unchanged_autogen_agent_learns_arithmetic_from_reward(calc, tmp_path):
    """A short form of `make demo`: from one right answer in ten to far more, in about a minute."""
    config = settings(
        calc,
        tmp_path / "run",
        agent=f"{calc}/agent.py:solve",
        val=f"{calc}/val.jsonl",
        steps=45,
        tasks_per_step=16,
        group_size=8,
        workers=64,
        eval_every=0,
        seed=0,
    )
    done = run(config)
    before, after = ([e for e in done.evals if e.mode == "greedy"][i] for i in (0, -1))
    assert before.success < 0.15
    assert after.success > 0.30
    assert after.low > before.high, "not by chance: the 95 % intervals do not touch"
    assert done.peak_mb > 100, "of this process too, so no bound here: `make demo` reports it"
    assert (tmp_path / "run" / "reward.png").stat().st_size > 5000
    score = evaluate(
        agent=config.agent,
        tasks=f"{calc}/val.jsonl",
        grader=config.grader,
        model=done.checkpoint,
        out=str(tmp_path / "eval"),
        max_tokens=48,
        workers=64,
    )
    assert score.success == pytest.approx(after.success, abs=0.02), "what is saved is what learned"


def test_the_same_seed_gives_the_same_tokens_and_the_same_curve(calc, tmp_path):
    for name in ("one", "two"):
        run(settings(calc, tmp_path / name))
    names = step_names(1, 3, 4) + step_names(2, 3, 4)
    one, two = results(tmp_path / "one", names), results(tmp_path / "two", names)
    for a, b in zip(one, two, strict=True):
        assert [(c.prompt_ids, c.completion_ids, c.logprobs) for c in a.calls] == [
            (c.prompt_ids, c.completion_ids, c.logprobs) for c in b.calls
        ]
    assert curve(tmp_path / "one") == curve(tmp_path / "two")
    run(settings(calc, tmp_path / "three", seed=6))
    assert curve(tmp_path / "three") != curve(tmp_path / "one")


def test_an_agent_as_a_command_samples_the_same_tokens_as_the_function(calc, tmp_path):
    command = f"{sys.executable} {calc}/plain_agent.py"
    run(settings(calc, tmp_path / "function", steps=1))
    run(settings(calc, tmp_path / "command", steps=1, agent=command))
    names = step_names(1, 3, 4)
    pairs = zip(
        results(tmp_path / "function", names), results(tmp_path / "command", names), strict=True
    )
    for function, as_command in pairs:
        assert function.outcome.output == as_command.outcome.output
        assert [c.completion_ids for c in function.calls] == [
            c.completion_ids for c in as_command.calls
        ]
    assert curve(tmp_path / "function") == curve(tmp_path / "command")


@torch.no_grad()
def test_recorded_log_probabilities_equal_a_fresh_forward_over_tool_conversations(calc, tmp_path):
    config = settings(calc, tmp_path / "run", steps=1, tasks_per_step=6, workers=16)
    run(config)
    model = AutoModelForCausalLM.from_pretrained(f"{calc}/base", dtype=torch.float32).eval()
    checked = turns = 0
    for result in results(tmp_path / "run", step_names(1, 6, 4)):
        turns = max(turns, len(result.calls))
        assert [reward.source for reward in result.rewards] == ["grader"]
        for call in result.calls:
            ids = torch.tensor([call.prompt_ids + call.completion_ids])
            table = torch.log_softmax(model(input_ids=ids).logits[0], -1)
            for place, (token, logprob) in enumerate(
                zip(call.completion_ids, call.logprobs, strict=True)
            ):
                at = len(call.prompt_ids) + place - 1
                assert table[at, token].item() == pytest.approx(logprob, abs=1e-4)
                checked += 1
            if call.index:
                previous = result.calls[call.index - 1]
                assert call.parent == previous.id
                start = previous.prompt_ids + previous.completion_ids
                assert call.prompt_ids[: len(start)] == start
    assert checked > 300
    assert turns >= 2


@pytest.mark.parametrize(
    "changes", [{}, {"algorithm": "ppo"}, {"algorithm": "turn-ppo", "critic": "shared"}], ids=str
)
def test_a_stopped_run_goes_on_as_if_it_had_never_stopped(calc, tmp_path, changes):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(settings(calc, whole, steps=4, **changes))
    stop = threading.Event()

    def stop_in_step_two(event: Event) -> None:
        if isinstance(event, Progress) and event.phase == "collect" and event.step == 2:
            stop.set()

    first = run(settings(calc, parts, steps=4, **changes), stop_in_step_two, stop)
    assert (first.stopped, first.steps) == (True, 2)
    assert first.checkpoint is not None
    second = run(settings(calc, parts, steps=4, if_exists="resume", **changes))
    assert (second.stopped, second.steps) == (False, 4)
    assert curve(parts) == curve(whole)
    assert len(second.rewards) == 4
    assert all(("learn/value_loss" in step) == bool(changes) for step in curve(parts))


def test_a_stop_that_comes_after_a_step_was_committed_still_leaves_its_weights(calc, tmp_path):
    stop = threading.Event()

    def stop_late(event: Event) -> None:
        if isinstance(event, StepDone):
            stop.set()

    stopped = run(settings(calc, tmp_path / "run", steps=3), stop_late, stop)
    assert (stopped.steps, stopped.checkpoint) == (
        1,
        str(tmp_path / "run" / "checkpoints" / "step-000001"),
    )
    later: list[int] = []
    run(
        settings(calc, tmp_path / "run", steps=3, if_exists="resume"),
        lambda event: later.append(event.step) if isinstance(event, StepDone) else None,
    )
    assert later == [2, 3]


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_run_killed_between_checkpoints_repeats_only_what_was_lost(
    calc, tmp_path, database, request
):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    server = request.getfixturevalue("postgres") if database == "postgresql" else None
    place = {"store": without_schema(server.url())} if server else {}
    run(settings(calc, whole, steps=3, checkpoint_every=1))
    command = [
        *(sys.executable, "-m", "fulmen.cli.main", "train", "--json", "--checkpoint-every", "2"),
        *flags(settings(calc, killed, steps=3, **place)),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = json.loads(line)
            if event["type"] == "progress" and (event["phase"], event["step"]) == ("collect", 3):
                process.send_signal(signal.SIGKILL)
                break
    again = settings(calc, killed, steps=3, checkpoint_every=1, if_exists="resume", **place)
    assert run(again).steps == 3
    assert (killed / "run.db").exists() == (database == "sqlite")
    assert curve(killed) == curve(whole)


DIES = """
import os, signal, sys
from fulmen.launch.train import train
from fulmen.schema.config import make_config
from fulmen.schema.training import TrainConfig
from fulmen.trainer.events import EvalDone, StepDone

def listen(event):
    if isinstance(event, {event}) and event.step == 2:
        os.kill(os.getpid(), signal.SIGKILL)

train(make_config(TrainConfig, {values}), listen=listen)
"""


@pytest.mark.parametrize("event", ["StepDone", "EvalDone"])
def test_a_run_killed_around_an_evaluation_has_every_line_of_its_record_once(calc, tmp_path, event):
    """When the step is on record and not measured yet, or measured and that not noted yet."""
    few = (calc / "val.jsonl").read_text().splitlines(keepends=True)[:3]
    (tmp_path / "few.jsonl").write_text("".join(few))
    measured = {"val": f"{tmp_path}/few.jsonl", "eval_every": 1, "checkpoint_every": 2, "steps": 3}
    run(settings(calc, tmp_path / "whole", **measured))
    killed = settings(calc, tmp_path / "killed", **measured)
    values = killed.model_dump(exclude_unset=True)
    code = DIES.format(event=event, values=values)
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    run(settings(calc, tmp_path / "killed", if_exists="resume", **measured))
    assert record(tmp_path / "killed") == record(tmp_path / "whole")


def record(out: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what the clock says."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {key: value for key, value in line.items() if not any(word in key for word in TIMED)}
        for line in lines
    ]


def flags(config: TrainConfig) -> list[str]:
    return [
        part
        for key, value in config.model_dump(exclude_unset=True).items()
        for part in (f"--{key.replace('_', '-')}", str(value))
    ]


def test_ctrl_c_finishes_the_step_keeps_a_checkpoint_and_says_how_to_go_on(calc, tmp_path):
    config = settings(calc, tmp_path / "run", steps=50)
    command = [sys.executable, "-m", "fulmen.cli.main", "train", *flags(config)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=tmp_path
    ) as process:
        assert process.stdout is not None
        said = []
        for line in process.stdout:
            said.append(line)
            if line.startswith("step 1:"):
                process.send_signal(signal.SIGINT)
    assert process.returncode == 130
    assert "finishing this step" in "".join(said)
    text = "".join(said)
    assert "stopped after" in text
    assert f"fulmen train --config {tmp_path}/run/config.toml" in text
    assert "--resume" in text
    checkpoints = list((tmp_path / "run" / "checkpoints").glob("step-*"))
    assert len(checkpoints) == 1


@pytest.mark.parametrize("stopped", [False, True])
def test_workers_elsewhere_end_with_their_run_and_wait_for_one_that_was_stopped(
    calc, tmp_path, stopped
):
    out, stop, workers = tmp_path / "run", threading.Event(), list[subprocess.Popen[str]]()

    def listen(event: Event) -> None:
        if isinstance(event, RunStarted):
            flags = ["--server", event.gateway, "--key-file", f"{out}/worker.key", "--workers", "4"]
            command = [sys.executable, "-m", "fulmen.cli.main", "work", *flags, "--agent"]
            agent = f"{calc}/plain_agent.py:solve"
            workers.append(
                subprocess.Popen(
                    [*command, agent], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        if isinstance(event, StepDone) and stopped:
            stop.set()

    done = run(settings(calc, out, workers=0), listen, stop)
    (worker,) = workers
    assert done.stopped == stopped
    try:
        if stopped:
            assert worker.stdout is not None
            assert any("is away" in line for line in worker.stdout)
            assert worker.poll() is None
            worker.terminate()
        said, _ = worker.communicate(timeout=60)
    finally:
        worker.kill()
    assert worker.returncode == 0, said
    assert ("the run is over; 24 attempts" in said) != stopped, said


def test_any_numbers_of_tasks_groups_and_workers_fit_together(calc, tmp_path):
    steps: list[StepDone] = []
    config = settings(
        calc,
        tmp_path / "run",
        steps=1,
        tasks_per_step=5,
        group_size=3,
        workers=7,
        processes=3,
        updates_per_step=4,
        micro_batch_tokens=100,
    )
    run(config, lambda event: steps.append(event) if isinstance(event, StepDone) else None)
    metrics = steps[0].metrics
    assert metrics["collect/rollouts"] == 15
    assert not math.isnan(metrics["reward/mean"])


RULES = """
[[rule]]
when = "json_valid"
weight = 0.1
cap = 0.2
[[rule]]
when = "predicate"
function = "{file}:first"
weight = 0.05
name = "opened"
target = "rollout"
"""


def test_rewards_of_rules_are_stored_counted_and_learned_from(calc, tmp_path):
    checks = tmp_path / "run_checks.py"
    checks.write_text("def first(call, tools):\n    return call.index == 0\n")
    rules = tmp_path / "air.toml"
    rules.write_text(RULES.format(file=checks))
    out = tmp_path / "run"
    listened = []
    config = settings(
        calc,
        out,
        steps=1,
        air=str(rules),
        credit="last",
        train="prompt-*,nobody",
        reward_weights="opened=2,json_valid=1",
    )
    run(config, listen=listened.append)
    (line,) = curve(out)
    done = results(out, step_names(1, 3, 4))
    given = [r for one in done for r in one.rewards if r.source == "rule"]
    opened = [r for r in given if r.name == "opened"]
    valid = [r for r in given if r.name == "json_valid"]
    assert [r.value for r in opened] == [0.05] * 12
    assert {r.call_id for r in opened} == {None}
    assert all(r.call_id in {c.id for one in done for c in one.calls} for r in valid)
    for one in done:
        assert sum(r.value for r in one.rewards if r.name == "json_valid") <= 0.2 + 1e-9
    assert line["reward/air/opened"] == pytest.approx(0.05)
    total = sum(r.value * (2 if r.name == "opened" else 1) for r in given)
    assert line["reward/intermediate"] == pytest.approx(total / 12)
    calls = sum(line[name] for name in line if name.endswith("/calls"))
    assert calls == sum(len(one.calls) for one in done)
    shares = {name: line[name] for name in line if name.endswith("/trained")}
    assert shares == dict.fromkeys(shares, 1.0) != {}
    told = [e.text for e in listened if getattr(e, "code", "") == "unknown-agent"]
    assert len(told) == 1
    assert "no call of 'nobody' in this step" in told[0]
    assert 'reward_weights = { "opened" = 2.0' in Path(out, "config.toml").read_text()
    assert json.loads(Path(out, "summary.json").read_text())["steps"] == 1


def test_dynamic_sampling_trains_on_groups_whose_rewards_differ_and_shows_all(calc, tmp_path):
    out = tmp_path / "run"
    run(settings(calc, out, tasks_per_step=2, dynamic_sampling=True, workers=16))
    lines = curve(out)
    assert max(line["collect/groups"] for line in lines) > 2, "some groups were replaced"
    for line in lines:
        kept = (line["collect/rollouts"] - line["collect/left_out"]) / 4
        assert kept == 2 or line["collect/groups"] == 6
        assert line["learn/updates"] == (kept > 0)
