"""Jobs as the daemon carries them: each step written down, told to listeners, and awaited by callers."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from hive.audit.audit_log import AuditLog
from hive.domain import JobState
from hive.errors import HiveError, by_code
from hive.store import jobs
from hive.store.database import Database
from hive.store.jobs import StoredJob

Also = Callable[[sqlite3.Connection], None]
"""Writes that go in the same transaction."""
AlsoOfJob = Callable[[sqlite3.Connection, StoredJob], None]
"""The same, where they are about the job that begins."""
EARLIER = 5
"""Jobs of the same kind and target that say how long the next one takes: the median of them."""


def both(first: Also, second: Also) -> Also:
    """Writes of two, in this order, in one transaction."""

    def work(conn: sqlite3.Connection) -> None:
        first(conn)
        second(conn)

    return work


def job_error(error: HiveError, lines: Sequence[str] = ()) -> dict[str, Any]:
    """The error of a job. `lines`: what its server wrote last.

    >>> job_error(HiveError("it ended", hint="ask for it again"))
    {'code': 'internal', 'message': 'it ended', 'hint': 'ask for it again', 'log': []}
    """
    return {"code": error.code, "message": error.message, "hint": error.hint, "log": [*lines]}


def check_job(job: StoredJob) -> None:
    """Raises the error that the job has ended with, as its class."""
    if job.error is not None:
        raise by_code(str(job.error["code"]))(str(job.error["message"]), hint=str(job.error.get("hint", "")))


class Jobs:
    """Every method that writes raises as `Database.write` does; then nothing has changed."""

    def __init__(self, database: Database, audit_log: AuditLog) -> None:
        self._database = database
        self._audit_log = audit_log
        self._ends: dict[str, asyncio.Event] = {}
        """Of those that run, set when they end."""

    def __repr__(self) -> str:
        return f"<Jobs {len(self._ends)} running>"

    async def begin(
        self,
        kind: str,
        *,
        plan: dict[str, Any],
        progress: str,
        actor: str,
        eta_s: float | None = None,
        also: Also | None = None,
        of_job: AlsoOfJob | None = None,
    ) -> StoredJob:
        """Written down before anything is done, and `also`, then `of_job` in the same transaction: what they raise,
        this raises."""
        now = time.time()
        job = StoredJob(
            id=secrets.token_hex(6),
            kind=kind,
            plan=plan,
            progress=progress,
            eta_s=eta_s,
            actor=actor,
            created_at=now,
            updated_at=now,
        )

        def add(conn: sqlite3.Connection, job: StoredJob) -> None:
            jobs.add(conn, job)
            if also is not None:
                also(conn)
            if of_job is not None:
                of_job(conn, job)

        await self._write(add, job, None)
        self.adopt(job)
        self._note("job.begun", job)
        return job

    def adopt(self, job: StoredJob) -> None:
        """One that runs: begun here, or found when the daemon started. Once more changes nothing."""
        self._ends.setdefault(job.id, asyncio.Event())

    async def move(self, job: StoredJob, *, plan: dict[str, Any], progress: str, also: Also | None = None) -> StoredJob:
        """It is so far now, and `also` is written with that."""
        moved = msgspec.structs.replace(job, plan=plan, progress=progress, updated_at=time.time())
        await self._write(jobs.update, moved, also)
        if moved.progress != job.progress:
            self._note("job.step", moved)
        return moved

    async def tell(self, job: StoredJob, progress: str, *, plan: dict[str, Any] | None = None) -> StoredJob:
        """Notes the progress of the step; no event of its own. `plan`: else it stays."""
        told = msgspec.structs.replace(job, progress=progress, plan=plan or job.plan, updated_at=time.time())
        await self._write(jobs.update, told, None)
        return told

    async def end(
        self,
        job: StoredJob,
        state: JobState,
        *,
        result: dict[str, Any] | None = None,
        error: dict[str, Any] | None = None,
        also: Also | None = None,
    ) -> StoredJob:
        """It has ended so, and `also` is written with that."""
        ended = msgspec.structs.replace(job, state=state, result=result, error=error, updated_at=time.time())
        await self._write(jobs.update, ended, also)
        self._note("job.ended", ended)
        if (event := self._ends.pop(job.id, None)) is not None:
            event.set()
        return ended

    async def forget(self, job: StoredJob, *, plan: dict[str, Any], result: dict[str, Any], also: Also) -> None:
        """Of an ended one, only so much of what it was asked and came to is left, and the code of its error; `also` is
        written with that."""
        error = None if job.error is None else {**job.error, "message": "", "hint": "", "log": []}
        left = msgspec.structs.replace(job, plan=plan, result=result, error=error)
        await self._write(jobs.update, left, also)

    async def give_up(self, left: list[StoredJob]) -> None:
        """Jobs that an earlier daemon left, and that are not carried on."""
        for job in left:
            error = HiveError("Hive ended before it did", hint="ask for it again")
            await self.end(job, JobState.FAILED, error=job_error(error))

    async def get(self, job_id: str, *, wait_s: float = 0.0) -> StoredJob:
        """The job as it is; if it runs, once it has ended, or after `wait_s`. Raises NotFound."""
        if wait_s and (event := self._ends.get(job_id)) is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await event.wait()
        found: StoredJob = await self._database.read(lambda conn: jobs.get(conn, job_id))
        return found

    async def recent(self, limit: int, kind: str = "") -> list[StoredJob]:
        """The last ones, the newest first; of this kind alone, where one is given."""
        found: list[StoredJob] = await self._database.read(lambda conn: jobs.recent(conn, limit, kind))
        return found

    async def usual_s(self, kind: str, same: Callable[[StoredJob], bool]) -> float | None:
        """The usual duration of the last jobs of this kind that were the `same`; None where there were none."""
        done: list[StoredJob] = await self._database.read(lambda conn: jobs.done(conn, kind, 50))
        took = sorted(job.updated_at - job.created_at for job in [job for job in done if same(job)][:EARLIER])
        return took[len(took) // 2] if took else None

    async def _write(
        self, put: Callable[[sqlite3.Connection, StoredJob], None], job: StoredJob, also: Also | None
    ) -> None:
        def work(conn: sqlite3.Connection) -> None:
            put(conn, job)
            if also is not None:
                also(conn)

        await self._database.write(work)

    def _note(self, act: str, job: StoredJob) -> None:
        detail = {"name": job.kind, "state": str(job.state)}
        detail["reason"] = job.progress if job.error is None else str(job.error["message"])
        self._audit_log.note(act, target=job.id, actor=job.actor, detail=detail)
