"""Agents that are watched do what they do unwatched."""

import os
import sys
import textwrap

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import fulmen
from fulmen.runner.agents import parse_agent
from fulmen.runner.pool import Pool
from fulmen.schema.records import Outcome, Retry, Rollout, RolloutResult, Span, Task
from fulmen.server.http import Listening
from fulmen.server.traces import traces_routes
from fulmen.store.open import open_store
from fulmen.tracing.export import OtlpExporter, read_headers
from fulmen.tracing.otlp import read_spans


async def watch(folder, source: str, task: object = "x") -> tuple[RolloutResult, list[str]]:
    """The result of one rollout, and the hints."""
    path, hints = folder / "watched_agent.py", []
    path.write_text(textwrap.dedent(source))
    store = open_store(folder / "run.db")
    try:
        once = Retry(attempts=1)
        rollout = Rollout(id="r", task=Task(id="t", input=task), group="g", step=1, retry=once)
        await store.enqueue([rollout])
        agent = parse_agent(f"{path}:solve")
        async with Pool(store, agent, base_url="http://127.0.0.1:9", workers=1, trace=hints.append):
            assert await store.wait_finished(["r"], timeout_s=60)
        (result,) = await store.results(["r"])
    finally:
        await store.close()
    return result, hints


async def test_a_framework_whose_instrumentor_is_missing_is_a_hint_and_no_error(tmp_path):
    result, hints = await watch(
        tmp_path,
        """
        import sys
        sys.modules["opentelemetry.instrumentation.genai.langchain"] = None  # not installed
        import langchain_core
        def solve(task):
            return "done"
        """,
    )
    assert result.outcome.output == "done"
    assert hints == [
        "langchain-core: its agents and tools are not traced; "
        "pip install opentelemetry-instrumentation-genai-langchain"
    ]


async def test_texts_that_json_cannot_hold_do_not_fail_the_agent(tmp_path):
    result, hints = await watch(
        tmp_path,
        """
        from opentelemetry import trace
        class Text(str):
            pass
        def solve(task):
            with trace.get_tracer("theirs").start_as_current_span("work") as span:
                span.set_attribute("special", Text("a"))
                span.set_attribute("broken", "half \\ud83d")
            return "done"
        """,
    )
    assert result.outcome.output == "done"
    assert hints == []
    (span,) = [span for span in result.spans if span.name == "work"]
    assert (span.attributes["special"], span.attributes["broken"]) == ("a", "half ?")


async def test_a_span_that_cannot_be_told_is_a_hint_and_no_error(tmp_path):
    result, hints = await watch(
        tmp_path,
        """
        from opentelemetry import trace
        def solve(task):
            with trace.get_tracer("theirs").start_as_current_span("broken \\ud83d"):
                return "done"
        """,
    )
    assert result.outcome.output == "done"
    assert len(hints) == 1
    assert hints[0].startswith("a span of theirs is lost ('utf-8' codec can't encode")


async def test_an_agent_that_is_killed_leaves_the_span_that_was_running(tmp_path):
    result, _ = await watch(
        tmp_path,
        """
        import os
        from opentelemetry import trace
        tracer = trace.get_tracer("theirs")
        def solve(task):
            with tracer.start_as_current_span("looking up"):
                pass
            with tracer.start_as_current_span("execute_tool deploy") as span:
                os.kill(os.getpid(), 9)
        """,
    )
    assert result.outcome.failure == "infrastructure"
    assert {span.name: span.ended is None for span in result.spans} == {
        "fulmen.rollout": True,
        "looking up": False,
        "execute_tool deploy": True,
    }


async def test_every_span_of_an_attempt_is_under_its_root(tmp_path):
    result, _ = await watch(
        tmp_path,
        """
        from concurrent.futures import ThreadPoolExecutor
        from opentelemetry import trace
        tracer = trace.get_tracer("theirs")
        def work():
            with tracer.start_as_current_span("in a thread"):
                pass
        def solve(task):
            with ThreadPoolExecutor(1) as pool, tracer.start_as_current_span("outer"):
                pool.submit(work).result()
        """,
    )
    by_name = {span.name: span for span in result.spans}
    assert by_name["fulmen.rollout"].parent is None
    assert by_name["outer"].parent == by_name["fulmen.rollout"].id
    assert by_name["in a thread"].parent == by_name["outer"].id


async def test_rewards_that_the_agent_gives_reach_the_rollout_with_their_targets(tmp_path):
    result, _ = await watch(
        tmp_path,
        """
        import fulmen
        class Answer:
            id = "chatcmpl-1"
        async def solve(task):
            fulmen.reward(0.5)
            fulmen.reward(True, name="valid", of=Answer())
            fulmen.reward(0.1, name="kept", agent="writer")
            fulmen.reward(0.2, name="kept", agent="writer")
        """,
    )
    given = {(r.name, r.call_id, r.agent): r.value for r in result.rewards}
    assert given == {
        ("intermediate", None, None): 0.5,
        ("valid", "chatcmpl-1", None): 1.0,
        ("kept", None, "writer"): 0.2,
    }
    assert {r.source for r in result.rewards} == {"agent"}


