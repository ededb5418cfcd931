"""The page on algorithms knows every formula."""

import inspect
from pathlib import Path

import pytest

from fulmen.learner import corrections, kl, losses, normalisers
from fulmen.schema.presets import PRESETS

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


def row(name: str) -> list[str]:
    """An algorithm's cells of the page's table, but for what is said of it in words."""
    own = dict(PRESETS[name])
    advantage, loss, normaliser = (own.pop(key) for key in ("advantage", "loss", "normaliser"))
    clip = ", ".join(str(own.pop(key)) for key in ("clip_low", "clip_high") if key in own)
    more = "; ".join(f"`{key}`" if v is True else f"`{key}` {v}" for key, v in own.items())
    cells = (f"`{name}`", f"`{advantage}`", f"`{loss}` {clip}", f"`{normaliser}`", more)
    return [cell.strip() for cell in cells]


def test_the_table_of_algorithms_is_what_their_names_stand_for():
    lines = PAGE.partition("| `--algorithm` |")[2].partition("\n\n")[0].splitlines()[2:]
    table = [[cell.strip() for cell in line.strip("|").split("|")][:5] for line in lines]
    assert table == [row(name) for name in PRESETS]
