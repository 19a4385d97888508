"""The audit table: a chain that stays one while rows come, the oldest go, and writers are killed."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hive.store import anchors, audit, chain
from hive.store.audit import KEPT_S, AuditRecord, Filter
from hive.store.chain import PRUNED, TAKEN_IN, ChainVerdict, Head
from hive.store.database import Database
from hive.store.migrations import STEPS, migrate

NOW = 2 * KEPT_S
WRITER = """
import asyncio, sys
from pathlib import Path
from hive.store import audit
from hive.store.audit import AuditRecord
from hive.store.database import Database

async def write():
    database = Database.open(Path(sys.argv[1]))
    row = AuditRecord(at=1.0, actor="uid:0", act="agent.paused", target="a1", origin="socket")
    while True:
        heads = await asyncio.gather(*(database.write(lambda conn: audit.append(conn, row)) for _ in range(7)))
        print(max(heads)[0], flush=True)

asyncio.run(write())
"""
"""Says the number of a row once it is on the disk."""


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "ROWS_MAX", 8)
    monkeypatch.setattr(audit, "PRUNED_AT_ONCE", 3)


def row_at(at: float, act: str = "agent.created") -> AuditRecord:
    return AuditRecord(at=at, actor="uid:0", act=act, target=str(at), origin="socket")


async def add(database: Database, *ats: float) -> Head:
    def work(conn: sqlite3.Connection) -> Head:
        return [audit.append(conn, row_at(at)) for at in ats][-1]

    return await database.write(work)


@pytest.fixture
def prune(database: Database) -> Callable[[], object]:
    def work(conn: sqlite3.Connection) -> int:
        to = audit.prunable(conn, now=float(NOW))
        return 0 if to is None else audit.prune(conn, to, now=float(NOW))

    return lambda: database.write(work)


async def left(database: Database) -> list[float]:
    """Times of the rows that are events."""
    return [row.at for row in await database.read(lambda conn: audit.tail(conn, 100))]


def looked_at(conn: sqlite3.Connection, *heads: Head) -> ChainVerdict:
    return chain.verify(
        audit.links(conn), heads, begun_after=audit.begun_after(conn), numbered_to=audit.numbered_to(conn)
    )


async def verdict_of(database: Database, *heads: Head) -> ChainVerdict:
    return await database.read(lambda conn: looked_at(conn, *heads))


async def do(database: Database, *statements: str) -> None:
    """Runs statements as a person with sqlite3 does."""
    for statement in statements:
        await database.write(lambda conn, statement=statement: conn.execute(statement))  # type: ignore[misc]


# --- pruning -------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small")
async def test_what_is_too_old_goes_in_slices(database: Database, prune: Callable[..., object]) -> None:
    await add(database, 1.0, 2.0, 3.0, 4.0, NOW - KEPT_S - 0.1, NOW - KEPT_S, NOW)
    assert [await prune(), await prune(), await prune()] == [3, 2, 0]  # type: ignore[misc]
    assert await left(database) == [NOW - KEPT_S, NOW]


@pytest.mark.usefixtures("small")
async def test_an_old_row_behind_a_young_one_stays_until_that_goes(
    database: Database, prune: Callable[..., object]
) -> None:
    """The host's clock was set back: what is left has no gap."""
    await add(database, 1.0, NOW, 2.0)
    assert [await prune(), await prune()] == [1, 0]  # type: ignore[misc]
    assert await left(database) == [NOW, 2.0]


@pytest.mark.usefixtures("small")
async def test_beyond_their_number_the_oldest_go_however_young(
    database: Database, prune: Callable[..., object]
) -> None:
    """The row that says so is a row too."""
    await add(database, *(NOW + number for number in range(13)))
    assert [await prune(), await prune(), await prune(), await prune()] == [3, 3, 2, 0]  # type: ignore[misc]
    assert await left(database) == [NOW + number for number in range(8, 13)]
    verdict = await verdict_of(database)
    assert (verdict.rows, verdict.bad) == (8, None)


