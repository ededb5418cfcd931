"""Spans read in every dialect, streamed, joined to agents, and carried over OTLP."""

import importlib.util
import inspect
import json
import random
import sys
import types

import pytest
from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import StatusCode

from fulmen.schema.errors import DataError
from fulmen.schema.headers import read_agent, read_span
from fulmen.schema.records import Call, Outcome, Record, Rollout, RolloutResult, Span, Task
from fulmen.tracing.current import (
    Attempt,
    agent_of_metadata,
    current_attempt,
    langgraph_agent,
    trace_id_of,
)
from fulmen.tracing.frameworks import Framework
from fulmen.tracing.imports import after_import
from fulmen.tracing.normalise import MOST_CHARACTERS, Raw, normalise
from fulmen.tracing.otlp import read_spans, write_rollouts
from fulmen.tracing.stream import SpanStream
from fulmen.tracing.switch import OwnIds, _switch

TOOL = "execute_tool"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        (Raw("t", status="ok"), "ok"),
        (Raw("t", status="unset"), "ok"),
        (Raw("t", status="error"), "error"),
        (Raw("t", attributes={"error.type": "KeyError"}), "error"),
        (Raw("t", attributes={"error.type": "asyncio.TimeoutError"}, status="error"), "timeout"),
        (Raw("t", exceptions=[{"exception.type": "ValueError"}]), "error"),
        (Raw("t", status="unset", ended=False), "unknown"),
        # AgentScope's span of a failed tool ends well.
        (
            Raw(
                "t",
                status="ok",
                attributes={"gen_ai.tool.call.result": "state=<ToolResultState.ERROR: 'error'>"},
            ),
            "error",
        ),
    ],
)
def test_a_tool_s_outcome_follows_from_errors_and_ends_and_never_from_an_unset_status(
    raw, expected
):
    attributes = {**raw.attributes, "gen_ai.operation.name": TOOL}
    given = Raw(raw.name, "", attributes, raw.status, "", raw.exceptions, raw.ended)
    assert normalise(given)["fulmen.tool.outcome"] == expected


def test_what_is_no_tool_has_no_outcome():
    assert "fulmen.tool.outcome" not in normalise(Raw("chat m", status="ok"))


def test_openinference_s_agents_and_models_are_read():
    agent = Raw("calc_agent.run", attributes={"openinference.span.kind": "AGENT"})
    assert normalise(agent)["gen_ai.agent.name"] == "calc_agent"
    named = Raw("x", attributes={"openinference.span.kind": "AGENT", "graph.node.id": "writer"})
    assert normalise(named)["gen_ai.agent.name"] == "writer"
    model = Raw(
        "llm",
        attributes={"openinference.span.kind": "LLM", "output.value": '{"id": "chatcmpl-1"}'},
    )
    assert normalise(model)["gen_ai.response.id"] == "chatcmpl-1"


def test_an_older_name_never_replaces_the_conventions_own():
    raw = Raw("a", attributes={"gen_ai.agent.name": "new", "agent_name": "old"})
    assert normalise(raw)["gen_ai.agent.name"] == "new"


def test_long_values_are_cut_and_odd_ones_become_json():
    raw = Raw("a", attributes={"long": "x" * 9999, "odd": object(), "list": (1, "b")})
    found = normalise(raw)
    assert len(found["long"]) == MOST_CHARACTERS + 1
    assert found["list"] == [1, "b"]
    json.dumps(found)


