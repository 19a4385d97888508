"""The cost of requests: rows, agents' totals, marks of how far each proxy's events are committed, and questions.

A question is answered from the sums of rollups.py, and from single rows at its edge; so it means exactly the requests
since its `since`, but where rows were pruned: there since the beginning of that hour.
Every function takes the connection of one transaction (`Database.write`, `Database.read`).
"""

from __future__ import annotations

import math
import sqlite3
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import msgspec

from hive.budgets import UnitPrices
from hive.domain import By, UsageEvent
from hive.store import rollups
from hive.store.rollups import ALL, CountedRequest, Piece, Scope, UsageTable

_COLUMNS = (
    *("id", "agent_id", "tenant", "model", "backend", "endpoint", "unit", "tokens_in", "tokens_out", "cached_tokens"),
    *("estimated", "cut", "queue_ms", "ttft_ms", "duration_ms", "status", "client_request_id", "created_at"),
    *("asked", "rung", "far", "amount", "work"),
)
# DO NOTHING on the key alone: OR IGNORE would also swallow a broken row.
_INSERT = (
    f"INSERT INTO inference_usage ({', '.join(_COLUMNS)}, rolled_up) VALUES ({', '.join('?' * len(_COLUMNS))}, 1)"
    " ON CONFLICT (id) DO NOTHING"
)
_ADD_TO_AGENT = """
UPDATE agents SET total_requests = total_requests + ?, total_tokens_in = total_tokens_in + ?,
    total_tokens_out = total_tokens_out + ?, last_active_at = max(coalesce(last_active_at, 0), ?)
WHERE id = ?
"""
MARK_KEPT_S = 30 * 86400


class UsageMark(msgspec.Struct, frozen=True):
    """The settled part of one proxy epoch: every event up to `committed_to` is a row here or lost for ever.

    `lost` counts the latter: told by the proxy as dropped, or unreadable. `ahead`: ranges beyond, settled as well.
    """

    committed_to: int
    lost: int = 0
    ahead: tuple[tuple[int, int], ...] = ()


def insert(conn: sqlite3.Connection, events: Iterable[UsageEvent]) -> list[UsageEvent]:
    """Adds the events that are not there yet, and them alone to the sums and their agents' totals; returns those."""
    added = [event for event in events if conn.execute(_INSERT, _values(event)).rowcount == 1]
    totals: dict[str, list[float]] = {}
    for event in added:
        total = totals.setdefault(event.agent_id, [0, 0, 0, 0.0])
        total[0] += 1
        total[1] += event.tokens_in or 0
        total[2] += event.tokens_out or 0
        total[3] = max(total[3], event.created_at)
    conn.executemany(_ADD_TO_AGENT, [(*total, agent_id) for agent_id, total in totals.items()])
    rollups.add(conn, map(_counted, added))
    return added


def _values(event: UsageEvent) -> tuple[object, ...]:
    return tuple(getattr(event, column) for column in _COLUMNS)


def _counted(event: UsageEvent) -> CountedRequest:
    return CountedRequest(
        event.agent_id,
        event.tenant,
        event.model,
        event.backend,
        event.created_at,
        event.tokens_in,
        event.tokens_out,
        event.cached_tokens,
        event.cut,
        event.far,
        event.unit,
        event.amount,
        event.work,
    )


_ranges = msgspec.json.Decoder(tuple[tuple[int, int], ...]).decode


def marks(conn: sqlite3.Connection) -> dict[str, UsageMark]:
    """Proxy epoch → its mark."""
    rows = conn.execute("SELECT proxy_epoch, committed_to, lost, ahead FROM usage_marks")
    return {row["proxy_epoch"]: UsageMark(row["committed_to"], row["lost"], _ranges(row["ahead"])) for row in rows}


