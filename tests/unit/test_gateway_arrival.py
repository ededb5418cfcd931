"""Who asked, as requests say it, and requests that are refused: both are on record."""

import pytest

from fulmen.schema import headers
from gateways import Face

MESSAGES = [{"role": "user", "content": "q"}]
BODIES = {
    "/chat/completions": {"messages": MESSAGES},
    "/completions": {"prompt": "q"},
    "/messages": {"messages": MESSAGES, "max_tokens": 50},
    "/responses": {"input": "q"},
}
PROTOCOLS = {path: path.strip("/").partition("/")[0] for path in BODIES}
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


def face(tokenizer, **options) -> Face:
    return Face(tokenizer, script=lambda _: tokenizer.encode("yes<|im_end|>"), **options)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_agent_and_open_span_are_recorded_with_the_call(tokenizer, path, stream):
    served = face(tokenizer)
    given = {headers.AGENT: "SQL writer", headers.TRACEPARENT: f"00-{TRACE}-{SPAN}-01"}
    served.client.headers.update(given)
    assert (await served.post(path, **BODIES[path], stream=stream)).status_code == 200
    (call,) = served.calls
    assert (call.agent, call.span_id, call.status) == ("SQL writer", SPAN, 200)
    assert call.completion_ids


@pytest.mark.parametrize(
    ("agent", "trace"),
    [
        ("x" * 129, f"00-{TRACE}-{SPAN}"),
        ("two%0Alines", f"00-{TRACE}-{SPAN}-01-more"),
        ("", f"00-{'0' * 32}-{SPAN}-01"),
        ("%00", f"00-{TRACE}-{SPAN.upper()}-01"),
        (" ", f"ff-{TRACE}-{SPAN}-01"),
        ("%F0%9F", "junk"),
    ],
)
async def test_headers_that_say_nothing_usable_are_no_reason_to_refuse(tokenizer, agent, trace):
    served = face(tokenizer)
    served.client.headers.update({headers.AGENT: agent, headers.TRACEPARENT: trace})
    await served.ask("/chat/completions", messages=MESSAGES)
    (call,) = served.calls
    assert (call.agent, call.span_id) == ("", None)


def test_a_later_version_of_traceparent_may_say_more():
    assert headers.read_span(f"01-{TRACE}-{SPAN}-01-more") == SPAN


@pytest.mark.parametrize("name", ["writer", "100 % sure", "Prüferin 评论", "a/b:c;d,e"])
def test_any_printable_name_comes_through_a_header_that_holds_ascii(name):
    assert headers.encode_agent(name).isascii()
    assert headers.read_agent(headers.encode_agent(name)) == name


LONG = "long " * 99
REFUSED = [
    *((path, {"temperature": -3}, 400, "temperature") for path in BODIES),
    (
        "/chat/completions",
        {"messages": [{"role": "user", "content": LONG}]},
        400,
        "context",
    ),
    ("/completions", {"prompt": LONG}, 400, "context"),
    ("/messages", {"messages": [{"role": "user", "content": LONG}]}, 400, "too long"),
    ("/responses", {"input": LONG}, 400, "context"),
    ("/responses", {"previous_response_id": "resp_0"}, 400, "resp_0"),
    ("/chat/completions", {"n": 999}, 400, "n must"),
    (
        "/chat/completions",
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
        400,
        "schema",
    ),
]


@pytest.mark.parametrize(("path", "body", "status", "words"), REFUSED)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_refusal_is_recorded_as_the_client_got_it(
    tokenizer, path, body, status, words, stream
):
    served = face(tokenizer, max_context=60)
    served.client.headers[headers.AGENT] = "writer"
    whole = {**BODIES[path], **body, "stream": stream}
    response = await served.post(path, **whole)
    assert response.status_code == status
    (call,) = served.calls
    assert call.status == status
    assert call.response == response.json()
    assert words in str(call.response["error"])
    assert ("type" in call.response) == (path == "/messages"), "each protocol has its own form"
    assert call.request == {"model": "m", **whole}
    assert (call.agent, call.protocol) == ("writer", PROTOCOLS[path])
    assert (call.prompt_ids, call.completion_ids, call.finish_reason) == ((), (), "error")


async def test_a_body_that_is_no_object_is_refused_and_recorded(tokenizer):
    served = face(tokenizer)
    assert (await served.client.post("/v1/responses", content=b"[1]")).status_code == 400
    assert [call.request for call in served.calls] == [[1]]


async def test_requests_are_numbered_as_they_came_refused_ones_too(tokenizer):
    served = face(tokenizer)
    for options in ({}, {"n": 0}, {}):
        await served.post("/chat/completions", messages=MESSAGES, **options)
    assert [(call.index, call.status) for call in served.calls] == [(0, 200), (1, 400), (2, 200)]


async def test_what_cannot_be_read_is_held_too_long_or_has_no_key_is_not_recorded(tokenizer):
    served, path = face(tokenizer), "/v1/chat/completions"
    body = {"model": "m", "messages": MESSAGES}
    unreadable = await served.client.post(path, content=b"{")
    stranger = await served.client.post(path, json=body, headers={"authorization": "Bearer x"})
    async with served.gateway.hold():
        impatient = {"x-stainless-read-timeout": "0.004"}
        held = await served.client.post(path, json=body, headers=impatient)
    assert [r.status_code for r in (unreadable, stranger, held)] == [400, 401, 503]
    assert served.calls == []
