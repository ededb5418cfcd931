"""What one process tells the others about its changes, as the text of notifications.

A notification may have 8000 bytes at most, so much news goes in several; too much for that becomes
"look again".
"""

import json
from collections.abc import Iterable

from fulmen.store.database import Change, soonest

_BYTES = 7500
_MOST = 50
"""Notifications of one transaction; to read the tables is cheaper than to read more of them."""


def to_notices(sender: str, changes: Iterable[Change[object]]) -> list[str]:
    """News of one transaction; none if others need not know.

    >>> to_notices("p1", [Change(None, queued=2), Change("succeeded", finished=("r1",))])
    ['["p1",["q",2],["f","r1"]]']
    """
    changes = list(changes)
    queued = sum(change.queued for change in changes)
    items = [json.dumps(["q", queued], separators=(",", ":"))] if queued else []
    if (due := soonest(change.due_s for change in changes)) is not None:
        items.append(json.dumps(["d", due], separators=(",", ":")))
    for change in changes:
        items += [json.dumps(["f", name], separators=(",", ":")) for name in change.finished]
        items += [json.dumps(["e", *end], separators=(",", ":")) for end in change.ended]
    if not items:
        return []
    begin = "[" + json.dumps(sender)
    notices, text = [], begin
    for item in items:
        if len(text) + len(item) > _BYTES and text != begin:
            notices.append(text + "]")
            text = begin
        text += "," + item
    notices.append(text + "]")
    if len(notices) > _MOST or max(map(len, notices)) > _BYTES + 2:
        return [begin + "]"]
    return notices


def from_notice(text: str) -> tuple[str, Change[None] | None]:
    """Who sent a notice, and what it says; None: "look again".

    >>> from_notice('["p1",["q",2],["f","r1"],["e","r1",1]]')
    ('p1', Change(value=None, queued=2, due_s=None, finished=('r1',), ended=(('r1', 1),)))
    >>> from_notice('["p1"]')
    ('p1', None)
    """
    sender, *items = json.loads(text)
    if not items:
        return sender, None
    return sender, Change(
        None,
        queued=sum(item[1] for item in items if item[0] == "q"),
        due_s=soonest(item[1] for item in items if item[0] == "d"),
        finished=tuple(item[1] for item in items if item[0] == "f"),
        ended=tuple((item[1], item[2]) for item in items if item[0] == "e"),
    )
