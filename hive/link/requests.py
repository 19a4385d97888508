"""Messages about the proxy's requests: the queue, and the requests under way."""

from __future__ import annotations

import msgspec

from hive.link.message import LinkMessage


class TenantView(msgspec.Struct, frozen=True):
    """One tenant as `hive queue` and the metrics show it.

    `tokens_ahead`: its tokens of the normal band, running requests included, by weight, beyond the least served
    tenant's. `load_s`: seconds of models' loads that its requests have caused since the proxy began; they are charged
    to it in tokens.
    """

    name: str
    weight: float
    running: int
    waiting: int
    tokens_ahead: float
    load_s: float = 0.0


class WorkView(msgspec.Struct, frozen=True):
    """The work that one server does in a second: of `unit` so much. `model`: empty for the active backend;
    `is_measured`: it was seen to, else it is taken for granted."""

    model: str
    unit: str
    per_s: float
    is_measured: bool


class QueueView(msgspec.Struct, frozen=True):
    """The queue at one moment. `places`: None for no limit, `slots` in JSON; `drain_per_s`: places given back per
    second while requests waited, None if none has waited yet. `tokens_per_gpu_s`: tokens that a second of a server's
    work counts as where that is no tokens; `work`: what each server does in a second."""

    running: int
    waiting: int
    places: int | None = msgspec.field(name="slots")
    drain_per_s: float | None
    tenants: list[TenantView]
    tokens_per_gpu_s: float = 0.0
    work: list[WorkView] = []


class UnderWay(msgspec.Struct, frozen=True, kw_only=True):
    """One request that has begun and not ended. `agent`, `name`: as `AgentRow` has them.

    `state`: `parked` (its agent wakes), `uploading`, `reading`, `queued`, `connecting`, `waiting` (for the backend's
    first byte), `answering`, `streaming`, `cancelling` (it was given up, its server has not stopped yet). `endpoint`
    and `model` are empty where that is not known yet. `age_ms`: since its first byte; `queue_ms`: of that in line for a
    turn, None where it did not get so far. `slot`: of the pool, for which it is queued or where it is, empty for the
    active backend; `for_load`: it is queued because its model is not loaded.
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
    slot: str = ""
    for_load: bool = False


class AskQueue(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Answer: `QueueIs`."""


class QueueIs(LinkMessage, tag=True, frozen=True, kw_only=True):
    """The waiting and running requests. `requests`: all that are under way, the oldest first; `left_out`: the number of
    more."""

    queue: QueueView
    requests: list[UnderWay]
    left_out: int = 0


class AskTokensCome(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, of the daemon. A cluster says that nothing of it runs: do tokens come back all the same? Answer:
    `TokensCome`."""


class TokensCome(LinkMessage, tag=True, frozen=True, kw_only=True):
    """`comes`: part of an answer of the active backend came since that was asked last."""

    comes: bool


class AskModels(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, of the proxy. A request names a model that is not in the list: look whether it is there now. Answer: `Done`,
    after what is new was told (`Backend`); at once where it was looked for a moment ago."""


class CancelRequest(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. The request ends with an error of Hive's, in any state. Answer: `Done`, or `Failed(not_found)`."""

    id: str
