"""Messages about responses that are made in the background: the proxy asks, the daemon has the jobs that make them.

`agent` is the sender of the request: nothing of another agent's is ever found. All JSON goes as it was written.
"""

from __future__ import annotations

from hive.link.message import LinkMessage


class AskBeginBackground(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask: begin the job that makes this response. `request`: the body as its client sent it; `response`: the answer's
    object, without its id and time; `is_local_only`: it is not to leave this box. Answer: `BackgroundIs`, or
    `Failed`."""

    agent: str
    model: str
    request: bytes
    response: bytes
    is_local_only: bool = False


class AskBackground(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask: the response as it stands. Answer: `BackgroundIs`, or `Failed`: `not_found`."""

    agent: str
    id: str


class CancelBackground(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask: end it, unless it has ended. Answer: `BackgroundIs`, or `Failed`: `not_found`."""

    agent: str
    id: str


class DropBackground(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask: end it, and delete all of it. Answer: `Done`, or `Failed`: `not_found`."""

    agent: str
    id: str


class BackgroundIs(LinkMessage, tag=True, frozen=True, kw_only=True):
    """`content`: the answer's object."""

    id: str
    content: bytes


class AskBackgroundEvents(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask: its events behind the one with this number (-1: all), at most about so many bytes of them; where there is
    none yet, as soon as there is one, or none after `wait_s`. Answer: `BackgroundEventsAre`, or `Failed`: `not_found`,
    `bad_request` where its events are kept no more."""

    agent: str
    id: str
    after: int
    most_bytes: int
    wait_s: float


class BackgroundEventsAre(LinkMessage, tag=True, frozen=True, kw_only=True):
    """`events`: as they stand in a stream; `last`: the number of the last one so far; `is_over`: none comes behind."""

    events: bytes
    last: int
    is_over: bool = False


FromProxyBackground = AskBeginBackground | AskBackground | CancelBackground | DropBackground | AskBackgroundEvents
