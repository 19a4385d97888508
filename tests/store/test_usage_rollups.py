"""Sums of usage agree with the requests they are sums of, of old and new versions of Hive, and outlive them."""

from __future__ import annotations

import itertools
import random
import sqlite3
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.domain import By, UsageEvent, UsageUnit
from hive.store import rollups, usage
from hive.store.migrations import STEPS, migrate
from hive.store.rollups import DAY_S, HOUR_S, SUMS, WEEK_S, KeptSince, UsageTable, begin_of, cover, keep_from, let_go
from hive.store.usage import CostSums, GroupCost, SpentSums, UsageFilter
from tests.fakes.usage_events import usage_event

DAY = 19_999 * DAY_S
"""A day begins, Unix seconds, and a week."""


def event(no: int, **fields: Any) -> UsageEvent:
    return usage_event(no, **{"created_at": DAY + no, **fields})


COLUMNS = [name for name in UsageEvent.__struct_fields__ if name not in ("epoch", "event_no")]
OLDER = [name for name in COLUMNS if name not in ("asked", "rung", "far", "amount", "work")]


def insert_as_an_older_hive(conn: sqlite3.Connection, events: Iterable[UsageEvent]) -> None:
    """Inserts as the code before step 6 does into `inference_usage`."""
    conn.executemany(
        f"INSERT INTO inference_usage ({', '.join(OLDER)}) VALUES ({', '.join('?' * len(OLDER))})"
        " ON CONFLICT (id) DO NOTHING",
        [[getattr(event, name) for name in OLDER] for event in events],
    )


def opened(steps: tuple[str, ...] = STEPS) -> sqlite3.Connection:
    conn = sqlite3.connect(":memory:", isolation_level=None)
    conn.row_factory = sqlite3.Row
    migrate(conn, steps)
    return conn


@pytest.fixture
def conn() -> Iterator[sqlite3.Connection]:
    conn = opened()
    yield conn
    conn.close()


# --- which sums ------------------------------------------------------------------------------------------------------

MOMENTS = st.one_of(
    st.integers(0, 40 * 24).map(lambda hour: float(hour * HOUR_S)),
    st.integers(0, 40 * DAY_S).map(float),
    st.floats(0, 40 * DAY_S),
    st.floats(20 * DAY_S, 21 * DAY_S),
)
SPANS_S = {UsageTable.REQUESTS: 0, **dict(SUMS)}


