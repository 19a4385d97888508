"""The order in which wakes from deep sleep get their memory: RAM that a wake takes has to be there first.

Twenty sleepers woken at once fault in the memory of twenty agents. On a host that lives from their sleep the OOM killer
would then choose which agents survive. Pure: memory and monotonic time come in as arguments.
"""

from __future__ import annotations

from hive.domain import Tier

REFAULT_BYTES_PER_S = 150 << 20
"""The speed at which memory comes back: 300 MiB touched again took 0.98 s from zram and 2.1 s from a disk (measured on
two cores of an AMD EPYC, lz4, every object of a Python heap)."""
SHORTEST_S = 0.5
MARGIN_BYTES = 8 << 20
"""Beside a recorded working set: what a turn makes anew or has to itself from then on (4 to 8 MiB, measured with agents
of OpenAI's package and of LangGraph)."""

FIRST = {Tier.HIGH: 0, Tier.MEDIUM: 1, Tier.LOW: 2}
"""Order of the tiers: the smaller goes first."""


def need_bytes(swap_bytes: int, working_set_bytes: int | None) -> int:
    """RAM that a wake takes: the working set recorded and a margin, at most all that is in swap.

    All that is in swap where nothing is recorded yet: then nobody knows what of it will be touched.

    >>> need_bytes(300 << 20, 17 << 20) >> 20, need_bytes(300 << 20, None) >> 20, need_bytes(9 << 20, 17 << 20) >> 20
    (25, 300, 9)
    """
    return swap_bytes if working_set_bytes is None else min(swap_bytes, working_set_bytes + MARGIN_BYTES)


class _Wish:
    __slots__ = ("need_bytes", "rank")

    def __init__(self, need_bytes: int, rank: tuple[int, float]) -> None:
        self.need_bytes = need_bytes
        self.rank = rank


class _Admitted:
    __slots__ = ("at", "has_asked", "lasts_s", "need_bytes")

    def __init__(self, need_bytes: int, at: float) -> None:
        self.need_bytes = need_bytes
        self.at = at
        self.lasts_s = max(SHORTEST_S, need_bytes / REFAULT_BYTES_PER_S)
        self.has_asked = False

    def outstanding_bytes(self, now: float) -> int:
        """Memory it has not faulted in yet: less with time, as what is back is missing from the available memory."""
        left = 0.0 if self.has_asked else 1 - (now - self.at) / self.lasts_s
        return round(self.need_bytes * max(0.0, left))

    def is_over(self, now: float) -> bool:
        return now - self.at >= self.lasts_s


class MemoryAdmission:
    """Wakes in line for memory: high tier first, then in the order of asking. None overtakes, and the first always goes
    where no other is coming back.

    >>> line = MemoryAdmission()
    >>> for agent, tier in (("a", Tier.LOW), ("b", Tier.MEDIUM), ("c", Tier.MEDIUM)):
    ...     line.enter(agent, need_bytes=300 << 20, tier=tier, now=0.0)
    >>> line.admit(available_bytes=700 << 20, reserve_bytes=256 << 20, now=0.0), line
    (['b'], <MemoryAdmission 2 waiting, 1 coming back>)
    >>> line.admit(available_bytes=400 << 20, reserve_bytes=256 << 20, now=2.0)   # too little, but b is back
    ['c']
    """

    def __init__(self) -> None:
        self._waiting: dict[str, _Wish] = {}
        self._admitted: dict[str, _Admitted] = {}

    def __repr__(self) -> str:
        return f"<MemoryAdmission {len(self._waiting)} waiting, {len(self._admitted)} coming back>"

    def __len__(self) -> int:
        """Number of waiting wakes."""
        return len(self._waiting)

    def need_bytes(self, agent: str) -> int | None:
        """Memory the agent waits for; None where it does not wait."""
        wish = self._waiting.get(agent)
        return None if wish is None else wish.need_bytes

    def outstanding_bytes(self, now: float) -> int:
        """Memory that those admitted have not faulted in yet."""
        return sum(admitted.outstanding_bytes(now) for admitted in self._admitted.values())

    def enter(self, agent: str, *, need_bytes: int, tier: Tier, now: float) -> None:
        """It wants to wake. One that waits already keeps its place."""
        if agent not in self._waiting:
            self._waiting[agent] = _Wish(need_bytes, (FIRST[tier], now))

    def admit(self, *, available_bytes: int | None, reserve_bytes: int, now: float) -> list[str]:
        """Admits the agents that go ahead now, in this order. `available_bytes` None: not known, none waits for it."""
        for agent in [agent for agent, admitted in self._admitted.items() if admitted.is_over(now)]:
            del self._admitted[agent]
        admitted, coming = [], self.outstanding_bytes(now)
        for agent in sorted(self._waiting, key=lambda agent: self._waiting[agent].rank):
            need = self._waiting[agent].need_bytes
            left = None if available_bytes is None else available_bytes - coming - need
            if left is not None and left < reserve_bytes and self._admitted:
                break
            del self._waiting[agent]
            self._admitted[agent] = _Admitted(need, now)
            admitted.append(agent)
            coming += need
        return admitted

    def coming(self) -> list[str]:
        """Those that memory is held for."""
        return [agent for agent, admitted in self._admitted.items() if not admitted.has_asked]

    def waits_for_model(self, agent: str) -> None:
        """Its turn is at the model: what it needed to get there is back, and no memory is held for it.

        It counts as coming back for its time all the same: where nothing fits, no more go because of it.
        """
        if agent in self._admitted:
            self._admitted[agent].has_asked = True

    def runs(self, agent: str) -> None:
        """It came awake, by whatever way: it waits no longer."""
        self._waiting.pop(agent, None)

    def leave(self, agent: str) -> None:
        """It sleeps or has ended: it neither waits nor comes back."""
        self._waiting.pop(agent, None)
        self._admitted.pop(agent, None)
