"""What requests cost: rows, agents' totals and the marks that say how far each proxy's events are committed.

Every function takes the connection of one transaction (`Database.write`, `Database.read`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import StrEnum

import msgspec

from hive.domain import UsageEvent

_COLUMNS = (
    *("id", "agent_id", "tenant", "model", "backend", "endpoint", "unit", "tokens_in", "tokens_out", "cached_tokens"),
    *("estimated", "cut", "queue_ms", "ttft_ms", "duration_ms", "status", "client_request_id", "created_at"),
)
# DO NOTHING on the key alone: OR IGNORE would also swallow a broken row.
_INSERT = (
    f"INSERT INTO inference_usage ({', '.join(_COLUMNS)}) VALUES ({', '.join('?' * len(_COLUMNS))})"
    " ON CONFLICT (id) DO NOTHING"
)
_ADD_TO_AGENT = """
UPDATE agents SET total_requests = total_requests + ?, total_tokens_in = total_tokens_in + ?,
    total_tokens_out = total_tokens_out + ?, last_active_at = max(coalesce(last_active_at, 0), ?)
WHERE id = ?
"""
MARK_KEPT_S = 30 * 86400


class Mark(msgspec.Struct, frozen=True):
    """How far one proxy epoch is settled: every event up to `committed_to` is a row here or lost for ever.

    `lost` counts the latter: told by the proxy as dropped, or unreadable.
    """

    committed_to: int
    lost: int = 0


def insert(conn: sqlite3.Connection, events: Iterable[UsageEvent]) -> list[UsageEvent]:
    """Adds the events that are not there yet, and them alone to their agents' totals; returns those."""
    added = [event for event in events if conn.execute(_INSERT, _values(event)).rowcount == 1]
    totals: dict[str, list[float]] = {}
    for event in added:
        total = totals.setdefault(event.agent_id, [0, 0, 0, 0.0])
        total[0] += 1
        total[1] += event.tokens_in or 0
        total[2] += event.tokens_out or 0
        total[3] = max(total[3], event.created_at)
    conn.executemany(_ADD_TO_AGENT, [(*total, agent_id) for agent_id, total in totals.items()])
    return added


def _values(event: UsageEvent) -> tuple[object, ...]:
    return tuple(getattr(event, column) for column in _COLUMNS)


def marks(conn: sqlite3.Connection) -> dict[str, Mark]:
    """Proxy epoch → its mark."""
    rows = conn.execute("SELECT proxy_epoch, committed_to, lost FROM usage_marks")
    return {row["proxy_epoch"]: Mark(row["committed_to"], row["lost"]) for row in rows}


def set_marks(conn: sqlite3.Connection, changed: Mapping[str, Mark], *, now: float) -> None:
    """Records marks; call it in the transaction that inserts their rows."""
    conn.executemany(
        "INSERT INTO usage_marks (proxy_epoch, committed_to, lost, updated_at) VALUES (?, ?, ?, ?)"
        " ON CONFLICT (proxy_epoch) DO UPDATE SET committed_to = excluded.committed_to, lost = excluded.lost,"
        " updated_at = excluded.updated_at",
        [(epoch, mark.committed_to, mark.lost, now) for epoch, mark in changed.items()],
    )


def prune_marks(conn: sqlite3.Connection, *, spooled: Collection[str], now: float) -> list[str]:
    """Forgets the marks of epochs that stood still for 30 days and have no spool; returns these epochs.

    While a spool exists its mark must stay, or the next proxy would replay events whose rows may be pruned.
    """
    old = conn.execute("SELECT proxy_epoch FROM usage_marks WHERE updated_at < ?", (now - MARK_KEPT_S,)).fetchall()
    gone = [row["proxy_epoch"] for row in old if row["proxy_epoch"] not in spooled]
    conn.executemany("DELETE FROM usage_marks WHERE proxy_epoch = ?", [(epoch,) for epoch in gone])
    return gone


# --- questions ---------------------------------------------------------------------------------------------------


class Totals(msgspec.Struct, frozen=True, rename="camel"):
    tokens_in: int
    tokens_out: int


class ModelTotals(msgspec.Struct, frozen=True, rename="camel"):
    model: str
    total_in: int
    total_out: int
    count: int


class Recent(msgspec.Struct, frozen=True, rename="camel"):
    """One request; None is unknown, `created_at` Unix seconds."""

    id: str
    model: str
    tokens_in: int | None
    tokens_out: int | None
    duration_ms: float
    created_at: float


class AgentUsage(msgspec.Struct, frozen=True, rename="camel"):
    """`{"agentId","period","totals","byModel","recent"}`, the answer of `GET /api/agents/{ref}/usage`."""

    agent_id: str
    period: str
    totals: Totals
    by_model: list[ModelTotals]
    recent: list[Recent]


