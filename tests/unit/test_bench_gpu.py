"""The benchmark for GPUs, which no test machine has: its arithmetic, and that it runs at all."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def gpu(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(BENCH))
    return pytest.importorskip("gpu")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(part for part in sys.path if part)
    return subprocess.run(
        [sys.executable, str(BENCH / "gpu.py"), *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": paths},
        timeout=240,
        check=False,
    )


def test_operations_of_a_branching_tree_are_counted_once_for_what_is_shared(gpu):
    shape = gpu.Shape(hidden=4, inner=8, layers=1, heads=2, shared=1, width=2, vocabulary=10)
    items = gpu.group(10, turns=1, prompt=3, sampled=1, observed=1, rollouts=1)
    (forest,) = gpu.plant(items, 999)
    assert forest.depths.tolist() == [0, 1, 2]
    # Layers: 4 · (2 · 4 + 2 · 2) + 3 · 4 · 8 = 144 weights; attention: 1 + 2 + 3 keys of 4 numbers;
    # the vocabulary for the one token that was sampled.
    assert gpu.flops(shape, [forest]) == 6 * 144 * 3 + 12 * 4 * 6 + 6 * 4 * 10
    assert gpu.flops(shape, [forest, forest]) == 2 * gpu.flops(shape, [forest])


def test_the_group_that_is_learned_from_has_about_eight_thousand_positions(gpu):
    items = gpu.group(151_936, turns=5, prompt=1024, sampled=128, observed=50)
    forests = gpu.plant(items, 16_384)
    assert len(forests) == 1, "one tree"
    assert 7_500 < len(forests[0].ids) < 8_500
    assert np.max(forests[0].depths) < 2_048


def test_the_shapes_have_as_many_weights_as_their_names_say(gpu):
    for name, billions in (("0.6b", 0.596), ("1.7b", 1.72)):
        shape = gpu.SHAPES[name]
        queries, shared = shape.heads * shape.width, shape.shared * shape.width
        layer = 2 * shape.hidden * (queries + shared) + 3 * shape.hidden * shape.inner
        weights = shape.layers * layer + shape.vocabulary * shape.hidden
        assert weights == pytest.approx(billions * 1e9, rel=0.01)


def test_a_card_is_known_by_its_name_or_its_peak_must_be_given(gpu):
    assert gpu.peak_of("NVIDIA H200") == 989e12
    assert gpu.peak_of("NVIDIA H100 PCIe") == 756e12
    with pytest.raises(SystemExit, match="--peak"):
        gpu.peak_of("Abacus 3000")


def test_every_figure_is_there_in_a_run_of_the_tiny_shape():
    done = run("--device", "cpu", "--shapes", "tiny", "--steps", "1", "--peak", "0.05")
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [json.loads(x[7:]) for x in done.stdout.splitlines() if x.startswith("RESULT ")]
    figures = {line["name"]: line["value"] for line in lines}
    assert set(figures) == {
        "gpu.learner_mfu.tiny",
        "gpu.learner_tokens_per_s.tiny",
        "gpu.learner_mfu.tiny.checkpointed",
        "gpu.learner_tokens_per_s.tiny.checkpointed",
        "gpu.engine_tokens_per_s.tiny.c2",
        "gpu.engine_tokens_per_s.tiny.c4",
    }
    assert all(value > 0 for value in figures.values())
    assert figures["gpu.learner_mfu.tiny"] < 100


def test_without_a_gpu_it_says_so_in_one_line():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    done = run()
    assert done.returncode == 1
    assert done.stderr.strip().startswith("no GPU that PyTorch can use")
