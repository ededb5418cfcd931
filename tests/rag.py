"""The RAG example's modules; those of other examples have the same names."""

import importlib
from pathlib import Path
from types import ModuleType

RAG = Path(__file__).resolve().parents[1] / "examples" / "rag"


def load(name: str) -> ModuleType:
    """A module of the example, by name; inside the fixture `rag`."""
    return importlib.import_module(name)
