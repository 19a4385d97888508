"""Starting and ending an agent, and the consequences of an end nobody asked for."""

from __future__ import annotations

import contextlib
import logging
import time

from hive.agents.reconcile import FIRST_BACKOFF_S, Truth, after_end
from hive.agents.restarts import Restarts
from hive.agents.state import LifecycleState, wrong_state
from hive.agents.transition_lock import outcome_of
from hive.agents.waking import Waking
from hive.domain import ALIVE, AT_REST, AgentStatus
from hive.errors import DependencyDown, HiveError, NotFound, TimedOut, WrongState
from hive.link.helper import WENT_DOWN

log = logging.getLogger("hive.agents")

OPERATOR, HIVE = "operator", "hive"
"""`Agent.stopped_by`."""


class Starting:
    """Starts and ends one agent's process."""

    def __init__(self, state: LifecycleState, waking: Waking) -> None:
        self._state = state
        self._waking = waking
        self.restarts = Restarts()

    async def start(self, actor: str, reason: str = "started by operator") -> None:
        """See `Life.start`."""
        state = self._state
        if state.status not in AT_REST:
            if state.status is AgentStatus.STOPPING:
                raise wrong_state(state.agent, state.status)
            return
        await state.become_once_recorded(AgentStatus.STARTING, reason, actor)
        self.restarts.forget()
        state.effects.gates.tell(state.agent)
        try:
            await self._start_process(actor)
        except HiveError as error:
            await self.rest(AgentStatus.ERROR, error.message, actor)
            state.effects.failed(state.agent)
            raise

    async def _start_process(self, actor: str) -> None:
        """From `starting` to `running`. Raises HiveError with nothing of it left alive."""
        state, helper = self._state, self._state.effects.helper
        agent = state.agent
        spec = await state.effects.sandbox_spec(agent)
        await helper.define(agent.id, spec)
        state.no_process()
        try:
            started = await helper.start(agent.id)
            state.lives(started.pid, started.address)
        except WrongState:
            # It lives where the answer to an earlier start was lost; what is left of one that ended is in the way.
            stat = await state.look()
            if stat.state != Truth.RUNNING:
                raise
            state.saw(stat)
        except TimedOut:
            await outcome_of(helper.stop(agent.id, grace_s=0.0))
            raise
        state.started_with(agent.spec)
        if not state.gone:
            await self._waking.running(f"started, pid {state.pid}", actor)

    async def stop(self, actor: str, reason: str, *, by: str = "", is_last: bool = False) -> None:
        """Left in `stopping` where the helper is gone: the reconciliation that follows finishes it.

        `by`: as in `Agent.stopped_by`. What is at rest stays as it is, but does not come back after a boot where an
        operator wants it stopped. `is_last`: that it is at rest is not recorded, its record goes next.
        """
        state = self._state
        if state.status not in AT_REST:
            await self.end(actor, reason, by=by, is_last=is_last)
        elif by == OPERATOR and state.status is not AgentStatus.CREATED and state.agent.stopped_by != OPERATOR:
            await state.note_stopped_by(by)

    async def end(self, actor: str, reason: str, *, by: str = "", is_last: bool = False) -> None:
        """Asks all of its processes to end, and kills them after the grace."""
        state = self._state
        state.become(AgentStatus.STOPPING, reason, actor, bump=True, stopped_by=by)
        state.effects.gates.refuse(state.agent)
        state.answer(state.refused)
        await state.record()
        with contextlib.suppress(NotFound, WrongState):  # nothing of it lived any more
            await state.effects.helper.stop(state.agent.id, grace_s=state.effects.settings.agents.stop_grace_s)
        await self.rest(AgentStatus.STOPPED, reason, actor, stopped_by=by, is_last=is_last)

    async def after_end(self, exit_code: int | None, why: str = "") -> None:
        """It ended by itself, `why` if known: what the restart policy says. Ended by Hive, it comes back with Hive."""
        state = self._state
        if not state.gone or state.status not in ALIVE:
            return
        if why == WENT_DOWN:
            await self.rest(AgentStatus.STOPPED, why, "hive", stopped_by=HIVE)
            return
        agents = state.effects.settings.agents
        ends = self.restarts.ended(now=state.loop.time(), window_s=agents.restart_window_s)
        if exit_code != 0:
            state.effects.failed(state.agent)
        ending = after_end(state.agent.spec.restart, exit_code, ends, agents.restart_limit, why)
        if ending.restart_in_s is None:
            await self.rest(ending.status, ending.reason, "hive")
            return
        self.restarts.again(ending.how, next_at=time.time() + ending.restart_in_s)
        await self._to_be_started(ending.reason)
        await self._start_again(ending.restart_in_s)

    async def _to_be_started(self, reason: str) -> None:
        """Sets `starting`: calls of it wait from now on."""
        state = self._state
        state.to_be_started()
        state.become(AgentStatus.STARTING, reason, "hive", bump=True)
        state.effects.gates.tell(state.agent)
        await state.record()

    async def lost_in_boot(self) -> None:
        """It ran when the machine went down, or in a backup. `after_boot` starts it when its turn comes."""
        await self._to_be_started("the machine was started again, or a backup was restored")

    async def after_boot(self, why: str) -> None:
        """Starts it where it is still to be: meanwhile an operator may have thought otherwise.

        One try. Where something is away that it needs (a proxy, an engine, systemd that is busy), it is tried again by
        itself, and no caller waits for that.
        """
        state = self._state
        if state.status in AT_REST:
            self.restarts.forget()
            await self._to_be_started(why)
        if state.status is AgentStatus.STARTING and (waits_for := await self._try_to_start()) is not None:
            first = 1 if isinstance(waits_for, TimedOut) else 0
            state.turns.follow(lambda: self._start_again(FIRST_BACKOFF_S, too_slow=first), "start")

    async def _start_again(self, wait_s: float, *, too_slow: int = 0) -> None:
        """Until it runs, or cannot, or is stopped; a helper or proxy that is away is waited for.

        A host on which fifty start at once may be too slow for one: that is tried again, until `restart_limit` tries
        took too long.
        """
        state = self._state
        retry_at = state.loop.time() + wait_s
        while not state.leaving and state.status is AgentStatus.STARTING:
            if (left_s := retry_at - state.loop.time()) > 0:
                await state.turns.nap(left_s)
                continue
            is_last = too_slow + 1 >= state.effects.settings.agents.restart_limit
            if (waits_for := await self._try_to_start(is_last=is_last)) is None:
                return
            too_slow += isinstance(waits_for, TimedOut)
            retry_at = state.loop.time() + wait_s
            self.restarts.waits(waits_for.message, next_at=time.time() + wait_s)

    async def _try_to_start(self, *, is_last: bool = False) -> HiveError | None:
        """None once it runs, or is in `error` because it cannot; else what may pass.

        A start that took too long may, where it is not the last that is tried.
        """
        self.restarts.tried()
        try:
            await self._start_process("hive")
        except HiveError as error:
            may_pass = isinstance(error, DependencyDown) or (isinstance(error, TimedOut) and not is_last)
            if may_pass:
                return error
            await self.rest(AgentStatus.ERROR, error.message, "hive")
        return None

    async def rest(
        self, status: AgentStatus, reason: str, actor: str, *, stopped_by: str = "", is_last: bool = False
    ) -> None:
        """It is at rest: no process of it lives, and no caller waits for it."""
        state = self._state
        state.no_process()
        self.restarts.tried()
        self._waking.nobody_waits()
        bump = state.status is not AgentStatus.STOPPING
        state.become(status, reason, actor, bump=bump, stopped_by=stopped_by)
        state.effects.gates.tell(state.agent)
        state.effects.gates.refuse(state.agent)
        state.answer(state.refused)
        if not is_last:
            await state.record()
