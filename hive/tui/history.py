"""The last values of a few figures, from which their curves are drawn. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from hive.tui.snapshot import GpuRow, Snapshot

LOOKS = 256
"""Looks that are remembered: a curve has a column for each."""
FORGET_EVERY = 64


class History:
    """The history of all agents together, of each that generated something, and of each GPU.

    >>> History()
    <History 0 looks>
    """

    def __init__(self) -> None:
        self._looks = 0
        self._total: deque[float | None] = deque(maxlen=LOOKS)
        self._agents: dict[str, deque[tuple[int, float]]] = {}
        self._gpus: dict[str, deque[tuple[int, float]]] = {}

    def __repr__(self) -> str:
        return f"<History {self._looks} looks>"

    def add(self, snapshot: Snapshot) -> None:
        """Adds one look. A name without a value for `LOOKS` looks is forgotten some looks later."""
        self._looks += 1
        rates = [(row.id, row.tokens_per_s) for row in snapshot.agents if row.tokens_per_s is not None]
        self._total.append(sum(rate for _, rate in rates) if rates else None if snapshot.agents else 0.0)
        _remember(self._agents, self._looks, ((agent, rate) for agent, rate in rates if rate))
        busy = ((_name_of(gpu), gpu.busy_percent) for gpu in snapshot.gpus)
        _remember(self._gpus, self._looks, ((name, percent) for name, percent in busy if percent is not None))

    def tokens_per_s(self) -> list[float | None]:
        """The rates of all agents, the newest last; None where a look had no rates."""
        return list(self._total)

    def tokens_per_s_of(self, agent: str) -> list[float | None]:
        """The rates of this agent, as long as `tokens_per_s`."""
        known = dict(self._agents.get(agent, ()))
        first = self._looks - len(self._total) + 1
        return [None if total is None else known.get(first + n, 0.0) for n, total in enumerate(self._total)]

    def busy_percent_of(self, gpu: GpuRow) -> list[float | None]:
        """The load of this GPU; None where it did not say."""
        known = dict(self._gpus.get(_name_of(gpu), ()))
        return [known.get(look) for look in range(self._looks - len(self._total) + 1, self._looks + 1)]


def _name_of(gpu: GpuRow) -> str:
    return gpu.uuid or str(gpu.number)


def _remember(kept: dict[str, deque[tuple[int, float]]], look: int, found: Iterable[tuple[str, float]]) -> None:
    for name, value in found:
        kept.setdefault(name, deque(maxlen=LOOKS)).append((look, value))
    if look % FORGET_EVERY == 0:
        for name in [name for name, values in kept.items() if values[-1][0] <= look - LOOKS]:
            del kept[name]