def agent_usage(
    conn: sqlite3.Connection, agent_id: str, *, since: float, period: str = "", limit: int = 100
) -> AgentUsage:
    """What one agent used since `since` (Unix seconds); `recent` holds at most `limit` requests, newest first."""
    by_model = [
        ModelTotals(row["model"], row["total_in"], row["total_out"], row["count"])
        for row in conn.execute(
            "SELECT model, coalesce(sum(tokens_in), 0) AS total_in, coalesce(sum(tokens_out), 0) AS total_out,"
            " count(*) AS count FROM inference_usage WHERE agent_id = ? AND created_at >= ?"
            " GROUP BY model ORDER BY total_in + total_out DESC, model",
            (agent_id, since),
        )
    ]
    recent = [
        Recent(*row)
        for row in conn.execute(
            "SELECT id, model, tokens_in, tokens_out, duration_ms, created_at FROM inference_usage"
            " WHERE agent_id = ? AND created_at >= ? ORDER BY created_at DESC, id DESC LIMIT ?",
            (agent_id, since, limit),
        )
    ]
    totals = Totals(sum(row.total_in for row in by_model), sum(row.total_out for row in by_model))
    return AgentUsage(agent_id, period, totals, by_model, recent)


class Spent(msgspec.Struct, frozen=True, rename="camel"):
    """Tokens of ended requests, as far as known, and how many ended."""

    total_in: int = 0
    total_out: int = 0
    requests: int = 0


def spent_since(conn: sqlite3.Connection, since: float) -> Spent:
    """What all agents used since `since` (Unix seconds), removed ones too."""
    row = conn.execute(
        "SELECT coalesce(sum(tokens_in), 0), coalesce(sum(tokens_out), 0), count(*) FROM inference_usage"
        " WHERE created_at >= ?",
        (since,),
    ).fetchone()
    return Spent(*row)


class Cost(msgspec.Struct, frozen=True):
    """Sums over requests. `unknown`: requests whose tokens nobody counted; `cut`: not answered to the end."""

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cached_tokens: int = 0
    unknown: int = 0
    cut: int = 0


class AgentCost(Cost, frozen=True, kw_only=True):
    """`name` is None where the agent was removed."""

    agent_id: str
    name: str | None


class GroupCost(Cost, frozen=True, kw_only=True):
    """`key`: the tenant, model or backend; the Unix second at which the hour began."""

    key: str | int


class By(StrEnum):
    """What usage is added up by."""

    AGENT = "agent"
    TENANT = "tenant"
    MODEL = "model"
    BACKEND = "backend"
    HOUR = "hour"


class Asked(msgspec.Struct, frozen=True):
    """Requests that ended since `since` (Unix seconds), of this agent (by id), tenant and model; None is of all."""

    since: float = 0.0
    agent: str | None = None
    tenant: str | None = None
    model: str | None = None


class UsageSince(msgspec.Struct, frozen=True):
    """`{"agents","totals"}` of `GET /api/usage`."""

    agents: list[AgentCost]
    totals: Cost


_COSTS = """count(*) AS requests, coalesce(sum(tokens_in), 0) AS tokens_in,
    coalesce(sum(tokens_out), 0) AS tokens_out, coalesce(sum(cached_tokens), 0) AS cached_tokens,
    sum(tokens_in IS NULL OR tokens_out IS NULL) AS unknown, sum(cut) AS cut"""
_KEYS = {
    By.TENANT: "u.tenant",
    By.MODEL: "u.model",
    By.BACKEND: "u.backend",
    By.HOUR: "CAST(u.created_at AS INTEGER) / 3600 * 3600",
}
_MOST_FIRST = "sum(tokens_in) + sum(tokens_out) DESC"


def usage_since(conn: sqlite3.Connection, asked: Asked) -> UsageSince:
    """What every agent used, the most expensive first."""
    where, values = _where(asked)
    rows = conn.execute(
        f"SELECT u.agent_id AS agent_id, a.name AS name, {_COSTS}"
        f" FROM inference_usage u LEFT JOIN agents a ON a.id = u.agent_id WHERE {where}"
        f" GROUP BY u.agent_id ORDER BY {_MOST_FIRST}, u.agent_id",
        values,
    )
    agents = [AgentCost(**dict(row)) for row in rows]
    return UsageSince(agents, total(agents))


def usage_by(conn: sqlite3.Connection, by: By, asked: Asked) -> list[GroupCost]:
    """What every tenant, model or backend used, the most expensive first; hours in their order, those without a request
    left out. KeyError for agents: `usage_since` has them."""
    where, values = _where(asked)
    order = "key" if by is By.HOUR else f"{_MOST_FIRST}, key"
    rows = conn.execute(
        f"SELECT {_KEYS[by]} AS key, {_COSTS} FROM inference_usage u WHERE {where} GROUP BY key ORDER BY {order}",
        values,
    )
    return [GroupCost(**dict(row)) for row in rows]


def total(costs: Sequence[Cost]) -> Cost:
    return Cost(**{name: sum(getattr(cost, name) for cost in costs) for name in Cost.__struct_fields__})


def _where(asked: Asked) -> tuple[str, list[object]]:
    """A condition on `u`, and its values."""
    parts: list[str] = ["u.created_at >= ?"]
    values: list[object] = [asked.since]
    for column, value in (("agent_id", asked.agent), ("tenant", asked.tenant), ("model", asked.model)):
        if value is not None:
            parts.append(f"u.{column} = ?")
            values.append(value)
    return " AND ".join(parts), values
