"""What the proxy tells of the requests it has: who waits, who runs, and which they are."""

from __future__ import annotations

import msgspec

from hive.link.message import Message


class TenantView(msgspec.Struct, frozen=True):
    """One tenant as `hive queue` and the metrics show it.

    `tokens_ahead`: what it has had or is having of the normal band, by weight, beyond the least served tenant.
    """

    name: str
    weight: float
    running: int
    waiting: int
    tokens_ahead: float


class QueueView(msgspec.Struct, frozen=True):
    """The queue at one moment. `slots`: None for no limit; `drain_per_s`: slots given back per second while somebody
    waited, None where nobody has yet."""

    running: int
    waiting: int
    slots: int | None
    drain_per_s: float | None
    tenants: list[TenantView]


class UnderWay(msgspec.Struct, frozen=True, kw_only=True):
    """One request that has begun and not ended. `agent`, `name`: as `AgentRow` has them.

    `state`: `parked` (its agent wakes), `uploading`, `reading`, `queued`, `connecting`, `waiting` (for the backend's
    first byte), `answering`, `streaming`. `endpoint` and `model` are empty where that is not known yet. `age_ms`: since
    its first byte; `queue_ms`: of that in line for a turn, None where it did not get so far.
    """

    id: str
    agent: str
    name: str
    tenant: str
    model: str
    endpoint: str
    state: str
    age_ms: float
    queue_ms: float | None


class AskQueue(Message, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `QueueIs`."""


class QueueIs(Message, tag=True, frozen=True, kw_only=True):
    """Who waits and who runs. `requests`: all that are under way, the oldest first; `left_out`: how many more."""

    queue: QueueView
    requests: list[UnderWay]
    left_out: int = 0


class AskModels(Message, tag=True, frozen=True, kw_only=True):
    """Ask, of the proxy. A request names a model that is not in the list: look whether it is there now. Answer: `Done`,
    after what is new was told (`Backend`); at once where it was looked for a moment ago."""


class CancelRequest(Message, tag=True, frozen=True, kw_only=True):
    """Ask. The request ends with an error of Hive's, whatever it waits for. Answer: `Done`, or `Failed(not_found)`."""

    id: str
