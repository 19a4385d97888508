"""The view where the daemon is down: SQLite in each state it can be left in, and Redis."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import random
import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.client.client import Client
from hive.control import views
from hive.domain import Agent, AgentSpec, AgentStatus
from hive.errors import DependencyDown, WrongState
from hive.settings.table import Paths
from hive.store import agents, audit, keys
from hive.store.audit import AuditRecord
from hive.store.database import Database, plan_of
from hive.store.migrations import READABLE_FROM, STEPS, migrate
from hive.store.viewer import Viewer
from hive.tui import source as source_module
from hive.tui import stored
from hive.tui.snapshot import Snapshot
from hive.tui.source import Source
from hive.tui.stored import read
from hive.tui.watch import Watch
from tests.control.box import Box
from tests.nobody import run_as_nobody

ANN = Agent(id="id-ann", spec=AgentSpec(name="ann", command=["/bin/true"]), status=AgentStatus.PAUSED, reason="idle")
WRITER = """
import asyncio, sys
from pathlib import Path
from tests.tui.test_source import with_ann
async def main():
    database = await with_ann(Path(sys.argv[1]))
    print("written", flush=True)
    sys.stdin.read()
    database.close()
asyncio.run(main())
"""
AS_NOBODY = """
import os
from pathlib import Path
from hive.errors import HiveError
from hive.tui.source import Source
try:
    snapshot = Source([Path("/nowhere/hive.sock")], Path({0!r}), uid=os.getuid(), env={{}}).look()
    print(*(row.name for row in snapshot.agents), *(event.kind for event in snapshot.events))
except HiveError as error:
    print(type(error).__name__, error.message)
