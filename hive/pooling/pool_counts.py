"""Counters of the pool since the daemon started, for `GET /metrics`. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter

from hive.domain import Band
from hive.exposition import Histogram, Values
from hive.shapes.pool import PoolView

LOAD_SECONDS = (0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Buckets of a load: a small model from the page cache takes a second, a large one from a disk minutes."""
WAIT_SECONDS = (0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0)
"""Buckets of a wait for a load, which has the turns of others in it."""
STATES = ("cold", "loading", "ready", "draining", "asleep", "stopping", "failed")
"""Told as 0 where no slot is so: a series that comes and goes cannot be added up."""


LABELS = {
    "it fits": "fits",
    "room": "room",
    "idle": "idle",
    "an operator": "order",
    "switch": "switch",
    "nobody waits": "unwanted",
    "its prompt cache": "flush",
}
"""Beginning of the decider's reason → the label; the reason itself may name a model."""


def label_of(why: str) -> str:
    """The reason of a move as a label, of which there are few.

    >>> label_of("room for qwen3-8b-f9b30c0d"), label_of("it fits"), label_of("it cannot wake where it sleeps")
    ('room', 'fits', 'other')
    """
    return next((label for begin, label in LABELS.items() if why.startswith(begin)), "other")


class PoolCounts:
    """Counts of what happened in the pool since this daemon started. `why`: the decider's reason, told as its label.

    >>> counts = PoolCounts()
    >>> counts.loaded("qwen3-8b", "it fits", 3.0)
    >>> counts.evicted("room for qwen3-8b")
    >>> counts
    <PoolCounts 1 loads, 1 evictions>
    """

    def __init__(self) -> None:
        self._loads: Counter[tuple[str, ...]] = Counter()
        self._load_s = Histogram(LOAD_SECONDS)
        self._evictions: Counter[tuple[str, ...]] = Counter()
        self._wait_s = {band: Histogram(WAIT_SECONDS) for band in Band}
        self._sleeps: Counter[tuple[str, ...]] = Counter()
        self._wake_s = Histogram(LOAD_SECONDS)
        self._sleep_failures: Counter[tuple[str, ...]] = Counter()
        self._thrashes = 0
        self._cuts = 0

    def __repr__(self) -> str:
        return f"<PoolCounts {self._loads.total()} loads, {self._evictions.total()} evictions>"

    def loaded(self, model: str, why: str, seconds: float) -> None:
        """A load has ended well."""
        self._loads[model, label_of(why)] += 1
        self._load_s.observe(seconds)

    def evicted(self, why: str) -> None:
        """A model was unloaded, or put to sleep."""
        self._evictions[label_of(why),] += 1

    def dropped(self) -> None:
        """A model was unloaded by its server's own doing."""
        self._evictions["dropped",] += 1

    def waited(self, band: Band, seconds: float) -> None:
        """A request that had to wait for a load could go on, or was refused."""
        self._wait_s[band].observe(seconds)

    def slept(self, level: str) -> None:
        """A model has fallen asleep, and its memory is back."""
        self._sleeps[level,] += 1

    def woke(self, seconds: float) -> None:
        """A model has woken whole."""
        self._wake_s.observe(seconds)

    def sleep_failed(self, level: str) -> None:
        """A model did not fall asleep, or did not wake as it was."""
        self._sleep_failures[level,] += 1

    def thrash(self) -> None:
        """A model was asked for again within the turn it has just lost."""
        self._thrashes += 1

    def cut(self) -> None:
        """A request had not ended when the time after its model's turn was over."""
        self._cuts += 1

    def metrics(self) -> dict[str, Values | None]:
        """The same for Prometheus (`hive.control.metrics.TABLE`)."""
        return {
            "pool_loads": self._loads,
            "pool_load_seconds": {(): self._load_s},
            "pool_evictions": self._evictions,
            "pool_wait_seconds": {(str(band),): waits for band, waits in self._wait_s.items()},
            "pool_sleeps": self._sleeps,
            "pool_wake_seconds": {(): self._wake_s},
            "pool_sleep_failures": self._sleep_failures,
            "pool_thrash": {(): self._thrashes},
            "pool_turn_cut": {(): self._cuts},
        }


def pool_values(view: PoolView) -> dict[str, Values | None]:
    """The figures of the pool as it is now. Bytes that nobody can measure are left out.

    >>> nothing = {"accounts": [], "slots": [], "backends": [], "leases": []}
    >>> pool_values({"enabled": False, "why_not": "[pool] enabled = false", **nothing})
    {}
    """
    if not view["enabled"]:
        return {}
    accounts, slots = view["accounts"], view["slots"]
    charged: Counter[tuple[str, ...]] = Counter()
    for slot in slots:
        for grant in slot["grants"]:
            charged[grant["account"], slot["backend"]] += grant["charged_bytes"]
    for service in view["backends"]:
        for grant in service["grants"]:
            charged[grant["account"], service["kind"]] += grant["charged_bytes"]
    states: Counter[tuple[str, ...]] = Counter({(state,): 0 for state in STATES})
    states.update((slot["state"],) for slot in slots)
    return {
        "pool_charged_bytes": charged,
        "pool_measured_bytes": {
            (account["id"],): account["measured_bytes"] for account in accounts if account["measured_bytes"] is not None
        },
        "pool_foreign_bytes": {(account["id"],): account["foreign_bytes"] for account in accounts},
        "pool_free_bytes": {(account["id"],): account["free_bytes"] for account in accounts},
        "pool_slots": states,
    }
