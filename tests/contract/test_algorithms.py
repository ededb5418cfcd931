"""The page on algorithms knows every formula."""

import inspect
from pathlib import Path

import pytest

from fulmen.learner import corrections, kl, losses, normalisers

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "algorithms.md").read_text()


@pytest.mark.parametrize("module", [corrections, kl, losses, normalisers])
def test_every_formula_is_on_the_page(module):
    public = {
        name
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if function.__module__ == module.__name__ and not name.startswith("_")
    }
    assert len(public) >= 3
    assert {name for name in public - {"example"} if f"`{name}`" not in PAGE} == set()
