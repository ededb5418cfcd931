"""`POST /v1/store/<verb>`: the store, for workers and trainers on other machines.

Bodies and answers are msgpack (`fulmen.store.verbs`). `POST /v1/store/batch` takes several at once,
but none that waits, and answers them in order: `[true, answer]` or `[false, refusal]`. A request
that has the `x-fulmen-request` of an earlier one gets its answer, and nothing is done twice.
"""

import asyncio
import secrets
from collections.abc import Awaitable

import msgspec
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from fulmen.schema.errors import DataError, FulmenError, StoreError
from fulmen.schema.packing import pack
from fulmen.schema.records import Lease
from fulmen.schema.role_keys import Role, RoleKeys
from fulmen.server.answering import Answering, ServedStore, check, refusal_of, waits
from fulmen.server.ends import EndsList
from fulmen.server.repeats import Repeats
from fulmen.store.verbs import (
    VERBS,
    Claim,
    Question,
    RecordCalls,
    RecordSpans,
    Refusal,
    SupersedeCalls,
    read_question,
    verb_of,
)

MOST_BYTES = 64 * 2**20
"""Of a request."""
MOST_QUESTIONS = 10_000
"""In a batch."""
LINGER_S = 1.0
"""When the run is over, who was between two questions has so long to ask the next one, and hear
it."""
REQUEST_ID = b"x-fulmen-request"
BATCH = "batch"
MSGPACK = b"application/msgpack"

_STATUS = {"LeaseLost": 409, "StoreError": 409, "DataError": 400, "ConfigError": 401}
_PROMISES = {verb_of(kind) for kind in (RecordCalls, SupersedeCalls, RecordSpans)}


class _Verb(msgspec.Struct):
    """A question, as far as is needed to put it in order."""

    verb: str


_verbs = msgspec.msgpack.Decoder(_Verb)
_batches = msgspec.msgpack.Decoder(list[msgspec.Raw])
_encode = msgspec.msgpack.Encoder().encode


