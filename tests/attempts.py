"""Attempts as literal records: calls in every protocol, spans, results."""

from msgspec.structs import replace

from fulmen.schema.records import (
    Call,
    Outcome,
    Reward,
    Rollout,
    RolloutResult,
    Span,
    Task,
    VersionSpan,
)


def call(index: int, **changes) -> Call:
    values = {
        "id": f"c{index}",
        "rollout_id": "r",
        "attempt": 1,
        "index": index,
        "protocol": "chat",
        "prompt_ids": (1, 2),
        "completion_ids": (3, 4),
        "logprobs": (-0.5, -0.25),
        "versions": (VersionSpan(start=0, version=7),),
        "temperature": 1.0,
        "top_p": 1.0,
        "finish_reason": "stop",
        "started": 10.0 * index,
        "ended": 10.0 * index + 1,
    }
    return Call(**(values | changes))


def refused(index: int, status: int, error: dict, **changes) -> Call:
    """A request that got no answer."""
    nothing = {"prompt_ids": (), "completion_ids": (), "logprobs": (), "versions": ()}
    answer = {"status": status, "finish_reason": "error", "response": {"error": error}}
    return call(index, **(nothing | answer | changes))


def asks(*tools) -> dict:
    """An answer as the gateway keeps it, whatever the protocol: (id, name, arguments) each."""
    calls = [
        {"id": name, "type": "function", "function": {"name": tool, "arguments": arguments}}
        for name, tool, arguments in tools
    ]
    return {"role": "assistant", "content": None, "tool_calls": calls}


def says(text: str) -> dict:
    return {"role": "assistant", "content": text}


def span(name: str, parent: str | None = None, **changes) -> Span:
    plain = Span(
        id=name, rollout_id="r", attempt=1, parent=parent, name=name, started=1.0, ended=2.0
    )
    return replace(plain, **changes)


def agent_span(name: str, agent: str, parent: str | None = None) -> Span:
    attributes = {"gen_ai.operation.name": "invoke_agent", "gen_ai.agent.name": agent}
    return span(name, parent, attributes=attributes)


def answer_span(name: str, response: str, parent: str | None = None) -> Span:
    attributes = {"gen_ai.operation.name": "chat", "gen_ai.response.id": response}
    return span(name, parent, attributes=attributes)


def tool_span(name: str, tool: str, parent: str | None = None, *, at=1.0, **changes) -> Span:
    """`changes` are attributes by their last words, or fields of the span."""
    long = {
        "call_id": "gen_ai.tool.call.id",
        "arguments": "gen_ai.tool.call.arguments",
        "result": "gen_ai.tool.call.result",
        "error": "error.type",
        "outcome": "fulmen.tool.outcome",
    }
    attributes = {"gen_ai.operation.name": "execute_tool", "gen_ai.tool.name": tool}
    attributes |= {long[key]: changes.pop(key) for key in long if key in changes}
    times = {"started": at, "ended": at + 1}
    return span(name, parent, attributes=attributes, **(times | changes))


def result(*calls: Call, spans=(), rewards=(), name="r", group="g") -> RolloutResult:
    rollout = Rollout(id=name, task=Task(id="t", input=None), group=group, step=1)
    return RolloutResult(
        rollout=rollout,
        attempt=1,
        outcome=Outcome(),
        calls=calls,
        spans=tuple(spans),
        rewards=tuple(rewards),
    )


def own_reward(value: float, name="reward", **target) -> Reward:
    """As `fulmen.reward` in the agent gives it."""
    return Reward(rollout_id="r", attempt=1, name=name, value=value, source="agent", **target)
