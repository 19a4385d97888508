"""One agent's life. The only writer of agent state: memory decides, SQLite records, the sandbox is the truth.

Freezing writes its intent first; thawing acts first and records after. One transition at a time, each in a task of
its own: a client that leaves cancels nothing. Every failure ends awake (design.md §4).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec

from hive.agents.reconcile import Action, Truth, after_end, reconcile
from hive.agents.turns import Interrupted, Turns, outcome_of
from hive.agents.world import World
from hive.domain import ALIVE, Agent, AgentSpec, AgentStatus, SleepDepth, WakeCause
from hive.errors import AgentBusy, DependencyDown, HiveError, NotFound, StoreFull, TimedOut, WrongState
from hive.link.messages import Busy, Open, Refused, Stat
from hive.tasks import spawn

log = logging.getLogger("hive.agents")
Answer = Callable[[Open | Refused], None]

RETRY_BUSY_S = 1.0
"""An operator's pause tries again on the proxy's `quiet`, and this often in case that got lost with a link."""
RETRY_OTHER_S = 0.1
GONE = Stat(state=Truth.GONE)
LINK_LOST = "the proxy's link was lost"
LONGEST_THAW_RETRY_S = 0.25
RECORD_AGAIN_S = 1.0
END_TOLD_WITHIN_S = 1.0
"""The helper tells how an agent ended after it has killed what that left behind."""
FIRST_FREEZE_RETRY_S = 30.0
LONGEST_FREEZE_RETRY_S = 600.0

_WAKEABLE = frozenset({AgentStatus.STARTING, AgentStatus.PAUSING, AgentStatus.PAUSED, AgentStatus.RESUMING})
_DEPTHS = {
    AgentStatus.PAUSING: (SleepDepth.AWAKE, SleepDepth.LIGHT),
    AgentStatus.PAUSED: (SleepDepth.LIGHT, SleepDepth.LIGHT),
    AgentStatus.RESUMING: (SleepDepth.LIGHT, SleepDepth.AWAKE),
}
"""Depth and its goal, by status; awake in all others."""
_AT_REST = frozenset({AgentStatus.CREATED, AgentStatus.STOPPED, AgentStatus.ERROR})


class Attempt(msgspec.Struct, frozen=True):
    """How one try at sleep ended: `why_not` is None where it sleeps. `busy`: the proxy owes one `quiet`.

    `hopeless`: it could not be recorded, which another try at once does not change.
    """

    why_not: str | None = None
    busy: bool = False
    hopeless: StoreFull | None = None


class _Busy(Interrupted):
    """The proxy says that the agent is at work."""


class Life:
    """One agent, and whatever is being done to it.

    `last_wake`: milliseconds from the first ask to the open gate, and the cause. `awake_since`: loop time.
    """

    def __init__(self, agent: Agent, world: World) -> None:
        self.agent = agent
        self._world = world
        self._loop = asyncio.get_running_loop()
        self._turns = Turns(agent.name)
        self._waiting: list[Answer] = []
        self._woken: tuple[WakeCause, str, float] | None = None
        self._leaving = 0
        self._gone = False
        self._try_pause_again = asyncio.Event()
        self._failures: deque[float] = deque()
        self._freeze_failures = 0
        self._record_later: asyncio.TimerHandle | None = None
        self._is_unrecorded = False
        self.retry_freeze_at = 0.0
        self.awake_since = self._loop.time()
        self.pid: int | None = None
        self.address = ""
        self.started_spec: AgentSpec | None = None
        self.last_wake: tuple[float, WakeCause] | None = None
        self.pauses = 0
        self.wakes = 0

    def __repr__(self) -> str:
        busy = ", in transition" if self._turns.taken else ""
        return f"<Life {self.agent.name} {self.status} g{self.agent.generation}, {len(self._waiting)} waiting{busy}>"

    @property
    def status(self) -> AgentStatus:
        return self.agent.status

    @property
    def waiting(self) -> int:
        """How many wait for it to be awake."""
        return len(self._waiting)

    # What is asked of it ------------------------------------------------------------------------------------------

    async def start(self, actor: str) -> None:
        """Raises what kept it from starting; it is in `error` then. Unchanged where it is alive."""
        await self._turns.take(lambda: self._start(actor), "start")

    async def stop(self, actor: str) -> None:
        """Awake or asleep, it is asked to end and killed after the grace. Unchanged where nothing of it lives."""
        await self._leave(lambda: self._stop(actor, "stopped by operator"), "stop")

    async def restart(self, actor: str) -> None:
        """Stop, then start."""

        async def both() -> None:
            await self._stop(actor, "restarting")
            await self._start(actor)

        await self._leave(both, "restart")

    async def remove(self, actor: str) -> None:
        """Nothing of it is left afterwards: processes, socket, home, record, keys."""
        await self._leave(lambda: self._remove(actor), "remove")

    async def change_spec(self, spec: AgentSpec) -> None:
        """Records another spec. What concerns the process itself takes effect when it is started next."""
        await self._turns.take(lambda: self._change_spec(spec), "change")

    async def resume(self, actor: str) -> None:
        """Returns when it is awake. Raises WrongState where it is not to be woken."""
        done: asyncio.Future[Open | Refused] = self._loop.create_future()
        self.wake(WakeCause.OPERATOR, lambda answer: None if done.done() else done.set_result(answer), actor=actor)
        answer = await done
        if isinstance(answer, Refused):
            raise _wrong_state(self.agent, AgentStatus(answer.status))

    async def fall_asleep(self, reason: str) -> Attempt:
        """One try at sleep because it is idle; never sooner after a wake than the minimum."""
        minimum_s = self._world.settings.sleep.minimum_awake_s
        return await self._turns.take(lambda: self._pause_once("idle", reason, minimum_s), "sleep")

    async def pause(self, *, timeout_s: float, now: bool, actor: str) -> None:
        """Tries until it sleeps. `now`: raises AgentBusy instead of waiting.

        Raises TimedOut with the agent awake; StoreFull, awake too, where its sleep cannot be recorded.
        """
        deadline = self._loop.time() + timeout_s
        while True:
            self._try_pause_again.clear()
            attempt = await self._turns.take(lambda: self._pause_once(actor, "operator", 0.0), "pause")
            if attempt.why_not is None:
                return
            if attempt.hopeless is not None:
                raise attempt.hopeless
            if now:
                raise AgentBusy(f"{self.agent.name} stays awake: {attempt.why_not}")
            left_s = deadline - self._loop.time()
            if left_s <= 0:
                why = f"{self.agent.name} could not be put to sleep within {timeout_s:g} s: {attempt.why_not}"
                raise TimedOut(f"{why}; it is awake")
            retry_s = RETRY_BUSY_S if attempt.busy else RETRY_OTHER_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._try_pause_again.wait(), min(left_s, retry_s))

    def wake(self, cause: WakeCause, answer: Answer, *, actor: str = "proxy") -> None:
        """Somebody needs it awake; `answer` is called once, as soon as it is or will not be.

        A wake in `pausing` wins at once; in `starting` it waits; one that sleeps is thawed once for all who wait.
        """
        if self.status is AgentStatus.RUNNING:
            answer(self._open())
            return
        if self.status not in _WAKEABLE:
            answer(self._refused())
            return
        self._waiting.append(answer)
        self._woken = self._woken or (cause, actor, time.perf_counter())
        self._turns.interrupt(f"woken by {cause}")
        if self.status is AgentStatus.PAUSED:
            self._turns.follow(self._wake_up, "wake")

    # What is told of it -------------------------------------------------------------------------------------------

    def quiet(self) -> None:
        """The proxy says that it has become quiet, or is a new one that owes no such word."""
        self._try_pause_again.set()

    def proxy_lost(self) -> None:
        """Whatever the proxy acknowledged is void."""
        self._turns.interrupt(LINK_LOST)

    def helper_back(self) -> None:
        """Whoever waits for the helper tries again."""
        self._turns.interrupt("the helper was away")

    def ended(self, exit_code: int | None, pid: int) -> None:
        """Its main process ended. Ignored where that was asked for, or where `pid` is one of an earlier start."""
        if self._gone or self.status not in ALIVE or (pid and self.pid and pid != self.pid):
            return
        self._gone = True
        self._turns.interrupt("it ended")
        self._turns.follow(lambda: self._after_end(exit_code), "ended")

    def thawed_alone(self, reason: str) -> None:
        """The helper thawed it by itself: it runs."""
        self._turns.interrupt(f"the helper thawed it: {reason}")
        generation = self.agent.generation
        self._turns.follow(lambda: self._thawed(generation, f"thawed by the helper: {reason}"), "thawed")

    @property
    def moment(self) -> int:
        """The same before and after a question means that nothing was done to this agent meanwhile."""
        return self._turns.moment

    async def found(self, stat: Stat, moment: int) -> None:
        """Ground truth after a (re)connect to the helper, asked for at `moment`; asked again where that has passed."""
        fresh = moment == self.moment and not self._turns.taken
        if fresh and reconcile(self.status, Truth(stat.state)) is Action.KEEP:
            self.pid, self.address = stat.pid, stat.address
            return

        async def act() -> None:
            await self._reconcile(stat if fresh else await self._look())

        await self._turns.take(act, "reconcile")

    async def settle(self) -> None:
        """Ends a pause under way towards awake and returns when no transition is under way."""
        self._turns.interrupt("the daemon is leaving")
        await self._turns.free()

    async def _leave(self, work: Callable[[], Coroutine[Any, Any, None]], verb: str) -> None:
        """Takes its turn, and whoever has it now in a wait lets go of it."""
        self._leaving += 1
        self._turns.interrupt("it is being stopped")
        self._try_pause_again.set()

        async def last() -> None:
            self._leaving -= 1
            await work()

        await self._turns.take(last, verb)

    # To sleep -----------------------------------------------------------------------------------------------------

    async def _pause_once(self, actor: str, reason: str, minimum_awake_s: float) -> Attempt:
        """One try, read from top to bottom; every way out but the last one leaves the agent awake."""
        # 0. May it sleep at all?
        if self.status is AgentStatus.PAUSED:
            return Attempt()
        if self.status is not AgentStatus.RUNNING:
            raise _wrong_state(self.agent, self.status)
        session = self._world.gates.session
        if (objection := self._objection(session, minimum_awake_s)) is not None:
            return Attempt(objection)
        # 1. The intent is on disk before anything freezes.
        self._become(AgentStatus.PAUSING, reason, actor, bump=True)
        agent, generation = self.agent.id, self.agent.generation
        freezing: asyncio.Task[object] | None = None
        try:
            await self._turns.unless_interrupted(self._world.save(self.agent))
            # 2. The proxy closes the gate, or says who is at work.
            _refuse_busy(await self._turns.unless_interrupted(self._world.gates.close(agent, generation)))
            # 3. Freeze.
            self._turns.go_on()
            freezing = spawn(outcome_of(self._world.helper.freeze(agent, generation)), name=f"freeze {self.agent.name}")
            self._note_freeze(await self._turns.first(freezing))
            # 4. Nothing came to the host while it froze.
            _refuse_busy(await self._turns.unless_interrupted(self._world.gates.still_closed(agent, generation)))
            if self._world.gates.session != session:
                raise Interrupted(LINK_LOST)
            # 5. Commit.
            asleep = _replaced(self.agent, AgentStatus.PAUSED, reason)
            await self._turns.unless_interrupted(self._world.save(asleep))
            self._take(asleep, actor)
            # 6. From here a lost link does not open the gate, and the helper does not thaw by itself.
            self._world.gates.asleep(self.agent)
            await self._turns.unless_interrupted(self._world.helper.confirm(agent, generation))
        except Exception as why:  # whatever it was, the agent must not stay frozen
            await self._undo(str(why), actor, freezing)
            if not isinstance(why, Interrupted | HiveError):
                raise
            hopeless = why if isinstance(why, StoreFull) else None
            if hopeless is not None:
                self.retry_freeze_at = self._loop.time() + FIRST_FREEZE_RETRY_S
            return Attempt(str(why), busy=isinstance(why, _Busy), hopeless=hopeless)
        self._fell_asleep()
        return Attempt()

    def _objection(self, session: int | None, minimum_awake_s: float) -> str | None:
        if session is None:
            return "the proxy is not connected"
        if not self._world.helper.connected:
            return "the helper is not connected"
        if self._leaving or self._gone:
            return "it is ending"
        if self._loop.time() - self.awake_since < minimum_awake_s:
            return "it was woken a moment ago"
        return None

    def _note_freeze(self, outcome: object) -> None:
        """What cannot be frozen is left alone for a while. Raises the error that `outcome` is."""
        if not isinstance(outcome, HiveError):
            return
        if not isinstance(outcome, DependencyDown):
            delay_s = min(FIRST_FREEZE_RETRY_S * 2**self._freeze_failures, LONGEST_FREEZE_RETRY_S)
            self._freeze_failures += 1
            self.retry_freeze_at = self._loop.time() + delay_s
        raise outcome

    async def _undo(self, why: str, actor: str, freezing: asyncio.Task[object] | None) -> None:
        """Back to running: thawed where a freeze was asked for, the gate open, whoever waited answered."""
        slept = self.status is AgentStatus.PAUSED
        overtaken = freezing is not None and not freezing.done()
        if slept:
            self._fell_asleep()
            self._become(AgentStatus.RESUMING, why, actor, bump=True)
        if freezing is not None and not await self._thaw():
            return
        await self._running(why, actor, woke=slept)
        # Should the freeze that was overtaken come through after all, it is undone before anything else is done.
        if overtaken and freezing is not None and not isinstance(await freezing, HiveError):
            await self._thaw()

    def _fell_asleep(self) -> None:
        self._freeze_failures = 0
        self.pauses += 1
        self._world.fell_asleep()

    # Awake --------------------------------------------------------------------------------------------------------

    async def _wake_up(self) -> None:
        if self.status is AgentStatus.PAUSED:
            cause, actor, _ = self._woken or (WakeCause.OPERATOR, "hive", 0.0)
            await self._thaw_and_run(f"woken by {cause}", actor, woke=True)

    async def _thawed(self, generation: int, reason: str) -> None:
        """Said of the sleep of `generation`: another may have begun before this came to its turn."""
        if self.status is AgentStatus.PAUSED and self.agent.generation == generation:
            await self._running(reason, "helper", bump=True)

    async def _thaw_and_run(self, reason: str, actor: str, *, woke: bool) -> None:
        """Acts first and records after: nothing is written before the gate is open."""
        self._become(AgentStatus.RESUMING, reason, actor, bump=True)
        if await self._thaw():
            await self._running(reason, actor, woke=woke)

    async def _thaw(self) -> bool:
        """Thaws until the helper has verified it, however long the helper is away.

        False where nothing is left to thaw, or where a stop is waiting, which thaws by itself.
        """
        wait_s, said, nothing_since = 0.01, "", 0.0
        while not (self._gone or self._leaving):
            try:
                await self._world.helper.thaw(self.agent.id)
                return True
            except (NotFound, WrongState):
                # Nothing of it runs. How it ended is told in a moment, unless that was lost with a link.
                nothing_since = nothing_since or self._loop.time()
                if self._loop.time() - nothing_since > END_TOLD_WITHIN_S:
                    self.ended(None, 0)
            except HiveError as error:
                if error.message != said:
                    log.warning("agent_thaw_failed agent=%s error=%s", self.agent.name, error.message)
                    said = error.message
            await self._turns.nap(wait_s)
            wait_s = min(2 * wait_s, LONGEST_THAW_RETRY_S)
        return False

    async def _running(self, reason: str, actor: str, *, woke: bool = False, bump: bool = False) -> None:
        """It runs: the gate opens, whoever waited is answered, and only then it is recorded."""
        if self.status is not AgentStatus.PAUSING:
            self.awake_since = self._loop.time()
        self._become(AgentStatus.RUNNING, reason, actor, bump=bump)
        self._world.gates.open(self.agent)
        self._answer(self._open())
        woken, self._woken = self._woken, None
        if woke:
            self._count_wake(woken)
        await self._record()

    def _count_wake(self, woken: tuple[WakeCause, str, float] | None) -> None:
        self.wakes += 1
        if woken is not None:
            took_ms = 1000 * (time.perf_counter() - woken[2])  # uvloop's own time has milliseconds only
            self.last_wake = (took_ms, woken[0])
            self._world.woke(woken[0], took_ms)

    def _open(self) -> Open:
        return Open(agent=self.agent.id, generation=self.agent.generation)

    def _refused(self) -> Refused:
        return Refused(agent=self.agent.id, generation=self.agent.generation, status=str(self.status))

    def _answer(self, answer: Open | Refused) -> None:
        waiting, self._waiting = self._waiting, []
        for tell in waiting:
            tell(answer)

    # Start and end ------------------------------------------------------------------------------------------------

    async def _start(self, actor: str) -> None:
        if self.status not in _AT_REST:
            if self.status is AgentStatus.STOPPING:
                raise _wrong_state(self.agent, self.status)
            return
        starting = _replaced(self.agent, AgentStatus.STARTING, "started by operator", bump=True)
        await self._world.save(starting)
        self._take(starting, actor)
        self._failures.clear()
        self._world.gates.tell(self.agent)
        try:
            await self._start_process(actor)
        except HiveError as error:
            await self._rest(AgentStatus.ERROR, error.message, actor)
            self._world.failed(self.agent)
            raise

    async def _start_process(self, actor: str) -> None:
        """From `starting` to `running`. Raises HiveError with nothing of it left alive."""
        agent = self.agent
        spec = await self._world.sandbox_spec(agent)
        await self._world.helper.define(agent.id, spec)
        self._gone, self.pid = False, None
        try:
            started = await self._world.helper.start(agent.id)
            self.pid, self.address = started.pid, started.address
        except WrongState:
            # It lives where the answer to an earlier start was lost; what is left of one that ended is in the way.
            stat = await self._look()
            if stat.state != Truth.RUNNING:
                raise
            self.pid, self.address = stat.pid, stat.address
        except TimedOut:
            await outcome_of(self._world.helper.stop(agent.id, grace_s=0.0))
            raise
        self.started_spec = agent.spec
        if self.address:
            self._world.gates.tell(self.agent)
        if not self._gone:
            await self._running(f"started, pid {self.pid}", actor)

    async def _stop(self, actor: str, reason: str) -> None:
        """Left in `stopping` where the helper is gone: the reconciliation that follows finishes it."""
        if self.status not in _AT_REST:
            await self._end(actor, reason)

    async def _end(self, actor: str, reason: str) -> None:
        self._become(AgentStatus.STOPPING, reason, actor, bump=True)
        self._world.gates.refuse(self.agent)
        self._answer(self._refused())
        await self._record()
        with contextlib.suppress(NotFound, WrongState):  # nothing of it lived any more
            await self._world.helper.stop(self.agent.id, grace_s=self._world.settings.agents.stop_grace_s)
        await self._rest(AgentStatus.STOPPED, reason, actor)

    async def _remove(self, actor: str) -> None:
        await self._stop(actor, "being removed")
        with contextlib.suppress(NotFound):  # it was never started
            await self._world.helper.remove(self.agent.id)
        await self._world.forget(self.agent)
        self._turns.end()
        self._world.gates.gone(self.agent.id)

    async def _change_spec(self, spec: AgentSpec) -> None:
        if spec.cid != self.agent.spec.cid and self.status not in _AT_REST:  # its guest would go on calling from there
            hint = f"hive agent stop {self.agent.name}, then change it"
            raise WrongState(f"the cid of an agent that is {self.status} cannot be changed", hint=hint)
        changed = msgspec.structs.replace(self.agent, spec=spec)
        await self._world.save(changed)
        self.agent = changed
        self._world.gates.tell(changed)

    async def _after_end(self, exit_code: int | None) -> None:
        """It ended by itself: what the restart policy says."""
        if not self._gone or self.status not in ALIVE:
            return
        agents, now = self._world.settings.agents, self._loop.time()
        while self._failures and now - self._failures[0] >= agents.restart_window_s:
            self._failures.popleft()
        if exit_code != 0:
            self._failures.append(now)
            self._world.failed(self.agent)
        ending = after_end(self.agent.spec.restart, exit_code, len(self._failures), agents.restart_limit)
        if ending.restart_in_s is None:
            await self._rest(ending.status, ending.reason, "hive")
            return
        self.started_spec = None
        self._become(ending.status, ending.reason, "hive", bump=True)
        self._world.gates.tell(self.agent)
        await self._record()
        await self._start_again(ending.restart_in_s)

    async def _start_again(self, wait_s: float) -> None:
        """Until it runs, or cannot, or is stopped; a helper or proxy that is away is waited for."""
        retry_at = self._loop.time() + wait_s
        while not self._leaving:
            if (left_s := retry_at - self._loop.time()) > 0:
                await self._turns.nap(left_s)
                continue
            try:
                await self._start_process("hive")
                return
            except DependencyDown:
                retry_at = self._loop.time() + wait_s
            except HiveError as error:
                await self._rest(AgentStatus.ERROR, error.message, "hive")
                return

    async def _rest(self, status: AgentStatus, reason: str, actor: str) -> None:
        """It is at rest: nothing of it lives, and nobody waits for it."""
        self._gone, self.pid, self.started_spec, self._woken = False, None, None, None
        self._become(status, reason, actor, bump=self.status is not AgentStatus.STOPPING)
        self._world.gates.tell(self.agent)
        self._world.gates.refuse(self.agent)
        self._answer(self._refused())
        await self._record()

    # Truth --------------------------------------------------------------------------------------------------------

    async def _look(self) -> Stat:
        agent = self.agent.id
        return (await self._world.helper.stat([agent])).get(agent, GONE)

    async def _reconcile(self, stat: Stat) -> None:
        """Makes record and truth agree (reconcile.py says how)."""
        self.pid, self.address = stat.pid, stat.address
        found = f"found {stat.state}, recorded {self.status}"
        match reconcile(self.status, Truth(stat.state)):
            case Action.KEEP:
                pass
            case Action.ADOPT:
                await self._running(found, "hive", bump=True)
            case Action.THAW:
                await self._thaw_and_run(found, "hive", woke=False)
            case Action.ENDED:
                self._gone = True
                await self._after_end(stat.exit_code)
            case Action.FINISH:
                await self._rest(AgentStatus.STOPPED, self.agent.reason, "hive")
            case Action.STOP:
                await self._end("hive", found)

    # Memory and record --------------------------------------------------------------------------------------------

    def _become(self, status: AgentStatus, reason: str, actor: str, *, bump: bool = False) -> None:
        """The one place where the state in memory changes, but for what is recorded first."""
        self._take(_replaced(self.agent, status, reason, bump=bump), actor)

    def _take(self, agent: Agent, actor: str) -> None:
        before, self.agent = self.agent, agent
        self._world.changed(before, agent, actor)

    async def _record(self) -> None:
        """Writes what already is so. Where that fails memory goes on, and it is tried again until it is written."""
        try:
            await self._world.save(self.agent)
        except HiveError as error:
            if not self._is_unrecorded:
                log.error("agent_not_recorded agent=%s status=%s error=%s", self.agent.name, self.status, error.message)
            self._is_unrecorded = True
            if self._record_later is None:
                self._record_later = self._loop.call_later(RECORD_AGAIN_S, self._record_again)
        else:
            if self._is_unrecorded:
                log.info("agent_recorded_again agent=%s status=%s", self.agent.name, self.status)
            self._is_unrecorded = False

    def _record_again(self) -> None:
        self._record_later = None
        self._turns.follow(self._record, "record")


def _replaced(agent: Agent, status: AgentStatus, reason: str, *, bump: bool = False) -> Agent:
    depth, goal = _DEPTHS.get(status, (SleepDepth.AWAKE, SleepDepth.AWAKE))
    return msgspec.structs.replace(
        agent,
        status=status,
        depth=depth,
        depth_goal=goal,
        generation=agent.generation + bump,
        since=time.time(),
        reason=reason,
    )


def _wrong_state(agent: Agent, status: AgentStatus) -> WrongState:
    """Names the state, and what would change it."""
    how = f"in error: {agent.reason}" if status is AgentStatus.ERROR else str(status)
    return WrongState(f"{agent.name} is {how}", hint=f"hive agent start {agent.name}" if status in _AT_REST else "")


def _refuse_busy(answer: object) -> None:
    if isinstance(answer, Busy):
        raise _Busy(answer.reason)
