"""The facts about the pool that its deciders are given: slots, demands, accounts of memory, rules. Frozen, no I/O.

All times are seconds of one monotonic clock, the same that gives `now`. All memory is in bytes.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hive.domain import Band

MIB = 1 << 20
CPU = "cpu"
"""The account of the host's own memory, for a model that runs without a GPU."""


class SlotState(StrEnum):
    """State of a slot. `draining`: its gate is closed, what is in flight goes on; `asleep`: its server lives and holds
    less memory."""

    COLD = "cold"
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    ASLEEP = "asleep"
    STOPPING = "stopping"
    FAILED = "failed"


class Demand(msgspec.Struct, frozen=True):
    """One request, or an order of an operator, that waits for a model to be loaded.

    `deadline`: when its asker gives up; None for an order. `tenant`: to whom the seconds of the load are charged.
    """

    band: Band
    since: float
    deadline: float | None = None
    tenant: str = ""
    agent: str = ""


class Grant(msgspec.Struct, frozen=True):
    """The charge of one slot in one account. `measured_bytes`: of its processes there, None if it is not known."""

    account: str
    charged_bytes: int
    measured_bytes: int | None = None


class SleepLevel(msgspec.Struct, frozen=True):
    """A way to sleep that a model's server has. `kept_bytes`: stay charged in all its accounts together; `host_bytes`:
    of the host's memory while it sleeps; `wake_s`: to be ready again."""

    name: str
    kept_bytes: int
    host_bytes: int
    wake_s: float


class Audience(msgspec.Struct, frozen=True):
    """The clients that will probably ask a model again soon (audience.py counts them).

    `users`: agents, and callers without a name, that used it last and are free to ask; `rate_per_s`: of its requests;
    `ends_at`: when it is empty if nobody asks until then.
    """

    users: int = 0
    rate_per_s: float = 0.0
    ends_at: float = 0.0

    def is_empty(self, now: float) -> bool:
        """Whether nobody is expected.

        >>> Audience(users=1, ends_at=30.0).is_empty(29.0), Audience(users=1, ends_at=30.0).is_empty(30.0)
        (False, True)
        """
        return self.users <= 0 or now >= self.ends_at


class LeaseTerms(msgspec.Struct, frozen=True):
    """Terms that make a slot a lease: memory for a program that is no model. Its slot's `need_bytes` are for each of
    `accounts` accounts.

    `preemptible`: it may be ended for a model that is late, or for one of a higher band. `is_whole`: the share of
    leases does not hold for it. `until`: it ends by itself then, None if that is not known; `max_s`: as long as it may
    last from its grant, None for ever. `begun_at`: its grant, None before. `at_once`: it waits for nobody.
    """

    accounts: int = 1
    preemptible: bool = False
    is_whole: bool = False
    until: float | None = None
    max_s: float | None = None
    grace_s: float = 60.0
    begun_at: float | None = None
    at_once: bool = False


class SlotFacts(msgspec.Struct, frozen=True):
    """One model's server in the pool, started or not.

    `need_bytes`: the charge of a load; `load_s`, `unload_s`: what they take (p95, or estimated). `permitted`: the
    accounts its entry names, empty for any. `grants`: its charges, from the decision to load until the memory is
    measured back; `awake`: those it had before it fell asleep. `settled`: after a load, all that waited for it are in
    flight. `waiting`: the demands that wait for a load. `band`: of its last request. `closed_at`: its gate closed;
    `moved_at`: its load or unload began. `pinned_at`: since when an operator wants it resident, None if it is not
    pinned. `closing`: its gate was asked to close and has not answered yet; until then it counts as in use. `cut`: its
    requests were told to end. `renewing`: a flush has it loaded anew, and cuts nothing for that. `is_backend`: it is
    the service of `hive backend`, in the books but no model: a switch stops it, no decision does. `lease`: it is no
    model but a lease: it loads and unloads nothing, and what it holds moves when its holder likes.
    """

    id: str
    model: str
    need_bytes: int
    kind: str = ""
    is_backend: bool = False
    state: SlotState = SlotState.COLD
    generation: int = 0
    load_s: float = 30.0
    unload_s: float = 1.5
    permitted: tuple[str, ...] = ()
    grants: tuple[Grant, ...] = ()
    awake: tuple[Grant, ...] = ()
    levels: tuple[SleepLevel, ...] = ()
    level: str = ""
    ready_at: float = 0.0
    used_at: float = 0.0
    settled: bool = True
    in_flight: int = 0
    waiting: tuple[Demand, ...] = ()
    audience: Audience = Audience()
    band: Band = Band.NORMAL
    pinned_at: float | None = None
    keep_alive_s: float = 0.0
    unload_ordered: bool = False
    renewing: bool = False
    closed_at: float = 0.0
    closing: bool = False
    moved_at: float = 0.0
    cut: bool = False
    failures: int = 0
    retry_at: float = 0.0
    lease: LeaseTerms | None = None

    @property
    def reload_s(self) -> float:
        """Seconds until it is ready: of a wake if it sleeps, else of a load."""
        if self.state not in (SlotState.ASLEEP, SlotState.LOADING):
            return self.load_s
        return next((level.wake_s for level in self.levels if level.name == self.level), self.load_s)


