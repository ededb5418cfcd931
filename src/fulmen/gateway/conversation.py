"""What an attempt has been served: a tree of conversations, and how a request continues one.

The rule of token exactness lives here: a request whose messages repeat a served prompt and its
answer is continued from the tokens that were sampled, never from a new rendering of their text.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import orjson

from fulmen.gateway.render import ChatRenderer, Message, Tools, text_of
from fulmen.schema.records import JSON

Drift = Literal["edited", "template", "tokenisation"]
"""Why a conversation could not be continued: the agent changed what had been said; the model's
format does not allow to continue it (some drop earlier reasoning at a new question); or the format
says the same text again, but its tokens cannot be put behind those that were sampled."""


@dataclass(frozen=True, slots=True)
class Served:
    """One call as later requests may continue it."""

    call_id: str
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and completion."""
        return self.prompt_ids + self.completion_ids


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request's prompt."""

    ids: tuple[int, ...]
    parent: str | None = None
    """The call that it extends, token for token."""
    drift: Drift | None = None


@dataclass(slots=True)
class Conversation:
    """The served calls of one attempt, found by what has been said."""

    _served: dict[bytes, Served] = field(default_factory=dict)
    """By digest of all messages, the answer included."""
    _asked: set[bytes] = field(default_factory=set)
    """Digests of the messages of every served prompt."""
    _raw: list[tuple[str, Served]] = field(default_factory=list)
    """Calls without messages, with the text of prompt and completion."""

    def prompt(
        self,
        renderer: ChatRenderer,
        messages: Sequence[Message],
        tools: Tools,
        options: Mapping[str, JSON],
    ) -> Prompt:
        """Render a request, continuing the longest served conversation that it repeats."""
        chain = digests(messages, tools, options)
        for known in range(len(messages), 0, -1):
            served = self._served.get(chain[known])
            if served is not None and not _speaks(messages[known:]):
                return _continued(served, renderer, messages, known, tools, options)
            answered = known < len(messages) and messages[known].get("role") == "assistant"
            if served is not None or (answered and chain[known] in self._asked):
                # What was said here goes on with a turn that nobody sampled here.
                return Prompt(renderer.render(messages, tools, options), drift="edited")
        return Prompt(renderer.render(messages, tools, options))

    def add(
        self,
        served: Served,
        messages: Sequence[Message],
        answer: Message,
        tools: Tools,
        options: Mapping[str, JSON],
    ) -> None:
        """Remember a served call under what has been said after it."""
        chain = digests([*messages, answer], tools, options)
        self._served[chain[-1]] = served
        self._asked.add(chain[-2])

    def raw_prompt(self, renderer: ChatRenderer, prompt: str | tuple[int, ...]) -> Prompt:
        """A prompt that is text or tokens already, continuing the longest it begins with.

        Text behind a completion that ended by itself continues its tokens but for the last one:
        the end of the turn has no text, so the client cannot mean it. Such a prompt has no parent.
        """
        if not isinstance(prompt, str):
            ids, longest = prompt, None
            for _, served in self._raw:
                if ids[: len(served.ids)] == served.ids and len(ids) > len(served.ids):
                    longest = max(longest or served, served, key=lambda one: len(one.ids))
            return Prompt(ids, parent=longest.call_id if longest else None)
        known = [one for one in self._raw if prompt.startswith(one[0]) and prompt != one[0]]
        if not known:
            return Prompt(renderer.encode(prompt))
        text, served = max(known, key=lambda one: len(one[0]))
        rest = renderer.encode(prompt[len(text) :])
        if served.completion_ids[-1] in renderer.stop_ids:
            return Prompt(served.ids[:-1] + rest)
        return Prompt(served.ids + rest, parent=served.call_id)

    def add_raw(self, served: Served, text: str) -> None:
        """Remember a served call without messages; `text` is that of its prompt and completion."""
        self._raw.append((text, served))


def _continued(
    served: Served,
    renderer: ChatRenderer,
    messages: Sequence[Message],
    known: int,
    tools: Tools,
    options: Mapping[str, JSON],
) -> Prompt:
    """Go on from served tokens, which begin the prompt or it is called drift: checked, not hoped.

    Where the format refuses to go on, its own rendering may still begin with the served tokens: a
    new question drops earlier reasoning, say, and there was none.
    """
    pair = (served.prompt_ids, served.completion_ids)
    ids = renderer.extend(pair, messages, known, tools, options)
    if ids is None:
        ids = renderer.render(messages, tools, options)
    if ids[: len(served.ids)] == served.ids and len(ids) > len(served.ids):
        return Prompt(ids, parent=served.call_id)
    same = renderer.spell(ids).startswith(renderer.spell(served.ids))
    return Prompt(ids, drift="tokenisation" if same else "template")


def digests(messages: Sequence[Message], tools: Tools, options: Mapping[str, JSON]) -> list[bytes]:
    """Digest of nothing, of the first message, of the first two, and so on."""
    seed = orjson.dumps([list(tools or ()), dict(options)], option=orjson.OPT_SORT_KEYS)
    chain = [hashlib.blake2b(seed, digest_size=16).digest()]
    for message in messages:
        said = orjson.dumps(canonical(message), option=orjson.OPT_SORT_KEYS)
        chain.append(hashlib.blake2b(chain[-1] + said, digest_size=16).digest())
    return chain


def canonical(message: Message) -> list[JSON]:
    """What a message says, however a client spells it: missing, null and empty are the same.

    >>> canonical({"role": "assistant", "content": None}) == canonical(
    ...     {"role": "assistant", "content": "", "tool_calls": []})
    True
    """
    calls = [
        [call.get("id"), function.get("name"), _value(function.get("arguments"))]
        for call in message.get("tool_calls") or []
        if isinstance(call, dict)
        for function in [call.get("function") or {}]
    ]
    return [
        message.get("role"),
        text_of(message.get("content")),
        message.get("tool_call_id"),
        # An answer carries no name, but some clients add one when they send it back.
        None if message.get("role") == "assistant" else message.get("name"),
        calls,
    ]


def _value(arguments: JSON) -> JSON:
    """Arguments as a JSON value: some clients parse them and spell them anew."""
    try:
        value = orjson.loads(arguments or "")
        orjson.dumps(value)  # deep nesting can be read, but not written
    except (orjson.JSONDecodeError, TypeError):
        return arguments
    return value


def _speaks(messages: Sequence[Message]) -> bool:
    """Whether an assistant turn is among messages: one that was not sampled here."""
    return any(message.get("role") == "assistant" for message in messages)
