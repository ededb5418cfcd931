"""Agents that are watched do what they do unwatched."""

import textwrap

from fulmen.runner.agents import parse_agent
from fulmen.runner.pool import Pool
from fulmen.schema.records import Rollout, RolloutResult, Task
from fulmen.store.open import open_store


async def watch(folder, source: str) -> tuple[RolloutResult, list[str]]:
    """The result of one rollout, and the hints."""
    path, hints = folder / "watched_agent.py", []
    path.write_text(textwrap.dedent(source))
    store = open_store(folder / "run.db")
    try:
        rollout = Rollout(id="r", task=Task(id="t", input="x"), group="g", step=1, max_attempts=1)
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
