"""The scripted agent: talks to the gateway, leaves spans and rewards, and writes down what it did.

It is run by Fulmen's own worker process. Its moods follow from rollout and attempt: most attempts
end well, some raise, some are slow, some end their process, some never come to an end.
"""

import asyncio
import json
import os
import random
import time
from pathlib import Path

import httpx
from opentelemetry import trace

import fulmen
from fulmen.tracing.current import current_attempt

PATIENCE_S = 60.0
"""The server is away for moments only; who cannot reach it for so long has found a bug."""


class Ledger:
    """One attempt's lines. What is written survives the end of the process."""

    def __init__(self, rollout: str, attempt: int) -> None:
        self._whose = {"rollout": rollout, "attempt": attempt}

    def note(self, what: str, value: object = None) -> None:
        """Append a line with one write."""
        line = json.dumps({**self._whose, "what": what, "value": value, "at": time.time()})
        path = Path(os.environ["CRASH_LEDGERS"]) / f"{os.getpid()}.jsonl"
        with path.open("ab", buffering=0) as file:
            file.write(line.encode() + b"\n")


async def solve(task: dict) -> int:
    """One attempt; its answer is its final reward."""
    current = current_attempt.get()
    assert current is not None
    ledger = Ledger(current.rollout_id, current.number)
    mood = random.Random(f"{current.rollout_id}/{current.number}")
    ledger.note("began")
    messages = [{"role": "user", "content": f"{task['n']} of {current.rollout_id}"}]
    async with httpx.AsyncClient(timeout=5.0) as client:
        for turn in range(mood.randint(1, 3)):
            with trace.get_tracer("crash").start_as_current_span("tool") as span:
                await asyncio.sleep(mood.random() * 0.1)
                name = f"{span.get_span_context().span_id:016x}"
            ledger.note("span", name)
            answer = await _ask(client, messages)
            ledger.note("call", answer["id"])
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "go on"}]
            value = mood.randint(1, 100)
            ledger.note("reward", value)
            fulmen.reward(value, name=f"turn-{turn}")
    await _misbehave(mood.random(), ledger)
    output = mood.randint(1, 1000)
    ledger.note("ended", output)
    return output


async def _misbehave(chance: float, ledger: Ledger) -> None:
    if chance < 0.10:
        ledger.note("raised")
        raise ValueError("the agent's own mistake")
    if chance < 0.25:
        await asyncio.sleep(1.0)
    elif chance < 0.26:
        os._exit(3)
    elif chance < 0.27:
        await asyncio.sleep(3600)  # until its deadline


async def _ask(client: httpx.AsyncClient, messages: list[dict]) -> dict:
    """One call; asked again, as clients do, while the server is away or the line broken."""
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    until, tries = time.monotonic() + PATIENCE_S, 0
    while True:
        headers = {
            "authorization": f"Bearer {os.environ['OPENAI_API_KEY']}",
            "x-stainless-retry-count": str(tries),
        }
        body = {"model": "scripted", "messages": messages}
        try:
            answer = await client.post(url, json=body, headers=headers)
            if answer.status_code < 500:
                return answer.raise_for_status().json()
        except httpx.TransportError:
            if time.monotonic() > until:
                raise
        tries += 1
        await asyncio.sleep(min(0.05 * 2**tries, 0.5))
