"""Jobs in SQLite: what is written is found again, and what has ended does not pile up."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from hive.domain import JobState
from hive.errors import NotFound
from hive.store import jobs
from hive.store.database import Database
from hive.store.jobs import StoredJob


def job(number: int, **more: Any) -> StoredJob:
    plain = StoredJob(id=f"j{number}", kind="backend.switch", actor="uid:0", created_at=number, updated_at=number)
    return msgspec.structs.replace(plain, **more)


async def test_a_job_is_found_as_it_was_written(database: Database) -> None:
    first = job(1, plan={"step": "stop", "new": {"kind": "vllm"}}, progress="stopping ollama", eta_s=20.0)
    await database.write(lambda conn: jobs.add(conn, first))
    assert await database.read(lambda conn: jobs.get(conn, "j1")) == first
    failed = msgspec.structs.replace(first, state=JobState.FAILED, error={"code": "rolled_back", "log": ["x"]})
    await database.write(lambda conn: jobs.update(conn, failed))
    assert await database.read(lambda conn: jobs.get(conn, "j1")) == failed
    with pytest.raises(NotFound):
        await database.read(lambda conn: jobs.get(conn, "j2"))


async def test_running_ones_are_told_from_those_that_ended(database: Database) -> None:
    states = [JobState.RUNNING, JobState.DONE, JobState.FAILED, JobState.CANCELLED, JobState.RUNNING]
    for number, state in enumerate(states):
        await database.write(lambda conn, number=number, state=state: jobs.add(conn, job(number, state=state)))  # type: ignore[misc]
    running = await database.read(jobs.running)
    assert [found.id for found in running] == ["j0", "j4"]
    assert [found.ended for found in running] == [False, False]
    assert [found.id for found in await database.read(lambda conn: jobs.recent(conn, 3))] == ["j4", "j3", "j2"]
    assert [found.id for found in await database.read(lambda conn: jobs.done(conn, "backend.switch", 9))] == ["j1"]
    assert await database.read(lambda conn: jobs.done(conn, "model.pull", 9)) == []


async def test_of_those_that_ended_the_last_ones_are_kept(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "KEPT", 3)
    await database.write(lambda conn: jobs.add(conn, job(0)))
    for number in range(1, 10):
        ended = job(number, state=JobState.DONE)
        await database.write(lambda conn, ended=ended: jobs.add(conn, ended))  # type: ignore[misc]
    kept = await database.read(lambda conn: jobs.recent(conn, 100))
    assert [found.id for found in kept] == ["j9", "j8", "j7", "j0"]
