"""The second copy of agents and tokens: databases really damaged, disks really full, processes really killed."""

# ruff: noqa: ASYNC240 - small files, and nothing else on this loop

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.control import cloud
from hive.control.recorded import PROXY_PORT
from hive.control.runtime_config import PREFIX
from hive.domain import Agent, AgentSpec, AgentStatus, Role, TokenState
from hive.errors import HiveError, StoreFull
from hive.files.audit_check import verify
from hive.files.backup_contents import of_up
from hive.settings.table import Paths
from hive.store import (
    agents,
    anchors,
    anew,
    audit,
    cache_epochs,
    database,
    op_nonces,
    runtime_settings,
    second_copy,
    tokens,
)
from hive.store.anchors import anchors_of
from hive.store.audit import AuditRecord
from hive.store.chain import Head
from hive.store.database import Database, suspect_of
from hive.store.migrations import migrate
from hive.store.runtime_settings import BOOT
from hive.store.second_copy import copy_of, read, rows_of
from hive.store.tokens import StoredToken

RUNNING, PAUSED, STOPPED = AgentStatus.RUNNING, AgentStatus.PAUSED, AgentStatus.STOPPED


def agent(
    name: str, *, serial: int = 1, status: AgentStatus = RUNNING, uid: int | None = None, **spec: object
) -> Agent:
    found = AgentSpec(name=name, command=["x"], **spec)  # type: ignore[arg-type]
    return Agent(id=f"id-{name}", spec=found, token_serial=serial, status=status, uid=uid, created_at=5.0, generation=7)


def token(name: str) -> StoredToken:
    made = {"role": Role.OPERATOR, "created_by": "uid:0", "created_at": 1.0}
    return StoredToken(id=f"t-{name}", name=name, digest=f"digest of {name}", **made)  # type: ignore[arg-type]


async def a_hive(path: Path, *, rows: int = 40) -> Database:
    """Agents that run, sleep and stand; one that was removed; a token, one that was revoked; rows and noted heads."""
    store = Database.open(path)
    for made in (
        agent("ann", serial=3, uid=70000, system_prompt="Be kind.", tenant="t1"),
        agent("bob", status=PAUSED),
        agent("cid", status=STOPPED),
        agent("dan"),
    ):
        await store.write(lambda conn, made=made: agents.insert(conn, made))  # type: ignore[misc]
    for name in ("ci", "old"):
        await store.write(lambda conn, name=name: tokens.add(conn, token(name), now=2.0))  # type: ignore[misc]
    await store.write(lambda conn: runtime_settings.put(conn, BOOT, "boot 1", actor="hive", now=3.0))
    await store.write(lambda conn: agents.remove(conn, "id-dan", now=4.0))
    await store.write(lambda conn: tokens.revoke(conn, "old", now=5.0))
    for number in range(rows):
        row = AuditRecord(at=float(number), actor="uid:0", act="order.stop", target="x" * 500, origin="socket")
        head: Head = await store.write(lambda conn, row=row: audit.append(conn, row))  # type: ignore[misc]
    anchors.append(anchors_of(path), head, now=9.0)
    return store


async def check_it_is_back(store: Database) -> None:
    found = {one.name: one for one in await store.read(agents.all)}
    assert set(found) == {"ann", "bob", "cid"}, "who was removed is not there again"
    assert {name: one.status for name, one in found.items()} == {"ann": RUNNING, "bob": RUNNING, "cid": STOPPED}
    ann = found["ann"]
    assert (ann.token_serial, ann.uid, ann.spec.system_prompt, ann.spec.tenant) == (3, 70000, "Be kind.", "t1")
    assert ann.generation > 1_000_000, "no message of before is newer"
    states = {one.name: one.state(10.0) for one in await store.read(tokens.all)}
    assert states == {"ci": TokenState.LIVE, "old": TokenState.REVOKED}
    assert await store.read(lambda conn: runtime_settings.get(conn, BOOT)) == "boot 1"
    uids = await store.read(lambda conn: conn.execute("SELECT uid, agent_id, freed_at FROM uids").fetchall())
    assert [tuple(row) for row in uids] == [(70000, "id-ann", None)]


def overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(3 * 4096))


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 + 100)


