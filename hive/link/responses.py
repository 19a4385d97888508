"""Messages about responses that agents had kept: the daemon stores them.

`agent` is the sender of the request: nothing that another agent had kept is ever found. All JSON goes as it was
written.
"""

from __future__ import annotations

import msgspec

from hive.link.message import LinkMessage


class KeepResponse(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Told: keep this one. `asked`: the items of its request, a JSON array; `response`: the answer's object.

    Not acknowledged. What is asked of the same agent after it, over the same link, finds it.
    """

    agent: str
    id: str
    previous_id: str | None
    asked: bytes
    response: bytes


class AskHistory(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask: all that went in and came out up to the response `previous_id` (where it is not empty), and the items of
    these ids. Answer: `HistoryIs`, or `Failed`: `not_found`, `bad_request` where it is longer than `most_bytes`."""

    agent: str
    previous_id: str
    items: list[str] = msgspec.field(default_factory=list)
    most_bytes: int


class HistoryIs(LinkMessage, tag=True, frozen=True, kw_only=True):
    """`history`: an array of items, the oldest first. `items`: those asked for, in that order."""

    history: bytes
    items: list[bytes] = msgspec.field(default_factory=list)


class AskResponse(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `ResponseIs`, or `Failed`: `not_found`."""

    agent: str
    id: str


class AskInputItems(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask: a page of the model's input for this response. Answer: `ResponseIs` with the list, or `Failed`."""

    agent: str
    id: str
    limit: int
    after: str = ""
    ascending: bool = False
    most_bytes: int


class ResponseIs(LinkMessage, tag=True, frozen=True, kw_only=True):
    content: bytes


class DropResponse(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `Done` once it is on the disk no more, or `Failed`: `not_found`."""

    agent: str
    id: str


FromProxy = KeepResponse | AskHistory | AskResponse | AskInputItems | DropResponse
