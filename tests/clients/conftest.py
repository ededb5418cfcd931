"""What the tests of Python clients share. Only pytest and the standard library are here."""

import itertools
import json
import os
import urllib.request
from typing import Any

import pytest

SERVER = os.environ["FULMEN_CLIENTS_SERVER"]
HELLO = "Hello, wörld! 你好 👋🏽\u2028done"
END = "<|im_end|>"


def _control(path: str, data: bytes | None = None) -> Any:
    request = urllib.request.Request(f"{SERVER}/control/{path}", data)
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


class Seat:
    """One rollout's place at the gateway: a key, and what was recorded under it."""

    root = SERVER
    base_url = f"{SERVER}/v1"
    hello = HELLO

    def __init__(self) -> None:
        made = _control("key", b"")
        self.rollout, self.key = made["rollout"], made["key"]

    def calls(self, at_least: int = 1) -> list[Any]:
        """The recorded calls; waits until there are that many."""
        return _control(f"calls/{self.rollout}?at_least={at_least}")

    def recorded(self, text: str, *, calls: int = 1) -> None:
        """Check that the last of so many calls is exactly what the client was given."""
        last = self.calls(calls)[-1]
        assert last["completion"] == text + END
        assert last["drift"] is None
        assert not last["superseded"]

    def continued(self, calls: int) -> list[Any]:
        """Check that each of so many calls begins with all tokens of the one before it."""
        made = self.calls(calls)
        assert len(made) == calls
        for before, after in itertools.pairwise(made):
            seen = before["prompt_ids"] + before["completion_ids"]
            assert after["parent"] == before["id"]
            assert after["drift"] is None
            assert after["prompt_ids"][: len(seen)] == seen
        return made

    def reasoning_was_dropped(self) -> None:
        """Check that the first of two calls thought, and that its thoughts are in no later prompt.

        Qwen3's format leaves them out once there is a new question, so that this is the one
        conversation that cannot go on from the sampled tokens; the record says so.
        """
        first, second = self.calls(2)
        assert first["completion"] == "<think>\nTwo and two.\n</think>\n\nFour.<|im_end|>"
        assert "Two and two." not in second["prompt"]
        assert (second["parent"], second["drift"]) == (None, "template")


@pytest.fixture
def seat() -> Seat:
    """A rollout of the test's own."""
    return Seat()
