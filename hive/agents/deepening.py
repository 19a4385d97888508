"""From light sleep to deep: the goal is recorded first, and whatever happens the agent goes on sleeping light."""

from __future__ import annotations

import contextlib

from hive.agents.depth import retry_after_s
from hive.agents.state import LifecycleState, wrong_state
from hive.agents.transition_lock import Interrupted
from hive.domain import AgentStatus, SleepDepth
from hive.errors import HiveError, LinkLost, NotSupported, WrongState


class Deepening:
    """Pages one sleeper out. `failure`: how the last try failed; `retry_at`: loop time of the next one."""

    def __init__(self, state: LifecycleState) -> None:
        self._state = state
        self._failures = 0
        self.failure = ""
        self.retry_at = 0.0

    def forget_failures(self) -> None:
        """Another helper may do what the last one could not."""
        self._failures, self.failure, self.retry_at = 0, "", 0.0

    async def once(self, actor: str) -> None:
        """One try. Nothing is done where it is deep already.

        A wake ends the wait at once, and the helper's work with its thaw: WrongState. Raises what the helper does
        (NotSupported, Saturated, LinkLost …), StoreFull; the agent sleeps light then.
        """
        state, turns, effects = self._state, self._state.turns, self._state.effects
        if state.status is not AgentStatus.PAUSED:
            raise wrong_state(state.agent, state.status)
        if state.agent.depth is SleepDepth.DEEP:
            return
        if state.waiting or state.leaving or state.gone:
            # A wake or a stop that was asked for before this had its turn waits behind it, and no interruption will
            # come.
            raise WrongState(f"{state.agent.name} is not paged out: it is being woken or stopped")
        if state.agent.spec.deepest is not SleepDepth.DEEP:
            raise NotSupported(f"{state.agent.name} is not to sleep deep", hint="its spec says deepest = light")
        agent, generation = state.agent.id, state.agent.generation
        state.sleep_at(SleepDepth.LIGHT, SleepDepth.DEEP, actor)
        try:
            # 1. After a crash the next daemon knows that memory may be in swap.
            await state.record_intent()
            turns.go_on()
            # 2. Page out; a wake does not wait for its answer.
            paged = await turns.unless_interrupted(effects.helper.page_out(agent, generation))
        except Interrupted as why:
            raise WrongState(f"{state.agent.name} was not paged out: {why}") from why
        except LinkLost:
            raise  # still its goal: the next helper says how deep it is
        except HiveError as error:
            self._note(error)
            state.sleep_at(SleepDepth.LIGHT, SleepDepth.LIGHT, actor)
            await self._record()
            raise
        # 3. It is so, therefore it is recorded.
        self.forget_failures()
        state.paged_out(paged)
        state.sleep_at(SleepDepth.DEEP, SleepDepth.DEEP, actor)
        await self._record()

    async def found(self, depth: SleepDepth) -> None:
        """The truth about one that sleeps; a goal not reached stays one."""
        agent = self._state.agent
        if agent.depth is not depth:
            goal = depth if depth is SleepDepth.DEEP else agent.depth_goal
            self._state.sleep_at(depth, goal, "hive")
            await self._record()

    def _note(self, error: HiveError) -> None:
        self._failures += 1
        may_change = self._state.effects.memory().swap_free_bytes == 0  # an operator turns swap on
        delay_s = retry_after_s(self._failures, hopeless=isinstance(error, NotSupported) and not may_change)
        self.failure, self.retry_at = error.message, self._state.loop.time() + delay_s

    async def _record(self) -> None:
        with contextlib.suppress(Interrupted):  # a wake does not wait for this; what it records comes after it
            await self._state.turns.unless_interrupted(self._state.record())
