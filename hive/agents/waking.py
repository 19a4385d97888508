"""The way from asleep to awake: acts first and records after.

One thaw for all wakes that wait; from deep sleep as soon as there is memory for it (wake_queue.py).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from hive.agents.admission import need_bytes
from hive.agents.state import Answer, LifecycleState
from hive.agents.wake_queue import WakeQueue
from hive.domain import AgentStatus, SleepDepth, WakeCause
from hive.errors import HiveError, NotFound, WrongState

log = logging.getLogger("hive.agents")

LONGEST_THAW_RETRY_S = 0.25
END_TOLD_WITHIN_S = 1.0
"""The helper tells how an agent ended after it has killed what that left behind."""

_WAKEABLE = frozenset({AgentStatus.STARTING, AgentStatus.PAUSING, AgentStatus.PAUSED, AgentStatus.RESUMING})
_HAVE_NO_REQUEST = frozenset({WakeCause.SCHEDULE, WakeCause.OPERATOR})
"""Causes after which the proxy sees no activity: an awake agent stays awake as long as after a wake."""


class Waking:
    """Wakes one agent. `on_lost()` is called where nothing is left of one that should be thawed.

    `last`: milliseconds from the first ask to the open gate, and the cause.
    """

    def __init__(self, state: LifecycleState, line: WakeQueue, *, on_lost: Callable[[], None]) -> None:
        self._state = state
        self._line = line
        self._on_lost = on_lost
        self._woken: tuple[WakeCause, str, float] | None = None
        self.last: tuple[float, WakeCause] | None = None
        self.count = 0

    def ask(self, cause: WakeCause, answer: Answer, actor: str) -> None:
        """See `Life.wake`."""
        state = self._state
        if state.status is AgentStatus.RUNNING:
            if cause in _HAVE_NO_REQUEST:
                state.note_awake()
            answer(state.opened)
            return
        if state.status not in _WAKEABLE:
            answer(state.refused)
            return
        state.wait(answer)
        self._woken = self._woken or (cause, actor, time.perf_counter())
        state.turns.interrupt(f"woken by {cause}")
        if state.status is not AgentStatus.PAUSED:
            return
        if state.agent.depth is SleepDepth.DEEP:
            need = need_bytes(state.swap_bytes, state.working_set_bytes)
            self._line.enter(state.agent, need, self._go)
        else:
            self._go()

    def _go(self) -> None:
        self._state.turns.follow(self._wake_up, "wake")

    def fell_asleep(self) -> None:
        """Gives up its place in the line for memory."""
        self._line.leave(self._state.agent.id)

    def nobody_waits(self) -> None:
        """It will not be woken: the next ask is the first one of another wake."""
        self._woken = None
        self._line.leave(self._state.agent.id)

    async def _wake_up(self) -> None:
        if self._state.status is AgentStatus.PAUSED:
            cause, actor, _ = self._woken or (WakeCause.OPERATOR, "hive", 0.0)
            await self.thaw_and_run(f"woken by {cause}", actor, woke=True)

    async def thawed(self, generation: int, reason: str) -> None:
        """Said of the sleep of `generation`: another may have begun before this came to its turn."""
        if self._state.status is AgentStatus.PAUSED and self._state.agent.generation == generation:
            await self.running(reason, "helper", bump=True)

    async def thaw_and_run(self, reason: str, actor: str, *, woke: bool) -> None:
        """Acts first and records after: nothing is written before the gate is open."""
        self._state.become(AgentStatus.RESUMING, reason, actor, bump=True)
        if await self.thaw():
            await self.running(reason, actor, woke=woke)

    async def thaw(self) -> bool:
        """Thaws until the helper has verified it, however long the helper is away.

        False where nothing is left to thaw, or where a stop is waiting, which thaws by itself.
        """
        state, wait_s, said, nothing_since = self._state, 0.01, "", 0.0
        while not (state.gone or state.leaving):
            try:
                await state.effects.helper.thaw(state.agent.id)
                return True
            except (NotFound, WrongState):
                # Nothing of it runs. How it ended is told in a moment, unless that was lost with a link.
                nothing_since = nothing_since or state.loop.time()
                if state.loop.time() - nothing_since > END_TOLD_WITHIN_S:
                    self._on_lost()
            except HiveError as error:
                if error.message != said:
                    log.warning("agent_thaw_failed agent=%s error=%s", state.agent.name, error.message)
                    said = error.message
            await state.turns.nap(wait_s)
            wait_s = min(2 * wait_s, LONGEST_THAW_RETRY_S)
        return False

    async def running(self, reason: str, actor: str, *, woke: bool = False, bump: bool = False) -> None:
        """Notes that it runs: the gate opens, those that waited are answered, and only then it is recorded."""
        state, depth = self._state, self._state.agent.depth
        if state.status is not AgentStatus.PAUSING:
            state.note_awake()
        self._line.runs(state.agent.id)
        state.become(AgentStatus.RUNNING, reason, actor, bump=bump)
        state.effects.gates.open(state.agent)
        state.answer(state.opened)
        woken, self._woken = self._woken, None
        if woke:
            self._count(woken, depth)
        await state.record()

    def _count(self, woken: tuple[WakeCause, str, float] | None, depth: SleepDepth) -> None:
        self.count += 1
        if woken is not None:
            took_ms = 1000 * (time.perf_counter() - woken[2])  # uvloop's own time has milliseconds only
            self.last = (took_ms, woken[0])
            self._state.effects.woke(woken[0], took_ms, depth)
