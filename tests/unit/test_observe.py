"""Who asked and what tools did, from calls, spans and messages of every protocol."""

import pytest

from attempts import agent_span, answer_span, asks, call, refused, result, says, span, tool_span
from fulmen.credit.observe import observe

CHAT_TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
FLAT_TOOLS = [{"type": "function", "name": "add", "parameters": {}}]
ADD = ("call_1", "add", '{"a": 2, "b": 2}')


def chat(*messages, system="You add.", tools=CHAT_TOOLS) -> dict:
    return {"messages": [{"role": "system", "content": system}, *messages], "tools": tools}


def chat_result(name: str, text: str) -> dict:
    return {"role": "tool", "tool_call_id": name, "content": text}


def agents(*calls, spans=()) -> list[str]:
    return [c.agent for c in observe(result(*calls, spans=spans)).calls]


def test_the_requests_own_word_for_its_agent_wins():
    spans = [agent_span("a", "from_span"), answer_span("s", "c0", "a")]
    assert agents(call(0, agent="from_header"), spans=spans) == ["from_header"]


def test_an_agent_is_that_of_the_nearest_span_above_the_answers_span():
    spans = [
        span("root", attributes={"gen_ai.agent.name": "team"}),
        agent_span("a", "writer", "root"),
        span("chain", "a"),
        answer_span("s", "c0", "chain"),
        answer_span("t", "c1", "root"),
    ]
    assert agents(call(0), call(1), spans=spans) == ["writer", "team"]


def test_every_choice_of_an_answer_belongs_to_the_agent_of_the_answers_span():
    spans = [agent_span("a", "writer"), answer_span("s", "chatcmpl-x", "a")]
    first = call(0, id="chatcmpl-x")
    second = call(0, id="chatcmpl-x-1", choice=1)
    assert agents(first, second, spans=spans) == ["writer", "writer"]


def test_the_span_that_was_open_names_the_agent_where_the_answer_has_no_span():
    assert agents(call(0, span_id="a"), spans=[agent_span("a", "writer")]) == ["writer"]


def test_an_answers_span_without_an_agent_leaves_it_to_the_span_that_was_open():
    spans = [answer_span("s", "c0"), agent_span("a", "writer")]
    assert agents(call(0, span_id="a"), spans=spans) == ["writer"]


def test_spans_in_a_circle_name_nobody_and_end():
    spans = [answer_span("s", "c0", "t"), span("t", "s")]
    (name,) = agents(call(0), spans=spans)
    assert name.startswith("prompt-")


@pytest.mark.parametrize(
    ("protocol", "request_of"),
    [
        ("chat", lambda text, tools: chat(system=text, tools=tools)),
        (
            "responses",
            lambda text, tools: {"instructions": text, "input": "2 + 2?", "tools": tools},
        ),
        (
            "responses",
            lambda text, tools: {"input": [{"role": "developer", "content": text}], "tools": tools},
        ),
        (
            "messages",
            lambda text, tools: {"system": [{"type": "text", "text": text}], "tools": tools},
        ),
    ],
)
def test_without_spans_agents_are_told_apart_by_system_prompt_and_tools(protocol, request_of):
    other = [{"name": "look_up", "input_schema": {}}]
    asked = [("You write.", FLAT_TOOLS), ("You check.", FLAT_TOOLS), ("You write.", other)]
    calls = [
        call(index, protocol=protocol, request=request_of(*words))
        for index, words in enumerate([*asked, asked[0]])
    ]
    names = agents(*calls)
    assert len(set(names)) == 3
    assert names[3] == names[0]


def test_a_name_made_of_the_prompt_is_the_same_in_every_rollout_and_over_the_conversation():
    first = call(0, request=chat({"role": "user", "content": "1?"}))
    later = call(1, request=chat({"role": "user", "content": "other"}, says("so")))
    assert agents(first, later) == agents(later, first) == ["prompt-1fc173dd"] * 2


