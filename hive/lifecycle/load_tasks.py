"""Tasks of the runner API: each follows the job that loads a model, and is answered for ever.

A task's row is the truth about it. A daemon that finds one under way asks the pool what became of the load: a server
that goes on loading is followed to its end, a model that is loaded is done, anything else has failed. A task that
has failed is not over before the model that left for it is back.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import msgspec

from hive.audit.jobs import AlsoOfJob, Jobs, job_error
from hive.control.models import Models
from hive.domain import DeploymentState, JobState
from hive.errors import HiveError, NotFound
from hive.pool.state import MIB, SlotState
from hive.pooling.deployments import Deployments, RegistryChange
from hive.pooling.pooled_slot import PooledSlot
from hive.pooling.pooling import ModelPool
from hive.store import load_tasks as store
from hive.store.database import Database
from hive.store.jobs import StoredJob
from hive.store.load_tasks import StoredLoad
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

LOOK_S = 600.0
"""A job is looked at again after so long, should its end have been told to nobody."""
AGAIN_S = 0.2
AGAIN_MAX_S = 30.0
"""Between two attempts to write what has to be written, at first and at most."""
LAST_LINES = 20
PREFIX = "load-"
MOVING = (SlotState.DRAINING, SlotState.STOPPING, SlotState.LOADING)
Result = TypeVar("Result")
Measure = Callable[[str], int | None]
"""Bytes that a model holds, as they were measured last; None where nothing tells."""
ENDED = "Hive ended before the load did"


class LoadTasks:
    """One for the daemon. `models`: of the inference server in use. `measure`: asked when a load has ended."""

    def __init__(
        self,
        *,
        database: Database,
        jobs: Jobs,
        pool: ModelPool,
        models: Models,
        deployments: Deployments,
        measure: Measure,
        left: Sequence[StoredLoad] = (),
    ) -> None:
        """`left`: the tasks that an earlier daemon did not end."""
        self._database = database
        self._jobs = jobs
        self._pool = pool
        self._models = models
        self._deployments = deployments
        self._measure = measure
        self._left = left
        self._has_resumed = asyncio.Event()
        for load in left:
            if load.evicts:
                pool.swaps.remember(load.model, load.evicts)

    def __repr__(self) -> str:
        return f"<LoadTasks {len(self._left)} of an earlier daemon>"

    async def begun(self, job: StoredJob, *, asked: str, model: str, evicts: str = "") -> StoredLoad:
        """Follows the task of a job, with which it was written (`in_job`). Raises as `Database.write` does."""
        load = task_of(job, asked=asked, model=model, evicts=evicts)
        if job.ended:
            load = ended_as(load, job, self._memory_mb(load.model))
            await self._write(load)
        else:
            spawn(self._follow(load), name=f"load task {load.model}")
        return load

    async def get(self, task_id: str) -> StoredLoad:
        """The task; also of a load that was ordered in another way, as long as its job is known. Raises NotFound."""
        job_id = task_id.removeprefix(PREFIX)
        if not task_id.startswith(PREFIX):
            raise NotFound(f"there is no task {task_id[:40]}")

        def read(conn: Any) -> StoredLoad:
            return store.get(conn, job_id)

        load: StoredLoad = await self._database.read(read)
        return load

    # the tasks of an earlier daemon -----------------------------------------------------------------------------------

    async def forsake(self) -> None:
        """Before the servers are compared with what is on record: a model that another one left for, at the inference
        server in use, is not loaded anew; that other one comes back. Raises as `Database.write` does."""
        for load in self._left:
            if load.evicts and self._slot(load.model) is None:
                await self._models.forsaken(load.model, ENDED)

    async def resume(self) -> None:
        """Goes on with the tasks that an earlier daemon left; returns once each is followed, and those that have failed
        with it are on record."""
        try:
            await self._pool.known()
            for load in self._left:
                await self._resume(load)
        finally:
            self._has_resumed.set()

    async def resumed(self) -> None:
        """Returns once `resume` has."""
        await self._has_resumed.wait()

    async def _resume(self, load: StoredLoad) -> None:
        job = await self._job(load)
        if job is None or job.ended:
            spawn(self._end(load, job, is_resumed=True), name=f"load task {load.model}")
            return
        slot = self._slot(load.model)
        if slot is None:
            spawn(self._resume_at_server(load, job), name=f"load task {load.model}")
            return
        if slot.state in (SlotState.LOADING, SlotState.READY):
            spawn(self._follow_adopted(load, job, slot), name=f"load task {load.model}")
            return
        told = await self._give_up(load, job, ENDED)
        spawn(self._end(load, told, is_resumed=True), name=f"load task {load.model}")

    async def _resume_at_server(self, load: StoredLoad, job: StoredJob) -> None:
        """The inference server in use is asked, once it answers: it may have the model all the same."""
        if await self._models.is_in_memory(load.model):
            await self._done(load, job)
            return
        why = ENDED
        if load.evicts and self._slot(load.evicts) is None:
            why += await self._models.load_again(load.evicts)
        await self._end(load, await self._give_up(load, job, why))

    async def _follow_adopted(self, load: StoredLoad, job: StoredJob, slot: PooledSlot) -> None:
        """Follows a server that an earlier daemon started."""
        while slot.state is SlotState.LOADING:
            await self._pool.passed()
        if slot.state is not SlotState.READY:
            told = await self._give_up(load, job, slot.error or "its server ended", slot.last_lines)
            await self._end(load, told, is_resumed=True)
            return
        await self._done(load, job)

    async def _done(self, load: StoredLoad, job: StoredJob) -> None:
        took_s = round(time.time() - load.begun_at, 3)
        result = {"model": load.model, "changed": True, "took_s": took_s}
        told = await surely(lambda: self._jobs.end(job, JobState.DONE, result=result), f"end of {load.job}")
        await self._end(load, told)

    async def _give_up(self, load: StoredLoad, job: StoredJob, why: str, lines: list[str] | None = None) -> StoredJob:
        """Ends the job, and with it what is on record of its order, which nobody restores then."""
        error = job_error(HiveError(why, hint="ask for it again"), lines or ())
        row = None if (slot := self._slot(load.model)) is None else self._deployments.row(slot.id)
        change = RegistryChange()
        if row is not None and row.at <= load.begun_at:
            change = self._deployments.reached(row.id, row.at, DeploymentState.FAILED, why)
        told = await surely(
            lambda: self._jobs.end(job, JobState.FAILED, error=error, also=change.write), f"end of {load.job}"
        )
        self._deployments.took(change)
        return told

    # the end of a task ------------------------------------------------------------------------------------------------

    async def _follow(self, load: StoredLoad) -> None:
        while True:
            job = await self._job(load, wait_s=LOOK_S)
            if job is None or job.ended:
                await self._end(load, job)
                return

    async def _job(self, load: StoredLoad, wait_s: float = 0.0) -> StoredJob | None:
        """The job of a task; None where it is on record no more."""
        try:
            return await surely(lambda: self._jobs.get(load.job, wait_s=wait_s), f"job {load.job}")
        except NotFound:
            return None

    async def _end(self, load: StoredLoad, job: StoredJob | None, *, is_resumed: bool = False) -> None:
        """Writes how a task has ended: where it failed, once the model is back that left for it. A daemon that is
        killed before that leaves the task under way, and the next one does the rest."""
        slot = self._slot(load.evicts)
        if slot is not None and (job is None or job.state is not JobState.DONE):
            if is_resumed and slot.state in (SlotState.COLD, SlotState.STOPPING) and not slot.barred:
                self._pool.load_again([slot.id])
            await self._came_back(slot)
        ended = lost(load, time.time()) if job is None else ended_as(load, job, self._memory_mb(load.model))
        await surely(lambda: self._write(ended), f"task of {load.job}")

    async def _came_back(self, slot: PooledSlot) -> None:
        """Returns once it is loaded, or will not be: its load has failed, or somebody wants it out."""
        until = time.monotonic() + LOOK_S
        while slot.state in MOVING or (slot.state is SlotState.COLD and slot.order is not None and not slot.error):
            if time.monotonic() >= until:
                return
            await self._pool.passed()

    def _slot(self, model: str) -> PooledSlot | None:
        return next((slot for slot in self._pool.slots.values() if slot.model == model), None)

    def _memory_mb(self, model: str) -> int | None:
        bytes = self._measure(model)
        return None if bytes is None else round(bytes / MIB)

    async def _write(self, load: StoredLoad) -> None:
        await self._database.write(lambda conn: store.put(conn, load))


def task_of(job: StoredJob, *, asked: str, model: str, evicts: str = "") -> StoredLoad:
    """The task of a job that begins."""
    return StoredLoad(job=job.id, asked=asked, model=model, evicts=evicts, begun_at=job.created_at)


def in_job(*, asked: str, model: str, evicts: str = "") -> AlsoOfJob:
    """Writes the task in the transaction of its job."""
    return lambda conn, job: store.put(conn, task_of(job, asked=asked, model=model, evicts=evicts))


async def surely(ask: Callable[[], Awaitable[Result]], what: str) -> Result:
    """The answer, asked for again until there is one: what is not written would be under way for ever. Raises
    NotFound."""
    wait_s = AGAIN_S
    while True:
        try:
            return await ask()
        except NotFound:
            raise
        except HiveError as error:
            log.error("load_task_waits what=%s error=%s", what, error.message)
            await asyncio.sleep(wait_s)
            wait_s = min(AGAIN_MAX_S, wait_s * 2)


def lost(load: StoredLoad, now: float) -> StoredLoad:
    """The task of which nothing tells how its load went.

    >>> lost(StoredLoad(job="j", asked="m", model="m", begun_at=1.0), 3.0).state.value
    'failed'
    """
    return msgspec.structs.replace(
        load, state=JobState.FAILED, error="its job is on record no more: ask for it again", ended_at=now
    )


def ended_as(load: StoredLoad, job: StoredJob, memory_mb: int | None) -> StoredLoad:
    """The task after the end of its job. What it says of an error has the last lines of the server in it.

    >>> job = StoredJob(id="j", kind="model.load", state=JobState.FAILED, actor="", created_at=1.0, updated_at=3.5,
    ...                 error={"code": "x", "message": "it ended", "hint": "", "log": ["no", "file"]})
    >>> load = ended_as(StoredLoad(job="j", asked="m", model="m", begun_at=1.0), job, 7)
    >>> load.state.value, load.error, load.took_ms, load.memory_mb
    ('failed', 'it ended\\nno\\nfile', 2500, None)
    """
    error = ""
    if job.error is not None:
        error = "\n".join([str(job.error["message"]), *map(str, (job.error.get("log") or [])[-LAST_LINES:])])
    is_done = job.state is JobState.DONE
    return msgspec.structs.replace(
        load,
        state=job.state,
        memory_mb=memory_mb if is_done else None,
        took_ms=max(0, round((job.updated_at - load.begun_at) * 1000)),
        error=error,
        ended_at=job.updated_at,
    )