@pytest.mark.usefixtures("small")
async def test_an_empty_table_has_nothing_to_prune_and_numbers_are_not_used_again(
    database: Database, prune: Callable[..., object]
) -> None:
    assert await prune() == 0  # type: ignore[misc]
    await add(database, 1.0)
    assert await prune() == 1  # type: ignore[misc]
    await add(database, NOW)
    found = await database.read(lambda conn: conn.execute("SELECT id, act FROM audit_log").fetchall())
    assert [tuple(row) for row in found] == [(2, PRUNED), (3, "agent.created")]


@pytest.mark.usefixtures("small")
async def test_what_is_left_after_pruning_is_a_whole_chain_and_no_other_beginning_is(
    database: Database, prune: Callable[..., object]
) -> None:
    noted = await add(database, 1.0, 2.0)
    await add(database, 3.0, 4.0, NOW, NOW + 1)
    while await prune():  # type: ignore[misc]
        assert (await verdict_of(database, noted)).bad is None
    first = await database.read(lambda conn: next(audit.links(conn)))
    assert first.id == 5
    await do(
        database,
        "DELETE FROM audit_log WHERE id = 5",
        f"UPDATE audit_pruned SET id = 5, hash = '{first.hash}'",
    )
    bad = (await verdict_of(database)).bad
    assert bad is not None
    assert (bad.id, "no row of the chain says so" in bad.why) == (6, True)


def order(at: float, act: str = "order.stop", outcome: str = "ok") -> AuditRecord:
    return AuditRecord(at=at, actor="uid:0", act=act, target=f"t{at}", origin="socket", outcome=outcome)


async def prune_all(database: Database) -> None:
    """As the journal does it; what went is noted outside."""
    orders_from: int | None = None

    def work(conn: sqlite3.Connection) -> Head | None:
        to = audit.prunable(conn, now=float(NOW))
        if to is not None:
            audit.prune(conn, to, now=float(NOW), orders_from=orders_from)
        return to

    while await database.read(lambda conn: audit.prunable(conn, now=float(NOW))) is not None:
        if orders_from is None:
            orders_from = await database.read(audit.kept_orders_from)
        await database.write(work)


@pytest.mark.parametrize(
    "flood",
    [row_at(NOW, "agent.paused"), order(NOW, "order.remove", "not_permitted"), order(NOW, "order.tokens", "not_found")],
    ids=["transitions", "refused orders", "refused questions for secrets"],
)
async def test_neither_refusals_nor_what_agents_do_take_permitted_orders_away(
    database: Database, monkeypatch: pytest.MonkeyPatch, flood: AuditRecord
) -> None:
    """Somebody who may do nothing pruned a million rows of others away within 82 minutes, and so did agents that slept
    and woke."""
    monkeypatch.setattr(audit, "ROWS_MAX", 40)
    monkeypatch.setattr(audit, "ORDERS_MAX", 20)
    monkeypatch.setattr(audit, "PRUNED_AT_ONCE", 7)
    orders = [order(NOW + number, outcome=("ok", "timeout", "wrong_state")[number % 3]) for number in range(12)]
    for one in orders:
        head = await database.write(lambda conn, one=one: audit.append(conn, one))  # type: ignore[misc]
    for _ in range(6):
        for _ in range(50):
            head = await database.write(lambda conn: audit.append(conn, flood))
        await prune_all(database)
        assert (await verdict_of(database, head)).bad is None
    entries = await database.read(lambda conn: audit.page(conn, Filter(act="order.stop"), 100))
    assert [(entry.row.at, entry.row.target, entry.row.outcome) for entry in reversed(entries)] == [
        (one.at, one.target, one.outcome) for one in orders
    ]
    assert [entry.row.detail["carried"] for entry in reversed(entries)] == list(range(1, 13))
    assert (await verdict_of(database)).rows <= 40


async def test_orders_beyond_their_number_and_their_time_go_like_all_others(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "ROWS_MAX", 40)
    monkeypatch.setattr(audit, "ORDERS_MAX", 5)
    monkeypatch.setattr(audit, "PRUNED_AT_ONCE", 7)
    for number in range(12):
        await database.write(lambda conn, number=number: audit.append(conn, order(NOW + number)))  # type: ignore[misc]
    await database.write(lambda conn: audit.append(conn, order(NOW - KEPT_S - 1)))
    for _ in range(50):
        await database.write(lambda conn: audit.append(conn, row_at(NOW, "agent.paused")))
    await prune_all(database)
    entries = await database.read(lambda conn: audit.page(conn, Filter(act="order.stop"), 100))
    assert [entry.row.at for entry in reversed(entries)] == [NOW + 8, NOW + 9, NOW + 10, NOW + 11]
    assert (await verdict_of(database)).bad is None


