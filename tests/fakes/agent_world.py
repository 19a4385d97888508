"""A world for lives without a kernel, a link or a clock: everything in it may be slow, lost, late or refused.

`VirtualLoop` jumps to the next timer when nothing is ready, so hours pass in milliseconds and a wait that nothing
will ever end raises instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
import warnings
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any, TypeVar

from hive.agents.effects import HostMemory
from hive.agents.reconcile import gate_of
from hive.agents.roster import Roster
from hive.domain import Agent, AgentStatus, SleepDepth, WakeCause
from hive.errors import HiveError, LinkLost, NotFound, StoreFull, TimedOut, WrongState
from hive.link.helper import PagedOut, Started, Stat
from hive.link.messages import Activity, Busy, Closed, Open, Refused
from hive.link.specs import SandboxSpec
from hive.settings.table import Settings

Result = TypeVar("Result")


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        super().__init__(_InstantSelector(self))
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        """Lets `seconds` pass."""
        self.run_until_complete(asyncio.sleep(seconds))

    def do(self, act: Callable[..., Result], *args: Any) -> Result:
        """Calls `act` inside the loop; no time passes."""

        async def once() -> Result:
            return act(*args)

        return self.run_until_complete(once())

    def kill_tasks(self) -> None:
        """As kill -9: no task of this process goes on."""
        while tasks := asyncio.all_tasks(self):
            for task in tasks:
                task.cancel()
            with warnings.catch_warnings():
                # A coroutine whose task is killed before its first step was never awaited, and that is meant.
                warnings.simplefilter("ignore", RuntimeWarning)
                self.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
                del tasks, task


class _InstantSelector(selectors.DefaultSelector):
    def __init__(self, loop: VirtualLoop) -> None:
        super().__init__()
        self._loop = loop
        self._at_once = 0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None:
            raise AssertionError("nothing will ever happen any more")
        self._at_once = 0 if timeout > 0 else self._at_once + 1
        assert self._at_once < 100_000, "much happens and no time passes"
        # Ahead by a little, for `now + (when - now)` may fall short of `when`, for ever.
        self._loop.now += timeout + 1e-9 if timeout > 0 else 0.0
        return super().select(0)


class Wire:
    """One link: asks land after a delay and are answered after another; a lost link fails those under way.

    What an ask does to the other side happens (or has happened) although its answer is lost; one that handles its
    messages in order has handled all of a lost link before it takes the next.
    """

    def __init__(self, loop: VirtualLoop, name: str, delays: Sequence[float], *, in_order: bool = False) -> None:
        self.loop = loop
        self._in_order = in_order
        self._lands_at = 0.0
        self.name = name
        self.delays = list(delays) or [0.0]
        self._turn = 0
        self.connected = True
        self.number = 1
        self._asked: set[asyncio.Future[Any]] = set()

    def delay(self) -> float:
        self._turn += 1
        return self.delays[self._turn % len(self.delays)]

    async def ask(self, effect: Callable[[], Any]) -> Any:
        if not self.connected:
            raise LinkLost(f"{self.name} is not connected")
        future: asyncio.Future[Any] = self.loop.create_future()
        self._asked.add(future)
        future.add_done_callback(self._asked.discard)
        self.loop.call_at(self._when(), self._land, effect, future, self.number)
        return await future

    def tell(self, effect: Callable[[], Any]) -> None:
        """A message that is told lands behind what was asked or told before; on a lost link it is lost."""
        if self.connected:
            link = self.number
            self.loop.call_at(self._when(), lambda: effect() if link == self.number else None)

    def _when(self) -> float:
        lands_at = self.loop.time() + self.delay()
        if self._in_order:
            lands_at = self._lands_at = max(lands_at, self._lands_at + 1e-6)
        return lands_at

    def _land(self, effect: Callable[[], Any], future: asyncio.Future[Any], link: int) -> None:
        if self._in_order and link != self.number:
            return
        try:
            outcome = effect()
        except HiveError as error:
            outcome = error
        if isinstance(outcome, asyncio.Future):  # the other side takes its time
            outcome.add_done_callback(
                lambda done: self.loop.call_later(self.delay(), self._answer, done.result(), future)
            )
            return
        self.loop.call_later(self.delay(), self._answer, outcome, future)

    def _answer(self, outcome: Any, future: asyncio.Future[Any]) -> None:
        if future.done():
            return
        if isinstance(outcome, HiveError):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)

    def lose(self) -> None:
        self.connected = False
        self.number += 1
        for future in list(self._asked):
            if not future.done():
                future.set_exception(LinkLost(f"{self.name} is gone"))


class Sandbox:
    """The helper with one agent in it: `state` is the truth."""

    CONFIRM_WITHIN_S = 10.0
    HOLDS = 100 << 20
    """Bytes of memory its agent has."""
    SLICES = 4

    def __init__(self, world: MemoryWorld, delays: Sequence[float]) -> None:
        self.world = world
        self.wire = Wire(world.loop, "helper", delays)
        self.state = "gone"
        self.pid = 0
        self.exit_code: int | None = None
        self.cpu_us = 0
        self.generation = -1
        self.confirmed = False
        self.epoch = 0
        self.fail_freeze = self.fail_start = self.fail_thaw = False
        self.slow_starts = 0
        self.page_out_s = 0.0
        self.page_out_error: HiveError | None = None
        """Raised after the second slice."""
        self.swap_bytes = 0
        self.thaws = 0
        self.calls: list[str] = []

    @property
    def connected(self) -> bool:
        return self.wire.connected

    async def define(self, agent: str, spec: SandboxSpec) -> None:
        self.calls.append("define")
        await self.wire.ask(lambda: None)

    async def start(self, agent: str) -> Started:
        self.calls.append("start")

        def effect() -> Started:
            if self.state != "gone":
                raise WrongState("it lives")
            if self.fail_start:
                raise NotFound("no such command: nosuch")
            if self.slow_starts:
                self.slow_starts -= 1
                raise TimedOut("the agent's program was not reached within 5 s")
            self.pid += 1
            self.state, self.swap_bytes = "running", 0
            return Started(pid=self.pid)

        started: Started = await self.wire.ask(effect)
        return started

    async def stop(self, agent: str, *, grace_s: float) -> None:
        self.calls.append("stop")

        def effect() -> None:
            if self.state == "gone":
                raise WrongState("nothing of it lives")
            self.state = "gone"
            self.tell_ended(0)

        await self.wire.ask(effect)

    async def freeze(self, agent: str, generation: int) -> None:
        self.calls.append("freeze")
        self.world.check_freeze(generation)
        epoch = self.epoch

        def effect() -> None:
            if self.state == "gone" or epoch != self.epoch:
                raise WrongState("nothing of it lives")
            if self.fail_freeze:
                raise TimedOut("it does not stop")
            self.state, self.generation, self.confirmed = "frozen", generation, False
            self.world.loop.call_later(self.CONFIRM_WITHIN_S, self._unless_confirmed, generation, epoch)

        await self.wire.ask(effect)

    def _unless_confirmed(self, generation: int, epoch: int) -> None:
        if self.state == "frozen" and not self.confirmed and (generation, epoch) == (self.generation, self.epoch):
            self.thaw_alone("not confirmed")

    def thaw_alone(self, reason: str) -> None:
        if self.state == "frozen":
            self._run()
            if self.connected:
                self.world.roster.thawed_alone(self.world.agent_id, reason)

    async def confirm(self, agent: str, generation: int) -> None:
        self.calls.append("confirm")

        def effect() -> None:
            if self.state != "frozen" or generation != self.generation:
                raise WrongState("it was thawed")
            self.confirmed = True

        await self.wire.ask(effect)

    async def thaw(self, agent: str) -> None:
        self.calls.append("thaw")

        def effect() -> None:
            if self.state == "gone":
                raise WrongState("nothing of it lives")
            if self.fail_thaw:
                raise TimedOut("it does not run yet")
            self._run()

        await self.wire.ask(effect)

    def _run(self) -> None:
        """It runs, and touches all of its memory."""
        self.thaws += 1
        self.state, self.swap_bytes = "running", 0

    async def page_out(self, agent: str, generation: int) -> PagedOut:
        self.calls.append("page_out")
        self.world.check_page_out(generation)

        def effect() -> asyncio.Future[PagedOut | HiveError]:
            if self.state != "frozen" or not self.confirmed or generation != self.generation:
                raise WrongState("it is not asleep for this generation")
            done: asyncio.Future[PagedOut | HiveError] = self.world.loop.create_future()
            self.world.loop.call_later(self.page_out_s / self.SLICES, self._slice, 1, self.thaws, done)
            return done

        paged: PagedOut = await self.wire.ask(effect)
        return paged

    def _slice(self, number: int, thaws: int, done: asyncio.Future[PagedOut | HiveError]) -> None:
        if self.state != "frozen" or thaws != self.thaws:
            done.set_result(WrongState("it was woken"))
            return
        if number > self.SLICES / 2 and self.page_out_error is not None:
            done.set_result(self.page_out_error)
            return
        self.swap_bytes = max(self.swap_bytes, self.HOLDS * number // self.SLICES)
        if number < self.SLICES:
            self.world.loop.call_later(self.page_out_s / self.SLICES, self._slice, number + 1, thaws, done)
            return
        kept = self.HOLDS - self.swap_bytes
        done.set_result(PagedOut(took_ms=1.0, kept_bytes=kept, swap_bytes=self.swap_bytes, how="madvise"))

    async def remove(self, agent: str) -> None:
        def effect() -> None:
            self.state = "gone"

        await self.wire.ask(effect)

    def truth(self) -> Stat:
        return Stat(
            state=self.state,
            pid=self.pid if self.state != "gone" else None,
            cpu_us=self.cpu_us,
            exit_code=self.exit_code,
            rss_bytes=self.HOLDS - self.swap_bytes if self.state != "gone" else 0,
            held_bytes=self.HOLDS - self.swap_bytes if self.state != "gone" else None,
            swap_bytes=self.swap_bytes if self.state != "gone" else 0,
        )

    async def stat(self, agents: list[str], *, pss: bool = False) -> dict[str, Stat]:
        found: dict[str, Stat] = await self.wire.ask(lambda: {self.world.agent_id: self.truth()})
        return found

    async def reconcile(self, asleep: dict[str, int]) -> dict[str, Stat]:
        def effect() -> dict[str, Stat]:
            self.epoch += 1
            if self.state == "frozen":
                if self.world.agent_id in asleep:
                    self.confirmed, self.generation = True, asleep[self.world.agent_id]
                else:
                    self._run()
            return {self.world.agent_id: self.truth()}

        found: dict[str, Stat] = await self.wire.ask(effect)
        return found

    def end(self, exit_code: int) -> None:
        """Its main process ends by itself."""
        if self.state != "gone":
            self.state, self.exit_code = "gone", exit_code
            self.tell_ended(exit_code)

    def tell_ended(self, exit_code: int) -> None:
        if self.connected:
            self.world.roster.ended(self.world.agent_id, exit_code, self.pid)


class Proxy:
    """The proxy's gate of one agent, and the requests parked before it."""

    def __init__(self, world: MemoryWorld, delays: Sequence[float]) -> None:
        self.world = world
        self.wire = Wire(world.loop, "proxy", delays, in_order=True)
        self.session: int | None = 1
        self._sessions = 1
        self.gate = "refused"
        self.generation = 0
        self.busy = ""
        self.owes_quiet = False
        self.parked: list[float] = []
        self.refused = 0
        self.acked: tuple[int | None, int] | None = None
        self.seen = Activity()
        self.told: list[str] = []

    async def close(self, agent: str, generation: int) -> Closed | Busy:
        def effect() -> Closed | Busy:
            if generation < self.generation:
                return Busy(agent=agent, generation=generation, reason="a newer generation is known")
            self.generation = generation
            if self.busy:
                self.owes_quiet = True
                return Busy(agent=agent, generation=generation, reason=self.busy)
            self.gate = "closed"
            self.acked = (self.session, generation)
            return Closed(agent=agent, generation=generation)

        answer: Closed | Busy = await self.wire.ask(effect)
        return answer

    async def still_closed(self, agent: str, generation: int) -> Closed | Busy:
        def effect() -> Closed | Busy:
            if generation != self.generation or self.gate != "closed":
                return Busy(agent=agent, generation=generation, reason="the gate is no longer closed")
            if self.busy or self.parked:
                return Busy(agent=agent, generation=generation, reason=self.busy or "requests are parked")
            return Closed(agent=agent, generation=generation)

        answer: Closed | Busy = await self.wire.ask(effect)
        return answer

    async def activity(self, agents: Collection[str] = ()) -> dict[str, Activity]:
        seen: dict[str, Activity] = await self.wire.ask(lambda: {self.world.agent_id: self.seen})
        return seen

    def asleep(self, agent: Agent) -> None:
        def effect() -> None:
            if agent.generation == self.generation and self.gate == "closed":
                self.gate = "asleep"

        self.wire.tell(effect)

    def open(self, agent: Agent) -> None:
        self.wire.tell(lambda: self.move("open", agent.generation))

    def refuse(self, agent: Agent) -> None:
        self.wire.tell(lambda: self.move("refused", agent.generation))

    def tell(self, agent: Agent) -> None:
        self.wire.tell(lambda: self.move(gate_of(agent.status), agent.generation))

    def gone(self, agent: str) -> None:
        self.told.append("gone")

    def move(self, gate: str, generation: int) -> None:
        if generation < self.generation:
            return
        self.generation, self.gate = generation, gate
        self.told.append(gate)
        if gate == "open":
            self.parked.clear()
        elif gate == "refused":
            self.refused += len(self.parked)
            self.parked.clear()
        elif self.parked:
            self.ask_wake()

    def request(self) -> None:
        """Somebody calls the agent through Hive."""
        if self.gate in ("closed", "asleep"):
            self.parked.append(self.world.loop.time())
            if len(self.parked) == 1:
                self.ask_wake()

    def ask_wake(self) -> None:
        if self.wire.connected:
            self.world.roster.wake(self.world.agent_id, WakeCause.INGRESS, self.answer_wake)

    def answer_wake(self, answer: Open | Refused) -> None:
        self.wire.tell(lambda: self.move("open" if isinstance(answer, Open) else "refused", answer.generation))

    def become_quiet(self) -> None:
        self.busy = ""
        if self.owes_quiet and self.wire.connected:
            self.owes_quiet = False
            self.world.roster.quiet(self.world.agent_id)

    def lose(self) -> None:
        self.session = None
        self.wire.lose()
        self.owes_quiet = False
        if self.gate == "closed":
            self.gate = "open"
            self.parked.clear()
        self.world.roster.proxy_lost()

    def connect(self) -> None:
        """Both send their whole tables; what the daemon says in its own counts, whatever was known before."""
        self.wire.connected = True
        self._sessions += 1
        self.session = self._sessions
        agent = self.world.life.agent
        self.generation = 0
        self.move(gate_of(agent.status), agent.generation)
        self.world.roster.proxy_table({agent.id: Activity(parked=len(self.parked))})


