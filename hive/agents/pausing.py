"""One try at sleep: the intent is recorded first, and every way out but the last one leaves the agent awake."""

from __future__ import annotations

import asyncio

import msgspec

from hive.agents.depth import FIRST_RETRY_S, retry_after_s
from hive.agents.state import LifecycleState, wrong_state
from hive.agents.transition_lock import Interrupted, outcome_of
from hive.agents.waking import Waking
from hive.domain import AgentStatus
from hive.errors import DependencyDown, HiveError, StoreFull, TimedOut, WrongState
from hive.link.messages import Busy
from hive.tasks import spawn

INSIDE = "somebody runs a program inside (hive agent exec)"
LINK_LOST = "the proxy's link was lost"


class Attempt(msgspec.Struct, frozen=True):
    """The result of one try at sleep: `why_not` is None where it sleeps. `busy`: the proxy owes one `quiet`.

    `hopeless`: another try at once would fail too, because the state cannot be recorded, the agent must not be frozen,
    or its engine is down.
    """

    why_not: str | None = None
    busy: bool = False
    hopeless: HiveError | None = None


class _Busy(Interrupted):
    """The proxy says that the agent is at work."""


_MAY_PASS = (DependencyDown, WrongState, TimedOut)
"""Failures that another try may not meet: the helper or the proxy is back, no wake comes in the middle."""


class Pausing:
    """Puts one agent to sleep. `retry_at`: loop time before which idleness alone causes no try."""

    def __init__(self, state: LifecycleState, waking: Waking) -> None:
        self._state = state
        self._waking = waking
        self._failures = 0
        self.retry_at = 0.0
        self.count = 0

    async def once(self, actor: str, reason: str, *, idle: bool = False) -> Attempt:
        """One try, read from top to bottom. `idle`: nobody asked for it, so it gives way to all that keeps it awake."""
        state = self._state
        # 0. May it sleep at all?
        if state.status is AgentStatus.PAUSED:
            return Attempt()
        if state.status is not AgentStatus.RUNNING:
            raise wrong_state(state.agent, state.status)
        effects, turns, session = state.effects, state.turns, state.effects.gates.session
        if (objection := self._objection(session, idle=idle)) is not None:
            return Attempt(objection)
        # 1. The intent is on disk before anything freezes.
        state.become(AgentStatus.PAUSING, reason, actor, bump=True)
        agent, generation = state.agent.id, state.agent.generation
        freezing: asyncio.Task[object] | None = None
        try:
            await state.record_intent()
            # 2. The proxy closes the gate, or says that it is busy.
            _refuse_busy(await turns.unless_interrupted(effects.gates.close(agent, generation)))
            # 3. Freeze.
            turns.go_on()
            freezing = spawn(outcome_of(effects.helper.freeze(agent, generation)), name=f"freeze {state.agent.name}")
            self._note_freeze(await turns.first(freezing))
            # 4. Nothing came to the host while it froze.
            _refuse_busy(await turns.unless_interrupted(effects.gates.still_closed(agent, generation)))
            if effects.gates.session != session:
                raise Interrupted(LINK_LOST)
            # 5. Commit.
            await state.commit_sleep(reason, actor)
            # 6. From here a lost link does not open the gate, and the helper does not thaw by itself.
            effects.gates.asleep(state.agent)
            await turns.unless_interrupted(effects.helper.confirm(agent, generation))
        except Exception as why:  # whatever it was, the agent must not stay frozen
            await self._undo(str(why), actor, freezing)
            if not isinstance(why, Interrupted | HiveError):
                raise
            hopeless = why if isinstance(why, HiveError) and not isinstance(why, _MAY_PASS) else None
            if isinstance(why, StoreFull):
                self.retry_at = state.loop.time() + FIRST_RETRY_S
            return Attempt(str(why), busy=isinstance(why, _Busy), hopeless=hopeless)
        self._fell_asleep()
        return Attempt()

    def _objection(self, session: int | None, *, idle: bool) -> str | None:
        state = self._state
        if session is None:
            return "the proxy is not connected"
        if not state.effects.helper.connected:
            return "the helper is not connected"
        if state.leaving or state.gone:
            return "it is ending"
        if state.held:
            return INSIDE
        if idle and state.loop.time() - state.awake_since < state.effects.settings.sleep.minimum_awake_s:
            return "it was woken a moment ago"
        if idle and state.kept_awake_for_s() > 0:
            return "it is kept awake"
        return None

    def _note_freeze(self, outcome: object) -> None:
        """Notes a failed freeze: the agent is left alone for a while. Raises the error that `outcome` is."""
        if not isinstance(outcome, HiveError):
            return
        if not isinstance(outcome, DependencyDown):
            self._failures += 1
            self.retry_at = self._state.loop.time() + retry_after_s(self._failures, hopeless=False)
        raise outcome

    async def _undo(self, why: str, actor: str, freezing: asyncio.Task[object] | None) -> None:
        """Goes back to running: thaws where a freeze was asked for, opens the gate, answers those that waited."""
        state, waking = self._state, self._waking
        slept = state.status is AgentStatus.PAUSED
        overtaken = freezing is not None and not freezing.done()
        if slept:
            self._fell_asleep()
            state.become(AgentStatus.RESUMING, why, actor, bump=True)
        if freezing is not None and not await waking.thaw():
            return
        await waking.running(why, actor, woke=slept)
        # Should the freeze that was overtaken come through after all, it is undone before anything else is done.
        if overtaken and freezing is not None and not isinstance(await freezing, HiveError):
            await waking.thaw()

    def _fell_asleep(self) -> None:
        self._failures = 0
        self.count += 1
        self._waking.fell_asleep()
        self._state.effects.fell_asleep()


def _refuse_busy(answer: object) -> None:
    if isinstance(answer, Busy):
        raise _Busy(answer.reason)