@pytest.mark.parametrize(
    ("call", "why"),
    [
        ("fulmen.reward(float('nan'), name='x')", "fulmen.reward: x is nan, not a finite number"),
        ("fulmen.reward(1, name=3)", "fulmen.reward: name is 3, not a text"),
        ("fulmen.reward(1, name='reward')", "'reward' is the name of the final reward"),
        ("fulmen.reward(1, of=3)", "fulmen.reward: a int has no id; give the model's answer"),
    ],
)
async def test_a_reward_that_cannot_be_is_the_agent_s_error_at_its_own_line(tmp_path, call, why):
    result, _ = await watch(tmp_path, f"import fulmen\ndef solve(task):\n    {call}\n")
    assert result.outcome.failure == "agent"
    assert why in result.outcome.error
    assert "watched_agent.py:3" in result.outcome.error


def test_outside_of_a_rollout_a_reward_does_nothing():
    assert fulmen.reward(1.0) is None


EXPORTING_COMMAND = """
    import json, sys
    from opentelemetry import trace
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(OTLPSpanExporter()))
    with provider.get_tracer("its-own").start_as_current_span("step") as span:
        span.set_attribute("task", json.load(sys.stdin)["n"])
"""


async def test_spans_of_a_command_arrive_by_otlp_with_nothing_but_the_environment(
    tmp_path, monkeypatch
):
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    script = tmp_path / "command.py"
    script.write_text(textwrap.dedent(EXPORTING_COMMAND))
    store = open_store(tmp_path / "run.db")
    app = Starlette(routes=traces_routes(store, store.secret))
    names = ["r1", "r2"]
    try:
        await store.enqueue([rollout(name) for name in names])
        agent = parse_agent(f"{sys.executable} {script}")
        async with (
            Listening(app, "127.0.0.1", 0) as server,
            Pool(store, agent, base_url=server.url, workers=2),
        ):
            for name in names:
                assert await store.wait_finished([name], timeout_s=60)
        results = await store.results(names)
    finally:
        await store.close()
    assert [[(s.name, s.attributes["task"]) for s in r.spans] for r in results] == [
        [("step", "r1")],
        [("step", "r2")],
    ]


async def test_a_tracing_backend_gets_every_rollout_and_one_that_fails_is_told_of_once():
    received: list[str] = []
    status = [200]

    async def take(request: Request) -> Response:
        spans = read_spans(
            await request.body(), request.headers["content-type"], rollout_id="", attempt=1
        )
        received.extend(str(span.attributes.get("fulmen.rollout.id")) for span in spans)
        assert request.headers["x-project"] == "p q"
        return Response(status_code=status[0])

    app = Starlette(routes=[Route("/otlp/v1/traces", take, methods=["POST"])])
    told: list[str] = []
    async with Listening(app, "127.0.0.1", 0) as server:
        exporter = OtlpExporter(
            f"{server.url}/otlp", headers=read_headers("x-project=p%20q"), failed=told.append
        )
        exporter.export([finished("a"), finished("b")])
        exporter.export([])
        await exporter.aclose()
        assert (received, exporter.lost, told) == (["a", "b"], 0, [])
        status[0] = 403
        exporter = OtlpExporter(
            f"{server.url}/otlp", headers={"x-project": "p q"}, failed=told.append
        )
        exporter.export([finished("c")])
        exporter.export([finished("d")])
        await exporter.aclose()
    assert exporter.lost == 2
    url = f"{server.url}/otlp/v1/traces"
    assert told == [f"{url} does not take traces (status 403); training goes on without"]


def rollout(name: str) -> Rollout:
    task = Task(id=name, input={"n": name})
    return Rollout(id=name, task=task, group="g", step=1, deadline_s=60, retry=Retry(attempts=1))


def finished(name: str) -> RolloutResult:
    root = Span(id="00" * 7 + "aa", rollout_id=name, attempt=1, name="fulmen.rollout", started=1.0)
    return RolloutResult(rollout=rollout(name), attempt=1, outcome=Outcome(), spans=(root,))


async def test_a_task_and_an_answer_may_be_any_json(tmp_path):
    result, _ = await watch(
        tmp_path,
        """
        def solve(task):
            return {"n": task["n"] * 10}
        """,
        {"n": 10**30},
    )
    assert result.outcome.output == {"n": 10**31}


@pytest.mark.parametrize("work", ["print('half \\ud83d')", "raise ValueError('half \\ud83d')"])
async def test_half_a_character_in_log_or_error_costs_nothing_but_the_character(tmp_path, work):
    result, _ = await watch(tmp_path, f"def solve(task):\n    {work}\n    return 'done'\n")
    assert result.outcome.failure == (None if "print" in work else "agent")
    assert "half ?" in result.outcome.log


async def test_a_forked_copy_of_the_worker_says_nothing(tmp_path):
    result, _ = await watch(
        tmp_path,
        """
        import os
        from opentelemetry import trace
        def solve(task):
            with trace.get_tracer("theirs").start_as_current_span("outer"):
                child = os.fork()
                if child == 0:
                    for _ in range(100):
                        with trace.get_tracer("theirs").start_as_current_span("in the copy"):
                            pass
                    os._exit(0)
                os.waitpid(child, 0)
            return "done"
        """,
    )
    assert result.outcome.output == "done"
    assert {span.name for span in result.spans} == {"fulmen.rollout", "outer"}
