"""`hive doctor` beside real databases and real Redis servers: sound ones, damaged ones, stopped ones, open ones."""

from __future__ import annotations

import shutil
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.doctor import doctor
from hive.doctor.checks import stores
from hive.doctor.checks.check import Status
from hive.doctor.checks.target import Subject
from hive.doctor.doctor import Result, examine
from hive.files.redis_acl import acl_file
from hive.settings.table import Paths
from hive.store.database import Database
from tests.nobody import run_as_nobody

PASS, WARN, FAIL, SKIP = Status.PASS, Status.WARN, Status.FAIL, Status.SKIP


def look(one: Subject, *names: str) -> Result:
    """The one result of the one check of this name."""
    (result,) = examine(one, doctor.choose(names))
    return result


# --- SQLite ------------------------------------------------------------------------------------------------------


def test_a_database_in_use_is_sound_and_is_not_disturbed(up: Subject) -> None:
    assert up.paths is not None
    database = Database.open(up.paths.database)
    try:
        result = look(up, "sqlite.integrity")
    finally:
        database.close()
    assert result.status is PASS


def test_a_database_of_a_killed_daemon_is_read_with_its_log(up: Subject) -> None:
    """Without the write-ahead log the table would be missing, or half of it there."""
    assert up.paths is not None
    program = (
        "import sqlite3, os, sys\n"
        "conn = sqlite3.connect(sys.argv[1], isolation_level=None)\n"
        "conn.execute('PRAGMA journal_mode = WAL')\n"
        "conn.execute('CREATE TABLE t (x)')\n"
        "conn.execute('PRAGMA user_version = 999')\n"
        "os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", program, str(up.paths.database)])
    assert up.paths.database.with_name("hive.db-wal").stat().st_size > 0
    assert "newer Hive" in look(up, "sqlite.integrity").reason


def test_a_closed_database_is_read_without_a_trace(up: Subject) -> None:
    assert up.paths is not None
    Database.open(up.paths.database).close()
    before = sorted(path.name for path in up.paths.state.iterdir())
    assert look(up, "sqlite.integrity").status is PASS
    assert sorted(path.name for path in up.paths.state.iterdir()) == before


def test_a_closed_database_is_read_by_who_may_not_write(passable: Path) -> None:
    """SQLite could not open it otherwise: it has a write-ahead log by its mode, and none beside it."""
    path = passable / "hive.db"
    Database.open(path).close()
    path.chmod(0o644)
    said = run_as_nobody(
        "from pathlib import Path\n"
        "from hive.doctor.checks.stores import quick_check\n"
        f"print(quick_check(Path({str(path)!r}), limit_s=30)[0])\n"
    )
    assert said == "ok\n"


def test_a_damaged_database_is_found(up: Subject) -> None:
    assert up.paths is not None
    conn = sqlite3.connect(up.paths.database)
    conn.execute("CREATE TABLE t (x)")
    conn.executemany("INSERT INTO t VALUES (?)", [("x" * 900,)] * 50)
    conn.commit()
    conn.close()
    with up.paths.database.open("r+b") as file:
        file.seek(4096 * 3)
        file.write(b"\xff" * 4096)
    result = look(up, "sqlite.integrity")
    assert result.status is FAIL
    assert "damaged" in result.reason


def test_something_else_than_a_database_is_found(up: Subject) -> None:
    assert up.paths is not None
    up.paths.database.write_bytes(b"no database" * 1000)
    assert look(up, "sqlite.integrity").status is FAIL


def test_a_check_of_a_large_database_ends_when_its_time_is_over(up: Subject) -> None:
    assert up.paths is not None
    conn = sqlite3.connect(up.paths.database)
    conn.execute("CREATE TABLE t (x PRIMARY KEY)")
    conn.executemany("INSERT INTO t VALUES (?)", [(str(n),) for n in range(50_000)])
    conn.commit()
    conn.close()
    verdict = stores.look_at_sqlite(msgspec.structs.replace(up, limit_s=stores.SPARE_S))
    assert verdict.status is SKIP
    assert verdict.fix == "hive doctor sqlite.integrity"


# --- Redis -------------------------------------------------------------------------------------------------------


@pytest.fixture
def beside_redis(redis_server: Any, up: Subject) -> Subject:
    """A Hive started by hand whose Redis is the test's."""
    assert up.paths is not None
    runs = Paths(up.paths.state, redis_server.socket.parent)
    return msgspec.structs.replace(up, paths=runs, health={"problems": []})


@pytest.mark.redis
def test_a_redis_that_is_stopped_or_gone_is_found(redis_server: Any, beside_redis: Subject) -> None:
    assert look(beside_redis, "redis.answers").status is PASS
    redis_server.stop()
    stopped = look(beside_redis, "redis.answers")
    redis_server.go_on()
    assert (stopped.status, "timed out" in stopped.reason) == (FAIL, True)
    redis_server.kill()
    assert look(beside_redis, "redis.answers").status is FAIL


class AclRedis:
    """A redis-server where an appliance has its own, with an ACL file of the test's."""

    def __init__(self, appliance: Subject, acl: str) -> None:
        assert appliance.redis_socket is not None
        self.socket = appliance.redis_socket
        self.socket.parent.mkdir(parents=True)
        written = appliance.layout.at("/etc/hive/redis/users.acl")
        written.parent.mkdir(parents=True)
        written.write_text(acl)
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--save", "", "--dir", "/tmp"]
        self._process = subprocess.Popen([*command, "--aclfile", str(written)], stdout=subprocess.DEVNULL)
        until = time.monotonic() + 20
        while not self._answers():
            assert self._process.poll() is None, "redis-server did not start"
            assert time.monotonic() < until
            time.sleep(0.01)

    def _answers(self) -> bool:
        """It listens some time after its socket is there."""
        with socket.socket(socket.AF_UNIX) as asking:
            return asking.connect_ex(str(self.socket)) == 0

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


@pytest.mark.redis
@pytest.mark.skipif(shutil.which("redis-server") is None, reason="needs redis-server")
@pytest.mark.parametrize(
    ("acl", "status", "word"),
    [
        (acl_file({"daemon": "ab" * 32}), PASS, "viewer may read and not write"),
        ("user default on nopass ~* &* +@all\n", FAIL, "default user is on"),
        ("user default off\nuser viewer on nopass ~* &* +@all\n", FAIL, "viewer may write"),
        ("user default off\n", WARN, "no viewer"),
        (acl_file({}) + "user ann on >sesame ~* +@all\n", FAIL, "password of ann"),
    ],
    ids=["as installed", "open", "viewer writes", "no viewer", "password in clear"],
)
def test_the_acl_of_a_real_redis(appliance: Subject, acl: str, status: Status, word: str) -> None:
    with AclRedis(appliance, acl):
        result = look(appliance, "redis.acl")
    assert (result.status, word in result.reason) == (status, True), result
    assert "sesame" not in result.reason
