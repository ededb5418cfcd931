"""`fulmen.reward`: an agent says what a part of its work was worth."""

import math

from fulmen.schema.errors import AgentError
from fulmen.schema.records import Reward
from fulmen.tracing.current import current_attempt

FINAL = "reward"
"""What the grader's reward is called."""


def reward(
    value: float, *, name: str = "intermediate", of: object = None, agent: str | None = None
) -> None:
    """Give an intermediate reward from inside an agent that is a Python function.

    It is added to what the grader says, times the weight of its name (`reward_weights`, 1 if it has
    none), and earned by whom the rule of credit says. Outside of a rollout nothing happens: the
    agent can be run by hand as it is.

    Args:
        value: a finite number, or a bool.
        name: what it is for; given again with the same name and target, it replaces the earlier.
        of: the model's answer that earned it (anything with an `id`, or the id), or the id of a
            tool call in it. None: the rollout as a whole, or `agent`.
        agent: name of the agent that earned it, if no single answer did.

    Raises:
        AgentError: the value is no finite number, `of` has no id, or the name is none or taken.

    Example, in an agent::

        answer = client.chat.completions.create(...)
        fulmen.reward(0.1, name="valid-sql", of=answer)
    """
    for what, given in (("name", name), ("agent", agent)):
        if given is not None and not isinstance(given, str):
            raise AgentError(f"fulmen.reward: {what} is {given!r}, not a text")
    if name == FINAL:
        raise AgentError(f"fulmen.reward: {FINAL!r} is the name of the final reward; take another")
    number = float(value)
    if not math.isfinite(number):
        raise AgentError(f"fulmen.reward: {name} is {value}, not a finite number")
    attempt, call = current_attempt.get(), _id_of(of)
    if attempt is None:
        return
    earned = Reward(
        rollout_id=attempt.rollout_id,
        attempt=attempt.number,
        name=name,
        value=number,
        source="agent",
        call_id=call,
        agent=agent,
    )
    attempt.emit(earned)


def _id_of(of: object) -> str | None:
    if of is None or isinstance(of, str):
        return of
    metadata = getattr(of, "response_metadata", None)
    if isinstance(metadata, dict) and isinstance(metadata.get("id"), str):
        return metadata["id"]  # LangChain's messages have an id of their own beside it
    found = of.get("id") if isinstance(of, dict) else getattr(of, "id", None)
    if not isinstance(found, str):
        raise AgentError(
            f"fulmen.reward: a {type(of).__name__} has no id; give the model's answer or its id"
        )
    return found
