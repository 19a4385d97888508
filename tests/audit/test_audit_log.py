"""The journal: nothing that could not be written is lost, and nothing is told twice."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import Counter
from pathlib import Path

import pytest

from hive.audit import audit_log as journal_module
from hive.audit.audit_log import AuditLog, event_of, transition_of
from hive.domain import Agent, AgentSpec, AgentStatus
from hive.errors import DependencyDown, HiveError
from hive.store import acts, anchors, audit, chain
from hive.store.acts import acts_of
from hive.store.anchors import anchors_of
from hive.store.audit import AuditRecord, Filter
from hive.store.chain import Bad
from hive.store.database import Database
from hive.store.live import Live
from hive.tasks import spawn
from tests.control.held_database import cancelled_while_it_writes

BOB = Agent(id="a1", spec=AgentSpec(name="bob", command=["/bin/true"]), status=AgentStatus.RUNNING)


def became(status: AgentStatus, before: Agent = BOB, reason: str = "") -> Agent:
    return Agent(id="a1", spec=before.spec, status=status, generation=before.generation + 1, since=9.5, reason=reason)


def test_a_transition_is_one_event_with_a_documented_shape() -> None:
    assert event_of(transition_of(BOB, became(AgentStatus.PAUSING, reason="idle: quiet for 20 s"), "idle")) == {
        "at": 9.5,
        "kind": "agent.pausing",
        "agent": "a1",
        "name": "bob",
        "from": "running",
        "to": "pausing",
        "generation": 1,
        "reason": "idle: quiet for 20 s",
        "actor": "idle",
        "outcome": "ok",
    }


async def test_rows_a_full_disk_did_not_take_are_written_later_in_their_order(
    database: Database, tmp_path: Path
) -> None:
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    journal.note("agent.created", target="a1", detail={"name": "bob"})
    taken = journal.take()
    journal.changed(BOB, became(AgentStatus.PAUSING), "idle")
    journal.give_back(taken)
    kinds = [event["kind"] for event in await journal.past(10)]
    assert kinds == ["agent.created", "agent.pausing"]
    assert [event["kind"] for event in await journal.past(1)] == ["agent.pausing"]
    assert repr(journal) == "<AuditLog 0 unwritten>"


async def test_a_database_that_is_gone_keeps_the_rows_for_later(database: Database, tmp_path: Path) -> None:
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    journal.note("backend.up")
    database.close()
    with pytest.raises(DependencyDown):
        await journal.flush()
    assert repr(journal) == "<AuditLog 1 unwritten>"


def noted(database: Database) -> list[int]:
    return [head.id for head in anchors.read(anchors.anchors_of(database.path)).heads]


async def until_noted(database: Database, *expected: int) -> None:
    while noted(database) != list(expected):  # noqa: ASYNC110 - it is written in a thread, for nobody to wait for
        await asyncio.sleep(0.01)


async def test_the_head_is_noted_every_hundred_rows_and_at_the_start_and_the_end(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "hive.daemon")
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    await journal.begin()
    assert noted(database) == []
    for _ in range(99):
        journal.note("backend.up")
    await journal.flush()
    journal.note("backend.up")
    await journal.flush()
    await until_noted(database, 100)
    journal.note("backend.down")
    await journal.close()
    await until_noted(database, 100, 101)
    await journal.close()
    journal.note("backend.up")
    await journal.flush()  # and here it was killed
    later = AuditLog(database, Live(tmp_path / "redis.sock"))
    await later.begin()
    assert noted(database) == [100, 101, 102]
    heads = anchors.read(anchors.anchors_of(database.path)).heads
    assert [line for line in caplog.messages if line.startswith("audit_head ")] == [
        f"audit_head head={head.id}:{head.hash}" for head in heads
    ]


async def test_a_start_on_a_table_that_is_not_as_it_was_noted_says_so_and_forgets_nothing(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    journal.note("backend.up")
    journal.note("backend.down")
    await journal.close()
    await database.write(lambda conn: conn.execute("DELETE FROM audit_log WHERE id = 2"))
    await AuditLog(database, Live(tmp_path / "redis.sock")).begin()
    assert "audit_not_as_noted head=2:" in caplog.text
    assert noted(database) == [2, 1]


async def test_an_order_is_on_the_disk_when_it_was_recorded_and_is_no_event(database: Database, tmp_path: Path) -> None:
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    row = AuditRecord(at=1.0, actor="uid:7", act="order.pause", target="a1", origin="socket", outcome="busy")
    journal.note("backend.up")
    await journal.record(row)
    found = await database.read(lambda conn: audit.page(conn, Filter(), 10))
    assert [entry.row.act for entry in found] == ["order.pause", "backend.up"]
    assert [event["kind"] for event in await journal.past(10)] == ["backend.up"]


async def test_an_order_that_cannot_be_written_is_kept_and_the_log_says_so(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    database.close()
    await journal.record(AuditRecord(at=1.0, actor="uid:7", act="order.stop", target="a1", origin="socket"))
    assert repr(journal) == "<AuditLog 1 unwritten>"
    assert "audit_late act=order.stop actor=uid:7" in caplog.text
    await journal.close()
    assert "audit_lost rows=1" in caplog.text


def ordered(at: float, outcome: str, *, actor: str = "token:viewer", act: str = "order.remove") -> AuditRecord:
    return AuditRecord(at=at, actor=actor, act=act, target="a1", origin="tcp:127.0.0.1", outcome=outcome)


async def test_of_what_one_is_refused_again_and_again_the_first_ten_are_rows_and_the_rest_of_a_minute_is_one(
    database: Database, tmp_path: Path
) -> None:
    """Each was a row: a user without any right wrote 203 a second, and each of them cost a write to the disk."""
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    for number in range(203):
        await journal.record(ordered(60.0 + number / 10, "not_permitted"))
    for number in range(30):
        await journal.record(ordered(60.0 + number, "not_found", act="order.tokens"))
        await journal.record(ordered(60.0 + number, "ok", actor="uid:0"))
        await journal.record(ordered(60.0 + number, "timeout", actor="uid:0"))
        await journal.record(ordered(60.0 + number, "wrong_state", actor="uid:0"))
    await journal.record(ordered(60.0, "not_permitted", actor="token:other"))
    await journal.record(ordered(120.0, "not_permitted"))
    await journal.close()
    entries = [entry.row for entry in await database.read(lambda conn: audit.page(conn, Filter(), 1000))]
    assert Counter((row.actor, row.act, row.outcome) for row in entries) == {
        ("token:viewer", "order.remove", "not_permitted"): 10 + 1 + 1,
        ("token:viewer", "order.tokens", "not_found"): 10 + 1,
        ("uid:0", "order.remove", "ok"): 30,
        ("uid:0", "order.remove", "timeout"): 30,
        ("uid:0", "order.remove", "wrong_state"): 30,
        ("token:other", "order.remove", "not_permitted"): 1,
    }
    again = {row.act: row for row in entries if "refused_again" in row.detail}
    assert {act: row.detail["refused_again"] for act, row in again.items()} == {"order.remove": 193, "order.tokens": 20}
    assert again["order.remove"].detail["outcomes"] == {"not_permitted": 193}
    assert (again["order.remove"].at, again["order.remove"].detail["from"]) == (80.2, 61.0)
    assert (again["order.remove"].target, again["order.remove"].origin) == ("a1", "tcp:127.0.0.1")
    assert await bad_of(database) is None


async def test_the_count_is_written_when_the_minute_is_over(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal_module, "WRITE_S", 0.01)
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    for _ in range(12):
        await journal.record(ordered(time.time() - 120, "not_permitted"))
    running = spawn(journal.run(), name="journal")
    async with asyncio.timeout(60):
        found: list[audit.AuditEntry] = []
        while len(found) < 11:
            found = await database.read(lambda conn: audit.page(conn, Filter(act="order.*"), 100))
    running.cancel()
    assert found[0].row.detail["refused_again"] == 2


async def test_on_a_full_disk_what_agents_do_takes_the_place_of_no_order(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the rows that wait for room in memory the oldest went, whatever they were."""
    monkeypatch.setattr(journal_module, "UNWRITTEN_MAX", 10)
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    database.close()
    for number in range(4):
        await journal.record(ordered(float(number), "ok"))
    for _ in range(50):
        journal.note("backend.up")
        await journal.record(ordered(9.0, "not_permitted"))
    kept = journal.take()
    assert (len(kept), [row.at for row in kept if row.outcome == "ok" and row.act == "order.remove"]) == (
        10,
        [0.0, 1.0, 2.0, 3.0],
    )
    for number in range(15):
        await journal.record(ordered(float(number), "ok"))
    assert [row.at for row in journal.take()] == [float(number) for number in range(5, 15)]


