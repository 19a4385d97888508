"""One agent as the helper holds it: its verbs, one at a time, and the promise that no agent is left frozen."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import msgspec

from hive.domain import INNER_PORT, RuntimeKind
from hive.errors import HiveError, NotFound, NotSupported, TimedOut, WrongState
from hive.host import netns
from hive.host.files import storage_error
from hive.host.process import ProcessTable
from hive.link.execution import Execute
from hive.link.helper import Ended, Frozen, PagedOut, Started, Stat, Thawed
from hive.link.link import Link
from hive.link.message import LinkMessage
from hive.link.messages import Done
from hive.link.specs import SandboxSpec
from hive.runtimes import template_fit
from hive.runtimes.dialling import Dialler
from hive.runtimes.entering import Enterable, EnteredProgram, command_inside
from hive.runtimes.runtime import NO_EXEC, BringsInner, RunningAgent, Runtime, SaysWhy, SocketPlace
from hive.sandbox.agent_memory import AgentMemory
from hive.sandbox.executions import Executions, Handed
from hive.sandbox.listeners import Listeners
from hive.sandbox.table import AgentRecords, Record
from hive.tasks import spawn

log = logging.getLogger("hive.sandbox")


class FreezeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """The helper's limits on waiting, in seconds (design.md §4)."""

    freeze_s: float = 2.0
    """From asking for a freeze to giving it up; the kernel cannot freeze what is stuck in I/O."""
    thaw_s: float = 2.0
    confirm_s: float = 10.0
    """A frozen agent that is not confirmed within this is thawed."""
    adopted_confirm_s: float = 60.0
    """The same for those found frozen by a restarted helper."""
    adopt_s: float = 2.0
    """For each agent a helper finds when it begins; those of an engine that hangs keep no other agent frozen."""
    report_s: float = 0.5
    """Wait for the exit code of a process whose parent is `hive up`."""
    log_check_s: float = 1.0
    settle_again_s: float = 1.0
    """Until an engine that did not answer is asked again how an agent ended."""


