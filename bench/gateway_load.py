"""Both ends around a gateway: a lean client, and a backend that answers as fast as it can.

Neither may become what is measured, so both are plain `asyncio` protocols that read just as much of
HTTP/1.1 as the servers at hand write.
"""

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from itertools import count
from typing import Self

_HEAD_END = b"\r\n\r\n"
_NUMBER = b"00000000"


@dataclass(frozen=True, slots=True)
class Reply:
    """An answer as it came."""

    status: int
    body: bytes
    seconds: float

    @property
    def chunks(self) -> int:
        """Events of a stream, `[DONE]` not counted."""
        return self.body.count(b"data: {")

    def content(self) -> str:
        """The text of a whole answer."""
        return json.loads(self.body)["choices"][0]["message"]["content"]


class Client(asyncio.Protocol):
    """One connection, kept open; one request at a time."""

    def __init__(self, path: str, key: str) -> None:
        self._head = (
            f"POST {path}/chat/completions HTTP/1.1\r\nhost: bench\r\nauthorization: Bearer {key}"
            "\r\ncontent-type: application/json\r\ncontent-length: "
        ).encode()
        self._transport: asyncio.Transport | None = None
        self._buffer = bytearray()
        self._body_at = 0
        self._length: int | None = None
        self._done: asyncio.Future[None] | None = None
        self.reads = 0
        """Pieces that have arrived for the request under way; the head is the first."""

    @classmethod
    async def connect(cls, port: int, path: str, key: str) -> Self:
        """Open a connection to a server on this machine."""
        loop = asyncio.get_running_loop()
        _, client = await loop.create_connection(lambda: cls(path, key), "127.0.0.1", port)
        return client

    async def post(self, body: bytes) -> Reply:
        """Ask. Raises ConnectionError if the server hangs up before the end of its answer."""
        if self._transport is None or self._transport.is_closing():
            raise ConnectionError("the server hung up between two requests")
        self._buffer, self._body_at, self._length, self.reads = bytearray(), 0, None, 0
        self._done = asyncio.get_running_loop().create_future()
        started = time.perf_counter()
        self._transport.write(self._head + str(len(body)).encode() + _HEAD_END + body)
        await self._done
        taken = time.perf_counter() - started
        return Reply(int(self._buffer[9:12]), bytes(self._buffer[self._body_at :]), taken)

    def close(self) -> None:
        """End the connection."""
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError(f"the server hung up ({exc})"))

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self.reads += 1
        if not self._body_at:
            end = self._buffer.find(_HEAD_END)
            if end < 0:
                return
            self._body_at = end + len(_HEAD_END)
            self._length = _content_length(bytes(self._buffer[:end]))
        if self._length is None:
            whole = self._buffer.endswith(b"\r\n0\r\n\r\n")
        else:
            whole = len(self._buffer) >= self._body_at + self._length
        if whole and self._done is not None and not self._done.done():
            self._done.set_result(None)


def _content_length(head: bytes) -> int | None:
    """None for a body in chunks."""
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line[15:])
    return None


class Backend(asyncio.Protocol):
    """Answers every request with the same completion, under an id of its own."""

    answer = b""
    numbers = count()

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(_HEAD_END)) >= 0:
            length = _content_length(bytes(self._buffer[:end])) or 0
            whole = end + len(_HEAD_END) + length
            if len(self._buffer) < whole:
                return
            del self._buffer[:whole]
            assert self._transport is not None
            self._transport.write(self.answer.replace(_NUMBER, b"%08d" % next(self.numbers)))


def completion(text: str) -> bytes:
    """A whole HTTP answer with a chat completion in it."""
    body = {
        "id": f"chatcmpl-{_NUMBER.decode()}",
        "object": "chat.completion",
        "created": 1_700_000_000,
        "model": "bench",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 60, "completion_tokens": 20, "total_tokens": 80},
    }
    data = json.dumps(body).encode()
    head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: "
    return head.encode() + str(len(data)).encode() + _HEAD_END + data


async def _answer_all(text: str) -> None:
    """Until standard input ends; prints the port as a line of JSON."""
    Backend.answer = completion(text)
    server = await asyncio.get_running_loop().create_server(Backend, "127.0.0.1", 0, backlog=512)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(_answer_all(sys.argv[1]))
