"""Agents behind HTTP, on a real store and real sockets."""

import asyncio
import contextlib
import socket
from pathlib import Path
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route

from fulmen.runner.agents import check_agent, parse_agent
from fulmen.runner.pool import Pool
from fulmen.schema.errors import AgentError
from fulmen.schema.records import Outcome, Retry, Rollout, RolloutResult, Task
from fulmen.server.http import Listening
from fulmen.store.open import open_store

GATEWAY = "http://127.0.0.1:9"


class Agent:
    """A server that answers tasks by what they ask for."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.elsewhere = 0
        self.left = asyncio.Event()
        routes = [
            Route("/solve", self._solve, methods=["POST"]),
            Route("/elsewhere", self._elsewhere, methods=["GET", "POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def _elsewhere(self, request: Request) -> Response:  # noqa: ARG002
        self.elsewhere += 1
        return PlainTextResponse("they followed")

    async def _solve(self, request: Request) -> Response:
        body = await request.json()
        self.asked.append(body)
        match body["task"]:
            case "wait":
                with contextlib.suppress(ClientDisconnect):
                    while (await request.receive())["type"] != "http.disconnect":
                        pass
                self.left.set()
                return Response()
            case "redirect":
                return RedirectResponse("/elsewhere", 307)
            case {"status": status, "text": text}:
                return PlainTextResponse(text, status)
            case {"json": raw}:
                return Response(raw, media_type="application/json; charset=utf-8")
        return JSONResponse({"output": {"said": body["task"]}})


@pytest.fixture
async def agent():
    made = Agent()
    async with Listening(made.app, "127.0.0.1", 0) as server:
        yield made, f"{server.url}/solve"


async def run(folder: Path, url: str, *tasks: Any, **changes: Any) -> list[RolloutResult]:
    """Let the agent work on tasks; the results in their order."""
    store = open_store(folder / "run.db")
    rollouts = [
        Rollout(
            id=f"r{number}",
            task=Task(id=str(number), input=task),
            group="g",
            step=1,
            **{"deadline_s": 30.0, "retry": Retry(attempts=1), **changes},
        )
        for number, task in enumerate(tasks)
    ]
    try:
        await store.enqueue(rollouts)
        pending = [rollout.id for rollout in rollouts]
        async with Pool(store, parse_agent(url), base_url=GATEWAY, workers=8):
            async with asyncio.timeout(60):
                while len(done := await store.wait_finished(pending, timeout_s=5)) < len(pending):
                    left = [name for name in pending if name not in done]
                    await store.wait_finished(left, timeout_s=5)
        return await store.results(pending)
    finally:
        await store.close()


async def test_it_is_told_the_task_and_where_its_model_calls_go(tmp_path, agent):
    server, url = agent
    (result,) = await run(tmp_path, url, {"question": "wörd?"}, deadline_s=12.5)
    assert result.outcome == Outcome(output={"said": {"question": "wörd?"}})
    (asked,) = server.asked
    assert asked.pop("api_key").startswith("fulmen-")
    assert asked == {
        "task": {"question": "wörd?"},
        "rollout_id": "r0",
        "base_url": f"{GATEWAY}/v1",
        "anthropic_base_url": GATEWAY,
        "traces_url": f"{GATEWAY}/v1/traces",
        "deadline_s": 12.5,
    }


async def test_every_rollout_has_a_key_of_its_own(tmp_path, agent):
    server, url = agent
    await run(tmp_path, url, *range(6))
    assert len({asked["api_key"] for asked in server.asked}) == 6


ANSWERS = [
    ({"status": 200, "text": " 42 \n"}, None, "42", ""),
    ({"json": '{"output": 0.5}'}, None, 0.5, ""),
    ({"json": '{"output": null}'}, None, None, ""),
    ({"json": '{"output": 1, "error": null}'}, None, 1, ""),
    ({"json": '{"error": "gave\\nup"}'}, "agent", None, "gave up"),
    ({"json": '{"error": {"code": 3}}'}, "agent", None, '{"code": 3}'),
    ({"json": '{"answer": 1}'}, "agent", None, 'JSON without "output" or "error"'),
    ({"json": "{"}, "agent", None, "not valid JSON"),
    ({"status": 422, "text": "\nno such tool\nmore"}, "agent", None, "answered 422: no such tool"),
    ({"status": 503, "text": "starting"}, "infrastructure", None, "answered 503: starting"),
    ("redirect", "agent", None, "answered 307: redirects are not followed"),
]


@pytest.mark.parametrize(("task", "failure", "output", "words"), ANSWERS)
async def test_what_it_answers_decides_how_the_attempt_ended(
    tmp_path, agent, task, failure, output, words
):
    server, url = agent
    (result,) = await run(tmp_path, url, task)
    assert (result.outcome.failure, result.outcome.output) == (failure, output)
    assert words in result.outcome.error
    assert "\n" not in result.outcome.error
    assert server.elsewhere == 0


async def test_a_server_s_own_failure_is_tried_again(tmp_path, agent):
    server, url = agent
    (result,) = await run(tmp_path, url, {"status": 500, "text": ""}, retry=Retry(attempts=3))
    assert (result.attempt, len(server.asked)) == (3, 3)
    assert result.outcome.failure == "infrastructure"


async def test_an_attempt_that_is_stopped_closes_its_connection(tmp_path, agent):
    server, url = agent
    (result,) = await run(tmp_path, url, "wait", deadline_s=0.3)
    assert result.outcome.failure == "timeout"
    await asyncio.wait_for(server.left.wait(), 10)


async def test_a_connection_that_breaks_before_an_answer_says_nothing_about_the_agent(tmp_path):
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.read(1):  # a look whether somebody listens sends nothing
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nhalf")
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as listening:
        port = listening.sockets[0].getsockname()[1]
        (result,) = await run(tmp_path, f"http://127.0.0.1:{port}", 1)
    assert result.outcome.failure == "infrastructure"
    assert result.outcome.error.startswith(f"the agent at http://127.0.0.1:{port}: ")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://127.0.0.1:{free}/solve", "cannot be reached (Connection refused); start it"),
        ("http://", "is no URL of the form"),
        ("http:///path", "is no URL of the form"),
        ("http://user:secret@127.0.0.1/", "is no URL of the form"),
        ("http://127.0.0.1:99999/", "is no URL (Port out of range"),
        ("http://127.0.0.1/a b", "is no URL of the form"),
        ("http://[::1/", "is no URL (Invalid IPv6 URL)"),
    ],
)
def test_a_url_where_no_agent_can_be_is_refused_in_one_line(url, words):
    with pytest.raises(AgentError) as caught:
        check_agent(parse_agent(url.format(free=free_port())))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