class SupervisedAgent:
    """An agent in the table. `on_ended`, `on_thawed_alone(reason)` are called for what nobody asked for.

    `permit(spec)`: the spec as the helper's policy lets it run, asked again at every start; raises NotPermitted.
    Verbs wait for each other, except `thaw`: it acts at once, and a freeze under way gives up.
    """

    def __init__(
        self,
        agent: str,
        *,
        runtimes: Mapping[RuntimeKind, Runtime],
        table: AgentRecords,
        listeners: Listeners,
        limits: FreezeLimits,
        permit: Callable[[SandboxSpec], SandboxSpec],
        on_ended: Callable[[Ended], None],
        on_thawed_alone: Callable[[str, str], None],
    ) -> None:
        self.agent = agent
        self._runtimes = runtimes
        self._table = table
        self._listeners = listeners
        self._limits = limits
        self._permit = permit
        self._on_ended = on_ended
        self._on_thawed_alone = on_thawed_alone
        self._loop = asyncio.get_running_loop()
        self._lock = asyncio.Lock()
        self._paging = asyncio.Lock()
        self._dialler = Dialler()
        self._executions = Executions(lambda: self._name)
        self._running: RunningAgent | None = None
        self._memory = AgentMemory(None)
        self._is_unknown = False
        self._exited = asyncio.Event()
        self._report: asyncio.Future[int] = self._loop.create_future()
        self._generation = 0
        self._thaws = 0
        self._asleep = False
        self._log_seen: int | None = None
        self._unconfirmed: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        state = "gone" if self._running is None else "asleep" if self._asleep else "awake"
        return f"<SupervisedAgent {self.agent} {state} generation {self._generation}>"

    @property
    def record(self) -> Record:
        """Raises NotFound before the first `define` and after `remove`."""
        record = self._table.records.get(self.agent)
        if record is None:
            raise NotFound(f"agent {self.agent} is not defined")
        return record

    @property
    def _name(self) -> str:
        """For log lines, which people read: the agent's name, its id once nothing is known of it any more."""
        record = self._table.records.get(self.agent)
        return self.agent if record is None else record.spec.name

    @property
    def template(self) -> str:
        """The process of a template it was forked from (`Run.template`); empty where it does not run, or was not."""
        return "" if self._running is None else self._running.run.template

    def _must_run(self) -> RunningAgent:
        if self._running is None or self._exited.is_set():
            raise WrongState(f"agent {self.agent} is not running")
        return self._running

    # --- define, start, stop, remove -----------------------------------------------------------------------------

    def _runtime_of(self, spec: SandboxSpec) -> Runtime:
        """Raises NotSupported for a runtime this helper does not have."""
        if (runtime := self._runtimes.get(spec.runtime)) is None:
            raise NotSupported(f"this helper runs no {spec.runtime} agents")
        return runtime

    async def define(self, spec: SandboxSpec) -> SocketPlace:
        """Makes or changes the agent and its socket. What failed the first time leaves no record."""
        async with self._lock:
            allowed, runtime = self._permit(spec), self._runtime_of(spec)
            left = await self._leave_runtime(spec)
            try:
                return await self._prepare(runtime, spec, allowed)
            except HiveError:
                await self._go_back(left)
                raise
            except OSError as error:
                await self._go_back(left)
                raise storage_error(error) from error

    async def _leave_runtime(self, spec: SandboxSpec) -> SandboxSpec | None:
        """Leaves the runtime of before where `spec` is of another: deletes what that made, and returns the spec it had.

        It must not run there.
        """
        await self._get_to_know()
        before = self._table.records.get(self.agent)
        if before is None or before.spec.runtime is spec.runtime:
            return None
        if self._running is not None:
            raise WrongState(f"agent {self.agent} runs as {before.spec.runtime}", hint="stop it first")
        await self._runtime_of(before.spec).discard(self.agent, before.spec)
        return before.spec

    async def _go_back(self, left: SandboxSpec | None) -> None:
        """The new runtime did not take it: it is the old one's again, with an empty home."""
        if left is not None:
            with contextlib.suppress(HiveError, OSError):
                await self._runtime_of(left).prepare(self.agent, left)

    async def _prepare(self, runtime: Runtime, spec: SandboxSpec, allowed: SandboxSpec) -> SocketPlace:
        """Written down as it was asked for: what the policy adds is asked anew at every start."""
        is_new = await runtime.prepare(self.agent, allowed)
        try:
            place = runtime.place(self.agent, spec)
            self._bind(spec, place)
            await self._write_down(spec)
        except (HiveError, OSError):
            if is_new:
                await runtime.discard(self.agent, allowed)
            raise
        return place

    def _bind(self, spec: SandboxSpec, place: SocketPlace) -> None:
        self._listeners.bind(self.agent, place.path, uid=spec.uid, gid=spec.gid, jail=place.jail)

    def bind(self) -> None:
        """Makes its socket after a restart of the helper; one that cannot be made keeps no other agent waiting."""
        spec = self.record.spec
        try:
            self._bind(spec, self._runtime_of(spec).place(self.agent, spec))
        except (HiveError, OSError) as error:
            log.error("socket_not_bound agent=%s error=%s", self._name, error)

    async def _write_down(self, spec: SandboxSpec) -> None:
        records = self._table.records
        before = records.get(self.agent)
        records[self.agent] = msgspec.structs.replace(before, spec=spec) if before else Record(spec=spec)
        try:
            await self._table.save_durably(self.agent)
        except HiveError:
            if before is None:
                with contextlib.suppress(HiveError):
                    await self._table.remove(self.agent)
            else:
                records[self.agent] = before
            raise

    async def start(self) -> Started:
        """Starts it. A start that cannot be written down is undone: the next helper would not know of it."""
        async with self._lock:
            await self._get_to_know()
            record = self.record
            if self._running is not None:
                raise WrongState(f"agent {self.agent} is running as pid {self._running.run.main.pid}")
            spec = self._permit(record.spec)
            runtime = self._runtime_of(spec)
            try:
                if (place := runtime.place(self.agent, spec)).jail is not None:
                    self._bind(spec, place)  # what is in a jail its user may have removed
                running = await runtime.start(self.agent, spec, mark=record.environment)
            except OSError as error:
                raise storage_error(error) from error
            self._take(running)
            record.run = running.run
            try:
                self._table.save(self.agent)
            except HiveError:
                await running.kill()
                await self._end(running)
                raise
            log.info("agent_started agent=%s pid=%d", self._name, running.run.main.pid)
            return Started(pid=running.run.main.pid, address=running.address)

    def _take(self, running: RunningAgent) -> None:
        self._running, self._memory = running, AgentMemory(running)
        self._exited.clear()
        self._report = self._loop.create_future()
        self._loop.add_reader(running.ended_fd, self._main_ended, running)
        self._listen_inside(running)

    def _listen_inside(self, running: RunningAgent) -> None:
        """Makes Hive listen in its own network, where it has one. (A guest's network is not that of its monitor.)

        Where that fails the agent runs on without: a program inside may have the port, and mean to.
        """
        sock = running.take_inner() if isinstance(running, BringsInner) else None
        try:
            if (
                sock is None
                and self.record.spec.runtime is not RuntimeKind.FIRECRACKER
                and netns.differs(running.run.main.pid)
            ):
                sock = netns.listen_inside(running.ended_fd, INNER_PORT)
        except HiveError as error:
            log.warning("not_listening_inside agent=%s error=%s", self._name, error)
        if sock is not None:
            self._listeners.keep_inner(self.agent, sock)

    async def stop(self, *, grace_s: float, why: str = "") -> Ended:
        """Ends all of it, `why` in words. Already ended: says how. Raises TimedOut where a process survives SIGKILL."""
        self._wake_up()
        async with self._lock:
            await self._get_to_know()
            if self._running is None:
                return self._last_end()
            if not await self._running.stop(grace_s=grace_s):
                raise TimedOut(f"a process of {self.agent} does not end on SIGKILL: it hangs in the kernel")
            return await self._end(self._running, why)

    async def remove(self) -> None:
        """Kills it, closes its sockets, deletes its files and its record."""
        self._wake_up()
        async with self._lock:
            record = self.record
            runtime = self._runtimes.get(record.spec.runtime)
            if runtime is not None:
                await self._get_to_know()
            if self._running is not None:
                if not await self._running.kill():
                    raise TimedOut(f"a process of {self.agent} does not end on SIGKILL: it hangs in the kernel")
                await self._end(self._running)
            self._listeners.drop(self.agent)
            if runtime is not None:
                await runtime.discard(self.agent, record.spec)
            else:
                log.warning("files_not_deleted agent=%s runtime=%s", self._name, record.spec.runtime)
            await self._table.remove(self.agent)

    # --- the end -------------------------------------------------------------------------------------------------

    def _main_ended(self, running: RunningAgent) -> None:
        self._loop.remove_reader(running.ended_fd)
        self._exited.set()
        spawn(self._settle(running), name=f"settle {self.agent}")

    async def _settle(self, running: RunningAgent) -> None:
        """The main process ended by itself: what it leaves behind goes with it, then the daemon hears of it."""
        ended = await self._try_to_settle(running)
        while ended is None and running is self._running:
            await asyncio.sleep(self._limits.settle_again_s)
            ended = await self._try_to_settle(running)
        if ended is not None:
            log.info("agent_ended agent=%s exit_code=%s", self._name, ended.exit_code)
            self._on_ended(ended)

    async def _try_to_settle(self, running: RunningAgent) -> Ended | None:
        """None where another process did it, or an engine that has to be asked does not answer."""
        async with self._lock:
            if running is not self._running:
                return None
            try:
                if not await running.kill():
                    log.error("agent_left_a_process agent=%s", self._name)
                return await self._end(running)
            except HiveError as error:
                log.warning("end_not_settled agent=%s error=%s", self._name, error)
                return None

    async def _end(self, running: RunningAgent, why: str = "") -> Ended:
        """Takes down how it ended. The caller holds the lock and has killed all of it."""
        async with asyncio.timeout(self._limits.thaw_s):
            await self._exited.wait()
        self._disarm()
        await self._executions.end_all()
        exit_code = await running.reap()
        if exit_code is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._limits.report_s):
                    exit_code = await asyncio.shield(self._report)
        self._memory.rests()
        self._running, self._memory = None, AgentMemory(None)
        self._asleep = False
        self._listeners.drop_inner(self.agent)
        record = self.record
        record.run, record.last_pid, record.exit_code = None, running.run.main.pid, exit_code
        record.why = why or (running.why_ended if isinstance(running, SaysWhy) else "")
        async with self._paging:  # one under way sees that it is over; nothing is closed under its hands
            running.close()
        # A record that still names the ended process does no harm: its identity is looked at before it is believed.
        with contextlib.suppress(HiveError):
            self._table.save(self.agent)
        return self._last_end()

    def _last_end(self) -> Ended:
        record = self.record
        return Ended(agent=self.agent, exit_code=record.exit_code, pid=record.last_pid, why=record.why)

    def reaped(self, pid: int, exit_code: int) -> None:
        """Takes the exit code of `pid` from `hive up`, the parent of agents with a killed helper. Ignores other
        pids."""
        record = self._table.records.get(self.agent)
        if self._running is not None and self._running.run.main.pid == pid:
            if not self._report.done():
                self._report.set_result(exit_code)
        elif record is not None and record.last_pid == pid and record.exit_code is None:
            record.exit_code = exit_code
            with contextlib.suppress(HiveError):
                self._table.save(self.agent)

    # --- asleep and awake ----------------------------------------------------------------------------------------

    def freeze(self, generation: int) -> Coroutine[Any, Any, Frozen]:
        """Freezes it. Not itself a coroutine: a thaw that arrives after this call must be seen by it."""
        return self._freeze(generation, self._thaws)

    async def _freeze(self, generation: int, thaws: int) -> Frozen:
        async with self._lock:
            running = self._must_run()
            if generation < self._generation:
                raise WrongState(f"generation {generation} is older than {self._generation}")
            if self._executions:
                raise WrongState(f"somebody runs a program inside {self.agent}")
            self._generation = generation
            self._disarm()
            self._memory.rests()
            began = time.monotonic()
            try:
                await running.freeze(
                    deadline_s=self._limits.freeze_s,
                    give_up=lambda: thaws != self._thaws or self._exited.is_set(),
                )
            except (HiveError, OSError):
                self._asleep = False
                with contextlib.suppress(HiveError):
                    await running.thaw(deadline_s=self._limits.thaw_s)
                raise
            self._asleep = True
            self._arm(self._limits.confirm_s)
            return Frozen(took_ms=(time.monotonic() - began) * 1000, how=running.freezer)

    async def page_out(self, generation: int) -> PagedOut:
        """Pages its memory out while it sleeps for `generation`; a thaw, a stop or its end gives up between slices."""
        running, memory, thaws = self._must_run(), self._memory, self._thaws
        if not self._asleep or generation != self._generation or self._unconfirmed is not None:
            raise WrongState(f"agent {self.agent} is not asleep for generation {generation}")

        def is_over() -> bool:
            same = running is self._running and (thaws, generation) == (self._thaws, self._generation)
            return not same or self._exited.is_set()

        async with self._paging:
            paged = None if is_over() else await memory.page_out(lambda: running.page_out(give_up=is_over), thaws)
        if paged is None or is_over():
            raise WrongState("woken, stopped or ended while its memory was paged out")
        return paged

    def confirm(self, generation: int) -> Done:
        """The pause is committed. Raises WrongState where it is not frozen, or for another generation."""
        running = self._must_run()
        if not self._asleep or generation != self._generation or not running.is_frozen():
            raise WrongState(f"agent {self.agent} is not frozen for generation {generation}")
        self._disarm()
        return Done()

    def thaw(self) -> LinkMessage | Coroutine[Any, Any, LinkMessage]:
        """Thaws at once; the answer, or where that is not verified yet the wait for it."""
        began = time.monotonic()
        running, sleep = self._must_run(), self._thaws
        self._wake_up()
        is_verified = running.thaw_now()
        self._memory.wakes(sleep)
        if is_verified:
            return Thawed(took_ms=(time.monotonic() - began) * 1000)
        return self._verify_thaw(running, began)

    async def _verify_thaw(self, running: RunningAgent, began: float) -> LinkMessage:
        await running.thaw(deadline_s=self._limits.thaw_s)
        return Thawed(took_ms=(time.monotonic() - began) * 1000)

    def _wake_up(self) -> None:
        """Ends the wish to keep it frozen: a freeze under way gives up, one that is done is forgotten."""
        self._thaws += 1
        self._asleep = False
        self._disarm()

    def _arm(self, limit_s: float) -> None:
        self._disarm()
        self._unconfirmed = self._loop.call_later(limit_s, self._not_confirmed, limit_s)

    def _disarm(self) -> None:
        if self._unconfirmed is not None:
            self._unconfirmed.cancel()
            self._unconfirmed = None

    def _not_confirmed(self, limit_s: float) -> None:
        spawn(self.thaw_alone(f"not confirmed within {limit_s:g} s"), name=f"thaw {self.agent}")

    async def stays_asleep(self) -> bool:
        """Whether it sleeps, confirmed, and may be left so to the next helper. A page-out under way gives up."""
        running = self._running
        if running is None or not self._asleep or self._unconfirmed is not None or not running.is_frozen():
            return False
        self._thaws += 1
        async with self._paging:
            return self._asleep

    def thaw_alone(self, reason: str) -> Coroutine[Any, Any, None]:
        """Thaws it now, whoever wanted it frozen; the rest verifies, and tells `on_thawed_alone` if it slept."""
        was_asleep = self._asleep
        self._wake_up()
        return self._verify_thaw_alone(self._running, reason if was_asleep else "")

    async def _verify_thaw_alone(self, running: RunningAgent | None, reason: str) -> None:
        if running is None:
            return
        with contextlib.suppress(HiveError, OSError):
            await running.thaw(deadline_s=self._limits.thaw_s)
        if reason:
            log.warning("agent_thawed_alone agent=%s reason=%r", self._name, reason)
            self._on_thawed_alone(self.agent, reason)

    async def reconcile(self, generation: int | None) -> None:
        """The daemon holds it asleep since `generation`, or awake (None): confirmed if it is frozen, else thawed."""
        running = self._running
        if running is None:
            return
        if generation is not None and self._asleep and running.is_frozen():
            self._generation = generation
            self._disarm()
            return
        self._wake_up()
        with contextlib.suppress(HiveError, OSError):
            await running.thaw(deadline_s=self._limits.thaw_s)

    async def dial(self) -> socket.socket:
        """A connection to its port, the caller's. Raises WrongState where it does not run or sleeps; see `Dialler`."""
        running = self._must_run()
        if self._asleep:
            raise WrongState(f"agent {self.agent} is asleep")
        return await self._dialler.dial(running)

    # --- programs inside -------------------------------------------------------------------------------------------

    async def execute(self, asked: Execute, owner: Link, mark: str) -> Handed:
        """Runs a program inside, within the policy as it is now. It ends with `owner`; see `Execute`. `mark`: for its
        environment."""
        async with self._lock:
            await self._get_to_know()
            record, running = self.record, self._must_run()
            if self._asleep:
                raise WrongState(f"agent {self.agent} is asleep")
            if not isinstance(running, Enterable):
                raise NotSupported(NO_EXEC)
            self._executions.check_room(asked.run)
            spec = self._permit(
                msgspec.structs.replace(record.spec, command=command_inside(record.spec, asked.command))
            )
            program = EnteredProgram(asked.run, spec, record.environment, mark, asked.terminal)
            try:
                entered = await running.enter(program)
            except OSError as error:
                raise storage_error(error) from error
            return self._executions.take(asked.run, entered, owner)

    async def end_executions(self, owner: Link | None) -> None:
        """Ends the programs inside that were asked for on that link, which is gone; None: all."""
        await self._executions.end_all(of=owner)

    async def end_execution(self, run: str) -> bool:
        """Kills such a program; False where there was none. Nothing of it is left."""
        return await self._executions.end(run)

    def has_execution(self, run: str) -> bool:
        return self._executions.has(run)

    async def resize(self, run: str, rows: int, columns: int) -> None:
        await self._executions.resize(run, rows, columns)

    # --- truth ---------------------------------------------------------------------------------------------------

    def stat(self, snapshot: ProcessTable) -> Stat:
        """Ground truth now."""
        if self._running is None or self._exited.is_set():
            record = self._table.records.get(self.agent)
            return (
                Stat(state="gone") if record is None else Stat(state="gone", exit_code=record.exit_code, why=record.why)
            )
        stat = self._memory.told(self._running.stat(snapshot))
        record = self._table.records.get(self.agent)
        note = "" if record is None else template_fit.note_of(record.spec, self._running.run)
        return msgspec.structs.replace(stat, template_note=note) if note else stat

    def pss_age_s(self) -> float:
        """Age of its PSS, where that is what a list shows of it and it may be wrong by now; else 0."""
        return self._memory.age_s(self._thaws if self._asleep else None)

    async def measure_pss(self) -> None:
        """Walks all of its memory, off the loop."""
        await self._memory.measure(self._thaws if self._asleep else None)

    def trim_log(self) -> None:
        """Cuts its log back where that is too long; once in a sleep, in which it writes nothing. Raises OSError."""
        if self._running is None or (self._asleep and self._log_seen == self._thaws):
            return
        self._log_seen = self._thaws if self._asleep else None
        self._runtime_of(self.record.spec).trim_log(self.record.spec)

    # --- across helpers ------------------------------------------------------------------------------------------

    async def adopt(self, snapshot: ProcessTable) -> None:
        """After a restart: takes over what an earlier helper started, or notes that it is gone.

        An agent that cannot be asked for now (its engine is down, this helper lacks its runtime) is held as gone, and
        asked for again before anything is done with it.
        """
        try:
            async with asyncio.timeout(self._limits.adopt_s):
                await self._adopt(snapshot)
        except (HiveError, OSError) as error:  # TimeoutError too
            self._is_unknown = True
            why = str(error) or f"not within {self._limits.adopt_s:g} s"
            log.error("agent_not_adopted agent=%s error=%s", self._name, why)

    async def _get_to_know(self) -> None:
        """Raises what kept this helper from adopting it, if that is so still. The caller holds the lock."""
        if self._is_unknown:
            await self._adopt(ProcessTable())
            self._is_unknown = False

    async def _adopt(self, snapshot: ProcessTable) -> None:
        record = self.record
        before = msgspec.structs.replace(record)
        running = await self._find_or_sweep(record, snapshot)
        if running is not None:
            record.run = running.run
        if record != before:
            # Not written it does no harm: what is named there is looked at before it is believed, or found by its mark.
            with contextlib.suppress(HiveError):
                self._table.save(self.agent)
        if running is None:
            return
        self._take(running)
        log.info("agent_adopted agent=%s pid=%d", self._name, running.run.main.pid)
        if running.is_frozen():
            self._asleep = True
            self._arm(self._limits.adopted_confirm_s)
        elif running.is_half_frozen():
            spawn(self.thaw_alone("half frozen"), name=f"thaw {self.agent}")

    async def _find_or_sweep(self, record: Record, snapshot: ProcessTable) -> RunningAgent | None:
        """The process that an earlier helper started of it, if it lives; else notes that it is gone."""
        runtime = self._runtime_of(record.spec)
        if record.run is not None:
            running = await runtime.adopt(self.agent, record.spec, record.run, mark=record.environment)
            if running is None:
                await runtime.sweep(self.agent, record.spec, record.run, mark=record.environment)
                record.last_pid, record.exit_code, record.why = record.run.main.pid, None, ""
                record.run = None
            return running
        return await runtime.find(self.agent, record.spec, snapshot, mark=record.environment)

    def release(self) -> None:
        """The helper leaves; the agent stays."""
        self._disarm()
        if self._running is not None:
            self._loop.remove_reader(self._running.ended_fd)
            self._running.close()
            self._running, self._memory = None, AgentMemory(None)
