"""The servers that `gateway.py` compares: how each is started, and what its process costs."""

import contextlib
import json
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil

from gateway_load import Client

HERE = Path(__file__).resolve().parent
MODEL = "bench"
CORES = sorted(os.sched_getaffinity(0))
GATEWAY_CORE, OTHER_CORE = CORES[0], CORES[-1]
_START_S = 180.0


@dataclass(frozen=True, slots=True)
class Options:
    """What one measurement wants of the gateway under test."""

    reply: str
    keys: int
    """Rollouts under way, each with a key of its own."""
    delay_s: float = 0.0
    """Until a whole answer."""
    interval_s: float = 0.0
    """Between two tokens of a streamed answer."""
    repeat: int = 1
    """How often a streamed answer says the reply."""
    backend: str | None = None
    """Base URL of an endpoint that the model `external` stands for."""


@dataclass(slots=True)
class Served:
    """A server that accepts requests."""

    process: psutil.Process
    port: int
    path: str = "/v1"
    keys: list[str] = field(default_factory=lambda: ["none"])
    model: str = MODEL
    ended: dict[str, Any] = field(default_factory=dict)
    """What it said when it ended."""

    @property
    def url(self) -> str:
        """Base URL."""
        return f"http://127.0.0.1:{self.port}{self.path}"

    def cpu_s(self) -> float:
        """User and system time of the process and its children so far."""
        family = [self.process, *self.process.children(recursive=True)]
        times = [one.cpu_times() for one in family]
        return sum(one.user + one.system for one in times)

    def memory_mb(self) -> float:
        """Proportional set size."""
        return self.process.memory_full_info().pss / 2**20

    async def connect(self, number: int) -> Client:
        """As the agent with that number."""
        return await Client.connect(self.port, self.path, self.keys[number % len(self.keys)])


@contextmanager
def fulmen(options: Options) -> Iterator[Served]:
    """The gateway under test."""
    script = str(HERE / "gateway_served.py")
    with _running(GATEWAY_CORE, sys.executable, script, json.dumps(asdict(options))) as served:
        served.model = "external" if options.backend else MODEL
        yield served


@contextmanager
def backend(reply: str) -> Iterator[Served]:
    """An HTTP endpoint that answers at once."""
    script = str(HERE / "gateway_load.py")
    with _running(OTHER_CORE, sys.executable, script, reply) as served:
        yield served


@contextmanager
def agentlightning(python: str, url: str) -> Iterator[Served]:
    """Agent Lightning's LLM proxy in front of a backend."""
    script = str(HERE / "gateway_agentlightning.py")
    with _running(GATEWAY_CORE, python, script, url) as served:
        yield served


@contextmanager
def litellm(python: str, url: str) -> Iterator[Served]:
    """The LiteLLM proxy with one worker in front of a backend, by its own command."""
    port, key = _free_port(), "sk-" + secrets.token_hex(32)  # it refuses to start without a key
    model = {"model": f"openai/{MODEL}", "api_base": url, "api_key": "none"}
    config = {
        "model_list": [{"model_name": MODEL, "litellm_params": model}],
        "general_settings": {"master_key": key},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(json.dumps(config))  # JSON is YAML
        command = [str(Path(python).parent / "litellm"), "--config", str(path)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
        with _running(GATEWAY_CORE, *command, port=port) as served:
            served.keys = [key]
            yield served


PEERS = {"litellm": litellm, "agentlightning": agentlightning}


@contextmanager
def _running(core: int, *command: str, port: int | None = None) -> Iterator[Served]:
    """A process on one core that says as JSON when it is ready, or else listens on `port`."""
    environment = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    # Files, not pipes: servers that log every request would fill one.
    with tempfile.TemporaryFile("w+") as said, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=said, stderr=errors, env=environment, text=True
        )
        process = psutil.Process(child.pid)
        process.cpu_affinity([core])
        try:
            facts = _facts(child, said) if port is None else _listening(child, port)
            if not facts:
                errors.seek(0)
                raise SystemExit(f"{command[0]} did not start:\n{errors.read()[-2000:]}")
            served = Served(process, **facts)
            yield served
            assert child.stdin is not None
            child.stdin.close()
            served.ended = _facts(child, said, place=1) if port is None else {}
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for one in [*process.children(recursive=True), process]:
                    one.terminate()
            child.wait(30)


def _facts(child: subprocess.Popen[str], said: IO[str], place: int = 0) -> dict[str, Any]:
    """A line of JSON among all that it prints; empty if it never comes."""
    end = time.monotonic() + _START_S
    while time.monotonic() < end:
        running = child.poll() is None
        lines = os.pread(said.fileno(), 1 << 26, 0).decode(errors="replace").splitlines(True)
        found = [line for line in lines if line.startswith('{"') and line.endswith("\n")]
        if len(found) > place:
            return json.loads(found[place])
        if not running:
            break
        time.sleep(0.1)
    return {}


def _listening(child: subprocess.Popen[str], port: int) -> dict[str, Any]:
    end = time.monotonic() + _START_S
    while time.monotonic() < end and child.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return {"port": port}
        time.sleep(0.2)
    return {}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