def header_gone(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(bytes(100))


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def text_overwritten(path: Path) -> None:
    """Of a row, and nothing else: no check of SQLite's sees that."""
    content = path.read_bytes()
    assert content.count(b'{"name":"ann"') == 1
    path.write_bytes(content.replace(b'{"name":"ann"', b'\xff\xfename":"ann"'))


DAMAGES = [overwritten, truncated, header_gone, emptied, text_overwritten, os.unlink]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
async def test_whatever_damages_the_database_agents_and_tokens_are_as_they_were(
    tmp_path: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged database was moved aside, and from then on every agent's token was refused."""
    path = tmp_path / "hive.db"
    (await a_hive(path)).close()
    damage(path)
    store = Database.open(path)
    await check_it_is_back(store)
    assert store.loss is not None
    assert (store.loss.copy, store.loss.agents, store.loss.tokens) == ("whole", 3, 2)
    assert [record.levelname for record in caplog.records if "database_damaged" in record.message] == ["CRITICAL"]
    assert bool(list(tmp_path.glob("hive.db.damaged-*"))) == (damage is not os.unlink)
    store.close()
    again = Database.open(path)
    await check_it_is_back(again)
    assert again.loss == store.loss, "it is told until somebody did something about it"
    assert again.loss.is_told(time.time())
    for aside in tmp_path.glob("hive.db.damaged-*"):
        aside.unlink()
    assert again.loss.is_told(again.loss.at + anew.TOLD_S) is False
    assert [one.key for one in await again.read(cache_epochs.epochs)] == ["all"], "flushes that were lost hold"
    again.close()


async def test_the_new_audit_table_follows_the_last_row_that_was_noted_and_verifies(tmp_path: Path) -> None:
    place = of_up(Paths(tmp_path, tmp_path / "run"))
    (await a_hive(place.database)).close()
    noted = max(anchors.read(anchors_of(place.database)).heads)
    overwritten(place.database)
    store = Database.open(place.database)
    for _ in range(3):
        await store.write(lambda conn: audit.append(conn, audit.own("agent.started", 1.0, {})))
    first = (await store.read(lambda conn: audit.page(conn, audit.Filter(), 10)))[-1]
    store.close()
    assert (first.id, first.row.act) == (noted.id + 1, "audit.begun_anew")
    assert (first.row.detail["to"], first.row.detail["hash"]) == noted
    checked = verify(place)
    assert (checked.verdict.bad, checked.verdict.rows, checked.verdict.begun_anew) == (None, 4, 1)


async def test_nobody_can_say_that_rows_went_with_a_damaged_database_behind_a_head_that_is_noted_as_no_beginning(
    tmp_path: Path,
) -> None:
    place = of_up(Paths(tmp_path, tmp_path / "run"))
    (await a_hive(place.database)).close()
    noted = max(anchors.read(anchors_of(place.database)).heads)
    with contextlib.closing(sqlite3.connect(place.database, isolation_level=None)) as conn:
        conn.execute("DELETE FROM audit_log WHERE id > 10")
        audit.go_on_after(conn, noted, {}, now=9.0)
    bad = verify(place).verdict.bad
    assert bad is not None
    assert bad.id == 11


# --- the copy itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:200] + bytes([content[200] ^ 1]) + content[201:],
        lambda content: content[: content[:-1].rfind(b"\n") + 1],
        lambda content: bytes(50) + content[50:],
        lambda content: b"",
    ],
    ids=["a bit", "its last line", "its seal", "all of it"],
)
async def test_a_copy_that_is_not_whole_is_not_used_and_that_is_told(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    """A right may have been taken away in what is missing of it."""
    path = tmp_path / "hive.db"
    (await a_hive(path)).close()
    overwritten(path)
    copy_of(path).write_bytes(damage(copy_of(path).read_bytes()))
    store = Database.open(path)
    assert (await store.read(agents.all), await store.read(tokens.all)) == ([], [])
    assert store.loss is not None
    assert "its second copy is damaged too" in store.loss.kept
    assert len(list(tmp_path.glob("hive.db.damaged-*.second"))) == 1
    store.close()


async def test_beside_a_sound_database_a_damaged_copy_is_written_anew(tmp_path: Path) -> None:
    path = tmp_path / "hive.db"
    (await a_hive(path)).close()
    copy_of(path).write_bytes(b"rubbish")
    Database.open(path).close()
    overwritten(path)
    store = Database.open(path)
    await check_it_is_back(store)
    store.close()


async def test_half_a_line_at_its_end_was_never_answered(tmp_path: Path) -> None:
    path = tmp_path / "hive.db"
    (await a_hive(path)).close()
    with copy_of(path).open("ab") as file:
        file.write(b'0123456789abcdef0123456789abcdef {"commit":99,')
    store = Database.open(path)
    await store.write(lambda conn: tokens.revoke(conn, "ci", now=6.0))
    store.close()
    overwritten(path)
    store = Database.open(path)
    assert {one.name for one in await store.read(agents.all)} == {"ann", "bob", "cid"}
    assert {one.state(9.0) for one in await store.read(tokens.all)} == {TokenState.REVOKED}
    store.close()


ACTS = st.one_of(
    st.tuples(st.just("agent"), st.integers(0, 4)),
    st.tuples(st.just("serial"), st.integers(0, 4)),
    st.tuples(st.just("status"), st.integers(0, 40)),
    st.tuples(st.just("prompt"), st.integers(0, 4)),
    st.tuples(st.just("remove"), st.integers(0, 4)),
    st.tuples(st.just("token"), st.integers(0, 4)),
    st.tuples(st.just("revoke"), st.integers(0, 4)),
    st.tuples(st.just("setting"), st.integers(0, 4)),
    st.tuples(st.just("fail"), st.integers(0, 4)),
)


def act(conn: sqlite3.Connection, kind: str, number: int) -> None:
    name, known = f"n{number}", {one.name: one for one in agents.all(conn)}
    one = known.get(f"n{number % 5}")
    with contextlib.suppress(HiveError, sqlite3.IntegrityError):
        if kind == "agent":
            agents.insert(conn, agent(name))
        elif kind == "remove":
            agents.remove(conn, f"id-{name}", now=1.0)
        elif kind == "token":
            tokens.add(conn, token(name), now=1.0)
        elif kind == "revoke":
            tokens.revoke(conn, name, now=2.0)
        elif kind == "setting":
            runtime_settings.put(conn, (BOOT, PROXY_PORT, "other")[number % 3], name, actor="x", now=1.0)
        elif one is not None:
            changes = {
                "serial": lambda one: msgspec.structs.replace(one, token_serial=one.token_serial + 1),
                "status": lambda one: msgspec.structs.replace(one, status=list(AgentStatus)[number % 9]),
                "prompt": lambda one: msgspec.structs.replace(
                    one, spec=msgspec.structs.replace(one.spec, system_prompt=None if number % 2 else "p")
                ),
                "fail": lambda one: msgspec.structs.replace(one, token_serial=99),
            }
            agents.update(conn, changes[kind](one))
    if kind == "fail":
        raise HiveError("undone")


@given(commits=st.lists(st.lists(ACTS, max_size=5), max_size=8))
def test_after_every_commit_it_says_what_the_database_does(commits: list[list[tuple[str, int]]]) -> None:
    conn = sqlite3.connect(":memory:", isolation_level=None)
    conn.row_factory = sqlite3.Row
    migrate(conn)
    with contextlib.closing(conn), pytest.MonkeyPatch.context() as patch, scratch() as path:
        patch.setattr(second_copy, "COMPACT_BYTES", 2000)
        copy = second_copy.SecondCopy(path, conn)
        copy.begin(conn)
        found = None
        for works in commits:
            conn.execute("BEGIN IMMEDIATE")
            for kind, number in works:
                conn.execute("SAVEPOINT work")
                try:
                    act(conn, kind, number)
                except HiveError:
                    conn.execute("ROLLBACK TO work")
                conn.execute("RELEASE work")
            copy.append(conn)
            conn.execute("COMMIT")
            copy.settle()
            copy.tidy(conn)
            found, why = read(path)
            assert found is not None, why
            assert second_copy.says(conn, found)
            assert second_copy.mark_of(conn) == (found.name, found.commit)
        before = rows_of(conn)
        for table in ("agents", "agent_prompts", "api_tokens", "runtime_settings", "uids"):
            conn.execute(f"DELETE FROM {table}")
        second_copy.put_back(conn, dict(found.rows) if found is not None else {}, now=1.0)
        assert not commits or rows_of(conn) == before
        copy.close()


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory, "second")