async def test_rows_of_a_month_ago_are_pruned_in_as_many_slices_as_it_takes(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "PRUNED_AT_ONCE", 2)
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    for _ in range(5):
        journal.changed(BOB, became(AgentStatus.PAUSING), "idle")  # in 1970
    journal.note("backend.up")
    await journal.flush()
    assert await journal.prune() == 5
    assert [event["kind"] for event in await journal.past(10)] == ["backend.up"]


async def bad_of(database: Database) -> Bad | None:
    """As `hive audit verify` looks at it."""
    known = anchors.read(anchors_of(database.path))

    def work(conn: sqlite3.Connection) -> Bad | None:
        after = audit.begun_after(conn)
        return chain.verify(
            audit.links(conn),
            known.heads,
            begun_after=after,
            begins_as_noted=known.vouch_for(after),
            numbered_to=audit.numbered_to(conn),
        ).bad

    return await database.read(work)


async def fill(journal: AuditLog, rows: int) -> None:
    for _ in range(rows):
        journal.note("backend.up")
    await journal.flush()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "ROWS_MAX", 50)
    monkeypatch.setattr(audit, "PRUNED_AT_ONCE", 20)
    monkeypatch.setattr("hive.audit.audit_log.ANCHOR_EVERY", 10)


@pytest.mark.usefixtures("small")
async def test_heads_go_with_the_rows_they_are_of_and_what_was_pruned_last_stays_noted(
    database: Database, tmp_path: Path
) -> None:
    """The file grew for ever: 100 bytes for every 100 rows."""
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    for _ in range(6):
        for _ in range(10):
            await fill(journal, 10)
            await asyncio.sleep(0)
        begun = await database.read(audit.begun_after)
        assert await journal.prune() > 0
        assert min(noted(database)) >= begun.id
        assert (await database.read(audit.begun_after)).id in noted(database)
        assert await bad_of(database) is None
    await journal.close()
    assert len(noted(database)) < 40
    assert await bad_of(database) is None