def test_completions_have_no_prompt_of_an_agent_and_one_name():
    calls = [call(n, protocol="completions", request={"prompt": f"{n} +"}) for n in range(2)]
    assert len(set(agents(*calls))) == 1


def test_a_request_that_goes_on_from_a_response_has_the_name_of_that_ones_agent():
    opening = {"input": [{"role": "system", "content": "You add."}], "tools": FLAT_TOOLS}
    first = call(0, id="resp_x", protocol="responses", request=opening)
    output = {"type": "function_call_output", "call_id": "call_1", "output": "4"}
    second = call(
        1,
        protocol="responses",
        request={"previous_response_id": "resp_x", "input": [output], "tools": FLAT_TOOLS},
    )
    names = agents(first, second)
    assert names[0] == names[1]


# Each protocol's way to tell the model what a tool gave.
RETURNS = {
    "chat": lambda text: chat(asks(ADD), chat_result("call_1", text)),
    "responses": lambda text: {
        "input": [
            {"type": "function_call", "call_id": "call_1", "name": "add", "arguments": ADD[2]},
            {"type": "function_call_output", "call_id": "call_1", "output": text},
        ]
    },
    "messages": lambda text: {
        "messages": [
            {
                "role": "user",
                "content": [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_1",
                        "content": [{"type": "text", "text": text}],
                    }
                ],
            }
        ]
    },
}


@pytest.mark.parametrize(
    ("protocol", "outcome"), [("chat", "unknown"), ("responses", "unknown"), ("messages", "ok")]
)
def test_a_tools_result_is_read_from_the_next_request_in_every_protocol(protocol, outcome):
    first = call(0, protocol=protocol, response=asks(ADD))
    (use,) = observe(result(first, call(1, request=RETURNS[protocol]("4")))).tools
    assert (use.name, use.arguments, use.result) == ("add", ADD[2], "4")
    assert (use.tool_call_id, use.call_id, use.span_id) == ("call_1", "c0", None)
    assert use.outcome == outcome
    assert use.agent == observe(result(first)).calls[0].agent


def test_anthropics_flag_says_that_a_tool_failed():
    body = RETURNS["messages"]("no")
    body["messages"][0]["content"][0]["is_error"] = True
    (use,) = observe(result(call(0, response=asks(ADD)), call(1, request=body))).tools
    assert use.outcome == "error"


@pytest.mark.parametrize(
    ("text", "outcome"),
    [
        ("Error: ZeroDivisionError('division by zero')\n Please fix your mistakes.", "error"),
        ("An error occurred while running the tool. Please try again.", "error"),
        ("Error: Function failed.", "error"),
        ("Error executing tool: no", "error"),
        ("boom: division by zero in calculator", "unknown"),
        ("There was an Error: none", "unknown"),
        ("", "unknown"),
    ],
)
def test_only_fixed_texts_of_frameworks_tell_a_failure_anything_else_is_unknown(text, outcome):
    later = call(1, request=RETURNS["chat"](text))
    (use,) = observe(result(call(0, response=asks(ADD)), later)).tools
    assert use.outcome == outcome


def test_tool_calls_of_models_elsewhere_are_read_from_their_own_answers():
    bodies = [
        {"choices": [{"message": asks(("e0", "add", "{}"))}]},
        {"content": [{"type": "tool_use", "id": "e1", "name": "add", "input": {"a": 1}}]},
        {
            "output": [
                {"type": "function_call", "call_id": "e2", "name": "add", "arguments": "{}"},
            ]
        },
    ]
    calls = [call(n, response=body, finish_reason="external") for n, body in enumerate(bodies)]
    tools = observe(result(*calls)).tools
    assert [use.tool_call_id for use in tools] == ["e0", "e1", "e2"]
    assert tools[1].arguments == '{"a": 1}'


