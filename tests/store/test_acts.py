"""Acts of the `hive` command: each is in the audit table once, though processes are killed meanwhile."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hive.store import acts, audit
from hive.store.acts import UNREADABLE, OfflineAct, acts_of
from hive.store.audit import AuditRecord
from hive.store.database import Database

WRITER = """
import sys
from pathlib import Path
from hive.store import acts
for number in range(60):
    act = acts.new(at=1.0, actor="uid:0", act="x", target=f"{sys.argv[2]}-{number}", outcome="ok", detail={})
    acts.append(Path(sys.argv[1]), act)
"""


def act(target: str, act: str = "set_config") -> OfflineAct:
    return acts.new(at=5.0, actor="uid:0", act=act, target=target, outcome="ok", detail={"file": "/etc/x\x1b"})


async def take_in(database: Database, *, removing: bool = True) -> None:
    """Takes the acts in, as the daemon does."""
    path = acts_of(database.path)
    found = acts.read(path)
    await database.write(lambda conn: acts.take_in(conn, found, now=9.0))
    if removing:
        acts.remove(path, found)


async def rows(database: Database) -> list[AuditRecord]:
    found = await database.read(lambda conn: audit.page(conn, audit.Filter(), 1000))
    return [entry.row for entry in reversed(found)]


async def targets(database: Database) -> list[str]:
    return [row.target for row in await rows(database)]


async def test_an_act_becomes_an_order_with_its_origin_and_the_file_goes(database: Database) -> None:
    path = acts_of(database.path)
    acts.append(path, act("proxy.port"))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    await take_in(database)
    (row,) = await rows(database)
    assert (row.at, row.actor, row.act, row.origin, row.outcome) == (5.0, "uid:0", "order.set_config", "cli", "ok")
    assert row.detail == {"file": "/etc/x\x1b"}
    assert not path.exists()
    await take_in(database)
    assert await targets(database) == ["proxy.port"]


async def test_what_was_taken_in_by_one_who_was_killed_before_he_removed_it_is_not_again(database: Database) -> None:
    path = acts_of(database.path)
    acts.append(path, act("a"))
    acts.append(path, act("b"))
    await take_in(database, removing=False)
    acts.append(path, act("c"))
    await take_in(database, removing=False)
    await take_in(database)
    assert await targets(database) == ["a", "b", "c"]
    assert not path.exists()


async def test_what_is_added_while_the_rest_is_taken_in_stays_for_the_next_time(database: Database) -> None:
    path = acts_of(database.path)
    acts.append(path, act("a"))
    found = acts.read(path)
    await database.write(lambda conn: acts.take_in(conn, found, now=9.0))
    acts.append(path, act("b"))
    assert not acts.remove(path, found)
    await take_in(database)
    assert await targets(database) == ["a", "b"]


async def test_a_torn_line_spoils_no_other_and_is_told(database: Database) -> None:
    path = acts_of(database.path)
    acts.append(path, act("a"))
    with path.open("ab") as file:
        file.write(b'{"id": "torn')
    acts.append(path, act("b"))
    await take_in(database)
    told = await rows(database)
    assert [row.target for row in told] == ["a", "b", "hive"]
    assert (told[2].act, told[2].actor, told[2].detail) == (UNREADABLE, "hive", {"lines": 1})
    assert not path.exists()


def begin_writing(path: Path) -> list[subprocess.Popen[bytes]]:
    return [subprocess.Popen([sys.executable, "-c", WRITER, str(path), str(number)]) for number in range(3)]


async def test_many_write_while_a_daemon_takes_in_and_none_is_lost_or_there_twice(database: Database) -> None:
    writers = begin_writing(acts_of(database.path))
    while any(writer.poll() is None for writer in writers):
        await take_in(database)
        await asyncio.sleep(0.001)
    await take_in(database)
    found = await targets(database)
    assert sorted(found) == sorted(f"{writer}-{number}" for writer in range(3) for number in range(60))
    assert all(writer.returncode == 0 for writer in writers)


def test_too_many_that_no_daemon_takes_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acts, "FILE_MAX_BYTES", 400)
    path = tmp_path / "audit.acts"
    acts.append(path, act("a"))
    acts.append(path, act("b"))
    with pytest.raises(OSError, match="too many acts wait"):
        acts.append(path, act("c"))
    assert [found.target for found in acts.read(path).acts] == ["a", "b"]


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_what_is_no_file_is_neither_written_nor_read(kind: str, tmp_path: Path) -> None:
    """It lies where the daemon's user may write, and root writes there."""
    path, other = tmp_path / "audit.acts", tmp_path / "other"
    make: dict[str, Callable[[], None]] = {
        "link": lambda: path.symlink_to(other),
        "fifo": lambda: os.mkfifo(path),
        "directory": path.mkdir,
    }
    make[kind]()
    with pytest.raises(OSError, match=r"audit\.acts|symbolic"):
        acts.append(path, act("a"))
    with pytest.raises(OSError, match=r"audit\.acts|symbolic"):
        acts.read(path)
    assert not other.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root writes into others' directories")
def test_what_root_writes_belongs_to_the_user_of_the_daemon(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12346)
    acts.append(tmp_path / "audit.acts", act("a"))
    found = (tmp_path / "audit.acts").stat()
    assert (found.st_uid, found.st_gid, stat.S_IMODE(found.st_mode)) == (12345, 12346, 0o600)
