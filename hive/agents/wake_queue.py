"""The line of wakes from deep sleep: asks the host for its free memory, and calls the agents admission.py names."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from hive.agents.admission import MemoryAdmission
from hive.agents.effects import Effects
from hive.agents.transition_lock import outcome_of
from hive.agents.units_text import mib
from hive.domain import Agent
from hive.errors import HiveError
from hive.tasks import spawn

log = logging.getLogger("hive.agents")

LOOK_S = 0.05
"""Between looks while a wake waits. A look costs some 60 µs (`Effects.memory`)."""


class WakeQueue:
    """One per daemon."""

    def __init__(self, effects: Effects) -> None:
        self._effects = effects
        self._loop = asyncio.get_running_loop()
        self._admission = MemoryAdmission()
        self._go: dict[str, Callable[[], None]] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._asks = False

    def __repr__(self) -> str:
        return f"<WakeQueue {len(self)} waiting>"

    def __len__(self) -> int:
        return len(self._admission)

    def enter(self, agent: Agent, need_bytes: int, go: Callable[[], None]) -> None:
        """Calls `go` as soon as there is memory, which may be now. One that waits already is called once."""
        if agent.id in self._go:
            return
        self._go[agent.id] = go
        self._admission.enter(agent.id, need_bytes=need_bytes, tier=agent.spec.tier, now=self._loop.time())
        self._look()
        if agent.id in self._go:
            log.info("agent_waits_for_memory agent=%s need_mb=%d", agent.name, need_bytes >> 20)

    def runs(self, agent: str) -> None:
        """It came awake, by whatever way."""
        self._go.pop(agent, None)
        self._admission.runs(agent)

    def leave(self, agent: str) -> None:
        """It sleeps or has ended."""
        self._go.pop(agent, None)
        self._admission.leave(agent)

    def why(self, agent: str) -> str:
        """The reason for its waiting, in words; empty where it does not wait."""
        need = self._admission.need_bytes(agent)
        if need is None:
            return ""
        available, coming = self._effects.memory().available_bytes or 0, self._admission.outstanding_bytes(self._now)
        reserve = self._effects.settings.sleep.wake_reserve_mb
        there = f"{mib(available)} available" + (f", {mib(coming)} of it promised" if coming else "")
        return f"is being woken, waits for memory: needs {mib(need)} ({there}, {reserve} MiB kept free)"

    @property
    def _now(self) -> float:
        return self._loop.time()

    def _look(self) -> None:
        """Admits the wakes for which there is memory; looks again soon while others wait."""
        admitted = self._admission.admit(
            available_bytes=self._effects.memory().available_bytes,
            reserve_bytes=self._effects.settings.sleep.wake_reserve_mb << 20,
            now=self._now,
        )
        for agent in admitted:
            self._go.pop(agent)()
        if len(self._admission) and self._timer is None:
            self._timer = self._loop.call_later(LOOK_S, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._look()
        if len(self._admission) and self._admission.coming() and not self._asks:
            self._asks = True
            spawn(self._ask_who_waits_for_a_model(), name="who waits for a model")

    async def _ask_who_waits_for_a_model(self) -> None:
        """While others wait for memory, none is held for an agent with a turn at the model."""
        try:
            coming = self._admission.coming()
            if self._effects.gates.session is None:
                return
            activity = await outcome_of(self._effects.gates.activity(coming))
            if isinstance(activity, HiveError):
                return
            for agent in coming:
                if (seen := activity.get(agent)) is not None and seen.in_flight:
                    self._admission.waits_for_model(agent)
        finally:
            self._asks = False
