"""Which steps' calls and spans a run may still be asked for, and letting the others go.

A resumed run goes back to a checkpoint and measures there again, from the evaluation's rollouts in
the store: their graders read calls. So evaluations stay from the oldest checkpoint on.
"""

from collections.abc import Sequence

from fulmen.schema.records import Split
from fulmen.store.base import Store
from fulmen.trainer.folder import RunFolder


def last_needless(step: int, keep: int, checkpoints: Sequence[int]) -> dict[Split, int]:
    """The last step, of each split, whose calls and spans nobody needs any more.

    Args:
        step: the last one that is committed.
        keep: steps that are kept in any case, that one included.
        checkpoints: steps that the run can go back to.

    >>> last_needless(30, 10, checkpoints=[15, 25])
    {'train': 20, 'eval': 14}
    >>> last_needless(3, 1, checkpoints=[])
    {'train': 2, 'eval': -1}
    """
    train = step - keep
    return {"train": train, "eval": min(train, min(checkpoints, default=0) - 1)}


class Retention:
    """Lets old calls and spans of a run go, step by step."""

    def __init__(self, folder: RunFolder, store: Store, keep: int | None) -> None:
        """`keep`: how many steps keep theirs; None: all."""
        self._folder, self._store, self._keep = folder, store, keep
        self._next: dict[Split, int] = {"train": 0, "eval": 0}

    async def after(self, step: int) -> None:
        """Let go what is not needed once this step is committed.

        What an earlier process has left, the first call finds.
        """
        if self._keep is None:
            return
        last = last_needless(step, self._keep, self._folder.checkpoint_steps())
        for split, end in last.items():
            if end >= self._next[split]:
                await self._store.forget(split, self._next[split], end)
                self._next[split] = end + 1
