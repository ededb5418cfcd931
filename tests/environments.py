"""Environments for tests with packages that Fulmen's own environment has not.

Each is made once, beside `.venv`, and anew when one of the files that it is made from changes.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_ELSEWHERE = ("OPENAI_", "ANTHROPIC_", "LITELLM_", "OTEL_", "FULMEN_", "NODE_OPTIONS")


def environment(name: str, sources: Sequence[Path], make: Callable[[Path], None]) -> Path:
    """The folder of an environment, made unless one from the same sources is there."""
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:16]
    folder = ROOT / f".venv-{name}-{digest}"
    ready = folder / "ready"
    if not ready.exists():
        print(f"making {folder.name}", flush=True)
        for old in ROOT.glob(f".venv-{name}-{'[0-9a-f]' * 16}"):
            shutil.rmtree(old)
        make(folder)
        ready.touch()
    return folder


def variables() -> dict[str, str]:
    """This process's environment variables, less those that would turn a client elsewhere."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_ELSEWHERE)}
    return {**kept, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