@pytest.fixture
def traced():
    """A tracer whose spans go to the attempt of the running code, and what came."""
    seen: list[Record] = []
    stream, provider = SpanStream(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(stream)
    token = current_attempt.set(Attempt("r", 2, seen.append))
    yield provider.get_tracer("lib"), stream, seen
    current_attempt.reset(token)


def test_a_span_is_told_of_when_it_starts_and_when_it_ends(traced):
    tracer, _, seen = traced
    with tracer.start_as_current_span("outer"), tracer.start_as_current_span("inner"):
        assert [(span.name, span.ended) for span in seen] == [("outer", None), ("inner", None)]
    outer, inner, inner_ended, outer_ended = seen
    assert (inner_ended.id, outer_ended.id) == (inner.id, outer.id)
    assert inner.parent == outer.id
    assert inner_ended.ended >= inner_ended.started > 0
    assert {(span.rollout_id, span.attempt) for span in seen} == {("r", 2)}


def test_an_exception_is_on_record_with_its_kind_and_text(traced):
    tracer, _, seen = traced
    with pytest.raises(KeyError), tracer.start_as_current_span("tool"):
        raise KeyError("gone")
    assert seen[-1].status == "error"
    assert seen[-1].attributes["error.type"] == "KeyError"
    assert seen[-1].attributes["fulmen.error.message"] == "'gone'"


def test_a_span_in_a_thread_that_lost_its_context_belongs_to_its_parent_s_attempt(traced):
    tracer, _, seen = traced
    with tracer.start_as_current_span("outer"):
        token = current_attempt.set(None)
        with tracer.start_as_current_span("inner"):
            pass
        current_attempt.reset(token)
    assert [span.name for span in seen] == ["outer", "inner", "inner", "outer"]


def test_spans_outside_of_attempts_go_nowhere(traced):
    tracer, stream, seen = traced
    token = current_attempt.set(None)
    with tracer.start_as_current_span("startup"):
        assert stream.headers() == {}
    current_attempt.reset(token)
    assert seen == []


def test_a_request_names_the_nearest_agent_even_one_that_is_named_late(traced):
    tracer, stream, seen = traced
    with tracer.start_as_current_span("invoke_agent") as agent:
        agent.set_attribute("gen_ai.operation.name", "invoke_agent")
        with tracer.start_as_current_span("chat"):
            assert "x-fulmen-agent" not in stream.headers()
            agent.set_attribute("gen_ai.agent.name", "prüfer")
            headers = stream.headers()
    assert read_agent(headers["x-fulmen-agent"]) == "prüfer"
    assert read_span(headers["traceparent"]) == seen[1].id


def test_forgetting_an_attempt_leaves_its_open_spans_open(traced):
    tracer, stream, seen = traced
    attempt = current_attempt.get()
    span = tracer.start_span("hung tool")
    stream.forget(attempt)
    span.end()
    assert [(one.name, one.ended) for one in seen] == [("hung tool", None)]


def test_a_langgraph_node_is_the_agent_of_the_code_that_runs_in_it():
    config = pytest.importorskip("langchain_core.runnables.config")
    token = config.var_child_runnable_config.set({"metadata": {"langgraph_node": "writer"}})
    assert langgraph_agent() == "writer"
    config.var_child_runnable_config.reset(token)
    assert langgraph_agent() is None


def test_a_module_is_acted_on_when_it_is_imported_and_at_once_if_it_was(tmp_path, monkeypatch):
    (tmp_path / "framework_of_tomorrow.py").write_text("loaded = True\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[str] = []
    act = {
        name: lambda module: seen.append(module.__name__)
        for name in ("json", "framework_of_tomorrow")
    }
    after_import(act)
    assert seen == ["json"]
    import framework_of_tomorrow  # type: ignore[import-not-found]

    assert framework_of_tomorrow.loaded
    assert seen == ["json", "framework_of_tomorrow"]
    # What asks the module for its source still finds it.
    assert inspect.getsource(framework_of_tomorrow) == "loaded = True\n"
    monkeypatch.delitem(sys.modules, "framework_of_tomorrow")


def test_looking_for_a_module_is_not_importing_it(tmp_path, monkeypatch):
    (tmp_path / "probed_framework.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    seen: list[str] = []
    after_import({"probed_framework": lambda module: seen.append(module.__name__)})
    assert importlib.util.find_spec("probed_framework") is not None
    assert seen == []
    importlib.import_module("probed_framework")
    assert seen == ["probed_framework"]
    monkeypatch.delitem(sys.modules, "probed_framework")


def test_agents_that_seed_the_same_random_numbers_have_spans_of_their_own():
    ids = OwnIds()
    random.seed(0)
    first = (ids.generate_span_id(), ids.generate_trace_id())
    random.seed(0)
    assert not set(first) & {ids.generate_span_id(), ids.generate_trace_id()}


def test_a_thread_of_an_earlier_attempt_that_works_for_a_later_one_tells_the_later(traced):
    tracer, _, seen = traced
    with tracer.start_as_current_span("outer"):
        earlier: list[Record] = []
        token = current_attempt.set(Attempt("earlier", 1, earlier.append))
        with tracer.start_as_current_span("inner"):
            pass
        current_attempt.reset(token)
    assert earlier == []
    assert [span.rollout_id for span in seen] == ["r"] * 4


@pytest.mark.parametrize(
    ("metadata", "agent"),
    [
        # A graph of the user's in a tool of a LangChain agent inherits that agent's marks.
        ({"langgraph_node": "checker", "lc_agent_name": "boss"}, "checker"),
        ({"langgraph_node": "model", "lc_agent_name": "boss"}, "boss"),
        ({"langgraph_node": "model", "langgraph_checkpoint_ns": "tools:1|2|model:3"}, None),
        ({"langgraph_node": "Todo.before_model", "lc_agent_name": "boss"}, "boss"),
    ],
)
def test_nodes_of_langchain_s_own_agents_are_no_agents(metadata, agent):
    assert agent_of_metadata({"ls_integration": "langchain_create_agent", **metadata}) == agent


def framework(**changes):
    values = {"module": "m", "switch": lambda _: None, "distribution": "numpy", **changes}
    return Framework(**values)


def test_an_instrumentor_that_fails_is_a_hint_and_the_agent_goes_on():
    def broken(_):
        raise RuntimeError("another version")

    hints: list[str] = []
    _switch(framework(switch=broken), hints.append, types.ModuleType("m"))
    assert hints == ["numpy: not traced (RuntimeError: another version)"]


def test_a_module_that_is_only_called_like_a_framework_is_left_alone():
    hints: list[str] = []
    used: list[object] = []
    other = framework(distribution="no-such-package-anywhere", switch=used.append)
    _switch(other, hints.append, types.ModuleType("agents"))
    assert (hints, used) == ([], [])


def test_without_the_instrumentor_what_must_not_happen_is_still_prevented():
    done: list[object] = []
    lacking = framework(needs="no_such_module", instrumentor="the-package", otherwise=done.append)
    hints: list[str] = []
    module = types.ModuleType("m")
    _switch(lacking, hints.append, module)
    assert done == [module]
    assert hints == ["numpy: its agents and tools are not traced; pip install the-package"]


JSON_REQUEST = {
    "resourceSpans": [
        {
            "scopeSpans": [
                {
                    "scope": {"name": "their-lib"},
                    "spans": [
                        {
                            "traceId": "5b8efff798038103d269b633813fc60c",
                            "spanId": "eee19b7ec3c1b174",
                            "parentSpanId": "eee19b7ec3c1b173",
                            "name": "execute_tool calculator",
                            "kind": 1,
                            "startTimeUnixNano": "1700000000000000000",
                            "endTimeUnixNano": "1700000001500000000",
                            "attributes": [
                                {
                                    "key": "gen_ai.operation.name",
                                    "value": {"stringValue": "execute_tool"},
                                },
                                {"key": "gen_ai.tool.name", "value": {"stringValue": "calculator"}},
                                {"key": "n", "value": {"intValue": "7"}},
                            ],
                            "status": {"code": 2, "message": "no"},
                            "unknownField": 1,
                        }
                    ],
                }
            ]
        }
    ]
}


def test_otlp_s_json_is_read_as_its_specification_writes_it():
    body = json.dumps(JSON_REQUEST).encode()
    (span,) = read_spans(body, "application/json", rollout_id="r", attempt=1)
    assert (span.id, span.parent) == ("eee19b7ec3c1b174", "eee19b7ec3c1b173")
    assert (span.started, span.ended) == (1_700_000_000.0, 1_700_000_001.5)
    assert span.attributes["n"] == 7
    assert span.attributes["fulmen.tool.outcome"] == "error"
    assert span.attributes["fulmen.source"] == "their-lib"
    assert span.attributes["fulmen.error.message"] == "no"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (b"\xff\xff\xff", "application/x-protobuf"),
        (b"{", "application/json"),
        (b'{"resourceSpans": 3}', "application/json"),
        (
            b'{"resourceSpans": [{"scopeSpans": [{"spans": [{"spanId": "xyz"}]}]}]}',
            "application/json",
        ),
        (b"[" * 100_000, "application/json"),
        (b"5", "application/json"),
    ],
)
def test_what_is_no_otlp_is_refused_in_one_line(body, kind):
    with pytest.raises(DataError, match="not an OTLP request") as refused:
        read_spans(body, kind, rollout_id="r", attempt=1)
    assert "\n" not in str(refused.value)


def a_result() -> RolloutResult:
    rollout = Rollout(id="r", task=Task(id="t", input="x"), group="g", step=3)
    root = Span(
        id="00000000000000aa", rollout_id="r", attempt=1, name="fulmen.rollout", started=1.0
    )
    tool = Span(
        id="00" * 7 + "bb",
        rollout_id="r",
        attempt=1,
        parent=root.id,
        name="tool",
        status="error",
        started=2.0,
        ended=3.5,
        attributes={"fulmen.error.message": "no", "list": ["a", 1], "flag": True, "half": 0.5},
    )
    call = Call(
        id="chatcmpl-1",
        rollout_id="r",
        attempt=1,
        index=0,
        protocol="chat.completions",
        agent="writer",
        span_id=tool.id,
        policy="m",
        prompt_ids=(1, 2, 3),
        completion_ids=(4,),
        logprobs=(-0.5,),
        versions=(),
        temperature=1.0,
        top_p=1.0,
        finish_reason="stop",
        started=2.5,
        ended=2.75,
    )
    return RolloutResult(
        rollout=rollout, attempt=1, outcome=Outcome(), calls=(call,), spans=(root, tool)
    )


def test_a_rollout_leaves_as_one_trace_of_its_spans_and_calls():
    request = ExportTraceServiceRequest.FromString(write_rollouts([a_result()]))
    spans = {span.name: span for span in request.resource_spans[0].scope_spans[0].spans}
    assert set(spans) == {"fulmen.rollout", "tool", "chat m"}
    assert {span.trace_id for span in spans.values()} == {trace_id_of("r", 1).to_bytes(16, "big")}
    assert spans["chat m"].parent_span_id == spans["tool"].span_id
    assert spans["tool"].parent_span_id == spans["fulmen.rollout"].span_id
    assert spans["tool"].status.code == StatusCode.ERROR.value
    # Never ended: to a viewer it ends with the last that is known of the attempt.
    assert spans["fulmen.rollout"].end_time_unix_nano == 3_500_000_000
    said = MessageToDict(spans["chat m"])["attributes"]
    assert {"key": "gen_ai.agent.name", "value": {"stringValue": "writer"}} in said
    assert {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "3"}} in said


def test_what_leaves_by_otlp_comes_back_by_it():
    body = write_rollouts([a_result()])
    root, tool, _ = read_spans(body, "application/x-protobuf", rollout_id="r", attempt=1)
    sent = a_result().spans[1]
    assert (tool.id, tool.parent, tool.status, tool.started, tool.ended) == (
        sent.id,
        root.id,
        sent.status,
        sent.started,
        sent.ended,
    )
    assert tool.attributes | sent.attributes == tool.attributes
