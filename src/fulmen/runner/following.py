"""Hearing from another machine that attempts have ended."""

from collections.abc import Awaitable, Callable

from fulmen.store.verbs import Ends, Heard

_WAIT_S = 25.0


class Following:
    """Asks for ends of attempts, one long request after the other."""

    def __init__(
        self,
        ask: Callable[[Ends], Awaitable[Heard]],
        look_again: Callable[[], Awaitable[list[tuple[str, int]]]],
    ) -> None:
        """`look_again` finds out about attempts of one's own, when ends may have been missed."""
        self._ask, self._look_again = ask, look_again
        self._listeners: list[Callable[[str, int], None]] = []

    def add(self, listener: Callable[[str, int], None]) -> None:
        """Call it with every end that is heard of."""
        self._listeners.append(listener)

    async def run(self) -> None:
        """Follow for ever; raises what asking raises."""
        heard = await self._ask(Ends())
        while True:
            question = Ends(epoch=heard.epoch, after=heard.last, wait_s=_WAIT_S)
            heard = await self._ask(question)
            ended = await self._look_again() if heard.missed else heard.ended
            for rollout_id, attempt in ended:
                for listener in self._listeners:
                    listener(rollout_id, attempt)