async def test_sleeping_waking_and_usage_write_nothing_to_it(tmp_path: Path) -> None:
    """Else each of them would cost another write to the disk."""
    store = await a_hive(tmp_path / "hive.db")
    content = copy_of(store.path).read_bytes()
    for status in (AgentStatus.PAUSING, PAUSED, AgentStatus.RESUMING, RUNNING):
        changed = msgspec.structs.replace(agent("ann", serial=3, uid=70000, tenant="t1"), status=status, generation=9)
        changed = msgspec.structs.replace(changed, spec=msgspec.structs.replace(changed.spec, system_prompt="Be kind."))
        await store.write(lambda conn, changed=changed: agents.update(conn, changed))  # type: ignore[misc]
    await store.write(lambda conn: agents.touch(conn, {"id-ann": 5.0}))
    await store.write(lambda conn: tokens.used(conn, {"t-ci": 5.0}))
    assert copy_of(store.path).read_bytes() == content
    store.close()


async def test_it_does_not_grow_with_every_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(second_copy, "COMPACT_BYTES", 8000)
    monkeypatch.setattr(second_copy, "AHEAD_BYTES", 1000)
    store = await a_hive(tmp_path / "hive.db")
    for serial in range(4, 200):
        changed = agent("ann", serial=serial, uid=70000, tenant="t1", system_prompt="Be kind.")
        await store.write(lambda conn, changed=changed: agents.update(conn, changed))  # type: ignore[misc]
    assert copy_of(store.path).stat().st_size < 16000
    found, why = read(copy_of(store.path))
    assert found is not None, why
    assert found.rows["agents", "id-ann"]["token_serial"] == 199
    store.close()