def set_marks(conn: sqlite3.Connection, changed: Mapping[str, UsageMark], *, now: float) -> None:
    """Records marks; call it in the transaction that inserts their rows."""
    conn.executemany(
        "INSERT INTO usage_marks (proxy_epoch, committed_to, lost, ahead, updated_at) VALUES (?, ?, ?, ?, ?)"
        " ON CONFLICT (proxy_epoch) DO UPDATE SET committed_to = excluded.committed_to, lost = excluded.lost,"
        " ahead = excluded.ahead, updated_at = excluded.updated_at",
        [
            (epoch, mark.committed_to, mark.lost, msgspec.json.encode(mark.ahead).decode(), now)
            for epoch, mark in changed.items()
        ],
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


class TotalsOfModel(msgspec.Struct, frozen=True, rename="camel"):
    model: str
    total_in: int
    total_out: int
    count: int


class EndedRequest(msgspec.Struct, frozen=True, kw_only=True):
    """All that is known of one request, as UsageEvent has it: None is unknown, `cut` means not answered to the end.

    Durations in milliseconds, `created_at` (when it ended) Unix seconds. `agent` is an id.
    """

    id: str
    agent: str
    tenant: str
    model: str
    backend: str
    endpoint: str
    unit: str
    tokens_in: int | None
    tokens_out: int | None
    cached_tokens: int | None
    estimated: bool
    cut: bool
    queue_ms: float
    ttft_ms: float | None
    duration_ms: float
    status: int
    client_request_id: str | None
    created_at: float
    asked: str
    rung: int | None
    far: bool
    amount: float | None
    work: float | None


def request(conn: sqlite3.Connection, id: str) -> EndedRequest | None:
    """One ended request by its id; None where there is none, or where it was pruned."""
    row = conn.execute(f"SELECT {', '.join(_COLUMNS)} FROM inference_usage WHERE id = ?", (id,)).fetchone()
    if row is None:
        return None
    found = dict(zip(_COLUMNS, row, strict=True))
    return EndedRequest(
        agent=found.pop("agent_id"), **found | {name: bool(found[name]) for name in ("estimated", "cut", "far")}
    )


class Recent(msgspec.Struct, frozen=True, rename="camel"):
    """One request; None is unknown, `created_at` Unix seconds."""

    id: str
    model: str
    tokens_in: int | None
    tokens_out: int | None
    duration_ms: float
    created_at: float


class UsageOfAgent(msgspec.Struct, frozen=True, rename="camel"):
    """`{"agentId","period","totals","byModel","recent"}`, the answer of `GET /api/agents/{ref}/usage`."""

    agent_id: str
    period: str
    totals: Totals
    by_model: list[TotalsOfModel]
    recent: list[Recent]


def agent_usage(
    conn: sqlite3.Connection, agent_id: str, *, since: float, period: str = "", limit: int = 100
) -> UsageOfAgent:
    """The usage of one agent since `since` (Unix seconds); `recent` holds at most `limit` requests that are still kept
    one by one, newest first."""
    sums = _sums(conn, By.MODEL, UsageFilter(since, agent=agent_id))
    by_model = [
        TotalsOfModel(str(model), tokens_in, tokens_out, requests)
        for model, (requests, tokens_in, tokens_out, *_) in sums.items()
    ]
    by_model.sort(key=lambda row: (-row.total_in - row.total_out, row.model))
    recent = [
        Recent(*row)
        for row in conn.execute(
            "SELECT id, model, tokens_in, tokens_out, duration_ms, created_at FROM inference_usage"
            " WHERE agent_id = ? AND created_at >= ? ORDER BY created_at DESC, id DESC LIMIT ?",
            (agent_id, since, limit),
        )
    ]
    totals = Totals(sum(row.total_in for row in by_model), sum(row.total_out for row in by_model))
    return UsageOfAgent(agent_id, period, totals, by_model, recent)


class SpentSums(msgspec.Struct, frozen=True, rename="camel"):
    """Tokens of ended requests, as far as known, and how many ended."""

    total_in: int = 0
    total_out: int = 0
    requests: int = 0


def spent_since(conn: sqlite3.Connection, since: float) -> SpentSums:
    """The usage of all agents since `since` (Unix seconds), removed ones too."""
    found = total(usage_by(conn, By.BACKEND, UsageFilter(since)))
    return SpentSums(found.tokens_in, found.tokens_out, found.requests)


class CostSums(msgspec.Struct, frozen=True):
    """Sums over requests. `unknown`: requests whose count is not known, of tokens or of their own unit; `cut`: not
    answered to the end; `far`: left the box; `audio_ms`: milliseconds of audio that were heard; `pixel_steps`: pixels
    of all steps of the images."""

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cached_tokens: int = 0
    unknown: int = 0
    cut: int = 0
    far: int = 0
    audio_ms: int = 0
    images: int = 0
    pixel_steps: int = 0


class CostOfAgent(CostSums, frozen=True, kw_only=True):
    """`name` is None where the agent was removed."""

    agent_id: str
    name: str | None


class GroupCost(CostSums, frozen=True, kw_only=True):
    """`key`: the tenant, model or backend; the Unix second at which the hour began."""

    key: str | int


class UsageFilter(msgspec.Struct, frozen=True):
    """Requests that ended since `since` (Unix seconds), of this agent (by id), tenant and model; None is of all."""

    since: float = 0.0
    agent: str | None = None
    tenant: str | None = None
    model: str | None = None


class UsageSince(msgspec.Struct, frozen=True):
    """`{"agents","totals"}` of `GET /api/usage`."""

    agents: list[CostOfAgent]
    totals: CostSums


def usage_since(conn: sqlite3.Connection, asked: UsageFilter) -> UsageSince:
    """The usage of every agent, the most expensive first."""
    known = dict(conn.execute("SELECT id, name FROM agents").fetchall())
    sums = _sums(conn, By.AGENT, asked)
    agents = [CostOfAgent(*cost, agent_id=str(agent), name=known.get(agent)) for agent, cost in sums.items()]
    agents.sort(key=lambda cost: (-cost.tokens_in - cost.tokens_out, cost.agent_id))
    return UsageSince(agents, total(agents))


def usage_by(conn: sqlite3.Connection, by: By, asked: UsageFilter) -> list[GroupCost]:
    """The usage of every tenant, model or backend, the most expensive first; hours in their order, those without a
    request left out. KeyError for agents: `usage_since` has them."""
    if by is By.AGENT:
        raise KeyError(by)
    costs = [GroupCost(*cost, key=key) for key, cost in _sums(conn, by, asked).items()]
    if by is By.HOUR:
        return sorted(costs, key=lambda cost: cost.key)
    return sorted(costs, key=lambda cost: (-cost.tokens_in - cost.tokens_out, cost.key))


def used_in_all(conn: sqlite3.Connection) -> CostSums:
    """All usage ever, also that of pruned rows."""
    found: dict[int, list[int]] = {}
    _add_up(
        found, conn.execute(f"SELECT 0, {_SUMS} FROM {UsageTable.WEEKS} WHERE scope = {Scope.BOX:d} AND model = {ALL}")
    )
    _add_up(found, conn.execute(f"SELECT 0, {_COSTS} FROM {_IN_NO_SUM} WHERE rolled_up = 0"))
    return CostSums(*found[0])


def total(costs: Iterable[CostSums]) -> CostSums:
    return CostSums(*map(sum, zip(*map(_fields, costs), strict=True)))


# --- sums --------------------------------------------------------------------------------------------------------

_COSTS = """count(*), coalesce(sum(tokens_in), 0), coalesce(sum(tokens_out), 0), coalesce(sum(cached_tokens), 0),
    coalesce(sum(CASE unit WHEN 'tokens' THEN tokens_in IS NULL OR tokens_out IS NULL ELSE amount IS NULL END), 0),
    coalesce(sum(cut), 0), coalesce(sum(far), 0),
    coalesce(sum(CASE unit WHEN 'audio_s' THEN CAST(amount * 1000 + 0.5 AS INTEGER) END), 0),
    coalesce(sum(CASE unit WHEN 'images' THEN CAST(amount + 0.5 AS INTEGER) END), 0),
    coalesce(sum(CASE WHEN unit <> 'tokens' THEN CAST(work + 0.5 AS INTEGER) END), 0)"""
_SUMS = ", ".join(f"coalesce(sum({name}), 0)" for name in CostSums.__struct_fields__)
_COLUMN = {By.AGENT: "agent_id", By.TENANT: "tenant", By.MODEL: "model", By.BACKEND: "backend"}
_HOUR = f"CAST(created_at AS INTEGER) / {rollups.HOUR_S} * {rollups.HOUR_S}"
_IN_NO_SUM = f"{UsageTable.REQUESTS} INDEXED BY inference_usage_unrolled"
"""SQLite 3.40 would take the index of an agent's requests, thousands, where there is none of these."""
_fields = attrgetter(*CostSums.__struct_fields__)
_Key = TypeVar("_Key", str | int, int)


def _sums(conn: sqlite3.Connection, by: By, asked: UsageFilter) -> dict[str | int, list[int]]:
    """The sums asked for, as the fields of a Cost; in no order."""
    begin = rollups.begin_of(asked.since, rollups.kept(conn))
    found: dict[str | int, list[int]] = {}
    numbered: dict[int, list[int]] = {}
    for piece in rollups.cover(begin, rollups.newest(conn), by_hour=by is By.HOUR):
        if piece.table is UsageTable.REQUESTS:
            _add_up(found, _of_requests(conn, by, asked, piece, rolled_up=True), piece.sign)
        else:
            _add_up(numbered, _of_sums(conn, by, asked, piece), piece.sign)
    in_no_sum = Piece(UsageTable.REQUESTS, begin, math.inf, 1)
    _add_up(found, _of_requests(conn, by, asked, in_no_sum, rolled_up=False))
    names = {} if by is By.HOUR else rollups.names(conn, numbered)
    _add_up(found, ((names.get(number, number), *sums) for number, sums in numbered.items()))
    return {key: sums for key, sums in found.items() if sums[0]}


def _add_up(found: dict[_Key, list[int]], rows: Iterable[Sequence[Any]], sign: int = 1) -> None:
    """A row is a key and the fields of its Cost."""
    for key, *sums in rows:
        signed = sums if sign > 0 else [-one for one in sums]
        so_far = found.get(key)
        found[key] = signed if so_far is None else [one + other for one, other in zip(so_far, signed, strict=True)]


def _of_requests(
    conn: sqlite3.Connection, by: By, asked: UsageFilter, piece: Piece, *, rolled_up: bool
) -> Iterable[sqlite3.Row]:
    conditions = [f"rolled_up = {rolled_up:d}", "created_at >= ?", "created_at < ?"]
    values: list[object] = [piece.first, piece.last]
    for column, value in (("agent_id", asked.agent), ("tenant", asked.tenant), ("model", asked.model)):
        if value is not None:
            conditions.append(f"{column} = ?")
            values.append(value)
    key = _HOUR if by is By.HOUR else _COLUMN[by]
    table, where = piece.table if rolled_up else _IN_NO_SUM, " AND ".join(conditions)
    return conn.execute(f"SELECT {key} AS key, {_COSTS} FROM {table} WHERE {where} GROUP BY key", values)


def _of_sums(conn: sqlite3.Connection, by: By, asked: UsageFilter, piece: Piece) -> Iterable[sqlite3.Row]:
    """The sums by the numbers of their names, each with one look-up.

    The box's own sums tell which hours (days, weeks) there are, with which models.
    """
    scope = _scope(by, asked)
    conditions = [f"u.scope = {scope:d}", "u.begins = filled.begins", "u.model = filled.model"]
    values: list[object] = [piece.first, piece.last]
    if asked.model is not None:
        values.append(rollups.id_of(conn, asked.model))
    if scope is Scope.AGENT and asked.agent is not None:
        conditions.append("u.agent = ?")
        values.append(rollups.id_of(conn, asked.agent))
    elif scope is Scope.TENANT:
        conditions.append(f"u.agent = {ALL}")
    if asked.tenant is not None:
        conditions.append("u.tenant = ?")
        values.append(rollups.id_of(conn, asked.tenant))
    of_models = "= ?" if asked.model is not None else "> 0" if by is By.MODEL else f"= {ALL}"
    key = "begins" if by is By.HOUR else by.value
    return conn.execute(
        f"SELECT u.{key}, {_SUMS} FROM (SELECT DISTINCT begins, model FROM {piece.table}"
        f" WHERE scope = {Scope.BOX:d} AND begins >= ? AND begins < ? AND model {of_models}) AS filled"
        f" CROSS JOIN {piece.table} AS u ON {' AND '.join(conditions)} GROUP BY u.{key}",
        values,
    )


def _scope(by: By, asked: UsageFilter) -> Scope:
    """The scope of the sums that answer it: the fewest rows that still tell apart what is asked for.

    >>> every, acme = UsageFilter(), UsageFilter(tenant="acme")
    >>> _scope(By.MODEL, every).name, _scope(By.HOUR, acme).name, _scope(By.AGENT, every).name
    ('BOX', 'TENANT', 'AGENT')
    """
    if by is By.AGENT or asked.agent is not None:
        return Scope.AGENT
    return Scope.TENANT if by is By.TENANT or asked.tenant is not None else Scope.BOX


# --- spending in a day and a month -----------------------------------------------------------------------------------

_FAR_TOKENS = """
SELECT {column}, sum(coalesce(tokens_in, 0) + coalesce(tokens_out, 0)) FROM inference_usage
INDEXED BY inference_usage_far WHERE far = 1 AND created_at >= ? GROUP BY {column}
"""


class PeriodTokens(NamedTuple):
    """Tokens in and out since the day began, since the month began, and since the day began of requests that left."""

    day: int = 0
    month: int = 0
    cloud_day: int = 0


class SpentOfAll(NamedTuple):
    """By agent's id and by tenant's name; who is not there has spent nothing."""

    agents: dict[str, PeriodTokens]
    tenants: dict[str, PeriodTokens]


def spent_of_all(conn: sqlite3.Connection, day_begins: float, month_begins: float, prices: UnitPrices) -> SpentOfAll:
    """The tokens that each agent and tenant has spent; audio and images count as `prices` says. Requests whose end is
    later than now, by a clock that was set back, are among them."""
    agents = [
        {cost.agent_id: _counted_tokens(cost, prices) for cost in usage_since(conn, UsageFilter(since)).agents}
        for since in (day_begins, month_begins)
    ]
    tenants = [
        {str(cost.key): _counted_tokens(cost, prices) for cost in usage_by(conn, By.TENANT, UsageFilter(since))}
        for since in (day_begins, month_begins)
    ]
    far = [_far_tokens(conn, column, day_begins) for column in ("agent_id", "tenant")]
    return SpentOfAll(_periods(agents[0], agents[1], far[0]), _periods(tenants[0], tenants[1], far[1]))


def _counted_tokens(cost: CostSums, prices: UnitPrices) -> int:
    return cost.tokens_in + cost.tokens_out + prices.tokens(audio_ms=cost.audio_ms, pixel_steps=cost.pixel_steps)


def _far_tokens(conn: sqlite3.Connection, column: str, since: float) -> dict[str, int]:
    """Requests are kept one by one for a day at least, so the sums need not tell of these tokens. No server of audio or
    images is far."""
    return dict(conn.execute(_FAR_TOKENS.format(column=column), (since,)).fetchall())


def _periods(day: dict[str, int], month: dict[str, int], far: dict[str, int]) -> dict[str, PeriodTokens]:
    names = day.keys() | month.keys() | far.keys()
    return {name: PeriodTokens(day.get(name, 0), month.get(name, 0), far.get(name, 0)) for name in names}
