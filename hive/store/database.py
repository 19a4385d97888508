"""The one SQLite file: a single writer thread, a single reader thread, and what a failure means.

Synchronous is FULL for everything: with group commit one fsync carries whatever was queued, measured here at
0.28 ms a lone commit (0.03 ms with NORMAL) and 0.66 ms per 100 rows (0.51 ms): a second mode would
save nothing and would need an argument at every call about what a power cut may take away.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Self, TypeVar

import msgspec

from hive.errors import DependencyDown, WrongState
from hive.store import explain
from hive.store.anew import Loss, begin_anew, loss_of, notice_rollback
from hive.store.lock import Lock
from hive.store.migrations import migrate, schema_of
from hive.store.second_copy import SecondCopy, agreeing, copy_of

log = logging.getLogger("hive.store")
Result = TypeVar("Result")
Work = Callable[[sqlite3.Connection], Result]

BUSY_MS = 5000
"""Longest wait of SQLite for a foreign writer (an operator's sqlite3, a backup)."""
GROUP = 64
"""Most writes that share one commit."""
WAL_LIMIT_BYTES = 64 * 1024 * 1024
_SUFFIXES = ("", "-wal", "-shm")
CHECKED_BYTES = 64 * 1024 * 1024
"""Looked through in a second; a file of 1 GiB took 18 s cold, at every start."""


class _Job(NamedTuple):
    work: Work[Any]
    future: Future[Any]


class _Opened(NamedTuple):
    """`loss`: what went with the last database that was damaged, None where none was."""

    writer: sqlite3.Connection
    copy: SecondCopy
    loss: Loss | None


class Database:
    """`hive.db`, held by this process alone (`flock` on `hive.db.lock`) until `close`."""

    def __init__(self, path: Path, lock: Lock, opened: _Opened, reader: sqlite3.Connection) -> None:
        self.path = path
        self.loss = opened.loss
        self.is_suspect = False
        """Set once something read of it cannot be right: the next start looks through all of it."""
        self._lock = lock
        self._writer = opened.writer
        self._copy = opened.copy
        self._reader = reader
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        self._readers = ThreadPoolExecutor(1, thread_name_prefix="hive-db-read")
        self._thread = threading.Thread(target=self._serve, name="hive-db-write", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, path: Path) -> Self:
        """Opens, checks and migrates; a damaged file is moved aside and a new one begun (anew.py), which the log says
        loudly. Where the second copy knows of changes that the database has lost, it has them again.

        Blocks. A file above `CHECKED_BYTES` is looked through only where it was found damaged while it was open:
        `hive doctor sqlite.integrity` does. Raises WrongState where another process holds it (naming its pid), a newer
        Hive wrote it, or a restore was cut short; ConfigError where the directory is missing, NotPermitted, StoreFull.
        """
        lock = Lock(path.with_name(path.name + ".lock"), what="the database")
        try:
            _refuse_half_restored(path)
            opened = _open_sound(path)
            try:
                reader = _connect(path)
                reader.execute("PRAGMA query_only = ON")
            except BaseException:
                opened.copy.close()
                opened.writer.close()
                raise
        except sqlite3.Error as error:
            lock.release()
            raise explain.sqlite_error(error, path) from error
        except OSError as error:
            lock.release()
            raise explain.os_error(error, path) from error
        except BaseException:
            lock.release()
            raise
        return cls(path, lock, opened, reader)

    @property
    def is_writing(self) -> bool:
        """Whether the writer's thread lives; False once it is closed."""
        return self._thread.is_alive()

    async def write(self, work: Work[Result]) -> Result:
        """Runs `work(conn)` in the writer thread, in one IMMEDIATE transaction; returns after the commit.

        Several waiting writes share one commit, each in a savepoint: what `work` raises undoes its own changes
        only and is raised here. `work` may be called a second time where the shared commit failed, so it
        must not change anything but the database. Cancelling the caller after it began does not undo it.
        Raises StoreFull, NotPermitted, DependencyDown, HiveError for SQLite's own errors; IntegrityError is
        raised as it is, because only `work` knows what it means.
        """
        if self._closed:
            raise DependencyDown("the database is closed")
        future: Future[Result] = Future()
        self._jobs.put(_Job(work, future))
        return await asyncio.wrap_future(future)

    async def read(self, work: Work[Result]) -> Result:
        """Runs `work(conn)` in the reader thread on one consistent snapshot. Raises as `write` does."""
        if self._closed:
            raise DependencyDown("the database is closed")
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._look, work)

    def read_now(self, work: Work[Result]) -> Result:
        """The same for a program whose loop has nothing else to do yet: blocks."""
        return self._readers.submit(self._look, work).result()

    def close(self) -> None:
        """Finishes what is queued, closes, gives the lock back. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._thread.join()
        self._readers.shutdown()
        self._reader.close()
        self._writer.close()
        self._copy.close()
        self._lock.release()

    def _look(self, work: Work[Result]) -> Result:
        try:
            self._reader.execute("BEGIN")
            try:
                return work(self._reader)
            finally:
                self._reader.execute("ROLLBACK")
        except sqlite3.Error as error:
            self._suspect(error)
            raise explain.sqlite_error(error, self.path) from error

    def _suspect(self, error: BaseException) -> None:
        """Notes that the file is damaged, so that the next start looks at all of it, however large it is."""
        if self.is_suspect or not isinstance(error, sqlite3.Error) or not explain.is_corrupt(error):
            return
        self.is_suspect = True
        log.critical("database_found_damaged path=%s error=%s: the next start begins it anew", self.path, error)
        with contextlib.suppress(OSError):
            suspect_of(self.path).touch(mode=0o600)

    def _serve(self) -> None:
        open_for_more = True
        while open_for_more:
            taken = [self._jobs.get()]
            while len(taken) < GROUP and not self._jobs.empty():
                taken.append(self._jobs.get())
            open_for_more = None not in taken
            jobs = [job for job in taken if job is not None and job.future.set_running_or_notify_cancel()]
            if jobs and not self._commit(jobs, last_try=len(jobs) == 1):
                for job in jobs:
                    self._commit([job], last_try=True)

    def _commit(self, jobs: list[_Job], *, last_try: bool) -> bool:
        """Runs the jobs in one transaction and answers them. False: nothing was written and none was answered."""
        outcomes: list[tuple[Any, BaseException | None]] = []
        try:
            self._writer.execute("BEGIN IMMEDIATE")
            for job in jobs:
                outcomes.append(self._attempt(job.work))
            self._copy.append(self._writer)
            self._writer.execute("COMMIT")
        except BaseException as error:  # of foreign code in a thread that must live
            with contextlib.suppress(sqlite3.Error):
                self._writer.execute("ROLLBACK")
            self._copy.undo()
            with contextlib.suppress(sqlite3.Error):
                # What failed stays in the WAL as dead pages: on a full disk they are needed back.
                self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            if not last_try:
                return False
            outcomes = [(None, error)] * len(jobs)
        else:
            self._copy.settle()
        for job, (result, failure) in zip(jobs, outcomes, strict=True):
            if failure is None:
                job.future.set_result(result)
            else:
                job.future.set_exception(self._explained(failure))
        self._copy.tidy(self._writer)
        return True

    def _attempt(self, work: Work[Any]) -> tuple[Any, BaseException | None]:
        """Runs one work in its savepoint. Raises where the whole transaction is gone (SQLite undoes it on FULL)."""
        self._writer.execute("SAVEPOINT work")
        try:
            result = work(self._writer)
        except BaseException as error:
            if not self._writer.in_transaction:
                raise
            self._writer.execute("ROLLBACK TO work")
            self._writer.execute("RELEASE work")
            return None, error
        self._writer.execute("RELEASE work")
        return result, None

    def _explained(self, error: BaseException) -> BaseException:
        if not isinstance(error, sqlite3.Error) or isinstance(error, sqlite3.IntegrityError):
            return error
        self._suspect(error)
        explained = explain.sqlite_error(error, self.path)
        explained.__cause__ = error
        return explained


def plan_of(path: Path) -> Path:
    """The path of a restore's plan, which exists until the restore is carried out to its end (backup/restore.py)."""
    return path.with_name(f"{path.name}.restoring")


