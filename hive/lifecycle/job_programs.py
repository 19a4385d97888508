"""Programs of model jobs inside agents: servers of MCP on stdin and stdout. They end with their job."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from hive.agents.roster import Roster
from hive.audit.shielded import carried_through
from hive.control.executing import ExecOrder, Executor, Inside
from hive.errors import HiveError, NotPermitted, Saturated
from hive.jobs.tool_specs import commands_of, read_tool_specs
from hive.lifecycle.job_runs import JobRun
from hive.link.jobs import AskExecIn, ExecIn
from hive.link.link import LinkReply, failed
from hive.link.messages import Done
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

A_JOB_MAX = 8
"""Programs of one job at a time."""
ENDED_BY_JOB = "its job needs it no longer"


class JobPrograms:
    """Those of all jobs."""

    def __init__(self, executor: Executor, roster: Roster) -> None:
        self._executor = executor
        self._roster = roster
        self._stops: dict[str, tuple[str, asyncio.Event]] = {}
        """Program → its job, and what ends it."""
        self._attending: dict[str, asyncio.Task[None]] = {}

    def __repr__(self) -> str:
        return f"<JobPrograms {len(self._stops)}>"

    async def begin(self, run: JobRun, asked: AskExecIn, reply: LinkReply) -> None:
        """Runs it, and answers with its descriptors; or with why not."""
        try:
            inside = await self._begun(run, asked)
        except HiveError as error:
            reply(failed(error))
            return
        execution, stop = inside.execution, asyncio.Event()
        self._stops[execution.run] = run.id, stop
        self._attending[execution.run] = spawn(self._attend(inside, stop), name=f"program of job {run.id}")
        reply(ExecIn(run=execution.run, form=execution.form), execution.descriptors)
        inside.let_go()
        if run.is_ended:
            stop.set()

    async def _begun(self, run: JobRun, asked: AskExecIn) -> Inside:
        """Raises NotFound, NotPermitted, Saturated, and what keeps it from running."""
        agent = self._roster.find(asked.agent).agent
        is_ordered = (asked.agent, tuple(asked.command)) in commands_of(read_tool_specs(run.order.tools))
        if not is_ordered or agent.id not in run.callable_agents or agent.spec.tenant != run.tenant:
            raise NotPermitted(f"the job may not run that inside {agent.name}")
        if sum(job == run.id for job, _ in self._stops.values()) >= A_JOB_MAX:
            raise Saturated(f"the job has {A_JOB_MAX} programs inside agents already")
        order = ExecOrder(asked.command, has_input=True, terminal=None)
        return await carried_through(self._executor.begin(agent.id, order, run.job.actor))

    async def _attend(self, inside: Inside, stop: asyncio.Event) -> None:
        """Until it is to end, or has ended."""
        async with inside:
            inside.execution.ended.add_done_callback(lambda _: stop.set())
            await stop.wait()
            inside.how.why = "" if inside.execution.ended.done() else ENDED_BY_JOB
        self._stops.pop(inside.execution.run, None)
        self._attending.pop(inside.execution.run, None)

    async def ended(self, program: str, reply: LinkReply) -> None:
        """Ends it, and answers once it has ended."""
        self.end(program)
        if (task := self._attending.get(program)) is not None:
            await asyncio.wait({task})
        reply(Done())

    def end(self, program: str) -> None:
        """It is to end; one that is not known has."""
        if (found := self._stops.get(program)) is not None:
            found[1].set()

    async def end_all(self, job: str) -> None:
        """Those of this job end; nobody waits long for that."""
        own = [program for program, (of, _) in self._stops.items() if of == job]
        for program in own:
            self.end(program)
        waiting = {task for program in own if (task := self._attending.get(program)) is not None}
        if waiting:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait(waiting, timeout=5.0)
