"""The SQLite file: locking, sharing, faults. Everything real, faults through SQLite's and the kernel's own means."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from hive.errors import ConfigError, DependencyDown, NotPermitted, StoreFull, WrongState
from hive.store import database as module
from hive.store import migrations
from hive.store.database import Database


def make_table(conn: sqlite3.Connection) -> None:
    conn.execute("CREATE TABLE t (id INTEGER PRIMARY KEY, text TEXT)")


def count(conn: sqlite3.Connection) -> int:
    return int(conn.execute("SELECT count(*) FROM t").fetchone()[0])


def insert(text: str = "x") -> module.Work[None]:
    def work(conn: sqlite3.Connection) -> None:
        conn.execute("INSERT INTO t (text) VALUES (?)", (text,))

    return work


def fill(path: Path) -> None:
    """Takes the last byte of the file system `path` is on."""
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    assert os.statvfs(path.parent).f_bavail == 0


async def test_what_was_written_is_read_and_survives_a_reopen(tmp_path: Path) -> None:
    path = tmp_path / "hive.db"
    database = Database.open(path)
    await database.write(make_table)
    await database.write(insert())
    database.close()
    again = Database.open(path)
    assert await again.read(count) == 1
    again.close()


async def test_files_are_readable_by_their_owner_only(database: Database) -> None:
    await database.write(make_table)
    modes = {file.name: file.stat().st_mode & 0o777 for file in database.path.parent.iterdir()}
    assert modes == dict.fromkeys(("hive.db", "hive.db-wal", "hive.db-shm", "hive.db.lock", "hive.db.second"), 0o600)


async def test_a_work_that_raises_is_undone_alone_while_its_neighbours_are_committed(database: Database) -> None:
    await database.write(make_table)

    def fails(conn: sqlite3.Connection) -> None:
        conn.execute("INSERT INTO t (text) VALUES ('half')")
        raise KeyError("no")

    results = await asyncio.gather(
        *(database.write(insert()) for _ in range(20)),
        database.write(fails),
        *(database.write(insert()) for _ in range(20)),
        return_exceptions=True,
    )
    assert [type(result) for result in results if result is not None] == [KeyError]
    assert await database.read(count) == 40


async def test_waiting_writes_share_a_commit(database: Database) -> None:
    await database.write(make_table)
    commits: list[str] = []
    database._writer.set_trace_callback(lambda sql: commits.append(sql) if sql == "COMMIT" else None)
    gate = threading.Event()
    first = asyncio.ensure_future(database.write(lambda conn: gate.wait(60)))
    await asyncio.sleep(0.05)
    others = [asyncio.ensure_future(database.write(insert())) for _ in range(30)]
    await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(first, *others)
    assert len(commits) == 2
    assert await database.read(count) == 30


async def test_three_concurrent_writers_lose_no_update(database: Database) -> None:
    await database.write(lambda conn: conn.execute("CREATE TABLE n (value INTEGER)") and None)
    await database.write(lambda conn: conn.execute("INSERT INTO n VALUES (0)") and None)

    def add_one(conn: sqlite3.Connection) -> None:
        value = conn.execute("SELECT value FROM n").fetchone()[0]
        conn.execute("UPDATE n SET value = ?", (value + 1,))

    async def writer() -> None:
        for _ in range(100):
            await database.write(add_one)

    await asyncio.gather(writer(), writer(), writer())
    assert await database.read(lambda conn: conn.execute("SELECT value FROM n").fetchone()[0]) == 300


async def test_reading_before_writing_does_not_fall_into_the_snapshot_trap(database: Database) -> None:
    """A deferred transaction that reads, then writes after a foreign commit, fails at once whatever its timeout."""
    await database.write(make_table)

    def foreign_insert() -> None:
        foreign = sqlite3.connect(database.path, timeout=5)
        foreign.execute("INSERT INTO t (text) VALUES ('foreign')")
        foreign.commit()
        foreign.close()

    trapped = sqlite3.connect(database.path, timeout=5, isolation_level=None)
    trapped.execute("BEGIN")
    trapped.execute("SELECT count(*) FROM t").fetchone()
    foreign_insert()
    with pytest.raises(sqlite3.OperationalError, match="locked"):
        trapped.execute("INSERT INTO t (text) VALUES ('x')")
    trapped.close()

    foreign = threading.Thread(target=foreign_insert)

    def read_then_write(conn: sqlite3.Connection) -> None:
        count(conn)
        foreign.start()
        foreign.join(0.2)  # it waits for this transaction, so it cannot have committed
        assert foreign.is_alive()
        conn.execute("INSERT INTO t (text) VALUES ('x')")

    await database.write(read_then_write)
    await asyncio.to_thread(foreign.join)
    assert await database.read(count) == 3


async def test_a_foreign_writer_that_stays_is_a_clear_error(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    await database.write(make_table)
    await database.write(lambda conn: conn.execute("PRAGMA busy_timeout = 50") and None)
    foreign = sqlite3.connect(database.path, isolation_level=None)
    foreign.execute("BEGIN IMMEDIATE")
    with pytest.raises(DependencyDown, match=r"keeps .* locked"):
        await database.write(insert())
    foreign.execute("ROLLBACK")
    foreign.close()
    await database.write(insert())
    assert await database.read(count) == 1


def test_a_second_daemon_is_told_who_holds_the_database(tmp_path: Path) -> None:
    program = (
        "import sys, pathlib, hive.store.database as d; base = d.Database.open(pathlib.Path(sys.argv[1]));"
        "print('open', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "hive.db")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(WrongState, match=rf"in use by process {holder.pid}\b"):
            Database.open(tmp_path / "hive.db")
    finally:
        holder.kill()
        holder.wait()
        holder.stdin.close()
        holder.stdout.close()
    Database.open(tmp_path / "hive.db").close()  # the lock died with its holder


async def test_a_full_database_fails_the_write_that_did_not_fit_and_works_again_with_room(database: Database) -> None:
    await database.write(make_table)
    pages = await database.read(lambda conn: conn.execute("PRAGMA page_count").fetchone()[0])
    await database.write(lambda conn: conn.execute(f"PRAGMA max_page_count = {pages}").fetchall())
    with pytest.raises(StoreFull) as caught:
        await database.write(insert("x" * 100_000))
    assert "free some space" in caught.value.hint
    await database.write(lambda conn: conn.execute("PRAGMA max_page_count = 100000").fetchall())
    await database.write(insert("x" * 100_000))
    assert await database.read(count) == 1


async def test_a_write_that_does_not_fit_does_not_fail_the_others_of_its_commit(database: Database) -> None:
    await database.write(make_table)
    pages = await database.read(lambda conn: conn.execute("PRAGMA page_count").fetchone()[0])
    await database.write(lambda conn: conn.execute(f"PRAGMA max_page_count = {pages}").fetchall())
    gate = threading.Event()
    first = asyncio.ensure_future(database.write(lambda conn: gate.wait(60)))
    await asyncio.sleep(0.05)
    texts = ["small", "x" * 100_000, "small"]
    works = [asyncio.ensure_future(database.write(insert(text))) for text in texts]
    await asyncio.sleep(0)
    gate.set()
    await first
    results = await asyncio.gather(*works, return_exceptions=True)
    assert [type(result).__name__ for result in results] == ["NoneType", "StoreFull", "NoneType"]
    assert await database.read(count) == 2


@pytest.mark.root
async def test_on_a_full_disk_nothing_is_damaged_and_freed_space_is_used(small_disk: Path) -> None:
    database = Database.open(small_disk / "hive.db")
    await database.write(make_table)
    fill(small_disk / "filler")
    works = [database.write(insert("x" * 3000)) for _ in range(200)]
    results = await asyncio.gather(*works, return_exceptions=True)
    assert {type(result) for result in results} - {type(None)} == {StoreFull}
    (small_disk / "filler").unlink()
    await database.write(insert("x" * 3000))
    assert await database.read(count) == results.count(None) + 1
    assert await database.read(lambda conn: conn.execute("PRAGMA quick_check").fetchone()[0]) == "ok"
    database.close()


@pytest.mark.root
def test_a_full_disk_at_the_start_is_a_clear_error(small_disk: Path) -> None:
    fill(small_disk / "filler")
    with pytest.raises(StoreFull, match="is full"):
        Database.open(small_disk / "hive.db")
    assert not (small_disk / "hive.db").exists()


@pytest.mark.root
def test_a_disk_that_has_no_room_for_the_shared_memory_is_full_too(small_disk: Path) -> None:
    """Some KiB were free, so SQLite said `disk I/O error` and `hive up` ended with exit code 1 and no hint."""
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    (small_disk / "fill").write_bytes(bytes(free - 24 * 1024))
    with pytest.raises(StoreFull):
        Database.open(small_disk / "hive.db")


def test_a_damaged_database_is_moved_aside_and_a_new_one_begun(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "hive.db"
    Database.open(path).close()
    with path.open("r+b") as file:
        file.seek(4096)
        file.write(os.urandom(8192))
    Database.open(path).close()
    assert [record.levelname for record in caplog.records if "database_damaged" in record.message] == ["CRITICAL"]
    assert list(tmp_path.glob("hive.db.damaged-*"))


def test_a_file_that_is_no_database_is_moved_aside(tmp_path: Path) -> None:
    path = tmp_path / "hive.db"
    path.write_bytes(b"this is a letter to my grandmother" * 100)
    Database.open(path).close()
    (aside,) = tmp_path.glob("hive.db.damaged-*")
    assert aside.read_bytes().startswith(b"this is a letter")


def test_a_missing_directory_is_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        Database.open(tmp_path / "not" / "hive.db")
    assert not list(tmp_path.iterdir())


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
@pytest.mark.parametrize("mode", [0o000, 0o500], ids=["unreadable", "read-only"])
def test_a_directory_this_user_may_not_use_is_a_clear_error(short_path: Path, mode: int) -> None:
    state = short_path / "state"
    state.mkdir()
    short_path.chmod(0o755)
    os.chown(state, 65534, 65534)
    state.chmod(mode)
    program = (
        "import os, sys, pathlib\nos.setgid(65534); os.setuid(65534)\n"
        "import hive.errors, hive.store.database as d\n"
        "try: d.Database.open(pathlib.Path(sys.argv[1]))\n"
        "except hive.errors.HiveError as e: print(type(e).__name__, e.exit_code, e.hint)"
    )
    # Imported before the uid is given up would not prove the point less, but the venv must be readable then.
    program = "import hive.errors, hive.store.database\n" + program
    done = subprocess.run(
        [sys.executable, "-c", program, str(state / "hive.db")], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith(f"NotPermitted {NotPermitted.exit_code} check who owns")


def test_a_step_that_fails_leaves_the_version_before_it(tmp_path: Path) -> None:
    conn = sqlite3.connect(tmp_path / "m.db", isolation_level=None)
    steps = ("CREATE TABLE a (x)", "CREATE TABLE c (x)", "CREATE TABLE b (x); CREATE TABLE a (x)")
    with pytest.raises(sqlite3.OperationalError):
        migrations.migrate(conn, steps)
    assert conn.execute("PRAGMA user_version").fetchone() == (0,), "a new one has all steps or none"
    assert conn.execute("SELECT name FROM sqlite_master").fetchall() == []
    assert migrations.migrate(conn, steps[:1]) == 1
    with pytest.raises(sqlite3.OperationalError):
        migrations.migrate(conn, steps)
    assert conn.execute("PRAGMA user_version").fetchone() == (2,)
    assert conn.execute("SELECT name FROM sqlite_master").fetchall() == [("a",), ("c",)]
    assert migrations.migrate(conn, (*steps[:2], "CREATE TABLE b (x)")) == 1
    conn.close()


def test_a_database_of_a_newer_hive_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "hive.db"
    Database.open(path).close()
    conn = sqlite3.connect(path)
    conn.execute("PRAGMA user_version = 999")
    conn.close()
    with pytest.raises(WrongState, match="newer Hive"):
        Database.open(path)


async def test_a_closed_database_says_so(tmp_path: Path) -> None:
    database = Database.open(tmp_path / "hive.db")
    database.close()
    database.close()
    with pytest.raises(DependencyDown):
        await database.write(count)
    with pytest.raises(DependencyDown):
        await database.read(count)
