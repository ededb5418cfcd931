"""What several tests share: the Calc example's tiny model and its tokenizer."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rag import MODULES, RAG

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


@pytest.fixture(scope="session")
def calc_modules() -> Path:
    """The Calc example's modules can be imported by name."""
    if str(CALC) not in sys.path:
        sys.path.insert(0, str(CALC))
    return CALC


@pytest.fixture(scope="module")
def rag() -> Iterator[None]:
    """The RAG example's modules can be imported by name, in place of other examples'."""
    kept = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    path = sys.path[:]
    sys.path[:] = [str(RAG), *(folder for folder in path if not folder.startswith(str(RAG.parent)))]
    yield
    sys.path[:] = path
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(kept)


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