class MemoryAccount(msgspec.Struct, frozen=True):
    """The memory of one GPU, by its UUID, or of the host (`CPU`).

    `used_bytes`: measured, of all processes; None if it is not known. `foreign_bytes`: the peak seen of processes that
    are none of the pool's, and memory that a server left behind. `strangers_bytes`: what processes that are surely none
    of the pool's have now, as far as the driver names them.
    """

    id: str
    total_bytes: int
    reserve_bytes: int = 512 * MIB
    used_bytes: int | None = None
    foreign_bytes: int = 0
    strangers_bytes: int = 0


class EvictedSlot(msgspec.Struct, frozen=True):
    """One victim of a claim. `level`: the sleep it goes to, empty if its server ends; `idle_only`: it goes only if it
    is idle at the moment of closing."""

    slot: str
    level: str = ""
    idle_only: bool = False


class Claim(msgspec.Struct, frozen=True):
    """A load that has been decided and waits for its victims to leave. Nothing else is given what it will take."""

    slot: str
    grants: tuple[Grant, ...]
    leaving: tuple[EvictedSlot, ...]


class ExclusiveOrder(msgspec.Struct, frozen=True):
    """`hive backend switch KIND`: slots of other kinds go, then `slot` is loaded, for which those of its kind that are
    not pinned go too if it needs their room. Nothing else moves meanwhile. `kind` empty: none goes for its kind, as on
    the way back; `slot` of none that is there: nothing is loaded yet."""

    kind: str
    slot: str


class Rules(msgspec.Struct, frozen=True):
    """The settings of the pool, as the deciders need them.

    `swap_share`: of the time of a box under contention that may be lost to loading. `backoff_s`: the waits after
    failed loads; after one more failure the slot is failed. `foreign_margin`: what foreign memory is multiplied with.
    `lease_share`: of an account, for all leases together that are not preemptible.
    """

    swap_share: float = 0.25
    swap_share_high: float = 0.5
    patience_high_s: float = 2.0
    patience_normal_s: float = 10.0
    patience_low_s: float = 60.0
    audience_s: float = 30.0
    drain_s: float = 60.0
    cut_s: float = 5.0
    free_s: float = 10.0
    foreign_margin: float = 1.1
    split_margin_bytes: int = 512 * MIB
    host_ram_bytes: int = 0
    finish_loads: bool = True
    unload_idle: bool = False
    backoff_s: tuple[float, ...] = (60.0, 300.0, 900.0)
    lease_share: float = 0.5


class PoolFacts(msgspec.Struct, frozen=True):
    """All that a decision is made from. `claims`: what the decider has begun; the doer keeps them between decisions."""

    slots: tuple[SlotFacts, ...]
    accounts: tuple[MemoryAccount, ...]
    claims: tuple[Claim, ...] = ()
    exclusive: ExclusiveOrder | None = None
    rules: Rules = Rules()

    def slot(self, id: str) -> SlotFacts:
        """The slot of this id; KeyError if there is none."""
        for slot in self.slots:
            if slot.id == id:
                return slot
        raise KeyError(id)
