"""Jobs on record: what is waited for, also where an earlier daemon left it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hive.audit.audit_log import AuditLog
from hive.audit.jobs import Jobs
from hive.domain import JobState
from hive.store.database import Database
from hive.store.live import Live


async def test_the_end_of_a_job_that_an_earlier_daemon_left_is_waited_for(database: Database, tmp_path: Path) -> None:
    earlier = Jobs(database, AuditLog(database, Live(tmp_path / "redis.sock")))
    job = await earlier.begin("task", plan={}, progress="asks the model", actor="root")
    jobs = Jobs(database, AuditLog(database, Live(tmp_path / "redis.sock")))
    jobs.adopt(job)
    asked = asyncio.create_task(jobs.get(job.id, wait_s=60.0))
    await asyncio.sleep(0.05)  # it waits by now
    assert not asked.done()
    jobs.adopt(job)  # once more: the wait goes on
    await jobs.give_up([job])
    assert (await asked).state is JobState.FAILED


async def test_a_job_that_runs_on_is_told_as_it_is_after_the_wait(database: Database, tmp_path: Path) -> None:
    jobs = Jobs(database, AuditLog(database, Live(tmp_path / "redis.sock")))
    job = await jobs.begin("task", plan={}, progress="asks the model", actor="root")
    assert (await jobs.get(job.id, wait_s=0.05)).state is JobState.RUNNING
