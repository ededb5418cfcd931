"""The shape of the house: rooms, sizes, dependencies, public names."""

import ast
import inspect
import re
import subprocess
import tomllib
from pathlib import Path

import pytest

import fulmen
from fulmen.cli.main import cli
from fulmen.schema.config import EvalConfig, ServeConfig, Settings
from fulmen.schema.training import TrainConfig

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "src" / "fulmen").rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WITHOUT_TORCH = ("schema", "store", "credit", "gateway", "runner", "server", "cli")
SETTINGS = (TrainConfig, EvalConfig, ServeConfig)


def imported_at_the_top(path: Path) -> set[str]:
    """First parts of what a file imports when it is imported itself."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    return names


def test_rooms_import_only_what_is_to_their_left():
    done = subprocess.run(
        [ROOT / ".venv" / "bin" / "lint-imports", "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_files_and_functions_stay_small(path):
    source = path.read_text()
    assert source.count("\n") <= 400
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            assert node.end_lineno - node.lineno < 60, node.name


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_rooms_that_need_no_model_load_no_pytorch(room):
    for path in (ROOT / "src" / "fulmen" / room).glob("*.py"):
        assert not imported_at_the_top(path) & {"torch", "transformers", "renderers"}, path


def test_every_requirement_has_a_lower_and_an_upper_bound():
    extras = PROJECT["optional-dependencies"].values()
    for requirement in [*PROJECT["dependencies"], *(r for extra in extras for r in extra)]:
        versions = requirement.partition(";")[0]
        assert re.search(r">=[\d.]+(b\d+)?,<[\d.]+$", versions), requirement


def test_the_base_resolves_to_at_most_forty_packages():
    lock = (ROOT / "requirements" / "base.txt").read_text().splitlines()
    pinned = [line for line in lock if "==" in line]
    assert len(pinned) <= 40
    assert not any(line.startswith("torch") for line in pinned)


def test_every_dependency_is_justified_in_the_architecture():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for requirement in PROJECT["dependencies"]:
        name = re.split(r"[\[>]", requirement)[0]
        assert f"**{name}**" in text, name


def test_the_public_names_are_these():
    assert fulmen.__all__ == [
        "EvalConfig",
        "FulmenError",
        "RolloutResult",
        "Rule",
        "Task",
        "TrainConfig",
        "evaluate",
        "reward",
        "train",
    ]
    for name in fulmen.__all__:
        assert getattr(fulmen, name).__name__ == name
    assert str(inspect.signature(fulmen.train)).startswith("(*, listen")


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_setting_is_explained(kind: type[Settings]):
    for name, field in kind.model_fields.items():
        assert field.description, name
        assert field.description.strip().endswith((".", ";")), name


def test_every_setting_is_read_somewhere():
    code = "\n".join(p.read_text() for p in SOURCES if p.name not in ("config.py", "training.py"))
    # `algorithm` stands for other settings, and is read where it is replaced by them.
    for name in {name for kind in SETTINGS for name in kind.model_fields} - {"algorithm"}:
        assert re.search(rf"\b(config|settings)\.{name}\b", code), name


@pytest.mark.parametrize("name", ["train", "eval", "serve"])
def test_help_shows_at_most_twelve_settings(name):
    shown = [p for p in cli.commands[name].params if not getattr(p, "hidden", False)]
    settings = [p for p in shown if p.name in TrainConfig.model_fields | EvalConfig.model_fields]
    assert 2 <= len(settings) <= 12


@pytest.mark.parametrize(
    "command", ["train", "eval", "serve", "export", "gc", "archive", "restore"]
)
def test_every_command_is_in_the_readme(command):
    assert f"fulmen {command}" in (ROOT / "README.md").read_text()