@given(st.lists(MOMENTS, max_size=30), MOMENTS, st.booleans())
def test_the_pieces_hold_each_request_since_then_once(ended: list[float], since: float, by_hour: bool) -> None:
    def counted(piece: rollups.Piece) -> int:
        """The table's count for that piece: a sum is counted where its span begins."""
        span_s = SPANS_S[piece.table]
        return sum(piece.first <= (at // span_s * span_s if span_s else at) < piece.last for at in ended)

    pieces = cover(since, max(ended, default=0.0), by_hour=by_hour)
    assert sum(piece.sign * counted(piece) for piece in pieces) == sum(at >= since for at in ended)
    if by_hour:
        assert {piece.table for piece in pieces} <= {UsageTable.REQUESTS, UsageTable.HOURS}


@given(MOMENTS, MOMENTS)
def test_half_an_hour_of_requests_half_a_day_of_hours_and_half_a_week_of_days_are_read_at_most(
    since: float, newest: float
) -> None:
    most = {
        UsageTable.REQUESTS: HOUR_S / 2,
        UsageTable.HOURS: DAY_S / 2,
        UsageTable.DAYS: WEEK_S / 2,
        UsageTable.WEEKS: float("inf"),
    }
    for piece in cover(since, newest):
        assert 0 < min(piece.last, max(newest, piece.first + 1e-3)) - piece.first <= most[piece.table]


@given(MOMENTS, MOMENTS, st.integers(0, 960), st.integers(0, 5))
def test_no_piece_needs_what_was_pruned(since: float, newest: float, hours_gone: int, weeks_gone: int) -> None:
    kept = KeptSince(max(hours_gone * HOUR_S, weeks_gone * WEEK_S), weeks_gone * WEEK_S)
    begin = begin_of(since, kept)
    assert begin_of(begin, kept) == begin
    for piece in cover(begin, newest):
        assert piece.first >= (kept.requests_from if piece.table is UsageTable.REQUESTS else kept.sums_from)


# --- exactness -------------------------------------------------------------------------------------------------------

KEYS = {By.AGENT: "agent_id", By.TENANT: "tenant", By.MODEL: "model", By.BACKEND: "backend"}
KEYS[By.HOUR] = "CAST(created_at AS INTEGER) / 3600 * 3600"


def by_hand(conn: sqlite3.Connection, by: By, asked: UsageFilter) -> dict[str | int, CostSums]:
    """The same question asked of single requests."""
    conditions = ["created_at >= ?"]
    values: list[float | str] = [asked.since]
    for column, value in (("agent_id", asked.agent), ("tenant", asked.tenant), ("model", asked.model)):
        if value is not None:
            conditions.append(f"{column} = ?")
            values.append(value)
    rows = conn.execute(
        f"SELECT {KEYS[by]} AS key, count(*), coalesce(sum(tokens_in), 0), coalesce(sum(tokens_out), 0),"
        " coalesce(sum(cached_tokens), 0), "
        " sum(iif(unit = 'tokens', tokens_in IS NULL OR tokens_out IS NULL, amount IS NULL)), sum(cut), sum(far),"
        " coalesce(sum(iif(unit = 'audio_s', round(amount * 1000), 0)), 0),"
        " coalesce(sum(iif(unit = 'images', round(amount), 0)), 0), coalesce(sum(iif(unit <> 'tokens', work, 0)), 0)"
        f" FROM inference_usage WHERE {' AND '.join(conditions)} GROUP BY key",
        values,
    )
    return {key: CostSums(*map(int, costs)) for key, *costs in rows}


def answer(conn: sqlite3.Connection, by: By, asked: UsageFilter) -> dict[str | int, CostSums]:
    if by is By.AGENT:
        found = usage.usage_since(conn, asked)
        assert found.totals == usage.total(found.agents)
        return {row.agent_id: _cost(row) for row in found.agents}
    return {row.key: _cost(row) for row in usage.usage_by(conn, by, asked)}


def _cost(row: CostSums) -> CostSums:
    return CostSums(*(getattr(row, name) for name in CostSums.__struct_fields__))


def every_question(since: float) -> Iterator[tuple[By, UsageFilter]]:
    agents, tenants, models = (None, "a1", "nobody"), (None, "default"), (None, "small")
    for by, agent, tenant, model in itertools.product(By, agents, tenants, models):
        yield by, UsageFilter(since, agent, tenant, model)


def assert_exact(conn: sqlite3.Connection, since: float) -> None:
    for by, asked in every_question(since):
        assert answer(conn, by, asked) == by_hand(conn, by, asked), (by, asked)
    everything = usage.total(list(by_hand(conn, By.BACKEND, UsageFilter(since)).values()))
    assert usage.spent_since(conn, since) == SpentSums(everything.tokens_in, everything.tokens_out, everything.requests)
    of_one = usage.agent_usage(conn, "a1", since=since)
    models = by_hand(conn, By.MODEL, UsageFilter(since, agent="a1"))
    assert {row.model: (row.total_in, row.total_out, row.count) for row in of_one.by_model} == {
        model: (cost.tokens_in, cost.tokens_out, cost.requests) for model, cost in models.items()
    }
    assert usage.used_in_all(conn) == usage.total(list(by_hand(conn, By.BACKEND, UsageFilter(0)).values()))


COUNTS = st.one_of(st.none(), st.integers(0, 2**40))
OF_UNITS = {
    "unit": st.sampled_from(UsageUnit),
    "amount": st.one_of(st.none(), st.integers(0, 10_000).map(float), st.integers(0, 10**7).map(lambda ms: ms / 1000)),
    "work": st.one_of(st.none(), st.integers(0, 2**40).map(float)),
}
REQUESTS = st.fixed_dictionaries(
    {
        "agent_id": st.sampled_from(["a1", "a2", "a3"]),
        "tenant": st.sampled_from(["default", "acme"]),
        "model": st.sampled_from(["small", "large", ""]),
        "backend": st.sampled_from(["ollama", "vllm"]),
        "tokens_in": COUNTS,
        "tokens_out": COUNTS,
        "cached_tokens": COUNTS,
        "cut": st.booleans(),
        "far": st.booleans(),
        "created_at": MOMENTS,
        **OF_UNITS,
    }
)


@settings(max_examples=25, deadline=None)
@given(st.lists(REQUESTS, max_size=40), st.lists(MOMENTS, min_size=1, max_size=2), st.randoms(use_true_random=False))
def test_every_answer_is_the_sum_of_the_requests_themselves(
    rows: list[dict[str, Any]], moments: list[float], dice: random.Random
) -> None:
    """Written by this Hive and by an older one in turns, in batches that overlap, and before and after those of the
    older one are in the sums."""
    conn = opened()
    events = [event(no, **row) for no, row in enumerate(rows)]
    for first in range(0, len(events), 5):
        batch = events[max(0, first - 2) : first + 5]
        if dice.random() < 0.3:
            insert_as_an_older_hive(conn, [msgspec.structs.replace(one, unit="tokens") for one in batch])
        else:
            usage.insert(conn, batch)
    for since in moments:
        assert_exact(conn, since)
    while rollups.roll_up(conn):
        pass
    assert conn.execute("SELECT count(*) FROM inference_usage WHERE rolled_up = 0").fetchone()[0] == 0
    for since in moments:
        assert_exact(conn, since)
    conn.close()


def test_rows_from_before_the_sums_come_into_them_bit_by_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollups, "ROLLED_UP_AT_ONCE", 10)
    conn = opened(STEPS[:5])
    insert_as_an_older_hive(conn, [event(no, created_at=DAY + 600.0 * no, model=f"m{no % 3}") for no in range(25)])
    assert migrate(conn) == len(STEPS) - 5
    steps = []
    while True:
        assert_exact(conn, DAY + 1000.0)
        if not (done := rollups.roll_up(conn)):
            break
        steps.append(done)
        left = conn.execute("SELECT max(created_at) FROM inference_usage WHERE rolled_up = 0").fetchone()[0]
        assert left is None or left == DAY + 600.0 * (24 - sum(steps)), "the newest first"
    assert steps == [10, 10, 5]
    conn.close()


def test_an_event_that_comes_again_is_in_the_sums_once(conn: sqlite3.Connection) -> None:
    usage.insert(conn, [event(1), event(2), event(2)])
    usage.insert(conn, [event(1), event(3)])
    assert usage.usage_by(conn, By.HOUR, UsageFilter()) == [GroupCost(key=DAY, requests=3, tokens_in=30, tokens_out=3)]


def test_what_a_transaction_that_failed_added_is_in_no_sum(conn: sqlite3.Connection) -> None:
    conn.execute("BEGIN IMMEDIATE")
    usage.insert(conn, [event(1)])
    conn.execute("ROLLBACK")
    assert conn.execute("SELECT count(*) FROM usage_hours").fetchone()[0] == 0
    assert usage.used_in_all(conn) == CostSums()


def test_no_question_reads_a_whole_table(conn: sqlite3.Connection) -> None:
    """Seen on 3.6 million sums: each full pass takes seconds."""
    usage.insert(conn, [event(no, agent_id=f"a{no % 3}", created_at=DAY + no * DAY_S) for no in range(30)])
    asked: list[str] = []
    conn.set_trace_callback(asked.append)
    for by, question in every_question(DAY + 2.2 * DAY_S):
        answer(conn, by, question)
    usage.agent_usage(conn, "a1", since=DAY + 1.5)
    usage.spent_since(conn, DAY + 1.5)
    usage.used_in_all(conn)
    usage.request(conn, "p1-1")
    conn.set_trace_callback(None)
    statements = {text.replace("Inf", "9e999") for text in asked}
    plans = {text: [row[3] for row in conn.execute(f"EXPLAIN QUERY PLAN {text}")] for text in statements}
    for table in UsageTable:
        assert any(table in text for text in plans), table
    few = ("agents", "filled", "json_each", "usage_kept", "inference_usage USING INDEX inference_usage_unrolled")
    for text, plan in plans.items():
        assert not [step for step in plan if step.startswith("SCAN") and not step[5:].startswith(few)], text
        if "rolled_up = 0" in text:  # there is none of these: the index of an agent's requests would find thousands
            assert [step for step in plan if "inference_usage_unrolled" in step], text


# --- one request -----------------------------------------------------------------------------------------------------


def test_one_request_is_told_with_all_that_is_known_of_it(conn: sqlite3.Connection) -> None:
    told = event(1, tokens_out=None, cut=True, ttft_ms=3.5, queue_ms=0.25, status=499, client_request_id="null")
    told = msgspec.structs.replace(told, asked="task:plan", rung=2, far=True)
    usage.insert(conn, [told, event(2)])
    found = usage.request(conn, "p1-1")
    assert found is not None
    assert msgspec.structs.asdict(found) == {
        "agent" if name == "agent_id" else name: getattr(told, name) for name in COLUMNS
    }
    assert (found.cut, found.estimated) == (True, False)
    assert usage.request(conn, "p1-3") is None


# --- pruning ---------------------------------------------------------------------------------------------------------


def prune(conn: sqlite3.Connection, kept: KeptSince, now: float) -> list[int]:
    """The number of rows each step deleted."""
    let_go(conn, kept, now=now)
    steps = []
    for step in (rollups.prune_requests, rollups.prune_sums):
        while done := step(conn):
            steps.append(done)
    return steps


def test_what_is_pruned_request_by_request_stays_in_the_sums(
    conn: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollups, "PRUNED_AT_ONCE", 4)
    usage.insert(conn, [event(no, created_at=DAY + 600.0 * no) for no in range(20)])
    before = usage.usage_by(conn, By.HOUR, UsageFilter())
    assert prune(conn, KeptSince(requests_from=DAY + 2 * HOUR_S), now=DAY + DAY_S) == [4, 4, 4]
    assert usage.usage_by(conn, By.HOUR, UsageFilter()) == before
    assert usage.request(conn, "p1-11") is None
    assert usage.request(conn, "p1-12") is not None
    assert [row.id for row in usage.agent_usage(conn, "a1", since=0, limit=3).recent] == ["p1-19", "p1-18", "p1-17"]
    assert usage.used_in_all(conn).requests == 20


def test_since_the_middle_of_an_hour_whose_requests_are_gone_means_since_its_beginning(
    conn: sqlite3.Connection,
) -> None:
    usage.insert(conn, [event(no, created_at=DAY + 600.0 * no) for no in range(18)])
    prune(conn, KeptSince(requests_from=DAY + 2 * HOUR_S), now=DAY + DAY_S)
    since = {"gone": DAY + HOUR_S + 1500.0, "kept": DAY + 2 * HOUR_S + 1500.0}
    assert {name: usage.spent_since(conn, at).requests for name, at in since.items()} == {"gone": 12, "kept": 3}
    (found, *_) = usage.usage_by(conn, By.HOUR, UsageFilter(since["gone"]))
    assert (found.key, found.requests) == (DAY + HOUR_S, 6)


def test_a_request_that_is_in_no_sum_is_not_pruned(conn: sqlite3.Connection) -> None:
    insert_as_an_older_hive(conn, [event(1)])
    assert prune(conn, KeptSince(requests_from=DAY + DAY_S), now=DAY + 2 * DAY_S) == []
    rollups.roll_up(conn)
    assert rollups.prune_requests(conn) == 1
    assert usage.used_in_all(conn).requests == 1


def test_sums_are_pruned_but_what_was_used_in_all_is_kept(
    conn: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollups, "PRUNED_AT_ONCE", 5)
    models = ("small", "made up once", "large")
    usage.insert(conn, [event(no, created_at=DAY + WEEK_S * no, model=models[no]) for no in range(3)])
    steps = prune(conn, KeptSince(DAY + 2 * WEEK_S, DAY + 2 * WEEK_S), now=DAY + 3 * WEEK_S)
    assert max(steps) <= 5
    assert usage.usage_by(conn, By.MODEL, UsageFilter()) == [
        GroupCost(key="large", requests=1, tokens_in=10, tokens_out=1)
    ]
    assert usage.used_in_all(conn) == CostSums(requests=3, tokens_in=30, tokens_out=3)
    left = {table: conn.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in UsageTable}
    assert left == {UsageTable.REQUESTS: 1, UsageTable.HOURS: 6, UsageTable.DAYS: 6, UsageTable.WEEKS: 6 + 2}
    names = {row[0] for row in conn.execute("SELECT name FROM usage_names")}
    assert names == {"a1", "default", "large", "ollama"}, "a name nothing is of any more is forgotten"


def test_names_nothing_is_of_any_more_go_in_slices_too(
    conn: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All went in one transaction, which every other write waited for."""
    monkeypatch.setattr(rollups, "PRUNED_AT_ONCE", 5)
    conn.executemany("INSERT INTO usage_names (name, last_day) VALUES (?, 0)", [(f"gone-{no}",) for no in range(12)])
    assert prune(conn, KeptSince(DAY, DAY), now=DAY + DAY_S) == [5, 5, 2]


def test_a_name_only_the_kept_weeks_of_the_box_know_is_kept(conn: sqlite3.Connection) -> None:
    usage.insert(conn, [event(1, backend="gone since")])
    prune(conn, KeptSince(DAY + 2 * WEEK_S, DAY + 2 * WEEK_S), now=DAY + 3 * WEEK_S)
    usage.insert(conn, [event(2, backend="gone since", created_at=DAY + 3.0 * WEEK_S)])
    assert usage.used_in_all(conn).requests == 2
    assert [(cost.key, cost.requests) for cost in usage.usage_by(conn, By.BACKEND, UsageFilter())] == [
        ("gone since", 1)
    ]


def test_what_comes_late_and_is_older_than_what_is_kept_goes_with_the_next_pruning(conn: sqlite3.Connection) -> None:
    kept = KeptSince(DAY + DAY_S, DAY)
    prune(conn, kept, now=DAY + 2 * DAY_S)
    usage.insert(conn, [event(1), event(2, created_at=DAY - 5.0)])
    assert usage.spent_since(conn, DAY + 100).requests == 1
    assert usage.spent_since(conn, 0).requests == 1
    assert prune(conn, kept, now=DAY + 2 * DAY_S)[0] == 2
    assert usage.spent_since(conn, 0).requests == 1
    assert usage.used_in_all(conn).requests == 2


def test_what_was_let_go_does_not_count_as_kept_again(conn: sqlite3.Connection) -> None:
    now = DAY + 10.0 * WEEK_S
    assert let_go(conn, KeptSince(DAY + HOUR_S, DAY), now=now) == rollups.kept(conn) == KeptSince(DAY + HOUR_S, DAY)
    assert let_go(conn, KeptSince(), now=now) == KeptSince(DAY + HOUR_S, DAY)


def test_a_note_of_a_clock_that_was_ahead_is_set_right(conn: sqlite3.Connection) -> None:
    let_go(conn, KeptSince(DAY + 5 * WEEK_S, DAY + 5 * WEEK_S), now=DAY + 50.0 * WEEK_S)
    now = DAY + HOUR_S + 7.0
    assert let_go(conn, KeptSince(), now=now) == KeptSince(DAY + HOUR_S, DAY)


@given(st.floats(0, 1e10), st.integers(0, 4000), st.integers(0, 4000))
def test_sums_are_kept_as_long_as_their_requests(now: float, requests_days: int, sums_days: int) -> None:
    found = keep_from(now, requests_days=requests_days, sums_days=sums_days)
    assert found.sums_from <= found.requests_from
    assert (found.requests_from % HOUR_S, found.sums_from % WEEK_S) == (0, 0)
    assert found.requests_from <= max(0.0, now - requests_days * DAY_S)
    if not requests_days:
        assert found == KeptSince()