@pytest.mark.usefixtures("small")
async def test_rows_that_somebody_removed_and_called_pruned_are_missed(database: Database, tmp_path: Path) -> None:
    """A chain written anew behind the last head, with a row that says all before was pruned, was believed."""
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    await fill(journal, 45)
    await journal.close()

    def forge(conn: sqlite3.Connection) -> None:
        """Prunes as `prune` does, and notes nothing."""
        audit.prune(conn, audit.head(conn), now=1.0)

    await database.write(forge)
    bad = await bad_of(database)
    assert bad is not None
    assert (bad.id, "no anchor says so" in bad.why) == (46, True)


@pytest.mark.usefixtures("small")
async def test_where_no_head_can_be_noted_nothing_is_pruned(database: Database, tmp_path: Path) -> None:
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    await fill(journal, 70)
    anchors_of(database.path).unlink(missing_ok=True)
    anchors_of(database.path).mkdir()
    with pytest.raises(HiveError, match=r"audit\.heads"):
        await journal.prune()
    assert (await database.read(audit.begun_after)).id == 0


async def test_a_file_of_heads_that_is_gone_is_begun_anew_with_where_the_chain_begins(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a restore, which moves it away."""
    monkeypatch.setattr(audit, "ROWS_MAX", 20)
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    await fill(journal, 30)
    await journal.prune()
    await journal.close()
    begun = await database.read(audit.begun_after)
    anchors_of(database.path).unlink()
    assert await bad_of(database) is None
    later = AuditLog(database, Live(tmp_path / "redis.sock"))
    await later.begin()
    assert f"audit_heads_begun path={anchors_of(database.path)} head=31: nothing vouches" in caplog.text
    assert noted(database) == [begun.id, 31]
    assert await bad_of(database) is None


async def test_what_the_hive_command_did_is_taken_in_at_the_start_and_when_somebody_asks(
    database: Database, tmp_path: Path
) -> None:
    path = acts_of(database.path)

    def tell(target: str) -> None:
        told = acts.new(at=1.0, actor="uid:0", act="set_config", target=target, outcome="ok", detail={})
        acts.append(path, told)

    tell("a")
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    await journal.begin()
    tell("b")
    found = await journal.page(Filter(act="order.*"), 10)
    assert [(entry.row.target, entry.row.origin) for entry in found] == [("b", "cli"), ("a", "cli")]
    assert not path.exists()
    assert await bad_of(database) is None


async def test_rows_that_nothing_takes_along_and_acts_are_written_soon(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acts of Hive alone, like `proxy.lost`, waited in memory for the next change of an agent, and a kill lost them."""
    monkeypatch.setattr("hive.audit.audit_log.WRITE_S", 0.01)
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    running = asyncio.ensure_future(journal.run())
    journal.note("proxy.lost")
    told = acts.new(at=1.0, actor="uid:0", act="restore", target="hive", outcome="ok", detail={})
    acts.append(acts_of(database.path), told)
    while len(await database.read(lambda conn: audit.page(conn, Filter(), 10))) < 2:  # noqa: ASYNC110 - it is not told
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])


