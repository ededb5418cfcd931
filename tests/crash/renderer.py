"""A format without a tokenizer: a token is a byte, and one more ends a turn."""

from collections.abc import Mapping, Sequence

from fulmen.gateway import dialects
from fulmen.gateway.families import Plain, Reading
from fulmen.gateway.form import AnswerForm
from fulmen.gateway.render import Answer, Message, Tools
from fulmen.schema.records import JSON

END = 256
VOCABULARY = 257


class ByteRenderer:
    """Implements `fulmen.gateway.render.ChatRenderer`."""

    stop_ids = frozenset({END})
    markers: Mapping[int, str] = {END: "<|end|>"}
    form = AnswerForm(dialects.PLAIN, {})

    def render(
        self,
        messages: Sequence[Message],
        tools: Tools,  # noqa: ARG002
        options: Mapping[str, JSON],  # noqa: ARG002
    ) -> tuple[int, ...]:
        ids: list[int] = []
        for message in messages:
            ids += [*f"{message['role']}:{message['content']}".encode(), END]
        return (*ids, *b"assistant:")

    def extend(
        self,
        served: tuple[tuple[int, ...], tuple[int, ...]],
        messages: Sequence[Message],
        known: int,
        tools: Tools,
        options: Mapping[str, JSON],
    ) -> tuple[int, ...]:
        return (*served[0], *served[1], *self.render(messages[known:], tools, options))

    def parse(
        self,
        prompt: Sequence[int],  # noqa: ARG002
        completion: Sequence[int],
        tools: Tools,  # noqa: ARG002
    ) -> Answer:
        return Answer(self.decode(completion))

    def reading(self, prompt: Sequence[int], tools: Tools) -> Reading:
        return Plain().reading(self, prompt, tools=bool(tools))

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(token for token in ids if token != END).decode(errors="replace")

    def spell(self, ids: Sequence[int]) -> str:
        return "".join(self.markers.get(token, chr(token)) for token in ids)

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode())
