"""Tensors to disk and back in one process; several are in tests/integration/test_sharded.py."""

import pytest
import torch

from fulmen.learner.checkpoint import load_tensors, save_tensors, saved_shapes
from fulmen.schema.errors import ModelError


def tensors():
    return {
        "weight.a": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)),
        "step.a": torch.tensor(7.0),
        "weight.b": torch.arange(4).bfloat16(),
    }


def test_what_is_loaded_is_what_was_saved_bit_for_bit(tmp_path):
    saved = tensors()
    save_tensors(tmp_path / "state", saved)
    found = {name: torch.full_like(tensor, 9) for name, tensor in saved.items()}
    load_tensors(tmp_path / "state", found)
    for name, tensor in saved.items():
        assert torch.equal(found[name], tensor), name


def test_only_what_is_asked_for_is_loaded(tmp_path):
    save_tensors(tmp_path / "state", tensors())
    step = torch.tensor(0.0)
    load_tensors(tmp_path / "state", {"step.a": step})
    assert step.item() == 7


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [("weight.a", (5, 4), "weight.a is [5, 4] here and [5, 3] there"), ("c", (1,), "no c")],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path, name, shape, message):
    save_tensors(tmp_path / "state", tensors())
    with pytest.raises(ModelError) as error:
        load_tensors(tmp_path / "state", {name: torch.zeros(shape)})
    assert message in str(error.value)


def test_a_folder_that_is_not_there_holds_nothing(tmp_path):
    assert saved_shapes(tmp_path / "state") == {}


def test_nothing_is_pickled(tmp_path):
    save_tensors(tmp_path / "state", tensors())
    (file,) = (tmp_path / "state").iterdir()
    assert file.suffix == ".safetensors"
