"""One agent's transitions: memory decides, SQLite records, the sandbox is the truth.

Freezing writes its intent first (pausing.py), so does paging out (deepening.py); thawing acts first and records after
(waking.py). One transition at a time, each in a task of its own: a client that leaves cancels nothing. Every failure
ends awake, or asleep as light as before (design.md §4).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from typing import Any

from hive.agents.deepening import Deepening
from hive.agents.depth import true_depth
from hive.agents.effects import Effects
from hive.agents.pausing import LINK_LOST, Attempt, Pausing
from hive.agents.reconcile import Action, Truth, reconcile
from hive.agents.restarts import Restarts
from hive.agents.starting import HIVE, OPERATOR, Starting
from hive.agents.state import Answer, LifecycleState, wrong_state
from hive.agents.wake_queue import WakeQueue
from hive.agents.waking import Waking
from hive.domain import ALIVE, AT_REST, Agent, AgentSpec, AgentStatus, SleepDepth, WakeCause
from hive.errors import AgentBusy, HiveError, NotFound, NotSupported, Saturated, TimedOut, WrongState
from hive.link.helper import WENT_DOWN, Stat
from hive.link.messages import Open, Refused

RETRY_BUSY_S = 1.0
"""An operator's pause tries again on the proxy's `quiet`, and this often in case that got lost with a link."""
RETRY_OTHER_S = 0.1


class AgentLifecycle:
    """One agent, and whatever is being done to it. `line`: where wakes from deep sleep wait, the same for all."""

    def __init__(self, agent: Agent, effects: Effects, line: WakeQueue) -> None:
        self._state = LifecycleState(agent, effects)
        self._turns = self._state.turns
        self._effects = effects
        self._loop = asyncio.get_running_loop()
        self._waking = Waking(self._state, line, on_lost=lambda: self.ended(None, 0))
        self._pausing = Pausing(self._state, self._waking)
        self._deepening = Deepening(self._state)
        self._starting = Starting(self._state, self._waking)
        self._try_pause_again = asyncio.Event()

    def __repr__(self) -> str:
        busy = ", in transition" if self._turns.taken else ""
        return (
            f"<AgentLifecycle {self.agent.name} {self.status} g{self.agent.generation}, {self.waiting} waiting{busy}>"
        )

    # How it is ----------------------------------------------------------------------------------------------------

    @property
    def agent(self) -> Agent:
        return self._state.agent

    @property
    def status(self) -> AgentStatus:
        return self._state.agent.status

    @property
    def pid(self) -> int | None:
        return self._state.pid

    @property
    def address(self) -> str:
        """The address of its port (`AgentRow.address`), empty for 127.0.0.1."""
        return self._state.address

    @property
    def started_spec(self) -> AgentSpec | None:
        """The spec it was started with by this daemon; None where it was not."""
        return self._state.started_spec

    @property
    def awake_since(self) -> float:
        """Loop time of its start or last wake."""
        return self._state.awake_since

    @property
    def retry_freeze_at(self) -> float:
        """Loop time before which it is not put to sleep because it is idle: that failed."""
        return self._pausing.retry_at

    @property
    def asleep_since(self) -> float:
        """Loop time of its last sleep, or of this daemon's start where it slept before."""
        return self._state.asleep_since

    @property
    def deep_failure(self) -> str:
        """The failure of the last try to page it out; empty after a success."""
        return self._deepening.failure

    @property
    def retry_deep_at(self) -> float:
        """Loop time before which it is not paged out by itself: that failed."""
        return self._deepening.retry_at

    @property
    def deep_note(self) -> str:
        """The reason for light sleep although deep was tried; empty where it is awake, deep, or nothing was tried."""
        return self._deepening.failure if self._state.sleeps_light else ""

    @property
    def kept_awake_until(self) -> float | None:
        """Unix seconds; None where nothing keeps it awake, or no longer."""
        return self.agent.keep_awake_until if self._state.kept_awake_for_s() > 0 else None

    @property
    def kept_awake_for_s(self) -> float:
        """Seconds for which it is still kept from sleeping when idle; 0 or less where nothing keeps it awake."""
        return self._state.kept_awake_for_s()

    @property
    def kept_awake_by(self) -> str:
        """The actor that keeps it awake, empty where an earlier daemon was asked."""
        return self._state.kept_awake_by

    @property
    def waiting(self) -> int:
        """Number of callers waiting for it to be awake."""
        return len(self._state.waiting)

    @property
    def last_wake(self) -> tuple[float, WakeCause] | None:
        """Milliseconds from the first ask to the open gate, and the cause."""
        return self._waking.last

    @property
    def restarts(self) -> Restarts:
        """The past and the next act of its restart policy."""
        return self._starting.restarts

    @property
    def recent_ends(self) -> int:
        """Ends within the window in which failures are counted."""
        window_s = self._effects.settings.agents.restart_window_s
        return self.restarts.recent(now=self._loop.time(), window_s=window_s)

    @property
    def wakes(self) -> int:
        return self._waking.count

    @property
    def pauses(self) -> int:
        return self._pausing.count

    # What is asked of it ------------------------------------------------------------------------------------------

    async def start(self, actor: str) -> None:
        """Raises what kept it from starting; it is in `error` then. Unchanged where it is alive."""
        await self._turns.take(lambda: self._starting.start(actor), "start")

    async def stop(self, actor: str, *, by: str = OPERATOR) -> None:
        """Awake or asleep, it is asked to end and killed after the grace.

        `by`: `operator`, or `hive` where Hive itself goes down: whether it comes back with Hive (boot.py).
        """
        reason = WENT_DOWN if by == HIVE else "stopped by operator"
        await self._leave(lambda: self._starting.stop(actor, reason, by=by), "stop")

    async def restart(self, actor: str) -> None:
        """Stop, then start."""

        async def both() -> None:
            await self._starting.stop(actor, "restarting")
            await self._starting.start(actor)

        await self._leave(both, "restart")

    async def remove(self, actor: str) -> None:
        """Nothing of it is left afterwards: processes, socket, home, record, keys."""
        await self._leave(lambda: self._remove(actor), "remove")

    async def change_spec(self, spec: AgentSpec) -> None:
        """Records another spec. What concerns the process itself takes effect when it is started next."""
        await self._turns.take(lambda: self._change_spec(spec), "change")

    async def keep_awake(self, until: float | None, actor: str) -> None:
        """Keeps it from being put to sleep for idleness until then (Unix seconds); None ends that. It wakes no agent.

        Outlives the daemon. An operator's pause is carried out all the same. Raises StoreFull and nothing is changed.
        """
        await self._turns.take(lambda: self._state.keep_awake(until, actor), "keep awake")

    def hold(self) -> None:
        """Keeps it awake, against an operator's pause too, until as many calls of `release`: a program runs inside."""
        self._state.hold()

    def release(self) -> None:
        """Ends one `hold`; a pause that waits for it tries again."""
        self._state.release()
        self._try_pause_again.set()

    @property
    def held(self) -> int:
        """Number of programs that callers run inside."""
        return self._state.held

    async def start_after_boot(self, why: str) -> None:
        """Starts it unasked (boot.py). Returns after the first try; it waits by itself for obstacles that may pass."""
        await self._turns.take(lambda: self._starting.after_boot(why), "start")

    async def resume(self, actor: str) -> None:
        """Returns when it is awake. Raises WrongState where it is not to be woken."""
        if status := await self.awaken(WakeCause.OPERATOR, actor=actor):
            raise wrong_state(self.agent, AgentStatus(status))

    async def awaken(self, cause: WakeCause, *, actor: str = "hive") -> str:
        """The empty string once it is awake; else the status that keeps it from being woken, like `stopped`."""
        done: asyncio.Future[Open | Refused] = self._loop.create_future()
        self.wake(cause, lambda answer: None if done.done() else done.set_result(answer), actor=actor)
        answer = await done
        return answer.status if isinstance(answer, Refused) else ""

    async def fall_asleep(self, reason: str) -> Attempt:
        """One try at sleep because it is idle; never sooner after a wake than the minimum."""
        return await self._turns.take(lambda: self._pausing.once("idle", reason, idle=True), "sleep")

    async def go_deep(self, actor: str = "idle") -> None:
        """From light sleep to deep; nothing where it is. Raises WrongState where it is awake or is woken meanwhile.

        Raises NotSupported, Saturated and whatever else the helper says, StoreFull: it sleeps light then.
        """
        await self._turns.take(lambda: self._deepening.once(actor), "go deep")

    async def pause(self, *, timeout_s: float, now: bool, actor: str, deep: bool = False) -> None:
        """Tries until it sleeps, `deep` until its memory is paged out too. `now`: raises AgentBusy instead of waiting.

        Raises TimedOut with the agent awake; StoreFull, awake too, where its sleep cannot be recorded. With `deep` also
        what `go_deep` raises; it sleeps light then, and NotSupported and Saturated say so.
        """
        await self._pause(timeout_s=timeout_s, now=now, actor=actor)
        if not deep:
            return
        try:
            await self.go_deep(actor)
        except (NotSupported, Saturated) as error:
            raise type(error)(f"{self.agent.name} sleeps light; {error.message}", hint=error.hint) from error

    async def _pause(self, *, timeout_s: float, now: bool, actor: str) -> None:
        deadline = self._loop.time() + timeout_s
        while True:
            self._try_pause_again.clear()
            attempt = await self._turns.take(lambda: self._pausing.once(actor, "operator"), "pause")
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
                async with asyncio.timeout(min(left_s, retry_s)):
                    await self._try_pause_again.wait()

    def wake(self, cause: WakeCause, answer: Answer, *, actor: str = "proxy") -> None:
        """Wakes it; `answer` is called once, as soon as it is awake or certain not to be.

        A wake wins at once over a pause and over a page-out; in `starting` it waits. A sleeping agent is thawed once
        for all wakes that wait; one in deep sleep as soon as there is memory for it.
        """
        self._waking.ask(cause, answer, actor)

    # What is told of it -------------------------------------------------------------------------------------------

    def quiet(self) -> None:
        """The proxy says that it has become quiet, or is a new one that owes no such word."""
        self._try_pause_again.set()

    def proxy_lost(self) -> None:
        """Drops all that the proxy acknowledged."""
        self._turns.interrupt(LINK_LOST)

    def helper_back(self) -> None:
        """Makes all that waited for the helper try again."""
        self._deepening.forget_failures()
        self._turns.interrupt("the helper was away")

    def ended(self, exit_code: int | None, pid: int, why: str = "") -> None:
        """Its main process ended, `why` if known. Ignored where that was asked for, or `pid` is of an earlier start."""
        state = self._state
        if state.gone or state.status not in ALIVE or (pid and state.pid and pid != state.pid):
            return
        state.note_end()
        self._turns.interrupt("it ended")
        self._turns.follow(lambda: self._starting.after_end(exit_code, why), "ended")

    def thawed_alone(self, reason: str) -> None:
        """The helper thawed it by itself: it runs."""
        self._turns.interrupt(f"the helper thawed it: {reason}")
        generation = self.agent.generation
        self._turns.follow(lambda: self._waking.thawed(generation, f"thawed by the helper: {reason}"), "thawed")

    @property
    def moment(self) -> int:
        """The same before and after a question means that nothing was done to this agent meanwhile."""
        return self._turns.moment

    async def found(self, stat: Stat, moment: int, *, is_new_boot: bool) -> None:
        """Ground truth after a (re)connect to the helper, asked for at `moment`; asked again where that has passed.

        `is_new_boot`: what is gone went down with the machine.
        """
        fresh = moment == self.moment and not self._turns.taken
        keep = reconcile(self.status, Truth(stat.state)) is Action.KEEP
        if fresh and keep and (self.status is not AgentStatus.PAUSED or self._true_depth(stat) is self.agent.depth):
            self._state.saw(stat)
            return

        async def act() -> None:
            await self._reconcile(stat if fresh else await self._state.look(), is_new_boot=is_new_boot)

        await self._turns.take(act, "reconcile")

    async def settle(self) -> None:
        """Ends a pause under way towards awake and returns when no transition is under way."""
        self._turns.interrupt("the daemon is leaving")
        await self._turns.free()

    # Inside a turn ------------------------------------------------------------------------------------------------

    async def _leave(self, work: Callable[[], Coroutine[Any, Any, None]], verb: str) -> None:
        """Takes its turn; the present holder of the turn, if it waits, gives it up."""
        self._state.begin_leaving()
        self._turns.interrupt("it is being stopped")
        self._try_pause_again.set()

        async def last() -> None:
            self._state.end_leaving()
            await work()

        await self._turns.take(last, verb)

    async def _remove(self, actor: str) -> None:
        await self._starting.stop(actor, "being removed", is_last=True)
        try:
            with contextlib.suppress(NotFound):  # it was never started
                await self._effects.helper.remove(self.agent.id)
            await self._effects.forget(self.agent, actor)
        except HiveError:
            await self._state.record()
            raise
        self._turns.end()
        self._effects.gates.gone(self.agent.id)

    async def _change_spec(self, spec: AgentSpec) -> None:
        if spec.cid != self.agent.spec.cid and self.status not in AT_REST:  # its guest would go on calling from there
            hint = f"hive agent stop {self.agent.name}, then change it"
            raise WrongState(f"the cid of an agent that is {self.status} cannot be changed", hint=hint)
        await self._state.change_spec(spec)

    async def _reconcile(self, stat: Stat, *, is_new_boot: bool) -> None:
        """Makes record and truth agree (reconcile.py says how)."""
        state = self._state
        state.saw(stat)
        found = f"found {stat.state}, recorded {self.status}"
        match reconcile(self.status, Truth(stat.state)):
            case Action.KEEP if self.status is AgentStatus.PAUSED:
                await self._deepening.found(self._true_depth(stat))
            case Action.KEEP:
                pass
            case Action.ADOPT:
                await self._waking.running(found, "hive", bump=True)
            case Action.THAW:
                await self._waking.thaw_and_run(found, "hive", woke=False)
            case Action.ENDED if is_new_boot:
                await self._starting.lost_in_boot()
            case Action.ENDED:
                state.note_end()
                await self._starting.after_end(stat.exit_code, stat.why)
            case Action.FINISH:
                by = self.agent.stopped_by
                await self._starting.rest(AgentStatus.STOPPED, self.agent.reason, "hive", stopped_by=by)
            case Action.STOP:
                await self._starting.end("hive", found, by=self.agent.stopped_by)

    def _true_depth(self, stat: Stat) -> SleepDepth:
        return true_depth(self.agent.depth, resident_bytes=stat.rss_bytes, swap_bytes=stat.swap_bytes)