def suspect_of(path: Path) -> Path:
    """There where the database was found damaged while it was open."""
    return path.with_name(f"{path.name}.suspect")


def _refuse_half_restored(path: Path) -> None:
    """Refuses a file that may be a mixture of before and after a restore. Raises WrongState."""
    if plan_of(path).exists():
        raise WrongState(f"a restore of {path} was cut short", hint="hive restore --finish brings it to its end")


def _connect(path: Path) -> sqlite3.Connection:
    # The connection is used by one thread at a time; it is only made in another.
    conn = sqlite3.connect(path, timeout=BUSY_MS / 1000, isolation_level=None, check_same_thread=False)
    try:
        conn.row_factory = sqlite3.Row
        conn.execute("PRAGMA journal_mode = WAL")
        conn.execute("PRAGMA synchronous = FULL")
        conn.execute(f"PRAGMA journal_size_limit = {WAL_LIMIT_BYTES}")
    except BaseException:
        conn.close()
        raise
    return conn


def _open_sound(path: Path) -> _Opened:
    """A checked and migrated connection, and the second copy, which says the same from here on."""
    if not path.exists() and copy_of(path).exists():
        begin_anew(path, "it is not there any more")
    existed = path.exists()
    # SQLite gives -wal and -shm the mode of the file itself, so no umask has to be changed.
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise explain.os_error(error, path) from error
    try:
        conn = _checked(path)
    except sqlite3.DatabaseError as error:
        if not existed:
            for suffix in _SUFFIXES:
                path.with_name(path.name + suffix).unlink(missing_ok=True)
        if not explain.is_corrupt(error):
            raise
        begin_anew(path, str(error))
        conn = _checked(path)
    try:
        with contextlib.suppress(OSError):
            suspect_of(path).unlink()
        copy, behind = agreeing(path, conn)
        notice_rollback(path, conn, behind)
        return _Opened(conn, copy, loss_of(conn))
    except BaseException:
        conn.close()
        raise


def _checked(path: Path) -> sqlite3.Connection:
    conn = _connect(path)
    try:
        if os.stat(path).st_size <= CHECKED_BYTES or suspect_of(path).exists():
            _refuse_damaged(conn.execute("PRAGMA quick_check(1)").fetchone()[0])
        if schema_of(conn).taken == 0 and copy_of(path).exists():
            _refuse_damaged("it is empty")
        migrate(conn)
        _refuse_damaged(_unreadable(conn))
    except BaseException:
        conn.close()
        raise
    return conn


def _refuse_damaged(found: str) -> None:
    """Raises DatabaseError where it is not `ok`."""
    if found != "ok":
        damage = sqlite3.DatabaseError(found)
        damage.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise damage


def _unreadable(conn: sqlite3.Connection) -> str:
    """The first agent with a name or spec that is no text or no JSON, which SQLite's checks do not see; else `ok`."""
    for number, name, spec in conn.execute("SELECT rowid, CAST(name AS BLOB), CAST(spec AS BLOB) FROM agents"):
        try:
            name.decode()
            msgspec.json.decode(spec)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return f"agent {number} cannot be read"
    return "ok"
