"""An agent behind HTTP, in whatever language: it is sent a task, and answers with its output.

Fulmen POSTs one JSON object for each attempt,

    {"task": …, "rollout_id": "…", "base_url": "http://…/v1", "anthropic_base_url": "http://…",
     "api_key": "…", "traces_url": "http://…/v1/traces", "deadline_s": 300.0}

and the agent answers 200 with `{"output": …}`, with `{"error": "…"}`, or with plain text, which is
its output. It should send its model calls to `base_url` with `api_key`, both for this attempt only;
spans that it sends to `traces_url` (OTLP/HTTP) with the same key are kept with the attempt.
Nothing is sent anywhere but to the URL that the user gave: no proxies, no redirects.
"""

import json
import ssl
from collections.abc import Awaitable, Callable

import httpx

from fulmen.runner.capture import MOST_CHARACTERS
from fulmen.runner.wire import Start
from fulmen.schema.records import JSON, Outcome

_CONNECT_S = 10.0
_MOST_BYTES = 32 * 2**20
"""An answer larger than this is the agent's failure."""


def http_runner(url: str, gateway: str) -> Callable[[Start], Awaitable[Outcome]]:
    """Run attempts by asking a server."""
    client = httpx.AsyncClient(
        verify=ssl.create_default_context(),  # the system's certificates, as trust_env is off
        trust_env=False,
        follow_redirects=False,
        timeout=httpx.Timeout(None, connect=_CONNECT_S),  # the attempt's deadline ends the rest
        # A connection for each attempt: one that was kept may be closed by the server just when it
        # is used again, which would look like a failure.
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
    )

    async def run(start: Start) -> Outcome:
        body = {
            "task": start.input,
            "rollout_id": start.rollout_id,
            "base_url": f"{gateway}/v1",
            "anthropic_base_url": gateway,
            "api_key": start.key,
            "traces_url": f"{gateway}/v1/traces",
            "deadline_s": start.deadline_s,
        }
        try:
            async with client.stream("POST", url, json=body) as response:
                content = await _read(response)
        except httpx.TransportError as error:
            # It may have ended; whatever it was doing says nothing about the policy.
            text = f"{type(error).__name__}: {error}".rstrip(": ")
            return Outcome(failure="infrastructure", error=f"the agent at {url}: {text}")
        if content is None:
            return _failed(f"the answer is larger than {_MOST_BYTES} bytes")
        return _outcome(response, content)

    return run


async def _read(response: httpx.Response) -> bytes | None:
    """The body; None if it is too large."""
    content = bytearray()
    async for part in response.aiter_bytes():
        content += part
        if len(content) > _MOST_BYTES:
            return None
    return bytes(content)


def _outcome(response: httpx.Response, content: bytes) -> Outcome:
    status, text = response.status_code, content.decode(errors="replace").strip()
    first = next((line.strip() for line in text.splitlines() if line.strip()), "")[:300]
    if status >= 500:
        log = text[-MOST_CHARACTERS:]
        error = f"the agent answered {status}: {first}"
        return Outcome(failure="infrastructure", error=error, log=log)
    if status >= 300:
        more = "redirects are not followed" if status < 400 else first
        return _failed(f"the agent answered {status}: {more}", text)
    kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
    return _answer(text) if kind == "application/json" else Outcome(output=text)


def _answer(text: str) -> Outcome:
    """The outcome that a JSON body tells."""
    try:
        answer: JSON = json.loads(text)
    except (ValueError, RecursionError) as error:
        return _failed(f"the answer is not valid JSON ({error})", text)
    if isinstance(answer, dict) and (error := answer.get("error")) is not None:
        said = error if isinstance(error, str) else json.dumps(error)
        return _failed(
            " ".join(said.split())[:300] or "the agent told an error without a text", said
        )
    if not isinstance(answer, dict) or "output" not in answer:
        return _failed('the answer is JSON without "output" or "error"', text)
    return Outcome(output=answer["output"])


def _failed(error: str, log: str = "") -> Outcome:
    return Outcome(failure="agent", error=error, log=log[-MOST_CHARACTERS:])
