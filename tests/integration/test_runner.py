"""Agents in real worker processes, on a real store, against a small fake gateway."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from fulmen.runner.agents import check_agent, load_function, parse_agent
from fulmen.runner.pool import Pool
from fulmen.schema.errors import AgentError
from fulmen.schema.records import Retry, Rollout, RolloutResult, Task
from fulmen.server.http import Listening
from fulmen.store.open import open_store


class FakeGateway:
    """Answers every chat request, and remembers which key came with which marker."""

    def __init__(self) -> None:
        self.keys: dict[str, list[str]] = {}
        self.app = Starlette(routes=[Route("/v1/chat/completions", self._chat, methods=["POST"])])

    async def _chat(self, request: Request) -> JSONResponse:
        body = await request.json()
        marker = body["messages"][-1]["content"]
        key = request.headers.get("authorization", "").removeprefix("Bearer ")
        assert request.headers.get("x-api-key", key) == key
        self.keys.setdefault(marker, []).append(key)
        message = {"role": "assistant", "content": f"re: {marker}"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return JSONResponse(
            {
                "id": "c",
                "object": "chat.completion",
                "created": 0,
                "model": "m",
                "choices": [choice],
            }
        )


def write_agent(folder: Path, source: str, name="my_agent.py") -> str:
    path = folder / name
    path.write_text(textwrap.dedent(source))
    return str(path)


def rollout(number: int, **changes: Any) -> Rollout:
    values: dict[str, Any] = {
        "task": Task(id=str(number), input={"n": number}),
        "group": "g",
        "step": 1,
        "deadline_s": 30.0,
        "retry": Retry(attempts=1),
    }
    return Rollout(id=f"r{number}", **(values | changes))


async def run(
    folder: Path, agent: str, rollouts: list[Rollout], *, url="http://127.0.0.1:9", **options: Any
) -> list[RolloutResult]:
    """Queue the rollouts, let the agent work on them, and return their results."""
    store = open_store(folder / "run.db")
    try:
        await store.enqueue(rollouts)
        names = [r.id for r in rollouts]
        options = {"workers": 4, "processes": 1, **options}
        async with Pool(store, parse_agent(agent), base_url=url, **options) as pool:
            broken = asyncio.ensure_future(pool.broken())
            while len(await store.wait_finished(names, timeout_s=0)) < len(names):
                pending = [
                    n for n in names if n not in await store.wait_finished(names, timeout_s=0)
                ]
                waiting = asyncio.ensure_future(store.wait_finished(pending, timeout_s=60))
                await asyncio.wait({waiting, broken}, return_when=asyncio.FIRST_COMPLETED)
                if broken.done():
                    waiting.cancel()
                    broken.result()
            broken.cancel()
        return await store.results(names)
    finally:
        await store.close()


ASYNC_CLIENT = """
    from openai import AsyncOpenAI
    client = AsyncOpenAI()
    async def solve(task):
        said = []
        for turn in range(2):
            answer = await client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": f"{task['n']}/{turn}"}])
            said.append(answer.choices[0].message.content)
        return said
"""
SYNC_CLIENT = """
    from concurrent.futures import ThreadPoolExecutor
    from openai import OpenAI
    client = OpenAI()
    pool = ThreadPoolExecutor(3)
    def ask(text):
        answer = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": text}])
        return answer.choices[0].message.content
    def solve(task):
        return [f.result() for f in [pool.submit(ask, f"{task['n']}/{t}") for t in range(2)]]
"""
LATE_IMPORT = """
    def solve(task):
        import openai
        with openai.OpenAI() as client:
            return [client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": f"{task['n']}/{t}"}]
            ).choices[0].message.content for t in range(2)]
"""

WITHOUT_OPENAI = """
    import http.client, json, os, threading, urllib.request
    import requests
    url, key = os.environ["OPENAI_BASE_URL"] + "/chat/completions", os.environ["OPENAI_API_KEY"]
    session, threads = requests.Session(), threading.local()
    def by_requests(body):
        return session.post(url, json=body, headers={"Authorization": "Bearer " + key}).json()
    def by_urllib(body):
        request = urllib.request.Request(url, json.dumps(body).encode(), {"X-Api-Key": key})
        return json.load(urllib.request.urlopen(request))
    def by_http_client(body):
        if not hasattr(threads, "connection"):
            threads.connection = http.client.HTTPConnection(url.split("/")[2])
        threads.connection.request("POST", "/v1/chat/completions", json.dumps(body))
        return json.load(threads.connection.getresponse())
    def solve(task):
        return [SENDER({"model": "m", "messages": [
                    {"role": "user", "content": f"{task['n']}/{t}"}]}
                )["choices"][0]["message"]["content"] for t in range(2)]
