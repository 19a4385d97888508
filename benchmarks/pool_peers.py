"""The decisions of other systems, in their best configuration, on the machine of pool_machine.py.

Read in their sources (2026-08): estimates are exact for all, nobody deadlocks, nothing in flight is evicted.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import combinations

from pool_machine import Ask, SimMachine


class PeerPolicy:
    """A policy that needs no word about requests."""

    def arrived(self, machine: SimMachine, ask: Ask) -> None:
        """Nothing to learn."""

    def ended(self, machine: SimMachine, ask: Ask) -> None:
        """Nothing to learn."""


def wanted(machine: SimMachine) -> list[str]:
    """Models that are not loaded and are waited for, the longest wait first."""
    heads = [(asks[0].at, name) for name, asks in machine.waiting.items() if asks and name not in machine.ready]
    return [name for _, name in sorted(heads)]


class OllamaScheduler(PeerPolicy):
    """server/sched.go: one pending request at a time. If it does not fit: one runner goes, the idle ones first, by
    keep_alive (the same for all) and then by name; if none is idle the first of that order is waited for. New requests
    for a loaded model are served at once, also by the runner that is waited for."""

    def __init__(self) -> None:
        self._pending = ""

    def act(self, machine: SimMachine) -> float | None:
        line = wanted(machine)
        if self._pending not in line:
            self._pending = line[0] if line else ""
        if not self._pending:
            return None
        if machine.models[self._pending].size_gib <= machine.free_gib:
            machine.load(self._pending)
            return None
        idle = sorted(name for name in machine.ready if not machine.is_busy(name))
        if idle:
            machine.unload(idle[0])
        return None


class LlamaSwap(PeerPolicy):
    """The matrix of sets, with each set that fits: the fewest victims, ties by the order of definition, or by last use.
    A loaded model is always served at once; requests are served model by model; in flight is never evicted.

    `only_idle`: sets with a busy victim are left aside while there is another; else they are waited for.
    """

    def __init__(self, *, by_use: bool, only_idle: bool) -> None:
        self._by_use = by_use
        self._only_idle = only_idle

    def act(self, machine: SimMachine) -> float | None:
        for name in wanted(machine):
            victims = self._victims(machine, name)
            if victims is None or any(machine.is_busy(victim) for victim in victims):
                continue
            if victims:
                machine.unload(victims[0])
            else:
                machine.load(name)
            return None
        return None

    def _victims(self, machine: SimMachine, name: str) -> tuple[str, ...] | None:
        short = machine.models[name].size_gib - machine.free_gib
        order = sorted(machine.ready, key=lambda model: machine.used_at[model] if self._by_use else 0.0)
        order = order if self._by_use else [model for model in machine.models if model in machine.ready]
        if self._only_idle:
            order = [model for model in order if not machine.is_busy(model)]
        for size in range(len(order) + 1):
            for victims in combinations(order, size):
                if gib(machine, victims) >= short:
                    return victims
        return None


def gib(machine: SimMachine, models: Iterable[str]) -> int:
    return sum(machine.models[model].size_gib for model in models)


class LeastRecentlyUsed(PeerPolicy):
    """As llama-server's router, LocalAI and Ray Serve, but by memory: idle models go, the longest unused first."""

    def act(self, machine: SimMachine) -> float | None:
        for name in wanted(machine):
            short = machine.models[name].size_gib - machine.free_gib
            if short <= 0:
                machine.load(name)
                return None
            idle = sorted((machine.used_at[model], model) for model in machine.ready if not machine.is_busy(model))
            if gib(machine, (model for _, model in idle)) >= short:
                machine.unload(idle[0][1])
                return None
        return None


STAY_WARM_S = 300.0
RECLAIM_S = 2.0


class Seed003(PeerPolicy):
    """seeds/003 to the letter: a victim has a lower priority than what comes, and all have the same here. So a model
    goes when it has been idle for `stay_warm` (300 s for an LLM) and no sooner; after an unload 2 s of sleep."""

    def __init__(self) -> None:
        self._asleep_until = 0.0

    def act(self, machine: SimMachine) -> float | None:
        if machine.now < self._asleep_until:
            return self._asleep_until
        for name in wanted(machine):
            if machine.models[name].size_gib <= machine.free_gib:
                machine.load(name)
                return None
        idle = [(machine.used_at[name] + STAY_WARM_S, name) for name in machine.ready if not machine.is_busy(name)]
        if not idle:
            return None
        at, name = min(idle)
        if at > machine.now:
            return at
        machine.unload(name)
        self._asleep_until = machine.now + RECLAIM_S
        return self._asleep_until


PEERS = {
    "Ollama": OllamaScheduler,
    "llama-swap": lambda: LlamaSwap(by_use=False, only_idle=False),
    "llama-swap idle": lambda: LlamaSwap(by_use=False, only_idle=True),
    "llama-swap LRU ties": lambda: LlamaSwap(by_use=True, only_idle=True),
    "LRU by VRAM": LeastRecentlyUsed,
}
"""Those that Hive is compared with; the best of them counts for each figure. seeds/003 starves and is printed alone."""


def in_order_optimum_s(machine: SimMachine) -> float:
    """The least seconds of loading with which the requests can be served in order of arrival, with all of them known.

    Exact: dynamic programming over resident sets. A set that costs no less than another one, even if that one had to
    load all that it lacks of it, is dropped.
    """
    models = list(machine.models.values())
    bit = {model.name: 1 << number for number, model in enumerate(models)}
    size = {1 << number: model.size_gib for number, model in enumerate(models)}
    load_s = {1 << number: model.load_s for number, model in enumerate(models)}
    bits = list(size)

    def total(table: dict[int, float] | dict[int, int], members: int) -> float:
        return sum(value for one, value in table.items() if members & one)

    states = {0: 0.0}
    before = ""
    for ask in machine.asks:
        if ask.model == before:
            continue
        before = ask.model
        one = bit[ask.model]
        found: dict[int, float] = {}
        for members, cost in states.items():
            if members & one:
                found[members] = min(cost, found.get(members, cost))
                continue
            paid = cost + load_s[one]
            short = total(size, members) + size[one] - machine.room_gib
            for kept in _minimal(members, short, bits, size):
                found[kept | one] = min(paid, found.get(kept | one, paid))
        states = {}
        for members, cost in sorted(found.items(), key=lambda item: (item[1], -item[0].bit_count())):
            if all(cost < other + total(load_s, members & ~kept) for kept, other in states.items()):
                states[members] = cost
    return min(states.values())


def _minimal(members: int, short: float, bits: list[int], size: dict[int, int]) -> list[int]:
    """Models that may stay after an eviction of which no victim can be left out."""
    if short <= 0:
        return [members]
    here = [one for one in bits if members & one]
    left = []
    for number in range(1, len(here) + 1):
        for victims in combinations(here, number):
            freed = sum(size[one] for one in victims)
            if freed >= short and all(freed - size[one] < short for one in victims):
                left.append(members & ~sum(victims))
    return left