def test_a_tool_is_joined_to_its_span_by_id_and_the_span_knows_how_it_ended():
    spans = [
        agent_span("a", "solver"),
        answer_span("s", "c0", "a"),
        tool_span("t", "add", "a", at=2.0, call_id="call_1", result="4"),
    ]
    (use,) = observe(result(call(0, response=asks(ADD)), spans=spans)).tools
    assert (use.outcome, use.result, use.span_id, use.agent) == ("ok", "4", "t", "solver")
    assert (use.started, use.ended) == (2.0, 3.0)


@pytest.mark.parametrize(
    ("changes", "outcome"),
    [
        ({"status": "error"}, "error"),
        ({"error": "ZeroDivisionError"}, "error"),
        ({"error": "httpx.ReadTimeout"}, "timeout"),
        ({"error": "TimeoutError", "status": "error"}, "timeout"),
        ({"ended": None}, "unknown"),
        ({"outcome": "error"}, "error"),
        ({"status": "ok", "outcome": "timeout"}, "timeout"),
        ({"status": "ok"}, "ok"),
        ({}, "ok"),
    ],
)
def test_the_outcome_of_a_span(changes, outcome):
    spans = [tool_span("t", "add", call_id="call_1", **changes)]
    (use,) = observe(result(call(0, response=asks(ADD)), spans=spans)).tools
    assert use.outcome == outcome


def test_a_spans_word_wins_over_the_message_and_the_message_speaks_where_it_is_silent():
    later = call(1, request=RETURNS["chat"]("Error: none"))
    attempt = (call(0, response=asks(ADD)), later)
    (ended,) = observe(result(*attempt, spans=[tool_span("t", "add", call_id="call_1")])).tools
    endless = tool_span("t", "add", call_id="call_1", ended=None)
    (silent,) = observe(result(*attempt, spans=[endless])).tools
    assert (ended.outcome, ended.result) == ("ok", "Error: none")
    assert silent.outcome == "error"


def test_of_two_spans_for_one_use_the_one_that_saw_the_failure_is_right():
    spans = [
        tool_span("native", "add", call_id="call_1", error="ValueError"),
        tool_span("other", "add", call_id="call_1", at=1.1, status="ok", result="4"),
    ]
    (use,) = observe(result(call(0, response=asks(ADD)), spans=spans)).tools
    assert (use.outcome, use.result, use.span_id) == ("error", "4", "native")


def test_spans_without_ids_are_joined_by_tool_arguments_and_order_under_the_same_agent():
    asked = [("i1", "add", '{"a":1,"b":2}'), ("i2", "add", "{}"), ("i3", "add", '{"b":2,"a":1}')]
    spans = [
        agent_span("w", "writer"),
        agent_span("k", "checker"),
        answer_span("s0", "c0", "w"),
        answer_span("s1", "c1", "k"),
        tool_span("t1", "add", "w", at=1.0, arguments={"a": 1, "b": 2}, result="first"),
        tool_span("t2", "add", "w", at=2.0, arguments={"a": 1, "b": 2}, error="ValueError"),
        tool_span("t3", "add", "w", at=3.0, arguments="{}"),
        tool_span("t4", "add", "k", at=4.0, arguments='{"a": 1, "b": 2}'),
    ]
    calls = call(0, response=asks(*asked)), call(1, response=asks(("i4", *asked[0][1:])))
    tools = observe(result(*calls, spans=spans)).tools
    joined = {use.tool_call_id: use.span_id for use in tools}
    assert joined == {"i1": "t1", "i3": "t2", "i2": "t3", "i4": "t4"}
    outcomes = {use.tool_call_id: use.outcome for use in tools}
    assert outcomes == {"i1": "ok", "i3": "error", "i2": "ok", "i4": "ok"}


def test_converted_arguments_are_no_obstacle_where_there_is_one_candidate_only():
    spans = [tool_span("t", "add", arguments={"a": 2.0, "b": 2.0, "precise": False})]
    (use,) = observe(result(call(0, response=asks(ADD)), spans=spans)).tools
    assert (use.span_id, use.arguments) == ("t", ADD[2])
    twice = asks(ADD, ("call_2", "add", "{}"))
    tools = observe(result(call(0, response=twice), spans=spans)).tools
    assert {(use.span_id, use.call_id) for use in tools} == {(None, "c0"), ("t", None)}