"""


async def with_ann(path: Path) -> Database:
    database = Database.open(path)
    await database.write(lambda conn: agents.insert(conn, ANN))
    act = AuditRecord(
        at=1.7e9, actor="hive", act="agent.paused", target="id-ann", origin="idle", detail={"from": "a", "to": "b"}
    )
    await database.write(lambda conn: audit.append(conn, act))
    return database


@contextlib.contextmanager
def writing(path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has the database open and has written into it; killed in the end."""
    tests = Path(__file__).parents[1]
    with subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path)],
        env={**os.environ, "PYTHONPATH": f"{tests}:{tests.parent}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "written\n"
            yield process
        finally:
            process.kill()


def source_of(directory: Path) -> Source:
    return Source([directory / "hive.sock"], directory, uid=0, env={})


def shown(snapshot: Snapshot) -> tuple[list[str], list[str]]:
    return [row.name for row in snapshot.agents], [event.kind for event in snapshot.events]


WHOLE = (["ann"], ["agent.paused"])

# --- what a daemon leaves ----------------------------------------------------------------------------------------


async def test_a_database_that_was_closed_is_read_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (await with_ann(tmp_path / "hive.db")).close()
    before = sorted(os.listdir(tmp_path))
    snapshot = source_of(tmp_path).look()
    assert [(row.name, row.status, row.why, row.rss_bytes) for row in snapshot.agents] == [
        ("ann", "paused", "idle", None)
    ]
    assert [event.text for event in snapshot.events] == ["ann a → b"]
    assert (snapshot.source, snapshot.is_live) == ("store", False)
    assert snapshot.problems[0].startswith(f"the daemon is down: this is what {tmp_path / 'hive.db'} says")
    assert sorted(os.listdir(tmp_path)) == before


def test_what_a_killed_daemon_left_in_its_wal_is_not_missed_and_stays_for_the_next(tmp_path: Path) -> None:
    with writing(tmp_path / "hive.db") as process:
        process.kill()
        process.wait()
        left = {name: (tmp_path / name).read_bytes() for name in ("hive.db", "hive.db-wal")}
        assert len(left["hive.db-wal"]) > 0
        assert shown(source_of(tmp_path).look()) == WHOLE
        assert {name: (tmp_path / name).read_bytes() for name in left} == left


async def test_while_it_is_written_each_look_shows_one_moment(tmp_path: Path) -> None:
    database = await with_ann(tmp_path / "hive.db")
    bob = msgspec.structs.replace(ANN, id="id-bob", spec=msgspec.structs.replace(ANN.spec, name="bob"))
    await database.write(lambda conn: agents.insert(conn, bob))
    over = asyncio.Event()

    def written(both: list[Agent], conn: sqlite3.Connection) -> None:
        for agent in both:
            agents.update(conn, agent)

    async def write() -> int:
        number = 0
        while not over.is_set():
            number += 1
            both = [msgspec.structs.replace(agent, reason=f"round {number}") for agent in (ANN, bob)]
            await database.write(partial(written, both))
        return number

    writer = asyncio.create_task(write())
    source, seen = source_of(tmp_path), set()
    for _ in range(40):
        rows = (await asyncio.to_thread(source.look)).agents
        assert rows[0].why == rows[1].why
        seen.add(rows[0].why)
    over.set()
    assert await writer >= len(seen) > 1
    database.close()


async def test_it_is_read_again_only_once_it_was_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[Path] = []
    monkeypatch.setattr(stored, "read", lambda path: looks.append(path) or read(path))  # type: ignore[func-returns-value]
    database, source = await with_ann(tmp_path / "hive.db"), source_of(tmp_path)
    for _ in range(3):
        assert shown(source.look()) == WHOLE
    assert len(looks) == 1
    await database.write(lambda conn: agents.update(conn, msgspec.structs.replace(ANN, reason="new")))
    assert source.look().agents[0].why == "new"
    database.close()
    assert source.look().agents[0].why == "new"
    source.look()
    assert len(looks) == 3


async def test_a_wal_that_goes_while_it_is_looked_for_is_none(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite removes it when its last writer closes: between "is it there" and "how large is it" hive top ended."""
    true_exists = os.path.exists
    monkeypatch.setattr(os.path, "exists", lambda path: str(path).endswith("-wal") or true_exists(path))
    assert shown(source_of(directory).look()) == WHOLE


async def test_a_database_of_which_nothing_can_be_said_is_a_daemon_that_is_down(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what went wrong while it was read was caught, not while its age was asked for."""
    true_stat, true_exists = os.stat, os.path.exists

    def broken(path: Any, *rest: Any, **named: Any) -> os.stat_result:
        if str(path).endswith("hive.db-wal"):
            raise OSError(errno.EIO, "Input/output error")
        return true_stat(path, *rest, **named)

    monkeypatch.setattr(os, "stat", broken)
    monkeypatch.setattr(os.path, "exists", lambda path: str(path).endswith("-wal") or true_exists(path))
    assert why_not(directory) == "[Errno 5] Input/output error"


def test_a_watch_that_is_forgotten_meanwhile_is_still_the_one_that_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page asks in one thread while the look in another finds the daemon silent: AttributeError of None."""
    source = source_of(tmp_path)

    class Forgetful:
        """Of a source whose watch is gone the moment it was read once."""

        def __get__(self, it: Any, kind: Any) -> Any:
            found, it.__dict__["kept"] = it.__dict__.get("kept"), None
            return found

        def __set__(self, it: Any, value: Any) -> None:
            it.__dict__["kept"] = value

    monkeypatch.setattr(Source, "_watch", Forgetful(), raising=False)
    source._watch = Watch(Client(tmp_path / "hive.sock"))
    assert source.client.path == tmp_path / "hive.sock"


async def test_a_daemon_that_begins_while_a_whole_database_is_read_costs_another_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "hive.db"
    (await with_ann(path)).close()
    opened: list[bool] = []
    true_read = stored._read
    with contextlib.ExitStack() as stack:

        def begun(path: Path, *, is_whole: bool) -> Any:
            opened.append(is_whole)
            found = true_read(path, is_whole=is_whole)
            if is_whole:
                with sqlite3.connect(path) as conn:
                    conn.execute("UPDATE agents SET reason = 'written meanwhile'")
                stack.callback(conn.close)
            return found

        monkeypatch.setattr(stored, "_read", begun)
        assert read(path)[0][0].reason == "written meanwhile"
    assert opened == [True, False]


# --- without write access ---------------------------------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("state", ["closed", "killed", "living"])
def test_who_may_read_and_not_write_sees_the_same(short_path: Path, state: str) -> None:
    with writing(short_path / "hive.db") as process:
        if state == "closed":
            process.communicate("")
            assert not (short_path / "hive.db-wal").exists()
        elif state == "killed":
            process.kill()
            process.wait()
        for name in ("", *os.listdir(short_path)):
            (short_path / name).chmod(0o755)
        before = sorted(os.listdir(short_path))
        assert run_as_nobody(AS_NOBODY.format(str(short_path))) == "ann agent.paused\n"
        assert sorted(os.listdir(short_path)) == before


@pytest.mark.root
@pytest.mark.parametrize("closed", ["directory", "file"])
def test_who_may_not_read_is_told_so(short_path: Path, closed: str) -> None:
    (short_path / "s").mkdir()
    asyncio.run(with_ann(short_path / "s/hive.db")).close()
    short_path.chmod(0o711)
    (short_path / "s").chmod(0o700 if closed == "directory" else 0o755)
    (short_path / "s/hive.db").chmod(0o600)
    said = run_as_nobody(AS_NOBODY.format(str(short_path / "s")))
    if closed == "directory":
        assert said.startswith("NotPermitted no Hive answers at")
        assert said.endswith(f"and this user may not read {short_path / 's/hive.db'}\n")
    else:
        assert said.startswith(f"DependencyDown the daemon is down, and {short_path / 's/hive.db'} cannot be read: ")


# --- what cannot be read -----------------------------------------------------------------------------------------


@pytest.fixture
async def directory(tmp_path: Path) -> Path:
    """With a database that was closed."""
    (await with_ann(tmp_path / "hive.db")).close()
    return tmp_path


def why_not(directory: Path) -> str:
    with pytest.raises(DependencyDown, match=r"the daemon is down, and .*/hive\.db cannot be read: ") as raised:
        source_of(directory).look()
    assert raised.value.hint
    return raised.value.message.partition(" cannot be read: ")[2]


@pytest.mark.parametrize(
    ("content", "why"),
    [(b"", "it is no database of Hive, or an empty one"), (b"no database at all" * 100, "file is not a database")],
)
def test_a_file_that_is_no_database_is_called_that(tmp_path: Path, content: bytes, why: str) -> None:
    (tmp_path / "hive.db").write_bytes(content)
    assert why_not(tmp_path) == why


def test_a_directory_in_its_place_is_said(tmp_path: Path) -> None:
    (tmp_path / "hive.db").mkdir()
    assert why_not(tmp_path)


def test_a_truncated_one_is_called_malformed(directory: Path) -> None:
    os.truncate(directory / "hive.db", 4096)
    assert why_not(directory) == "database disk image is malformed"


@pytest.mark.parametrize("seed", range(25))
def test_whatever_is_broken_in_it_it_is_said_in_words_or_shown_all_the_same(directory: Path, seed: int) -> None:
    chance = random.Random(seed)
    content = bytearray((directory / "hive.db").read_bytes())
    used = [at for at, byte in enumerate(content) if byte]
    for _ in range(chance.choice((1, 10, 200))):
        content[chance.choice(used)] = chance.randrange(256)
    if chance.random() < 0.3:
        del content[chance.randrange(len(content)) :]
    (directory / "hive.db").write_bytes(content)
    with contextlib.suppress(DependencyDown):
        source_of(directory).look()


async def test_one_that_another_program_has_for_itself_is_called_locked(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stored, "BUSY_S", 0.05)
    database = sqlite3.connect(directory / "hive.db", isolation_level=None)
    database.execute("BEGIN EXCLUSIVE")
    database.execute("UPDATE agents SET reason = 'not committed'")
    assert source_of(directory).look().agents[0].why == "idle"
    database.execute("COMMIT")
    database.close()
    database = sqlite3.connect(directory / "hive.db", isolation_level=None)
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("UPDATE agents SET reason = 'kept'")
    assert (directory / "hive.db-wal").stat().st_size > 0
    assert why_not(directory) == "database is locked"
    database.close()


def test_one_of_a_newer_hive_is_left_to_that(directory: Path) -> None:
    change(directory, "PRAGMA user_version = 99")
    assert why_not(directory) == (f"the database was written by a newer Hive (its version 99, known here {len(STEPS)})")


def test_what_a_newer_hive_only_added_is_not_in_the_way(directory: Path) -> None:
    change(
        directory,
        "ALTER TABLE agents ADD COLUMN mood TEXT NOT NULL DEFAULT 'calm'",
        f"INSERT INTO schema_steps VALUES ({len(STEPS) + 1}, '9.9', 0)",
    )
    assert shown(source_of(directory).look()) == WHOLE


def test_an_agent_only_a_newer_hive_understands_is_said(directory: Path) -> None:
    change(directory, """UPDATE agents SET spec = json_set(spec, '$.runtime', 'quantum')""")
    assert "quantum" in why_not(directory)


def test_one_of_an_older_hive_waits_for_its_daemon(tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "hive.db", isolation_level=None)) as conn:
        migrate(conn, STEPS[:READABLE_FROM])
    assert (
        why_not(tmp_path) == f"it was written by an older Hive (its version {READABLE_FROM}, known here {len(STEPS)})"
    )


def test_half_a_restore_is_shown_to_nobody(directory: Path) -> None:
    plan_of(directory / "hive.db").write_text("{}")
    assert why_not(directory) == "a restore of it was cut short"


def test_a_directory_may_be_named_as_it_likes_and_seen_from_within(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = directory / "a?b#c%20 d"
    odd.mkdir()
    shutil.move(directory / "hive.db", odd / "hive.db")
    monkeypatch.chdir(directory)
    assert shown(Source([odd / "hive.sock"], Path(odd.name), uid=0, env={}).look()) == WHOLE


def change(directory: Path, *statements: str) -> None:
    with contextlib.closing(sqlite3.connect(directory / "hive.db", isolation_level=None)) as conn:
        for statement in statements:
            conn.execute(statement)


# --- what answers, and is no daemon that can be shown ------------------------------------------------------------


def test_without_daemon_and_database_it_is_the_daemon_that_is_named(tmp_path: Path) -> None:
    with pytest.raises(DependencyDown, match="no Hive answers"):
        source_of(tmp_path).look()


def test_a_daemon_that_hangs_is_shown_by_its_database(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source_module, "ANSWER_S", 0.1)
    monkeypatch.setattr("hive.tui.watch.ANSWER_S", 0.1)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(directory / "hive.sock"))
        listener.listen()
        snapshot = source_of(directory).look()
    assert shown(snapshot) == WHOLE
    assert snapshot.problems[0].startswith("the daemon does not answer: this is what ")
    assert not snapshot.is_live


async def test_a_daemon_of_another_version_is_called_that(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    await box.create("ann")
    source, services = source_of(box.paths.runtime), box.services

    def nothing(*_: Any) -> dict[str, Any]:
        return {}

    assert (await asyncio.to_thread(source.look)).is_live
    with monkeypatch.context() as patch:
        patch.setattr(services.counters, "answer", nothing)
        assert (await asyncio.to_thread(source_of(box.paths.runtime).look)).requests is None
    for place, name in ((services.health, "view"), (views, "inference_view"), (views, "memory_view")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, nothing)
            with pytest.raises(WrongState, match="is no Hive of this version") as raised:
                await asyncio.to_thread(source_of(box.paths.runtime).look)
            assert "hive version" in raised.value.hint

    async def changes(since: str, fresh: object) -> dict[str, Any]:
        return {"agents": [{"id": 7}], "gone": [], "cursor": "", "is_whole": True}

    monkeypatch.setattr(services.agent_views, "changes", changes)
    with pytest.raises(WrongState, match="is no Hive of this version"):
        await asyncio.to_thread(source.look)


# --- Redis -------------------------------------------------------------------------------------------------------


@pytest.mark.redis
async def test_redis_knows_what_an_agent_did_since(short_path: Path, redis_server: Any) -> None:
    (await with_ann(short_path / "hive.db")).close()
    assert redis_server.socket == Paths(short_path, short_path).redis_socket
    import redis

    def row(source: Source) -> tuple[bool, int, int, int]:
        found = source.look().agents[0]
        return found.idle_s is not None and 50 <= found.idle_s < 100, found.tokens_in, found.tokens_out, found.requests

    source = source_of(short_path)
    assert row(source) == (False, 0, 0, 0)
    with redis.Redis(unix_socket_path=str(redis_server.socket)) as client:
        client.zadd(keys.AGENTS_ACTIVITY, {"id-ann": time.time() - 60, "id-gone": 1.0})
        client.hset(keys.agent_tokens("id-ann"), mapping={"input": 30, "output": 4, "requests": 2})
    assert row(source) == (True, 30, 4, 2)
    redis_server.kill()
    assert row(source) == (False, 0, 0, 0)
    redis_server.start()
    assert row(source) == (False, 0, 0, 0)


def test_the_connection_to_a_redis_is_closed_before_another_is_asked(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing ever closed one."""
    for name in ("one", "two"):
        (short_path / name).mkdir()
        (short_path / name / "redis.sock").touch()
    told: list[tuple[str, str]] = []
    monkeypatch.setattr(Viewer, "look", lambda it: told.append(("asked", it.socket)))
    monkeypatch.setattr(Viewer, "close", lambda it: told.append(("closed", it.socket)))
    looks = source_module.Stored()
    for name in ("one", "one", "two"):
        looks._seen(Paths(short_path / name, short_path / name))
    one, two = (str(short_path / name / "redis.sock") for name in ("one", "two"))
    assert told == [("asked", one), ("asked", one), ("closed", one), ("asked", two)]