# --- the chain -----------------------------------------------------------------------------------------------------


async def test_rows_of_one_commit_are_chained_and_one_that_failed_leaves_no_gap(database: Database) -> None:
    await add(database, 1.0)

    def failing(conn: sqlite3.Connection) -> None:
        audit.append(conn, row_at(9.0))
        raise ValueError

    with pytest.raises(ValueError, match=r"^$"):
        await database.write(failing)
    head = await add(database, 2.0, 3.0)
    verdict = await verdict_of(database)
    assert (verdict.rows, verdict.head, verdict.bad) == (3, head, None)


@pytest.mark.parametrize(
    ("statement", "first"),
    [
        ("UPDATE audit_log SET outcome = 'ok ' WHERE id = 2", 2),
        ("UPDATE audit_log SET at = at + 0.001 WHERE id = 3", 3),
        ("UPDATE audit_log SET hash = NULL, prev = NULL WHERE id >= 3", 3),
        ("DELETE FROM audit_log WHERE id = 1", 1),
        ("DELETE FROM audit_log WHERE id > 3", 4),
        ("DELETE FROM audit_log", 1),
        (
            "INSERT INTO audit_log SELECT 5, 1.0, actor, act, target, origin, outcome, detail, hash, hash "
            "FROM audit_log WHERE id = 4",
            5,
        ),
        ("INSERT INTO audit_pruned VALUES (1, 9, '')", 10),
    ],
)
async def test_what_a_person_with_sqlite3_does_is_found(database: Database, statement: str, first: int) -> None:
    await add(database, 1.0, 2.0, 3.0, 4.0)
    await do(database, statement)
    bad = (await verdict_of(database)).bad
    assert bad is not None
    assert bad.id == first


async def test_a_row_after_a_cut_off_end_does_not_take_the_number_of_one_that_is_gone(database: Database) -> None:
    await add(database, 1.0, 2.0, 3.0)
    await do(database, "DELETE FROM audit_log WHERE id > 1")
    assert (await add(database, 4.0)).id == 4
    bad = (await verdict_of(database)).bad
    assert bad is not None
    assert bad.id == 2