def test_a_tool_that_the_agents_own_code_used_was_asked_for_by_no_call():
    spans = [agent_span("a", "coder"), tool_span("t", "search", "a", arguments="q", result=["x"])]
    (use,) = observe(result(call(0, response=says("search('q')")), spans=spans)).tools
    assert (use.call_id, use.agent, use.arguments, use.result) == (None, "coder", "q", '["x"]')


def test_parallel_identical_tools_keep_their_own_results():
    twice = asks(("i1", "roll", "{}"), ("i2", "roll", "{}"))
    body = chat(twice, chat_result("i2", "5"), chat_result("i1", "3"))
    tools = observe(result(call(0, response=twice), call(1, request=body))).tools
    assert [(use.tool_call_id, use.result) for use in tools] == [("i1", "3"), ("i2", "5")]


def test_ids_that_a_client_made_up_are_followed_by_tool_and_arguments():
    body = chat(asks(("own_1", *ADD[1:])), chat_result("own_1", "4"))
    again = chat(asks(("own_1", *ADD[1:])), chat_result("own_1", "4"), says("4"))
    calls = call(0, response=asks(ADD)), call(1, request=body), call(2, request=again)
    (use,) = observe(result(*calls)).tools
    assert (use.tool_call_id, use.result) == ("call_1", "4")


def test_an_example_in_the_prompt_is_no_use_of_a_tool():
    example = (asks(("ex", *ADD[1:])), chat_result("ex", "5"))
    first = call(0, request=chat(*example), response=asks(ADD))
    second = call(1, request=chat(*example, asks(ADD)))
    (use,) = observe(result(first, second)).tools
    assert use.result is None


def test_tool_calls_that_the_agent_never_had_are_not_uses():
    lost = call(0, response=asks(("lost", *ADD[1:])), superseded=True)
    taken = call(1, id="x", response=asks(ADD))
    left = call(1, id="x-1", choice=1, response=asks(("left", *ADD[1:])))
    tools = observe(result(lost, taken, left, call(2, request=RETURNS["chat"]("4")))).tools
    assert [(use.tool_call_id, use.call_id) for use in tools] == [("call_1", "x")]


def test_a_tool_that_nothing_more_was_heard_of_is_unknown():
    (use,) = observe(result(call(0, response=asks(ADD)))).tools
    assert (use.outcome, use.result) == ("unknown", None)


def test_spans_are_joined_to_the_one_call_that_they_are_about():
    spans = [
        agent_span("a", "solver"),
        answer_span("s", "c0", "a"),
        answer_span("both", "x", "a"),
        tool_span("t", "add", "a", call_id="call_1"),
    ]
    calls = call(0, response=asks(ADD)), call(1, id="x"), call(1, id="x-1", choice=1)
    seen = observe(result(*calls, spans=spans))
    assert seen.call_of == {"s": "c0", "t": "c0"}
    assert seen.agent_of == dict.fromkeys(["a", "s", "both", "t"], "solver")


@pytest.mark.parametrize(
    "odd",
    [
        None,
        [],
        "text",
        {"messages": "x", "tools": 3, "input": {"a": 1}},
        {"messages": [None, {"role": "tool"}, {"content": [1, {"type": "tool_result"}]}]},
        {"tool_calls": [None, {}], "content": [{"type": "tool_use"}], "choices": [{}]},
    ],
)
def test_bodies_of_no_known_shape_say_nothing_and_stop_nothing(odd):
    calls = call(0, request=odd, response=odd), refused(1, 400, {"message": "no"}, request=odd)
    seen = observe(result(*calls))
    assert [c.id for c in seen.calls] == ["c0", "c1"]
