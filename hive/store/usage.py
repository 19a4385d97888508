"""What requests cost: rows, agents' totals and the marks that say how far each proxy's events are committed.

Every function takes the connection of one transaction (`Database.write`, `Database.read`).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Collection, Iterable, Mapping

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


class UsageSince(msgspec.Struct, frozen=True):
    """`{"agents","totals"}` of `GET /api/usage`."""

    agents: list[AgentCost]
    totals: Cost


def usage_since(conn: sqlite3.Connection, since: float) -> UsageSince:
    """What every agent used since `since` (Unix seconds), the most expensive first."""
    rows = conn.execute(
        "SELECT u.agent_id AS agent_id, a.name AS name, count(*) AS requests, coalesce(sum(tokens_in), 0) AS tokens_in,"
        " coalesce(sum(tokens_out), 0) AS tokens_out, coalesce(sum(cached_tokens), 0) AS cached_tokens,"
        " sum(tokens_in IS NULL OR tokens_out IS NULL) AS unknown, sum(cut) AS cut"
        " FROM inference_usage u LEFT JOIN agents a ON a.id = u.agent_id WHERE u.created_at >= ?"
        " GROUP BY u.agent_id ORDER BY sum(tokens_in) + sum(tokens_out) DESC, u.agent_id",
        (since,),
    )
    agents = [AgentCost(**dict(row)) for row in rows]
    totals = {name: sum(getattr(agent, name) for agent in agents) for name in Cost.__struct_fields__}
    return UsageSince(agents, Cost(**totals))
