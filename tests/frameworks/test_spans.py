"""What spans say of every framework's agents: who called, which tools ran, how they ended."""

from typing import Any

import pytest

from frameworks.rollouts import SUMS
from fulmen.schema import semconv
from fulmen.schema.records import RolloutResult, Span


@pytest.fixture
def traced(ran):
    """A case whose framework says more than its calls do."""
    if not ran.case.traced:
        pytest.skip("no framework, no spans of it")
    return ran


def test_everything_that_ran_is_under_the_rollout_s_own_span(traced):
    for result in traced.results.values():
        spans = {span.id: span for span in result.spans}
        (root,) = [span for span in result.spans if span.parent not in spans]
        assert root.parent is None
        assert all(_above(span, result)[-1] == root for span in result.spans if span != root)


def test_every_span_has_ended(traced):
    open_ones = [s for result in traced.results.values() for s in result.spans if s.ended is None]
    assert open_ones == []


def test_agents_have_their_names(traced):
    if traced.case.user is None:
        pytest.skip("its nodes are no agents of the framework's")
    for result in traced.sums:
        named = {span.attributes.get(semconv.AGENT_NAME) for span in _of(result, "invoke_agent")}
        assert named == set(traced.case.callers)


def test_every_call_is_of_the_agent_that_made_it(traced):
    from fulmen.credit.observe import observe

    for result in traced.sums:
        assert [call.agent for call in observe(result).calls] == list(traced.case.callers)


def test_every_tool_that_did_its_work_says_so(traced):
    for result in traced.sums:
        assert _outcomes(result) == [(tool, "ok") for tool in traced.case.tools]


def test_a_tool_that_raised_says_so(traced):
    for result in traced.raising:
        tools = traced.case.tools[:1] if traced.case.aborts else traced.case.tools
        assert _outcomes(result) == [(tools[0], "error"), *((tool, "ok") for tool in tools[1:])]


def test_tools_run_under_the_agent_that_uses_them(traced):
    for result in traced.results.values():
        for span in _of(result, "execute_tool"):
            named = [above.attributes.get(semconv.AGENT_NAME) for above in _above(span, result)]
            assert next(filter(None, named), None) == traced.case.user


def test_a_tool_s_span_says_what_it_was_given_and_what_it_gave(traced):
    if not traced.case.values:
        pytest.skip("its instrumentation leaves it out")
    for expression, result in traced.results.items():
        span = _of(result, "execute_tool")[0]
        assert expression in str(span.attributes.get(semconv.TOOL_ARGUMENTS))
    for expression in SUMS:
        span = _of(traced.results[expression], "execute_tool")[0]
        assert str(eval(expression)) in str(span.attributes.get(semconv.TOOL_RESULT))


def test_spans_carry_the_ids_of_the_calls(traced):
    if not traced.case.response_ids:
        pytest.skip("its instrumentation leaves them out")
    for result in traced.results.values():
        # Framework and client may both have a span of a call.
        ids = dict.fromkeys(span.attributes.get(semconv.RESPONSE_ID) for span in result.spans)
        assert [i for i in ids if i] == [call.id for call in result.calls]


def test_tools_carry_the_id_by_which_the_model_asked_for_them(traced):
    if not traced.case.tool_call_ids:
        pytest.skip("its instrumentation leaves them out")
    for result in traced.results.values():
        for span in _of(result, "execute_tool"):
            asked = span.attributes.get(semconv.TOOL_CALL_ID)
            assert asked == result.calls[0].response["tool_calls"][0]["id"]


def test_spans_are_of_the_rollout_that_they_are_about(traced):
    for expression, result in traced.results.items():
        told = [str(span.attributes) for span in result.spans]
        others = [other for other in traced.results if other != expression]
        assert [text for text in told for other in others if other in text] == []


def test_observation_tells_each_tool_s_outcome(ran):
    from fulmen.credit.observe import observe

    for result in ran.sums:
        assert [(use.name, use.outcome) for use in observe(result).tools] == [
            (tool, "ok") for tool in ran.case.tools
        ]
    for result in ran.raising:
        assert observe(result).tools[0].outcome == "error"


def _of(result: RolloutResult, operation: str) -> list[Span]:
    return [s for s in result.spans if s.attributes.get(semconv.OPERATION) == operation]


def _above(span: Span, result: RolloutResult) -> list[Span]:
    """Its ancestors, the nearest first."""
    spans, found = {each.id: each for each in result.spans}, []
    while span.parent in spans:
        span = spans[span.parent]
        found.append(span)
    return found


def _outcomes(result: RolloutResult) -> list[tuple[Any, Any]]:
    return [
        (span.attributes.get(semconv.TOOL_NAME), span.attributes.get(semconv.TOOL_OUTCOME))
        for span in _of(result, "execute_tool")
    ]