"""
SHARED = {"async": ASYNC_CLIENT, "thread-pool": SYNC_CLIENT, "late-import": LATE_IMPORT} | {
    name: WITHOUT_OPENAI.replace("SENDER", f"by_{name}")
    for name in ("requests", "urllib", "http_client")
}


@pytest.mark.parametrize("source", SHARED.values(), ids=SHARED)
async def test_a_shared_client_sends_each_rollout_s_own_key(tmp_path, source):
    gateway = FakeGateway()
    async with Listening(gateway.app, "127.0.0.1", 0) as server:
        agent = write_agent(tmp_path, source) + ":solve"
        results = await run(
            tmp_path, agent, [rollout(n) for n in range(12)], url=server.url, workers=8
        )
    assert [r.outcome.output for r in results] == [[f"re: {n}/0", f"re: {n}/1"] for n in range(12)]
    keys = [{gateway.keys[f"{n}/{turn}"][0] for turn in range(2)} for n in range(12)]
    assert all(len(pair) == 1 for pair in keys)
    assert len(set.union(*keys)) == 12
    assert all(key.startswith("fulmen-") for key in set.union(*keys))


@pytest.mark.parametrize(
    "post",
    [
        "httpx.post(url, json=body)",
        "requests.post(url, json=body)",
        "urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode()))",
    ],
    ids=["httpx", "requests", "urllib"],
)
async def test_the_key_is_not_sent_to_other_hosts(tmp_path, post):
    gateway, elsewhere = FakeGateway(), FakeGateway()
    async with (
        Listening(gateway.app, "127.0.0.1", 0) as server,
        Listening(elsewhere.app, "127.0.0.1", 0) as other,
    ):
        agent = write_agent(
            tmp_path,
            f"""
            import json, urllib.request, httpx, requests
            def solve(task):
                url = "{other.url}/v1/chat/completions"
                body = {{"messages": [{{"content": "x"}}]}}
                {post}
            """,
        )
        await run(tmp_path, agent + ":solve", [rollout(1)], url=server.url)
    assert elsewhere.keys == {"x": [""]}


async def test_a_command_gets_the_task_and_its_own_key_and_answers_on_standard_output(tmp_path):
    gateway = FakeGateway()
    source = """
        import json, os, sys, urllib.request
        task = json.load(sys.stdin)
        body = json.dumps({"messages": [{"content": str(task["n"])}]}).encode()
        request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body)
        request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
        print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
        print("working", file=sys.stderr)
    """
    async with Listening(gateway.app, "127.0.0.1", 0) as server:
        command = f"{sys.executable} {write_agent(tmp_path, source)} | cat"
        results = await run(tmp_path, command, [rollout(n) for n in range(3)], url=server.url)
    assert [r.outcome.output for r in results] == ["re: 0", "re: 1", "re: 2"]
    assert results[0].outcome.log == "working\n"
    assert len({keys[0] for keys in gateway.keys.values()}) == 3


async def outcome_of(tmp_path, body: str, **changes: Any):
    """How one rollout of a function agent ends; `body` is what the function does."""
    source = "import os, sys, time, asyncio\n" + textwrap.dedent(body)
    agent = write_agent(tmp_path, source) + ":solve"
    (result,) = await run(tmp_path, agent, [rollout(1, **changes)])
    return result.outcome


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (
            "def solve(task):\n    return 1 / 0",
            r"ZeroDivisionError: division by zero (my_agent.py:3)",
        ),
        ("async def solve(task):\n    raise KeyError('x')", "KeyError: 'x' (my_agent.py:3)"),
        ("def solve(task):\n    sys.exit(0)", "SystemExit: 0 (my_agent.py:3)"),
        (
            "async def solve(task):\n    raise KeyboardInterrupt",
            "KeyboardInterrupt (my_agent.py:3)",
        ),
        (
            "async def solve(task):\n    raise asyncio.CancelledError",
            "CancelledError (my_agent.py:3)",
        ),
    ],
)
async def test_an_exception_in_the_agent_is_its_own_failure_in_one_line(tmp_path, body, error):
    outcome = await outcome_of(tmp_path, body)
    assert outcome.failure == "agent"
    assert outcome.error == error
    assert "Traceback" in outcome.log


async def test_what_is_no_json_is_refused_by_its_type(tmp_path):
    outcome = await outcome_of(tmp_path, "def solve(task):\n    return {'x': object()}")
    assert outcome.failure == "agent"
    assert "returned a dict, which is not JSON" in outcome.error


async def test_numpy_numbers_are_numbers(tmp_path):
    body = "import numpy\ndef solve(task):\n    return numpy.float32(0.5)"
    assert (await outcome_of(tmp_path, body)).output == 0.5


async def test_what_an_agent_prints_is_kept_apart_for_each_attempt(tmp_path):
    agent = write_agent(
        tmp_path,
        """
        import asyncio, sys
        async def solve(task):
            print("out", task["n"])
            await asyncio.sleep(0)
            print("err", task["n"], file=sys.stderr)
        """,
    )
    results = await run(tmp_path, agent + ":solve", [rollout(n) for n in range(4)])
    assert [r.outcome.log for r in results] == [f"out {n}\nerr {n}\n" for n in range(4)]


@pytest.mark.parametrize(
    "body",
    [
        "async def solve(task):\n    await asyncio.sleep(1000)",
        "async def solve(task):\n    time.sleep(1000)",
        "def solve(task):\n    while True: time.sleep(1)",
    ],
    ids=["waiting", "blocking-the-loop", "blocking-a-thread"],
)
async def test_a_deadline_really_stops_the_agent(tmp_path, body):
    outcome = await outcome_of(tmp_path, body, deadline_s=0.5)
    assert outcome.failure == "timeout"
    assert outcome.error == "stopped after 0.5 s"
    assert not [c for c in psutil.Process().children(recursive=True) if c.status() != "zombie"]


async def test_a_command_that_ignores_being_told_is_ended_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    source = f"""
        import os, signal, subprocess, sys
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        child = subprocess.Popen(["sleep", "1000"])
        open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
        signal.pause()
    """
    command = f"{sys.executable} {write_agent(tmp_path, source)}"
    (result,) = await run(tmp_path, command, [rollout(1, deadline_s=1.5)])
    assert result.outcome.failure == "timeout"
    alive = [pid for pid in map(int, pids.read_text().split()) if psutil.pid_exists(pid)]
    assert all(psutil.Process(pid).status() == "zombie" for pid in alive)


async def test_a_command_that_fails_is_the_agent_s_failure_with_its_last_words(tmp_path):
    (result,) = await run(tmp_path, "echo oops >&2; exit 3", [rollout(1)])
    assert result.outcome.failure == "agent"
    assert result.outcome.error == "the command ended with exit status 3: oops"


async def test_an_agent_that_kills_its_process_is_infrastructure_and_tried_again(tmp_path):
    flag = tmp_path / "tried"
    body = f"""
        def solve(task):
            if not os.path.exists({str(flag)!r}):
                open({str(flag)!r}, "w").close()
                os._exit(7)
            return "second try"
    """
    outcome = await outcome_of(tmp_path, body, retry=Retry(attempts=2))
    assert outcome.output == "second try"


async def test_a_process_that_dies_again_and_again_is_an_error_not_an_endless_loop(tmp_path):
    agent = write_agent(tmp_path, "import os\ndef solve(task):\n    os._exit(7)\n")
    asked = [rollout(n, retry=Retry(attempts=9)) for n in range(3)]
    with pytest.raises(AgentError, match=r"ended its process 5 times in a row .*exit status 7"):
        await run(tmp_path, agent + ":solve", asked)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("def solve(task): pass", "missing.py:solve", "no such file .*missing.py"),
        ("def solve(task): pass", "my_agent.py:sole", "has no 'sole'; did you mean 'solve'"),
        ("def solve(task) pass", "my_agent.py:solve", "cannot be imported: SyntaxError"),
        ("import nowhere", "my_agent.py:solve", "ModuleNotFoundError: No module named 'nowhere'"),
        ("solve = 3", "my_agent.py:solve", "is a int, not a function"),
        ("def solve(): pass", "my_agent.py:solve", "cannot be called with one argument"),
        ("import os; os._exit(4)", "my_agent.py:solve", "ended its process while it was imported"),
        ("raise SystemExit(2)", "my_agent.py:solve", "cannot be imported: SystemExit: 2"),
    ],
)
async def test_an_agent_that_cannot_be_loaded_is_refused_in_one_line(
    tmp_path, source, target, message
):
    write_agent(tmp_path, source)
    with pytest.raises(AgentError, match=message) as caught:
        await run(tmp_path, f"{tmp_path}/{target}", [rollout(1)])
    assert "\n" not in str(caught.value)


async def test_a_program_that_is_not_there_is_refused_before_anything_starts():
    with pytest.raises(AgentError, match="no program 'nonesuch' is found in PATH"):
        check_agent(parse_agent("nonesuch --flag"))


async def test_one_worker_runs_rollouts_one_after_another_in_their_order(tmp_path):
    log = tmp_path / "log"
    agent = write_agent(
        tmp_path,
        f"""
        async def solve(task):
            with open({str(log)!r}, "a") as file:
                file.write(f"+{{task['n']}} ")
                file.write(f"-{{task['n']}} ")
        """,
    )
    await run(tmp_path, agent + ":solve", [rollout(n) for n in range(5)], workers=1)
    assert log.read_text().split() == [s for n in range(5) for s in (f"+{n}", f"-{n}")]


async def test_with_one_attempt_a_process_any_client_finds_its_key_in_the_environment(tmp_path):
    body = "def solve(task):\n    return os.environ['OPENAI_API_KEY']"
    agent = write_agent(tmp_path, "import os\n" + body) + ":solve"
    (result,) = await run(tmp_path, agent, [rollout(1)], workers=1)
    assert result.outcome.output.startswith("fulmen-")
    (result,) = await run(tmp_path, agent, [rollout(2)], workers=2)
    assert not result.outcome.output.startswith("fulmen-"), "it would be another rollout's key"


async def test_a_worker_imports_nothing_heavy(tmp_path):
    body = """
        def solve(task):
            heavy = ("torch", "transformers", "sqlalchemy", "starlette", "fulmen.learner")
            return [name for name in heavy if name in sys.modules]
    """
    assert (await outcome_of(tmp_path, body)).output == []


_PARENT = """
import asyncio, sys
from fulmen.runner.agents import parse_agent
from fulmen.runner.pool import Pool
from fulmen.schema.records import Rollout, Task
from fulmen.store.open import open_store
async def main():
    store = open_store(sys.argv[1])
    await store.enqueue([Rollout(id="r", task=Task(id="t", input=1), group="g", step=1)])
    async with Pool(store, parse_agent(sys.argv[2]), base_url="http://127.0.0.1:9", workers=2):
        await asyncio.Event().wait()
