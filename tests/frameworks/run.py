"""Run agents of every framework, each in an environment of its own, with Fulmen watching.

Run with Fulmen's own Python, as `make test-frameworks` does; names as arguments choose some.
Environments are made once, beside `.venv`, and anew when their list of packages changes. They hold
a framework, its instrumentors, and Fulmen without PyTorch.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from environments import ROOT, environment, variables

HERE = Path(__file__).resolve().parent


def lists() -> dict[str, Path]:
    """The list of packages of each environment, by its name."""
    found = sorted((ROOT / "requirements").glob("frameworks-*.txt"))
    return {path.stem.removeprefix("frameworks-"): path for path in found}


def python_of(name: str) -> str:
    """The interpreter of an environment; makes the environment if it is not there."""
    packages = lists()[name]
    uv = Path(sys.executable).with_name("uv")

    def make(folder: Path) -> None:
        begun = time.monotonic()
        subprocess.run([uv, "venv", "-q", "-p", sys.executable, folder], check=True)
        install = [uv, "pip", "install", "-q", "-p", folder, "--no-deps"]
        subprocess.run([*install, "-r", packages, "--editable", ROOT], check=True)
        print(f"frameworks: {name}: installed in {time.monotonic() - begun:.1f} s", flush=True)

    folder = environment(f"frameworks-{name}", [packages, ROOT / "pyproject.toml"], make)
    return str(folder / "bin/python")


def main(names: list[str]) -> int:
    """Make the environments and run the tests in them; the exit status of pytest."""
    names = names or list(lists())
    if unknown := set(names) - set(lists()):
        print(
            f"frameworks: there is no {', '.join(sorted(unknown))}; there are {', '.join(lists())}"
        )
        return 2
    pythons = [f"{name}={python_of(name)}" for name in names]
    given = {**variables(), "FULMEN_FRAMEWORKS": os.pathsep.join(pythons)}
    command = [sys.executable, "-m", "pytest", "-q", "--durations=5", str(HERE)]
    return subprocess.run(command, env=given, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
