"""Claims of many workers on one machine, waited for together."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from fulmen.schema.errors import FulmenError
from fulmen.schema.records import Lease
from fulmen.store.verbs import Claim, Claimant

_GATHER_S = 0.004
_UNDER_WAY = 4
WAIT_S = 25.0
"""A request that brings nothing is answered after so long, seconds."""


@dataclass(slots=True, eq=False)
class _Wish:
    worker: str
    limit: int
    lease_s: float
    leases: "asyncio.Future[list[Lease]]"


@dataclass(slots=True, eq=False)
class _Request:
    wishes: list[_Wish]
    task: "asyncio.Task[None] | None" = field(default=None)

    def is_moot(self) -> bool:
        return all(wish.leases.done() for wish in self.wishes)


class ClaimDesk:
    """Workers that wait for leases, and requests that wait for them at the server."""

    def __init__(
        self,
        ask: Callable[[Claim], Awaitable[list[Lease]]],
        give_back: Callable[[Sequence[Lease]], None],
    ) -> None:
        """`ask` sends one request, `give_back` is told of leases that nobody wants any more."""
        self._ask, self._give_back = ask, give_back
        self._wishes: list[_Wish] = []
        self._requests: set[_Request] = set()
        self._timer: asyncio.Handle | None = None

    async def claim(self, worker: str, *, limit: int, wait_s: float, lease_s: float) -> list[Lease]:
        """As a store's `claim`, for a `wait_s` of more than 0."""
        loop = asyncio.get_running_loop()
        wish = _Wish(worker, limit, lease_s, loop.create_future())
        self._wishes.append(wish)
        self._soon()
        try:
            await asyncio.wait({wish.leases}, timeout=wait_s)
        except asyncio.CancelledError:
            if wish.leases.done() and not wish.leases.exception():
                self._give_back(wish.leases.result())
            raise
        finally:
            if not wish.leases.done():
                wish.leases.cancel()
                self._forget(wish)
        return [] if wish.leases.cancelled() else wish.leases.result()

    async def aclose(self, reason: FulmenError) -> None:
        """Disappoint who waits."""
        wishes = self._wishes + [wish for one in self._requests for wish in one.wishes]
        self._wishes = []
        for wish in wishes:
            _refuse(wish, reason)
        tasks = [one.task for one in self._requests if one.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, wish: _Wish) -> None:
        if wish in self._wishes:
            self._wishes.remove(wish)
        for request in self._requests:
            if wish in request.wishes and request.is_moot() and request.task is not None:
                request.task.cancel()  # the server sees the connection end

    def _soon(self) -> None:
        if self._timer is None and self._wishes and len(self._requests) < _UNDER_WAY:
            loop = asyncio.get_running_loop()
            self._timer = (
                loop.call_later(_GATHER_S, self._send)
                if self._requests
                else loop.call_soon(self._send)
            )

    def _send(self) -> None:
        self._timer = None
        while self._wishes and len(self._requests) < _UNDER_WAY:
            lease_s = self._wishes[0].lease_s
            request = _Request([wish for wish in self._wishes if wish.lease_s == lease_s])
            self._wishes = [wish for wish in self._wishes if wish.lease_s != lease_s]
            self._requests.add(request)
            request.task = asyncio.ensure_future(self._run(request, lease_s))

    async def _run(self, request: _Request, lease_s: float) -> None:
        limits: dict[str, int] = {}
        for wish in request.wishes:
            limits[wish.worker] = limits.get(wish.worker, 0) + wish.limit
        workers = tuple(Claimant(worker=name, limit=limit) for name, limit in limits.items())
        try:
            leases = await self._ask(Claim(workers=workers, wait_s=WAIT_S, lease_s=lease_s))
            self._deal(request, leases)
        except FulmenError as error:
            for wish in request.wishes:
                _refuse(wish, error)
        finally:
            self._requests.discard(request)
            self._soon()

    def _deal(self, request: _Request, leases: Sequence[Lease]) -> None:
        of: dict[str, list[Lease]] = {}
        for lease in leases:
            of.setdefault(lease.worker, []).append(lease)
        left: list[_Wish] = []
        for wish in request.wishes:
            if wish.leases.done():
                continue
            waiting = of.get(wish.worker, [])
            if waiting:
                wish.leases.set_result(waiting[: wish.limit])
                of[wish.worker] = waiting[wish.limit :]
            else:
                left.append(wish)
        self._wishes = left + self._wishes  # they came first
        unwanted = [lease for rest in of.values() for lease in rest]
        if unwanted:
            self._give_back(unwanted)


def _refuse(wish: _Wish, error: FulmenError) -> None:
    if not wish.leases.done():
        wish.leases.set_exception(type(error)(error.message, hint=error.hint))
