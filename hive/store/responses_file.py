"""`responses.db`: the one file of kept responses, with one thread of its own, made when the first is kept.

It is apart from `hive.db` because of what it holds: prompts and answers, in bulk. So it is in no backup that does not
ask for it, costs a start nothing, and where it is damaged it is deleted, not set aside: what was promised to be deleted
with its agent must not stay in a file that nobody looks after (docs/decisions/024-kept-responses.md).

What was deleted is overwritten (`secure_delete`), and the write-ahead log cut off behind it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from hive.errors import DependencyDown, StoreFull, WrongState
from hive.store import explain
from hive.store.responses import TABLES, VERSION

log = logging.getLogger("hive.store")
Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Result]

SIDES = ("-wal", "-shm", "-journal")
CHECKED_BYTES = 64 * 1024 * 1024
"""Looked through at the first use; a larger file is found damaged when the damage is met."""
RESERVE_BYTES = 256 * 1024 * 1024
"""Of its disk, never taken: `hive.db` and the usage spool are on it too."""
BUSY_MS = 5000


class ResponsesFile:
    """Opened at the first use. The process that holds `hive.db` is the only one that writes it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._conn: sqlite3.Connection | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="hive-responses")
        self._closed = self._is_used = False

    def __repr__(self) -> str:
        return f"<ResponsesFile {self.path}>"

    @property
    def exists(self) -> bool:
        """Whether anything can be in it, when all that was asked for so far is done."""
        return self._is_used or self.path.exists()

    def do(self, work: Work[Result], *, then_clean: bool = False) -> asyncio.Future[Result]:
        """Runs `work(conn)` in one transaction, after everything that was asked for before; the future has its result.

        `then_clean`: what it deleted is nowhere on the disk then. Its errors: StoreFull, NotPermitted, DependencyDown,
        WrongState (a newer Hive wrote the file), HiveError, and what `work` raises.
        """
        if self._closed:
            raise DependencyDown("the file of responses is closed")
        self._is_used = True
        return asyncio.get_running_loop().run_in_executor(self._thread, partial(self._do, work, then_clean))

    def close(self) -> None:
        """Finishes what was asked for. A second call does nothing."""
        if not self._closed:
            self._closed = True
            self._thread.submit(self._hang_up)
            self._thread.shutdown()

    def room_for(self, size: int) -> None:
        """Raises StoreFull where that many bytes more would take of the disk what others need."""
        found = os.statvfs(self.path.parent)
        if found.f_bavail * found.f_frsize < RESERVE_BYTES + size:
            raise StoreFull(
                f"less than {RESERVE_BYTES // 2**20} MiB are free on the disk of {self.path}",
                hint="free some space, or lower proxy.responses_kept_mb",
            )

    # in the thread ------------------------------------------------------------------------------------------------

    def _do(self, work: Work[Result], then_clean: bool) -> Result:
        try:
            conn = self._conn
            if conn is None:
                conn = self._conn = _opened(self.path)
            conn.execute("BEGIN IMMEDIATE")
            try:
                result = work(conn)
                conn.execute("COMMIT")
            except BaseException:
                if conn.in_transaction:
                    conn.execute("ROLLBACK")
                raise
            if then_clean:
                _clean(conn)
            return result
        except sqlite3.Error as error:
            if explain.is_corrupt(error):
                self._hang_up()
                _delete_damaged(self.path, error)
            raise explain.sqlite_error(error, self.path) from error
        except OSError as error:
            raise explain.os_error(error, self.path) from error

    def _hang_up(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            with contextlib.suppress(sqlite3.Error):
                conn.close()


def _opened(path: Path) -> sqlite3.Connection:
    """Raises OSError, sqlite3.Error, WrongState."""
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    try:
        return _sound(path)
    except sqlite3.Error as error:
        if not explain.is_corrupt(error):
            raise
        _delete_damaged(path, error)
    os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600))
    return _sound(path)


def _sound(path: Path) -> sqlite3.Connection:
    conn = sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)
    try:
        # Before the first table, or it does nothing. NORMAL: what a power cut takes are the last seconds.
        for pragma in ("auto_vacuum = INCREMENTAL", "journal_mode = WAL", "synchronous = NORMAL", "secure_delete = ON"):
            conn.execute(f"PRAGMA {pragma}").fetchall()
        version = conn.execute("PRAGMA user_version").fetchone()[0]
        if version > VERSION:
            raise WrongState(f"{path} was written by a newer Hive")
        if os.stat(path).st_size <= CHECKED_BYTES:
            found = conn.execute("PRAGMA quick_check(1)").fetchone()[0]
            if found != "ok":
                damage = sqlite3.DatabaseError(found)
                damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
                raise damage
        if version == 0:
            conn.executescript(f"BEGIN; {TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
    except BaseException:
        conn.close()
        raise
    return conn


def _clean(conn: sqlite3.Connection) -> None:
    """Gives freed pages back, and writes the log into the file and cuts it off. A reader may hold that up: the next
    time does it."""
    with contextlib.suppress(sqlite3.OperationalError):
        conn.executescript("PRAGMA incremental_vacuum")  # `execute` stops after one page (Python 3.11)
        conn.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()


def _delete_damaged(path: Path, error: sqlite3.Error) -> None:
    log.critical("responses_damaged path=%s error=%s: all that was kept of responses is deleted", path, error)
    for side in (*SIDES, ""):
        path.with_name(path.name + side).unlink(missing_ok=True)
