"""What several tests share: the Calc example's tiny model and its tokenizer."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import settings

from databases import Postgres
from rag import RAG

# How long an example takes says something of the machine's other work, not of the code.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")

ROOT = Path(__file__).resolve().parents[1]
CALC = ROOT / "examples" / "calc"

collect_ignore = ["clients"]
"""Run by clients/run.py, in environments of their own."""
if "FULMEN_FRAMEWORKS" not in os.environ:
    collect_ignore.append("frameworks")  # run by frameworks/run.py, which makes environments


@pytest.fixture(scope="session")
def calc() -> Path:
    """Folder of the Calc example."""
    return CALC


@contextmanager
def modules_of(folder: Path) -> Iterator[None]:
    """An example's modules can be imported by name, in place of others of the same names."""
    names = {path.stem for path in folder.glob("*.py")}
    kept = {name: sys.modules.pop(name) for name in names & set(sys.modules)}
    path = sys.path[:]
    sys.path.insert(0, str(folder))
    yield
    sys.path[:] = path
    for name in names:
        sys.modules.pop(name, None)
    sys.modules.update(kept)


@pytest.fixture(scope="module")
def calc_modules() -> Iterator[Path]:
    """The Calc example's modules can be imported by name."""
    with modules_of(CALC):
        yield CALC


@pytest.fixture(scope="module")
def rag() -> Iterator[None]:
    """The RAG example's modules can be imported by name."""
    with modules_of(RAG):
        yield


@pytest.fixture(scope="module")
def scripts() -> Iterator[None]:
    """The scripts that all examples share can be imported by name."""
    with modules_of(ROOT / "examples"):
        yield


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    """A real PostgreSQL server. Without its programs the tests that use it fail."""
    server = Postgres()
    yield server
    server.remove()


@pytest.fixture(scope="session")
def tokenizer():
    """The tiny model's tokenizer: byte-level, with Qwen3's special tokens."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(CALC / "base")


@pytest.fixture(scope="session")
def renderer(tokenizer):
    """Qwen3's format over the tiny tokenizer."""
    from fulmen.gateway.render import make_renderer

    return make_renderer(tokenizer, "qwen3")


@pytest.fixture
def harmony(monkeypatch):
    """Gpt-oss without the vocabulary that its package would download."""
    import families

    encoding = families.Harmony(families.tokenizer("gpt-oss"))
    monkeypatch.setattr("renderers.gpt_oss.load_harmony_encoding", lambda _: encoding)
