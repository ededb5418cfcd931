"""Two processes that share a model's weights do what one does: CPUs over gloo, by torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import sharded
from fulmen.engine.adapters import load_adapter
from fulmen.learner.activations import checkpoint_layers
from fulmen.learner.learner import Learner

TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A base model, and what two processes made of it."""
    folder = tmp_path_factory.mktemp("sharded")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(sharded.CONFIG).save_pretrained(folder / "base")
    for case in sharded.RESUMED:
        learner = alone(case, folder / "base")
        sharded.train(learner, (0, 1))
        saved = folder / "one" / case
        saved.mkdir(parents=True)
        learner.save(saved)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*torchrun, "--nproc-per-node", "2", str(TESTS / "sharded.py"), str(folder)],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS), *sys.path])},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


def alone(case: str, base: Path, reference: PreTrainedModel | None = None) -> Learner:
    """The learner of the same training in this process."""
    model = sharded.whole_model(case, base)
    if case == "bfloat16":
        checkpoint_layers(model)
    return Learner(model, reference=reference, **sharded.arguments(case))


def close(learner: Learner, after: Path, *, by: float = 2e-6) -> None:
    """The learner's weights are those of a file."""
    found, own = torch.load(after), learner.weights.model.state_dict()
    assert found.keys() == own.keys()
    for name, weight in own.items():
        torch.testing.assert_close(found[name], weight, rtol=1e-4, atol=by, msg=name)


def timeless(metrics: dict[str, float]) -> dict[str, float]:
    return {n: v for n, v in metrics.items() if "seconds" not in n and "per_s" not in n}


@pytest.mark.parametrize("case", ["plain", "everything", "adapter", "one-sided"])
def test_metrics_and_weights_are_those_of_one_process(case, folder):
    learner = alone(case, folder / "base")
    want = sharded.train(learner, (0, 1, 2))
    got = json.loads((folder / "two" / case / "metrics.json").read_text())
    for ours, theirs in zip(got, want, strict=True):
        assert timeless(ours) == pytest.approx(timeless(theirs), rel=1e-4, abs=1e-6)
    close(learner, folder / "two" / case / "after.pt")


def test_processes_agree_that_an_update_without_a_say_is_not_made(folder):
    got = json.loads((folder / "two" / "silent" / "metrics.json").read_text())
    assert [(line["learn/empty_updates"], line["learn/updates"]) for line in got] == [(1, 0)] * 3
    close(alone("silent", folder / "base"), folder / "two" / "silent" / "after.pt", by=0)


def test_every_process_tells_what_it_has_found_of_its_calls(folder):
    learner = alone("everything", folder / "base")
    sharded.train(learner, (0, 1))
    want = learner.kl([item.transition for item in sharded.step(2)])
    got = json.loads((folder / "two" / "everything" / "kl.json").read_text())
    assert max(map(abs, want[0])) > 1e-4
    for ours, theirs in zip(got, want, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-6)


def test_bfloat16_layers_over_float32_parts_learn_alike(folder):
    learner = alone("bfloat16", folder / "base")
    want = sharded.train(learner, (0, 1, 2))
    got = json.loads((folder / "two" / "bfloat16" / "metrics.json").read_text())
    for ours, theirs in zip(got, want, strict=True):
        assert ours["learn/loss"] == pytest.approx(theirs["learn/loss"], abs=0.02)
        assert ours["learn/grad_norm"] == pytest.approx(theirs["learn/grad_norm"], rel=0.05)
    close(learner, folder / "two" / "bfloat16" / "after.pt", by=0.01)


@pytest.mark.parametrize("case", ["plain", "everything", "adapter"])
def test_one_process_goes_on_from_the_checkpoint_of_two(case, folder):
    saved, base = folder / "two" / case, folder / "base"
    if case == "adapter":
        learner = alone(case, base)
        load_adapter(learner.weights.model, saved)
    else:
        learner = alone(case, saved, reference=sharded.whole_model(case, base))
    learner.load(saved)
    sharded.train(learner, (2,))
    close(learner, saved / "after.pt")


@pytest.mark.parametrize("case", sharded.RESUMED)
def test_two_processes_go_on_from_the_checkpoint_of_one(case, folder):
    saved = folder / "one" / case
    learner = alone(case, saved)
    learner.load(saved)
    sharded.train(learner, (2,))
    close(learner, folder / "resumed" / case / "after.pt", by=0.01 if case == "bfloat16" else 2e-6)


def test_a_checkpoint_of_two_processes_is_a_model_for_transformers(folder):
    saved = folder / "two" / "plain"
    model = AutoModelForCausalLM.from_pretrained(saved)
    learner = alone("plain", folder / "base")
    sharded.train(learner, (0, 1))
    for ours, theirs in zip(model.parameters(), learner.weights.model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=2e-6)
