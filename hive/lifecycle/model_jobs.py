"""Model jobs as the daemon carries them: begun, told to their process, written down as they go on, ended once.

The process of jobs runs their loops and keeps nothing. What it says is on disk before it goes on; how a job ends is
decided here, whatever has died.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hive.agents.roster import Roster
from hive.agents.tokens import digest
from hive.audit.audit_log import AuditLog
from hive.audit.jobs import Jobs
from hive.control.executing import Executor
from hive.domain import Agent, JobState
from hive.errors import (
    HiveError,
    LinkLost,
    NotFound,
    NotPermitted,
    NotSupported,
    ResultNotReady,
    Saturated,
    TimedOut,
    WrongState,
    did_you_mean,
)
from hive.jobs.mcp_extra import check_mcp
from hive.jobs.order import JobEvent, JobOrder, JobWork, check_order, read_order
from hive.jobs.tool_specs import read_tool_specs
from hive.jobs.toolloop import LoopLimits
from hive.lifecycle import job_output
from hive.lifecycle.job_line import next_of
from hive.lifecycle.job_output import ENDED, OUTPUT, JobOutput, JobOutputReader
from hive.lifecycle.job_outputs_kept import KeptOutputs
from hive.lifecycle.job_process import JobProcessLink
from hive.lifecycle.job_programs import JobPrograms
from hive.lifecycle.job_runs import JobEnd, JobRun, rows_of
from hive.link.jobs import AskExecIn, EndExecIn, JobEnds, JobGrants, JobSaid, JobWord, RunJob, StopJob
from hive.link.link import LinkReply, failed
from hive.link.message import LinkMessage
from hive.link.messages import Done
from hive.link.proxy_link import ProxyGates
from hive.settings.jobs import JobsSection
from hive.settings.table import Paths
from hive.store import job_turns
from hive.store.database import Database
from hive.store.job_turns import KIND
from hive.store.jobs import StoredJob
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

WAITING_MAX = 1000
DEEPEST = 3
"""A job, one that an agent begins while it answers a call of that, and one more."""
TOLD_AGAIN_S = 2.0
STOPPED_S = 5.0
"""Longest wait for the last words of a job that is cancelled."""
END_AGAIN_S = 2.0
"""Until the end of a job is written again that the database had no room for."""
MIB = 1024 * 1024
WORKER_RESTARTED = "worker_restarted"
CANCELLED = "cancelled"


class ModelJobs:
    """All model jobs of the box. Its methods raise HiveErrors that say what is wrong. `actor`: for the audit table."""

    def __init__(
        self,
        paths: Paths,
        *,
        settings: Callable[[], JobsSection],
        jobs: Jobs,
        database: Database,
        audit_log: AuditLog,
        roster: Roster,
        executor: Executor,
        proxy_link: ProxyGates,
        tenants: Callable[[], Iterable[str]],
    ) -> None:
        """`tenants`: those that the settings describe."""
        self._directory = paths.jobs
        self._entry = str(paths.job_entry_socket)
        self._settings = settings
        self._tenants = tenants
        self._jobs = jobs
        self._database = database
        self._audit_log = audit_log
        self._roster = roster
        self._proxy_link = proxy_link
        self._process = JobProcessLink(
            paths.job_link_socket if paths.apart else None, hear=self._hear, on_lost=self._process_lost
        )
        self._programs = JobPrograms(executor, roster)
        self._runs: dict[str, JobRun] = {}
        self._waiting: deque[JobRun] = deque()
        self._idle: asyncio.TimerHandle | None = None
        self._closing = False
        self._kept_outputs = KeptOutputs(
            paths.jobs, database, lambda: settings().kept_mb, is_running=self._runs.__contains__
        )
        self.outcomes: dict[str, int] = {}
        """Ended jobs since this daemon started, by status."""

    def __repr__(self) -> str:
        return f"<ModelJobs {len(self._runs) - len(self._waiting)} running, {len(self._waiting)} waiting>"

    # orders -----------------------------------------------------------------------------------------------------------

    async def begin(self, order: JobOrder, *, actor: str, agent: Agent | None = None) -> StoredJob:
        """Begins a job; it is on record when this returns. `agent`: the one that begins it for itself.

        Raises NotSupported where jobs are off, BadRequest, NotFound for an agent that is not there, NotPermitted for
        one of another tenant and for a job too deep, Saturated where too many wait, StoreFull.
        """
        section = self._settings()
        if not section.enabled:
            raise NotSupported("model jobs are off", hint="[jobs] enabled = true of hive.conf permits them")
        if self._closing:
            raise Saturated("Hive is shutting down", retry_after_s=10)
        check_order(order)
        own = agent or (self._roster.find(order.agent).agent if order.agent else None)
        tenant = own.spec.tenant if own is not None else order.tenant or "default"
        callable_agents = self._callable(order, tenant)
        parent = None if agent is None else self._caller_of(agent)
        if parent is not None and parent.depth >= DEEPEST:
            raise NotPermitted(f"jobs that are begun by jobs are at most {DEEPEST} deep")
        self._check_tenant(order.tenant)
        ahead = sum(1 for run in self._waiting if bool(run.begun_by) == (agent is not None))
        if ahead >= WAITING_MAX:
            raise Saturated(f"{ahead} model jobs wait already", retry_after_s=30)
        if parent is not None:
            parent.take_turn()
        plan = {
            "name": order.name,
            "model": order.model,
            "form": str(order.form),
            "agent": "" if own is None else own.id,
            "agent_name": "" if own is None else own.name,
            "tenant": tenant,
            "priority": str(order.priority),
            "parent": "" if parent is None else parent.id,
        }
        job = await self._jobs.begin(KIND, plan=plan, progress="begun", actor=actor)
        run = JobRun(
            job,
            order,
            limits=limits_of(order, section),
            agent="" if own is None else own.id,
            tenant=tenant,
            callable_agents=callable_agents,
            parent=parent,
            begun_by="" if agent is None else agent.id,
            token=secrets.token_urlsafe(32),
        )
        self._runs[job.id] = run
        try:
            run.output = await asyncio.to_thread(self._opened, job.id, order)
        except (HiveError, OSError) as error:
            told = error if isinstance(error, HiveError) else HiveError(f"its output cannot be written: {error}")
            await self._end(run, JobEnd.failed(told.code, told.message))
            raise told from None
        if run.is_ended:  # cancelled meanwhile
            run.output.close()
            return await self._jobs.get(job.id)
        self._waiting.append(run)
        self._start_next()
        return job

    async def cancel(self, job_id: str, *, actor: str = "hive") -> StoredJob:
        """Ends it; what it said is kept. One that has ended stays as it is. Raises NotFound."""
        run = self._runs.get(job_id)
        if run is None:
            return self._task(await self._jobs.get(job_id))
        if not run.is_ended:
            self._audit_log.note("job.cancelled", target=job_id, actor=actor, detail={"name": run.order.name})
            run.is_cancelled = True
            await self._stop(run)
            await self._end(run, JobEnd(state=JobState.CANCELLED, reason=CANCELLED, detail="it was cancelled"))
        await run.ended.wait()
        return await self._jobs.get(job_id)

    async def release(self, job_id: str, *, actor: str = "hive") -> None:
        """Forgets what an ended job was asked and said; its row stays. Raises NotFound, WrongState while it runs."""
        job = self._task(await self._jobs.get(job_id))
        if job_id in self._runs or not job.ended:
            raise WrongState(f"job {job_id} has not ended", hint=f"hive job cancel {job_id}")
        await asyncio.to_thread(job_output.remove, self._directory, job_id)
        await self._jobs.forget(
            job,
            plan={"name": job.plan.get("name", ""), "released": True},
            result={"status": self.status_of(job)},
            also=lambda conn: job_turns.forget(conn, job_id),
        )
        self._audit_log.note("job.released", target=job_id, actor=actor, detail={"name": job.plan.get("name", "")})

    # what is known of them --------------------------------------------------------------------------------------------

    async def events(self, job_id: str, *, after: int = 0, follow: bool = False) -> AsyncIterator[JobEvent]:
        """The recorded events behind number `after`, then with `follow` those that come; the last one is `ended`.
        Raises NotFound, also for an output that is not kept any more."""
        self._task(await self._jobs.get(job_id))
        reader = JobOutputReader(self.output_of(job_id), after)
        while True:
            run = self._runs.get(job_id)
            changed = None if run is None else run.changed
            events = await asyncio.to_thread(reader.read)
            for event in events:
                if event.event == ENDED and run is not None:
                    await run.ended.wait()  # whoever hears of the end may ask for the result
                yield event
                if event.event == ENDED:
                    return
            if events:
                continue
            if changed is None or not follow:
                break
            await changed.wait()
        if changed is None and (reader.last is None or reader.last.event != ENDED):  # the disk had no room for it
            job, n = await self._jobs.get(job_id), 1 if reader.last is None else reader.last.n + 1
            if job.ended and n > after:
                yield JobEvent(n, job.updated_at, ENDED, job.result or {})

    async def result(self, job_id: str) -> dict[str, Any]:
        """Its result: `status`, `reason`, `detail`, `answer`, `signals`, `turns`, `usage`. Raises NotFound,
        ResultNotReady while it runs."""
        job = self._task(await self._jobs.get(job_id))
        if job_id in self._runs or not job.ended:
            raise ResultNotReady(f"job {job_id} is {self.status_of(job)}")
        if job.plan.get("released"):
            raise NotFound(f"what job {job_id} said was released")
        turns = await self._database.read(lambda conn: job_turns.turns(conn, job_id))
        signals = await self._database.read(lambda conn: job_turns.signals(conn, job_id))
        end = await asyncio.to_thread(self._end_of, job_id)
        told = {"status": self.status_of(job), "reason": "", "detail": "", "usage": {}} | (job.result or {})
        if end.get("detail"):
            told["detail"] = end["detail"]
        return {
            **told,
            "answer": turns[-1].answer if not end and turns else str(end.get("answer", "")),
            "signals": [msgspec.to_builtins(one) for one in signals],
            "turns": [msgspec.to_builtins(one) for one in turns],
        }

    def output_of(self, job_id: str) -> Path:
        """The file of its output, if that is kept."""
        return self._directory / f"{job_id}{OUTPUT}"

    async def order(self, job_id: str) -> JobOrder:
        """The order of it. Raises NotFound where that is not kept."""
        self._task(await self._jobs.get(job_id))
        return read_order(await asyncio.to_thread(job_output.kept_order, self._directory, job_id))

    def status_of(self, job: StoredJob) -> str:
        """OpenAI's word: queued, in_progress, completed, failed, cancelled or incomplete."""
        if job.ended:
            return str((job.result or {}).get("status") or _STATUS[job.state])
        run = self._runs.get(job.id)
        return "in_progress" if run is not None and run.is_told else "queued"

    def between_turns(self) -> Iterator[tuple[str, str]]:
        """(client, model) of each job whose tools are at work: the agent that it asks as, else the job itself."""
        return ((run.agent or f"job {run.id}", run.order.model) for run in self._runs.values() if run.waits_for_tools)

    def metrics(self) -> dict[str, Mapping[tuple[str, ...], float]]:
        """For the scraper."""
        running = len(self._runs) - len(self._waiting)
        return {
            "jobs_running": {("in_progress",): running, ("queued",): len(self._waiting)},
            "jobs": {(status,): count for status, count in self.outcomes.items()},
        }

    @property
    def process_id(self) -> int | None:
        """Of the process of jobs that this daemon started."""
        return self._process.pid

    def _task(self, job: StoredJob) -> StoredJob:
        """Raises NotFound for a job of another kind."""
        if job.kind != KIND:
            raise NotFound(f"{job.id} is no model job but one of the kind {job.kind}")
        return job

    def _end_of(self, job_id: str) -> Mapping[str, Any]:
        """The last event of its output; empty where that does not tell. Blocks."""
        events = job_output.whole_events(self.output_of(job_id))
        return events[-1].data if events and events[-1].event == ENDED else {}

    # coming and going -------------------------------------------------------------------------------------------------

    async def recover(self, left: Sequence[StoredJob]) -> None:
        """Ends the jobs that an earlier daemon left: as they had ended, where their output says so, else as failed."""
        for job in left:
            try:
                ending = await asyncio.to_thread(self._left_ending, job.id)
            except Exception as error:  # its output cannot be read, or is spoilt: the job has ended all the same
                log.warning("job_output_not_read job=%s error=%r", job.id, error)
                ending = JobEnd.failed(WORKER_RESTARTED, "Hive ended before it did, and its output cannot be read")
            await self._write_end(job, ending)
        try:
            await self._database.write(job_turns.forget_lost)
        except HiveError as error:
            log.warning("jobs_not_pruned error=%s", error.message)
        await self._kept_outputs.tidy()

    def _left_ending(self, job_id: str) -> JobEnd:
        """Writes the end of its output where that has none; blocks. Raises OSError, StoreFull, and whatever a spoilt
        line leads to."""
        output = JobOutput(self._directory, job_id)
        try:
            if output.last is not None and output.last.event == ENDED:
                return JobEnd.told(output.last.data)
            events = job_output.whole_events(output.path)
            detail = "Hive ended before it did; what it had said is kept"
            ending = JobEnd.failed(WORKER_RESTARTED, detail, answer=job_output.partial_answer(events))
            ending = ending.with_usage([event.data for event in events if event.event == "turn"])
            with contextlib.suppress(HiveError, OSError):
                output.append([JobWord(time.time(), ENDED, ending.data)])
            return ending
        finally:
            output.close()

    def proxy_here(self) -> None:
        """A proxy has come, which knows of no job."""
        spawn(self._tell_until_heard(), name="job grants")

    async def close(self) -> None:
        """Ends what runs, as failed; the process of jobs ends with it. What waits for its turn is on record, and the
        next start ends it: there may be very many of them."""
        self._closing = True
        if self._idle is not None:
            self._idle.cancel()
        runs = [run for run in self._runs.values() if run not in self._waiting]
        for run in self._waiting:
            run.is_ended = True
            if run.output is not None:
                run.output.close()
            run.ended.set()
            run.tell_changed()
        self._waiting.clear()
        self._process.close()
        ending = JobEnd.failed(WORKER_RESTARTED, "Hive ended before it did; what it had said is kept")
        await asyncio.gather(*(self._end(run, ending) for run in runs))
        await self._process.ended()

    # the life of one --------------------------------------------------------------------------------------------------

    def _opened(self, job_id: str, order: JobOrder) -> JobOutput:
        job_output.keep_order(self._directory, job_id, msgspec.json.encode(order))
        return JobOutput(self._directory, job_id)

    def _start_next(self) -> None:
        if self._idle is not None and self._runs:
            self._idle.cancel()
            self._idle = None
        places = self._settings().at_once
        while (run := next_of(self._waiting, self._started, places)) is not None:
            self._waiting.remove(run)
            spawn(self._start(run), name=f"start job {run.id}")

    @property
    def _started(self) -> list[JobRun]:
        waiting = set(self._waiting)
        return [run for run in self._runs.values() if run not in waiting]

    async def _start(self, run: JobRun) -> None:
        try:
            link = await self._process.link()
            run.is_granted = True
            await self._tell_grants()
        except HiveError as error:
            await self._end(run, JobEnd.failed(error.code, error.message))
            return
        if run.is_ended or run.is_cancelled:
            return
        if link.lost:
            await self._end(run, JobEnd.failed(WORKER_RESTARTED, "the process of model jobs ended"))
            return
        run.is_told = True
        work = JobWork(order=run.order, limits=run.limits)
        link.tell(RunJob(job=run.id, entry=self._entry, token=run.token, work=msgspec.json.encode(work)))

    async def _tell_grants(self) -> None:
        """The proxy knows of all jobs that may ask when this returns, or there is none: the next one is told."""
        grants = {digest(run.token): run.grant for run in self._runs.values() if run.is_granted and not run.is_ended}
        with contextlib.suppress(LinkLost):
            await self._proxy_link.job_grants(JobGrants(grants=grants))

    async def _tell_until_heard(self) -> None:
        """The same where no job waits for it: a proxy that does not answer in time is told again."""
        while not self._closing:
            try:
                await self._tell_grants()
                return
            except HiveError as error:
                log.warning("job_grants_not_heard error=%s", error.message)
                await asyncio.sleep(TOLD_AGAIN_S)

    async def _stop(self, run: JobRun) -> None:
        """Its process has let go of it, and told its last words; else it is ended without them."""
        if run in self._waiting:
            self._waiting.remove(run)
        if run.is_told and self._process.is_up:
            try:
                link = await self._process.link()
                await link.ask(StopJob(job=run.id), Done, timeout_s=STOPPED_S)
            except TimedOut:
                self._process.kill()
            except HiveError as error:
                log.warning("job_not_stopped job=%s error=%s", run.id, error.message)

    async def _end(self, run: JobRun, ending: JobEnd) -> None:
        """Ends it, once; of several ends the first holds."""
        if run.is_ended:
            return
        run.is_ended = True
        if run in self._waiting:
            self._waiting.remove(run)
        for below in [one for one in self._runs.values() if one.parent is run]:
            spawn(self.cancel(below.id), name=f"cancel job {below.id}")
        ending = ending.with_usage(run.turns)
        if run.output is not None:
            async with run.writing:
                if not ending.answer:
                    ending = ending.with_answer(await asyncio.to_thread(partial_of, run.output.path))
                try:
                    await asyncio.to_thread(run.output.append, [JobWord(time.time(), ENDED, ending.data)])
                except (HiveError, OSError) as error:
                    log.warning("job_end_not_kept job=%s error=%s", run.id, error)
                run.output.close()
        await self._programs.end_all(run.id)
        await self._write_end(run.job, ending)
        del self._runs[run.id]
        run.ended.set()
        run.tell_changed()
        spawn(self._after_end(), name="after a job")

    async def _after_end(self) -> None:
        spawn(self._tell_until_heard(), name="job grants")
        if self._closing:
            return
        self._start_next()
        if not self._runs:
            loop = asyncio.get_running_loop()
            if self._idle is not None:
                self._idle.cancel()
            self._idle = loop.call_later(self._settings().idle_exit_s, self._rest)
        await self._kept_outputs.tidy()

    def _rest(self) -> None:
        if not self._runs:
            self._process.close()

    async def _write_end(self, job: StoredJob, ending: JobEnd) -> None:
        """Writes the end down; where the database has no room for it now, once it has: until then the job is told to
        run."""
        self.outcomes[ending.status] = self.outcomes.get(ending.status, 0) + 1
        if not await self._has_written(job, ending):
            spawn(self._write_end_later(job, ending), name=f"end of job {job.id}")

    async def _write_end_later(self, job: StoredJob, ending: JobEnd) -> None:
        while not self._closing:  # else the next start reads it from the output
            await asyncio.sleep(END_AGAIN_S)
            if await self._has_written(job, ending):
                return

    async def _has_written(self, job: StoredJob, ending: JobEnd) -> bool:
        try:
            await self._jobs.end(job, ending.state, result=ending.row, error=ending.error)
        except HiveError as error:
            log.error("job_end_not_written job=%s error=%s: it is tried again", job.id, error.message)
            return False
        return True

    # what the process of jobs says ------------------------------------------------------------------------------------

    def _process_lost(self) -> None:
        detail = "the process of model jobs ended before it did; what it had said is kept"
        for run in list(self._runs.values()):
            if run.is_told:
                spawn(self._end(run, JobEnd.failed(WORKER_RESTARTED, detail)), name=f"end job {run.id}")

    def _hear(self, message: LinkMessage, reply: LinkReply | None) -> None:
        run = self._runs.get(getattr(message, "job", ""))
        if run is None or run.is_ended:
            if reply is not None:
                reply(failed(NotFound("there is no such job any more")))
            return
        match message:
            case JobSaid() if reply is not None:
                spawn(self._keep(run, message.words, reply), name=f"words of job {run.id}")
            case JobEnds() if reply is not None:
                spawn(self._ends(run, message, reply), name=f"end of job {run.id}")
            case AskExecIn() if reply is not None:
                spawn(self._programs.begin(run, message, reply), name=f"program of job {run.id}")
            case EndExecIn(run=program) if reply is not None:
                spawn(self._programs.ended(program, reply), name=f"end a program of job {run.id}")

    async def _keep(self, run: JobRun, words: Sequence[JobWord], reply: LinkReply) -> None:
        try:
            await self._write(run, words)
        except Exception as error:
            told = error if isinstance(error, HiveError) else HiveError(f"its output cannot be written: {error}")
            if not isinstance(error, (HiveError, OSError)):
                log.exception("job_words_not_kept job=%s", run.id)
            reply(failed(told))
            await self._end(run, JobEnd.failed(told.code, told.message))
            return
        reply(Done())

    async def _write(self, run: JobRun, words: Sequence[JobWord]) -> None:
        """Keeps them, in its output and in the database, and tells those that follow. Raises StoreFull, TooLarge, and
        HiveError for a tree of jobs that has used up its turns."""
        output, rows = run.output, rows_of(words, run.signals)
        assert output is not None
        async with run.writing:
            if run.is_ended:
                raise NotFound("the job has ended")
            limit = self._settings().output_max_mb * MIB
            await asyncio.to_thread(output.append, rows.lines, limit=limit)
            if (write := rows.write) is not None:
                await self._database.write(lambda conn: write(conn, run.id))
        run.took(rows)
        run.tell_changed()
        if rows.turns:
            with contextlib.suppress(HiveError):
                run.job = await self._jobs.tell(run.job, f"turn {len(run.turns)}")
        if run.has_overspent:
            raise HiveError("the jobs that belong together have used up their turns with calls")

    async def _ends(self, run: JobRun, message: JobEnds, reply: LinkReply) -> None:
        reply(Done())
        await self._end(
            run,
            JobEnd(
                state=message.state,
                reason=message.reason,
                detail=message.detail,
                answer=message.answer,
                is_incomplete=message.is_incomplete,
            ),
        )

    # who may begin what, and call whom ----------------------------------------------------------------------------

    def _check_tenant(self, name: str) -> None:
        """Raises NotFound for a tenant that nothing here is of: a slip of the pen would go past its budget."""
        known = {"default", *self._tenants(), *(life.agent.spec.tenant for life in self._roster)}
        if name and name not in known:
            raise NotFound(f"there is no tenant {name}", hint=did_you_mean(name, sorted(known)) or "hive config show")

    def _callable(self, order: JobOrder, tenant: str) -> list[str]:
        """The ids of the agents whose tools it names. Raises NotFound, NotPermitted for one of another tenant, and
        NotSupported for MCP servers without the extra."""
        found: dict[str, None] = {}
        specs = read_tool_specs(order.tools)
        check_mcp(specs)
        for source in specs:
            agent = self._roster.find(source.agent).agent
            if agent.spec.tenant != tenant:
                raise NotPermitted(
                    f"agent {agent.name} is of the tenant {agent.spec.tenant}, and the job of {tenant}",
                    hint="a job calls agents of its own tenant; --tenant, or --as an agent of it",
                )
            found[agent.id] = None
        return list(found)

    def _caller_of(self, agent: Agent) -> JobRun | None:
        """The job, of several the latest, that has a call under way at this agent."""
        calling = [run for run in self._runs.values() if run.called_agents & {agent.id, agent.name}]
        return max(calling, key=lambda run: run.job.created_at, default=None)


_STATUS = {JobState.DONE: "completed", JobState.FAILED: "failed", JobState.CANCELLED: "cancelled"}


def partial_of(path: Path) -> str:
    """The text of the turn that had not ended; blocks."""
    return job_output.partial_answer(job_output.whole_events(path))


def limits_of(order: JobOrder, section: JobsSection) -> LoopLimits:
    """The bounds of its loop: what it asks for, as far as the settings permit.

    >>> order = JobOrder(name="a", model="m", prompt="Hi", max_tool_iterations=100)
    >>> limits_of(order, JobsSection()).max_tool_iterations
    8
    """
    most = section.max_tool_iterations
    wanted = most if order.max_tool_iterations is None else min(most, order.max_tool_iterations)
    return LoopLimits(
        max_tool_iterations=wanted,
        tool_timeout_s=section.tool_timeout_s,
        result_max_bytes=section.tool_result_max_kb * 1024,
    )