asyncio.run(main())
"""


async def test_a_killed_parent_leaves_no_worker_behind(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    agent = write_agent(
        tmp_path,
        f"""
        import asyncio, os
        async def solve(task):
            with open({str(pipe)!r}, "w") as file:
                file.write(str(os.getpid()))
            await asyncio.sleep(1000)
        """,
    )
    arguments = [sys.executable, "-c", _PARENT, str(tmp_path / "run.db"), agent + ":solve"]
    parent = subprocess.Popen(arguments)
    worker = psutil.Process(int(await asyncio.to_thread(pipe.read_text)))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    with contextlib.suppress(psutil.NoSuchProcess):
        await asyncio.to_thread(worker.wait, 10)
    assert not worker.is_running()


def test_functions_and_commands_are_told_apart():
    kinds = {
        "agent.py:solve": "function",
        "a/b.py:solve": "function",
        "package.module:solve": "function",
        "python agent.py": "command",
        "./run.sh": "command",
        "node agent.mjs --x a:b": "command",
    }
    assert {text: parse_agent(text).kind for text in kinds} == kinds


def test_a_file_s_neighbours_can_be_imported(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", sys.path.copy())
    write_agent(tmp_path, "VALUE = 42", "its_helper.py")
    target = write_agent(tmp_path, "import its_helper\ndef f(x): return its_helper.VALUE", "m1.py")
    assert load_function(f"{target}:f")(0) == 42
    assert json.dumps(load_function(f"{target}:f")(0)) == "42"