async def test_rows_of_an_older_hive_are_taken_in_and_that_is_said(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had pruned some, and knew nothing of a chain."""
    monkeypatch.setattr(audit, "TAKEN_IN_AT_ONCE", 2)
    old = "INSERT INTO audit_log (at, actor, act, target, origin, outcome, detail)"
    old += " VALUES (1.0, 'a', 'b', 'c', 'api', '', '{}')"
    await do(database, *[old] * 7, "DELETE FROM audit_log WHERE id < 3")
    head = await database.write(audit.head)
    assert head.id == 8
    verdict = await verdict_of(database)
    assert (verdict.rows, verdict.bad, verdict.taken_in) == (6, None, 5)
    # back to the older one, and here again
    await do(database, old)
    await add(database, 2.0)
    acts = [link.act for link in await database.read(lambda conn: list(audit.links(conn)))]
    assert acts == ["b"] * 5 + [TAKEN_IN, "b", TAKEN_IN, "agent.created"]
    verdict = await verdict_of(database, head)
    assert (verdict.bad, verdict.taken_in, verdict.unanchored) == (None, 6, 3)


def test_after_a_killed_writer_every_row_it_said_was_written_is_in_a_whole_chain(tmp_path: Path) -> None:
    path, said = tmp_path / "hive.db", 0
    for _ in range(3):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE, text=True) as writer:
            assert writer.stdout is not None
            for _ in range(20):
                said = int(writer.stdout.readline())
            writer.kill()
        database = Database.open(path)
        database.close()
        conn = sqlite3.connect(path)
        verdict = looked_at(conn)
        conn.close()
        assert verdict.bad is None
        assert verdict.rows >= said


async def test_ten_thousand_rows_are_looked_at(database: Database) -> None:
    await add(database, *(float(number) for number in range(10_000)))
    began = time.perf_counter()
    verdict = await verdict_of(database)
    print(f"10,000 rows verified in {(time.perf_counter() - began) * 1000:.0f} ms")
    assert (verdict.rows, verdict.bad) == (10_000, None)


# --- what is asked for ---------------------------------------------------------------------------------------------


async def test_rows_are_found_by_agent_actor_act_and_time_and_paged(database: Database) -> None:
    def work(conn: sqlite3.Connection) -> None:
        for number in range(6):
            audit.append(
                conn,
                AuditRecord(
                    at=float(number),
                    actor=f"uid:{number % 2}",
                    act="order.pause" if number < 3 else "agent.paused",
                    target=f"a{number}",
                    origin="socket",
                    detail={"name": "bob"} if number == 5 else {},
                ),
            )

    await database.write(work)

    async def ids(asked: Filter, limit: int = 10) -> list[int]:
        return [entry.id for entry in await database.read(lambda conn: audit.page(conn, asked, limit))]

    assert await ids(Filter()) == [6, 5, 4, 3, 2, 1]
    assert await ids(Filter(before=4), 2) == [3, 2]
    assert await ids(Filter(agent=("a1", "bob"))) == [6, 2]
    assert await ids(Filter(actor="uid:1", act="order.*")) == [2]
    assert await ids(Filter(act="order")) == []
    assert await ids(Filter(since=4.0)) == [6, 5]
    assert await left(database) == [3.0, 4.0, 5.0]


# --- anchors -------------------------------------------------------------------------------------------------------


def test_anchors_are_appended_and_a_torn_line_spoils_no_other(tmp_path: Path) -> None:
    path = anchors.anchors_of(tmp_path / "hive.db")
    one, two = Head(100, "0a" * 32), Head(200, "0b" * 32)
    assert anchors.read(path) == anchors.Anchors([], frozenset(), 0, is_there=False)
    anchors.append(path, one, now=0.0)
    with path.open("ab") as file:
        file.write(b"200 0b0b")
    anchors.append(path, two, now=0.0, is_beginning=True)
    assert anchors.read(path) == anchors.Anchors([one, two], frozenset([two]), 1)
    assert path.read_text().splitlines()[-1] == f"200 {'0b' * 32} 1970-01-01T00:00:00Z pruned"
    assert path.stat().st_mode & 0o777 == 0o600


def test_a_link_in_the_place_of_the_anchors_is_not_followed(tmp_path: Path) -> None:
    path = tmp_path / "audit.heads"
    path.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match="symbolic"):
        anchors.append(path, Head(1, "0a" * 32), now=0.0)
    assert not (tmp_path / "other").exists()


def noted_to(path: Path) -> list[int]:
    return [head.id for head in anchors.read(path).heads]


def test_heads_of_rows_that_are_gone_go_and_nothing_else(tmp_path: Path) -> None:
    path = anchors.anchors_of(tmp_path / "hive.db")
    assert anchors.keep_from(path, 9) == 0
    for number in (100, 200, 150, 300):
        anchors.append(path, Head(number, "0a" * 32), now=0.0)
    with path.open("ab") as file:
        file.write(b"who knows\n")
    before = path.read_bytes().splitlines()
    assert anchors.keep_from(path, 200) == 2
    assert path.read_bytes().splitlines() == [before[1], *before[3:]]
    inode = path.stat().st_ino
    assert anchors.keep_from(path, 200) == 0
    assert path.stat().st_ino == inode, "it is not written for nothing"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in tmp_path.iterdir()] == [path.name]


TRIMMER = """
import os, signal, sys
from pathlib import Path
from hive.store import anchors
at, done = int(sys.argv[2]), [0]
for name in ("open", "unlink", "fsync", "rename"):
    def wrap(real):
        def call(*args, **more):
            done[0] += 1
            if done[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **more)
        return call
    setattr(os, name, wrap(getattr(os, name)))
anchors.keep_from(Path(sys.argv[1]), 50)
"""


def test_who_is_killed_while_heads_go_leaves_all_of_them_or_those_that_stay(tmp_path: Path) -> None:
    path, at, ends = anchors.anchors_of(tmp_path / "hive.db"), 0, set()
    while True:
        at += 1
        path.unlink(missing_ok=True)
        for number in range(100):
            anchors.append(path, Head(number, "0a" * 32), now=0.0)
        code = subprocess.run([sys.executable, "-c", TRIMMER, str(path), str(at)]).returncode
        assert noted_to(path) in (list(range(100)), list(range(50, 100)))
        ends.add(len(noted_to(path)))
        if code == 0:
            break
    assert ends == {100, 50}


# --- at a million rows -----------------------------------------------------------------------------------------------

ROWS = 20_000


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sqlite3.Connection]:
    """Twenty agents that sleep and wake, all but `agent-3` of those removed; the last rows are orders."""
    conn = sqlite3.connect(tmp_path_factory.mktemp("large") / "hive.db", isolation_level=None)
    conn.row_factory = sqlite3.Row
    migrate(conn)
    conn.execute("BEGIN")
    told = [
        (
            float(no),
            "agent.paused" if no < ROWS - 100 else "order.pause",
            f"id-{no % 20}",
            f'{{"name":"agent-{no % 20}"}}',
        )
        for no in range(ROWS)
    ]
    conn.executemany(
        "INSERT INTO audit_log (at, actor, act, target, origin, outcome, detail)"
        " VALUES (?, 'idle', ?, ?, 'hive', 'ok', ?)",
        told,
    )
    conn.execute("COMMIT")
    yield conn
    conn.close()


def steps_of(conn: sqlite3.Connection, work: Callable[[], object]) -> int:
    """The work of SQLite for it, in hundreds of its virtual machine's instructions: no clock is asked."""
    steps = 0

    def count() -> int:
        nonlocal steps
        steps += 1
        return 0

    conn.set_progress_handler(count, 100)
    try:
        work()
    finally:
        conn.set_progress_handler(None, 0)
    return steps


@pytest.mark.parametrize(
    "work",
    [
        lambda conn: audit.tail(conn, 20, "id-of-nobody"),
        lambda conn: audit.tail(conn, 20, "id-3"),
        lambda conn: audit.page(conn, Filter(agent=("nobody",)), 100),
        lambda conn: audit.page(conn, Filter(agent=("id-3", "agent-3")), 100),
        lambda conn: audit.page(conn, Filter(agent=("id-3", "agent-3"), act="agent.*", before=ROWS // 2), 100),
    ],
    ids=["events of nobody", "events of one", "rows of nobody", "rows of one", "rows of one, further back"],
)
def test_rows_of_one_agent_are_found_without_a_look_at_all_others(
    large: sqlite3.Connection, work: Callable[[sqlite3.Connection], object]
) -> None:
    """At a million rows the events of an unknown id took 0.46 s and the rows of a name 6 s, in the one thread all
    reads wait for."""
    assert steps_of(large, lambda: work(large)) < ROWS / 100, "one instruction a row would be more"


def test_rows_by_id_and_by_name_are_each_there_once_the_newest_first(large: sqlite3.Connection) -> None:
    found = audit.page(large, Filter(agent=("id-3", "agent-4", "id-4")), 5)
    assert [entry.row.target for entry in found] == ["id-4", "id-3"] * 2 + ["id-4"]
    further = audit.page(large, Filter(agent=("agent-3",), act="agent.*", since=100.0, before=found[-1].id), 10_000)
    assert [entry.id for entry in further] == [no + 1 for no in range(ROWS - 117, 99, -20)]


def test_a_row_whose_detail_is_no_json_keeps_nobody_from_starting_or_looking(tmp_path: Path) -> None:
    """A forger's: `hive audit verify` names it, and until then the daemon has to run."""
    conn = sqlite3.connect(tmp_path / "hive.db", isolation_level=None)
    migrate(conn, STEPS[:7])
    conn.execute(
        "INSERT INTO audit_log (at, actor, act, target, origin, outcome, detail)"
        " VALUES (1, 'x', 'y', 'a1', 'z', 'ok', 'no JSON')"
    )
    assert migrate(conn) == len(STEPS) - 7
    conn.execute("UPDATE audit_log SET detail = 'nor is this'")
    assert audit.page(conn, Filter(agent=("nobody",)), 10) == []
    conn.close()