async def test_acts_that_cannot_be_taken_in_wait_and_that_is_said_once(
    database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = acts_of(database.path)
    path.mkdir()
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    for _ in range(3):
        await journal.page(Filter(), 10)
    assert caplog.text.count("acts_not_taken_in") == 1
    path.rmdir()
    acts.append(path, acts.new(at=1.0, actor="uid:0", act="x", target="hive", outcome="ok", detail={}))
    assert len(await journal.page(Filter(), 10)) == 1


async def test_who_leaves_while_a_row_is_written_does_not_have_it_written_twice(
    database: Database, tmp_path: Path
) -> None:
    """A client of `/api/events` that left meanwhile gave rows back that were committed all the same."""
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    journal.note("backend.up")
    await cancelled_while_it_writes(database, journal.past(10))
    await journal.flush()
    found = await database.read(lambda conn: audit.page(conn, Filter(), 10))
    assert [entry.row.act for entry in found] == ["backend.up"]


@pytest.mark.parametrize("actor", ["token:ci", "internal", "api-token"])
async def test_what_came_of_an_order_on_tcp_is_not_called_hives_own(
    database: Database, tmp_path: Path, actor: str
) -> None:
    """The order's row had `tcp:<address>`, the transition's `hive`."""
    journal = AuditLog(database, Live(tmp_path / "redis.sock"))
    journal.note("agent.created", target="a1", actor=actor)
    journal.changed(BOB, became(AgentStatus.PAUSING), actor)
    found = await journal.page(Filter(), 10)
    assert [entry.row.origin for entry in found] == ["tcp", "tcp"]