class MemoryWorld:
    """One agent in a world of its own."""

    agent_id = "a1"

    def __init__(self, loop: VirtualLoop, agent: Agent, delays: Sequence[float] = (0.0,)) -> None:
        self.loop = loop
        self.settings = Settings()
        self.helper = Sandbox(self, delays)
        self.gates = Proxy(self, delays)
        self.wire = Wire(loop, "database", delays, in_order=True)
        self.disk_full = False
        self.record = agent
        self.history: list[tuple[AgentStatus, AgentStatus]] = []
        self.highest = agent.generation
        self.wrong: list[str] = []
        self.wake_ms: list[float] = []
        self.woken_from: list[SleepDepth] = []
        self.memory_is = HostMemory(available_bytes=8 << 30, swap_free_bytes=8 << 30, some_avg10=0.0)
        self.new_boot = False
        self.pauses = 0
        self.failures = 0
        self.forgotten = False
        self.roster = Roster(self)
        self.life = self.roster.add(agent)

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(work)

    async def save(self, agent: Agent) -> None:
        commits = agent.status is AgentStatus.PAUSED and self.record.status is AgentStatus.PAUSING
        if commits and self.gates.acked != (self.gates.session, agent.generation):
            self.wrong.append(f"committed asleep g{agent.generation} on the acknowledgement {self.gates.acked}")
        if self.disk_full:
            raise StoreFull
        alive = self.life

        def effect() -> None:
            if alive is self.life:
                self.record = agent

        await self.wire.ask(effect)

    async def forget(self, agent: Agent, actor: str) -> None:
        self.forgotten = True

    async def sandbox_spec(self, agent: Agent) -> SandboxSpec:
        return SandboxSpec(name=agent.name, command=agent.spec.command, env={}, home="/h", log="/l")

    def changed(self, before: Agent, after: Agent, actor: str) -> None:
        self.history.append((before.status, after.status))
        begins = after.status in (AgentStatus.PAUSING, AgentStatus.RESUMING, AgentStatus.STOPPING)
        if after.generation < self.highest or (begins and after.generation <= self.highest):
            self.wrong.append(f"{before.status} → {after.status}: generation {self.highest} → {after.generation}")
        self.highest = max(self.highest, after.generation)
        falls_asleep = (before.status, after.status) == (AgentStatus.RUNNING, AgentStatus.PAUSING)
        if falls_asleep and actor == "idle" and self.life.kept_awake_for_s > 0:
            self.wrong.append("put to sleep although it is kept awake")

    def memory(self) -> HostMemory:
        return self.memory_is

    async def is_new_boot(self) -> bool:
        return self.new_boot

    async def note_boot(self) -> None:
        self.new_boot = False

    def woke(self, cause: WakeCause, took_ms: float, depth: SleepDepth) -> None:
        self.wake_ms.append(took_ms)
        self.woken_from.append(depth)

    def fell_asleep(self) -> None:
        self.pauses += 1

    def failed(self, agent: Agent) -> None:
        self.failures += 1

    def check_freeze(self, generation: int) -> None:
        if self.gates.acked is None or self.gates.acked[1] != generation:
            self.wrong.append(f"froze g{generation} without an acknowledgement ({self.gates.acked})")
        if self.record.status is not AgentStatus.PAUSING or self.record.generation != generation:
            self.wrong.append(f"froze g{generation} before its intent was recorded ({self.record.status})")

    def check_page_out(self, generation: int) -> None:
        if self.record.depth_goal is not SleepDepth.DEEP or self.record.generation != generation:
            self.wrong.append(f"paged out g{generation} before its goal was recorded ({self.record.depth_goal})")

    def crash(self) -> None:
        """kill -9 of the daemon, and a new one from what was recorded. Sandbox and proxy live on."""
        self.gates.session = None
        self.gates.wire.lose()
        self.helper.wire.lose()
        self.wire.lose()
        if self.gates.gate == "closed":
            self.gates.gate = "open"
            self.gates.parked.clear()
        self.loop.kill_tasks()
        if (later := self.life._state._record_later) is not None:
            later.cancel()
        self.wire.connected = True
        self.highest = self.record.generation
        self.loop.run_until_complete(self._born_again())

    async def _born_again(self) -> None:
        self.roster = Roster(self)
        self.life = self.roster.add(self.record)