@pytest.mark.root
async def test_on_a_full_disk_nothing_is_changed_that_it_does_not_say(small_disk: Path) -> None:
    store = Database.open(small_disk / "hive.db")
    await store.write(lambda conn: tokens.add(conn, token("ci"), now=1.0))
    with contextlib.suppress(OSError), (small_disk / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    results = await asyncio.gather(
        *(
            store.write(lambda conn, n=n: agents.insert(conn, agent(f"a{n}", system_prompt="x" * 3000)))  # type: ignore[misc]
            for n in range(20)
        ),
        return_exceptions=True,
    )
    assert StoreFull in {type(result) for result in results}
    (small_disk / "filler").unlink()
    await store.write(lambda conn: tokens.revoke(conn, "ci", now=2.0))
    found, why = read(copy_of(store.path))
    assert found is not None, why
    assert await store.read(lambda conn: second_copy.says(conn, found))
    assert found.count("agents") == results.count(None)
    store.close()


CHANGER = """
import asyncio, os, sys
from pathlib import Path
from tests.store.test_second_copy import agent, token
from hive.store import agents, tokens
from hive.store.database import Database

async def main(path):
    store = Database.open(Path(path))
    for number in range(10_000):
        name = f"n{number}"
        await store.write(lambda conn: (agents.insert(conn, agent(name)), tokens.add(conn, token(name), now=1.0)))
        os.write(1, b"c")
        await store.write(lambda conn: tokens.revoke(conn, name, now=2.0))
        os.write(1, b"r")
        if number % 2:
            await store.write(lambda conn: agents.remove(conn, f"id-{name}", now=3.0))
            os.write(1, b"x")

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.breadth(2)
@pytest.mark.parametrize("answered", [1, 2, 5, 44, 333])
async def test_after_kill_9_and_a_damaged_database_all_is_there_that_was_said_and_nothing_that_was_taken_back(
    tmp_path: Path, answered: int
) -> None:
    path = tmp_path / "hive.db"
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", CHANGER, str(path)),
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert process.stdout is not None
    said = (await process.stdout.readexactly(answered)).decode()
    process.send_signal(signal.SIGKILL)
    said += (await process.stdout.read()).decode()
    await process.wait()
    header_gone(path)
    store = Database.open(path)
    there = {one.name for one in await store.read(agents.all)}
    states = {one.name: one.state(9.0) for one in await store.read(tokens.all)}
    number, expected, revoked = 0, set(), set()
    for word in said:
        name = f"n{number}"
        if word == "c":
            expected.add(name)
        elif word == "r":
            revoked.add(name)
            number += number % 2 == 0
        else:
            expected.discard(name)
            number += 1
    last = f"n{number}"  # of the one that was under way more may have been done than was said
    assert expected - {last} <= there <= expected | {last}
    assert {name for name, state in states.items() if state is TokenState.REVOKED} - {last} == revoked - {last}
    assert revoked <= {name for name, state in states.items() if state is TokenState.REVOKED}
    store.close()


# --- a database that lost its last changes -------------------------------------------------------------------------


async def killed_with_a_log(path: Path) -> None:
    """A Hive whose last changes are in the write-ahead log alone, and that has ended without closing anything."""
    store = await a_hive(path, rows=1)
    await store.write(lambda conn: op_nonces.make_box(conn, "box-1", 5.0))
    store.close()
    store = Database.open(path)
    await store.write(lambda conn: op_nonces.use(conn, "n1", "model-load", "ann", now=6.0, keep_until=900.0))
    await store.write(lambda conn: tokens.revoke(conn, "ci", now=6.0))
    await store.write(lambda conn: agents.remove(conn, "id-bob", now=6.0))
    for _ in range(5):
        head: Head = await store.write(lambda conn: audit.append(conn, audit.own("order.revoke", 7.0, {})))
    anchors.append(anchors_of(path), head, now=9.0)
    kept = {name: path.with_name(name).read_bytes() for name in ("hive.db", "hive.db-wal", "hive.db.second")}
    store.close()
    for name, content in kept.items():
        path.with_name(name).write_bytes(content)


@pytest.mark.parametrize("damage", [os.unlink, overwritten, emptied], ids=["gone", "overwritten", "emptied"])
async def test_a_damaged_write_ahead_log_revives_no_right(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """SQLite takes such a database for sound: it only is the one of some minutes before."""
    place = of_up(Paths(tmp_path, tmp_path / "run"))
    path = place.database
    await killed_with_a_log(path)
    damage(path.with_name("hive.db-wal"))
    store = Database.open(path)
    assert {one.name for one in await store.read(agents.all)} == {"ann", "cid"}
    assert {one.state(9.0) for one in await store.read(tokens.all)} == {TokenState.REVOKED}
    assert store.loss is not None
    assert store.loss.is_rollback
    assert store.loss.is_told(time.time())
    assert await store.read(op_nonces.box) is None, "the token that was used would be good again at box-1"
    await store.write(lambda conn: audit.append(conn, audit.own("order.stop", 9.0, {})))
    store.close()
    checked = verify(place).verdict
    assert (checked.bad, checked.begun_anew) == (None, 1)


async def before_the_last_commit(path: Path, *, is_settled: bool) -> None:
    """A database without its last commit, which revoked a token, and the copy that has it: as after the loss of the end
    of a write-ahead log, or, not settled, as a daemon leaves it that was killed before the commit."""
    store = await a_hive(path, rows=1)
    await store.write(lambda conn: op_nonces.make_box(conn, "box-1", 5.0))
    store.close()
    before, copy = path.read_bytes(), path.with_name("hive.db.second")
    sealed = copy.read_bytes().partition(b"\n")[0]
    store = Database.open(path)
    await store.write(lambda conn: tokens.revoke(conn, "ci", now=6.0))
    store.close()
    path.write_bytes(before)
    if not is_settled:
        copy.write_bytes(sealed + copy.read_bytes()[len(sealed) :])


async def test_a_single_commit_that_is_lost_is_told(tmp_path: Path) -> None:
    """One alone was taken for that of a daemon that was killed, and a token that it had used was good again."""
    path = tmp_path / "hive.db"
    await before_the_last_commit(path, is_settled=True)
    store = Database.open(path)
    assert {one.state(9.0) for one in await store.read(tokens.all)} == {TokenState.REVOKED}
    assert store.loss is not None
    assert (store.loss.is_rollback, store.loss.why) == (True, "1 commit")
    assert await store.read(op_nonces.box) is None
    store.close()
    again = Database.open(path)
    assert again.loss == store.loss, "told once, not found anew at each start"
    again.close()


async def test_a_lost_commit_of_an_op_token_alone_is_told_and_the_token_stays_used(tmp_path: Path) -> None:
    path = tmp_path / "hive.db"
    store = await a_hive(path, rows=1)
    await store.write(lambda conn: op_nonces.make_box(conn, "box-1", 5.0))
    store.close()
    before = path.read_bytes()
    store = Database.open(path)
    await store.write(lambda conn: op_nonces.use(conn, "n1", "model-load", "ann", now=6.0, keep_until=900.0))
    store.close()
    path.write_bytes(before)
    store = Database.open(path)
    assert store.loss is not None
    assert store.loss.is_rollback
    assert await store.read(lambda conn: op_nonces.is_used(conn, "n1"))
    assert await store.read(op_nonces.box) is None
    store.close()


async def test_a_commit_that_a_killed_daemon_did_not_get_to_is_no_loss(tmp_path: Path) -> None:
    path = tmp_path / "hive.db"
    await before_the_last_commit(path, is_settled=False)
    store = Database.open(path)
    assert {one.state(9.0) for one in await store.read(tokens.all)} == {TokenState.REVOKED}, "the copy has it"
    assert store.loss is None
    box = await store.read(op_nonces.box)
    assert box is not None
    assert box.id == "box-1"
    store.close()


async def test_a_daemon_that_was_killed_lost_nothing_and_nothing_is_told(tmp_path: Path) -> None:
    path = tmp_path / "hive.db"
    await killed_with_a_log(path)
    store = Database.open(path)
    assert {one.name for one in await store.read(agents.all)} == {"ann", "cid"}
    assert store.loss is None
    box = await store.read(op_nonces.box)
    assert box is not None
    assert (box.id, await store.read(lambda conn: op_nonces.is_used(conn, "n1"))) == ("box-1", True)
    store.close()


async def test_a_database_put_there_by_hand_is_the_truth(tmp_path: Path) -> None:
    """As one that `hive restore` put there: the copy of another one is written anew."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    (await a_hive(tmp_path / "a" / "hive.db")).close()
    other = Database.open(tmp_path / "b" / "hive.db")
    await other.write(lambda conn: agents.insert(conn, agent("zoe")))
    other.close()
    (tmp_path / "b" / "hive.db").rename(tmp_path / "a" / "hive.db")
    anchors_of(tmp_path / "a" / "hive.db").unlink()
    store = Database.open(tmp_path / "a" / "hive.db")
    assert [one.name for one in await store.read(agents.all)] == ["zoe"]
    found, _ = read(copy_of(store.path))
    assert found is not None
    assert found.count("agents") == 1
    store.close()


async def test_a_large_database_found_damaged_while_it_is_open_is_begun_anew_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was not looked through at the start, because that would take too long, and so never moved aside."""
    monkeypatch.setattr(database, "CHECKED_BYTES", 0)
    path = tmp_path / "hive.db"
    (await a_hive(path, rows=2000)).close()
    size = path.stat().st_size
    with path.open("r+b") as file:
        file.seek(size // 2)
        file.write(b"\xff" * (size // 2))
    store = Database.open(path)
    with pytest.raises(HiveError, match="damaged"):
        await store.read(lambda conn: [*audit.links(conn)])
    assert (store.is_suspect, suspect_of(path).exists()) == (True, True)
    store.close()
    again = Database.open(path)
    await check_it_is_back(again)
    assert (again.is_suspect, suspect_of(path).exists(), again.loss is not None) == (False, False, True)
    again.close()


def test_the_settings_it_keeps_are_those_that_the_daemon_means() -> None:
    assert set(second_copy.SETTINGS_KEPT) == {BOOT, PROXY_PORT, PREFIX + cloud.SETTING, cloud.SEEDED}


@pytest.mark.parametrize("step", ["_make", "append", "link", "rename", "sync"])
async def test_a_start_that_is_killed_while_it_begins_anew_is_finished_by_the_next(
    tmp_path: Path, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hive.db"
    (await a_hive(path)).close()
    overwritten(path)

    class Killed(BaseException):
        pass

    def die(*_: object, **__: object) -> None:
        raise Killed

    places: dict[str, ModuleType] = {"append": anchors, "link": os, "rename": os}
    with monkeypatch.context() as patch:
        patch.setattr(places.get(step, anew), step, die)
        with pytest.raises(Killed):
            Database.open(path)
    store = Database.open(path)
    await check_it_is_back(store)
    assert store.loss is not None
    store.close()
    assert not list(tmp_path.glob(".hive*"))