class Refused(Exception):
    """A request that is answered with this status."""

    def __init__(self, status: int, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.status, self.refusal = status, refusal


class StoreApi:
    """The store as an ASGI application. To be closed before the store is."""

    def __init__(self, store: ServedStore, keys: RoleKeys) -> None:
        self._keys = keys
        self._store = store
        ends = EndsList()
        store.on_attempt_end(ends.add)
        self._answering = Answering(store, ends)
        self._repeats = Repeats()
        self._over = False
        self._asked = False
        self._farewell: Refused | None = None
        """What everybody is answered from now on."""

    def routes(self) -> list[Route]:
        """To be mounted by the server."""
        return [Route("/v1/store/{verb}", self, methods=["POST"])]

    def run_is_over(self) -> None:
        """Have `aclose` tell everybody that the run has come to its end, and not to come again."""
        self._over = True

    async def aclose(self) -> None:
        """Answer no more: who waits is told to come again, to the server that comes next.

        If the run is over, who waits is told that instead, and so is whoever asks within the next
        moment: for that the server must still be there.
        """
        self._farewell = Refused(410, _OVER) if self._over else Refused(503, _ENDING)
        await self._repeats.aclose()
        if self._over and self._asked:
            await asyncio.sleep(LINGER_S)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            status, body = 200, await self._serve(scope, receive)
        except Refused as refused:
            status, body = refused.status, _encode(refused.refusal)
        except asyncio.CancelledError:
            if self._farewell is None:
                raise
            status, body = self._farewell.status, _encode(self._farewell.refusal)
        except Exception as error:
            refusal = refusal_of(error)
            known = isinstance(error, FulmenError)
            status, body = _STATUS[refusal.kind] if known else 500, _encode(refusal)
        if body is None:
            return  # nobody is there
        headers = [(b"content-type", MSGPACK), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _serve(self, scope: Scope, receive: Receive) -> bytes | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        role = self._role(headers)
        if self._farewell is not None:
            raise self._farewell
        self._asked = True
        verb = scope["path_params"]["verb"]
        if verb != BATCH and verb not in VERBS:
            raise Refused(404, Refusal(kind="DataError", message=f"a store has no verb {verb!r}"))
        body = await _read(headers, receive)
        name = headers.get(REQUEST_ID, b"").decode("latin-1")
        if verb == BATCH:
            return await self._once(name, self._batch(role, body))
        ask = read_question(body)
        if verb_of(type(ask)) != verb:
            raise DataError(f"a question to {verb_of(type(ask))} was sent to {verb}")
        check(role, ask)
        if not waits(ask):
            return await self._once(name, self._answering.answer(ask))
        return await self._wait(name or secrets.token_hex(12), ask, receive)

    def _role(self, headers: dict[bytes, bytes]) -> Role:
        kind, _, key = headers.get(b"authorization", b"").decode("latin-1").partition(" ")
        role = self._keys.role_of(key.strip()) if kind.lower() == "bearer" else None
        if role is None:
            reason = "the key is not one of this run's store"
            hint = "give the key in worker.key of the run's folder"
            raise Refused(401, Refusal(kind="ConfigError", message=reason, hint=hint))
        return role

    async def _once(self, name: str, work: Awaitable[bytes]) -> bytes | None:
        if not name:
            return await work
        taken = False

        def begin() -> Awaitable[bytes]:
            nonlocal taken
            taken = True
            return work

        try:
            return await self._repeats.answer(name, begin)
        finally:
            if not taken and asyncio.iscoroutine(work):
                work.close()

    async def _wait(self, name: str, ask: Question, receive: Receive) -> bytes | None:
        """Answer late; or, when the client goes away, not at all, and leave nothing behind."""
        leases: list[Lease] = []

        async def work() -> bytes:
            if isinstance(ask, Claim):
                leases.extend(await self._answering.claim(ask))
                return pack(leases, "leases")
            return await self._answering.answer(ask)

        async def undo() -> None:
            if leases:
                await self._store.give_back(leases)

        return await self._repeats.answer(name, work, left=_left(receive), undo=undo)

    async def _batch(self, role: Role, body: bytes) -> bytes:
        try:
            questions = _batches.decode(body)
        except msgspec.DecodeError as error:
            raise DataError(f"not a batch of questions: {error}") from error
        if len(questions) > MOST_QUESTIONS:
            raise DataError(f"a batch of {len(questions)} questions; at most {MOST_QUESTIONS}")
        asked: list[asyncio.Task[tuple[bool, object]]] = []
        try:
            for raw in questions:
                asked.append(asyncio.create_task(self._one(role, raw)))
                if _is_promise(raw):  # it may wait for room; what follows may not overtake it
                    await asyncio.wait(asked[-1:])
            return _encode(await asyncio.gather(*asked))
        finally:
            for task in asked:
                task.cancel()

    async def _one(self, role: Role, raw: msgspec.Raw) -> tuple[bool, object]:
        try:
            ask = read_question(raw)
            check(role, ask)
            if waits(ask):
                raise StoreError(f"{verb_of(type(ask))} waits, and may not be part of a batch")
            return True, msgspec.Raw(await self._answering.answer(ask))
        except Exception as error:
            return False, refusal_of(error)


def _is_promise(raw: msgspec.Raw) -> bool:
    """Whether a question is answered before what it brings is on disk, and must be so in turn."""
    try:
        return _verbs.decode(raw).verb in _PROMISES
    except msgspec.DecodeError:
        return False


def store_routes(store: ServedStore, keys: RoleKeys) -> list[Route]:
    """Routes of a store whose server ends with the process; else use `StoreApi`, and close it."""
    return StoreApi(store, keys).routes()


_ENDING = Refusal(kind="StoreError", message="the server is ending", hint="come again")
_OVER = Refusal(kind="RunOver", message="the run is over")


async def _left(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        continue


async def _read(headers: dict[bytes, bytes], receive: Receive) -> bytes:
    """The body, no further than is allowed."""
    if int(headers.get(b"content-length", b"0")) > MOST_BYTES:
        raise _too_large()
    parts, size, more = [], 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DataError("the client left before its request had come")
        part = message.get("body", b"")
        size += len(part)
        if size > MOST_BYTES:
            raise _too_large()
        parts.append(part)
        more = message.get("more_body", False)
    return parts[0] if len(parts) == 1 else b"".join(parts)


def _too_large() -> Refused:
    reason = f"a request of more than {MOST_BYTES >> 20} MiB"
    return Refused(413, Refusal(kind="DataError", message=reason, hint="send it in parts"))
