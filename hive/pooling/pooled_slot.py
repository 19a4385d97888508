"""One slot of the pool as the daemon keeps it: state, charges, traffic, demands. No I/O."""

from __future__ import annotations

import asyncio
import math
from typing import NamedTuple

import msgspec

from hive.backends.entries import ModelEntry
from hive.backends.speculation import Acceptance
from hive.domain import BackendInfo, ModelInfo
from hive.link.pool import SlotDemand, SlotFlow, SlotRow
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.pool.accounts import with_measured
from hive.pool.load_movement import STILL_S, LoadMovement
from hive.pool.stall import ServerStall
from hive.pool.state import MIB, Audience, Demand, Grant, SleepLevel, SlotFacts, SlotState

HELD = (SlotState.LOADING, SlotState.READY, SlotState.DRAINING, SlotState.ASLEEP, SlotState.STOPPING)
"""States in which a slot has memory."""
GATE_WORD_S = 1.0
"""An expected time that moved by less than this is not told again."""
LAST_LINES = 20


class Described(NamedTuple):
    """A server of its own as it described itself, with the entry and the model's files that it was started from."""

    entry: ModelEntry
    info: ModelInfo
    backend: BackendInfo
    models: list[ModelInfo]


class PooledSlot:
    """Times are of the monotonic clock. `generation` grows with each start of the server, also over daemons; `cause`:
    the demand that the last one was for. `address`: where a server of it listens that is started now.

    `process`: the server as the helper told it last, also after its end. `is_drained`: the proxy has said that
    nothing is in flight behind the closed gate; `is_closing`: it has been asked, and its answer decides what it is told
    next. `described`: what its server said after its last load. `stepping`: the step that is under way: a close, a load
    or an unload.
    `level`: at which it sleeps, falls asleep or wakes, and `awake`: its charges before that. `can_sleep`: its server
    was asked and has sleep; `token`: generated before it slept first, to compare with after a wake.
    `error`: why its last load or server ended, empty after a load that succeeded. `why_not`: why it cannot be loaded at
    all, a clause; `unapproved`: why the pool may not load it, however much it could. `never`: why its waiting requests
    were refused, until that has changed.
    `renewing`: a flush has it loaded anew, unless an operator orders it to go; `is_patient`: it drains as long as that
    gives it.
    `keep_until`: a task wants it kept until then.
    """

    still_s = STILL_S
    """A load that stands still for so long is ended."""

    def __init__(self, entry: ModelEntry, backend: BackendInfo, models: list[ModelInfo]) -> None:
        self.entry = entry
        self.backend = backend
        self.address = backend.address
        self.models = models
        self.described: Described | None = None
        self.state = SlotState.COLD
        self.generation = 0
        self.grants: tuple[Grant, ...] = ()
        self.process: SlotProcess | None = None
        self.run_before = ""
        self.awake: tuple[Grant, ...] = ()
        self.level: SleepLevel | None = None
        self.can_sleep = False
        self.token = ""
        self.peak_bytes = 0
        self.ready_at = self.used_at = self.closed_at = self.moved_at = self.ended_at = 0.0
        self.turn_lost_until = 0.0
        self.keep_until = 0.0
        self.is_settled = True
        self.is_drained = True
        self.is_closing = False
        self.was_cut = False
        self.is_patient = False
        self.flow = SlotFlow(in_flight=0)
        self.demands: tuple[Demand, ...] = ()
        self.more_demands = 0
        self.order: Demand | None = None
        self.cause: Demand | None = None
        self.unload_orders: set[str] = set()
        """The orders to unload it that are under way: jobs, or what else wants it; each is taken back by itself."""
        self.renewing = False
        self.pinned_at: float | None = None
        self.failures = 0
        self.ends: list[tuple[float, float]] = []
        self.retry_at = 0.0
        self.error = ""
        self.last_lines: list[str] = []
        self.why_not = ""
        self.unapproved = ""
        self.never = ""
        self.told_row: SlotRow | None = None
        self.told_at = 0.0
        self.stepping: asyncio.Task[None] | None = None
        self.came_up: asyncio.Event = asyncio.Event()
        self.went: asyncio.Event = asyncio.Event()
        self.movement = LoadMovement()
        self.stands: asyncio.Event = asyncio.Event()
        self.stall = ServerStall()
        self.acceptance = Acceptance()

    def __repr__(self) -> str:
        return f"<PooledSlot {self.entry.name} {self.state} generation {self.generation}>"

    @property
    def id(self) -> str:
        return self.entry.id

    @property
    def model(self) -> str:
        return self.entry.name

    @property
    def barred(self) -> str:
        """The reason that it is not loaded whatever else happens, a clause; empty where there is none."""
        return self.why_not or self.unapproved

    @property
    def unload_ordered(self) -> bool:
        """Whether somebody wants it unloaded."""
        return bool(self.unload_orders)

    @property
    def is_open(self) -> bool:
        """Whether requests go to its server."""
        return self.state is SlotState.READY

    @property
    def waiting(self) -> tuple[Demand, ...]:
        """Requests that wait for it to be loaded, and the order of an operator."""
        if self.state is SlotState.READY:
            return ()
        return self.demands if self.order is None else (*self.demands, self.order)

    @property
    def in_flight(self) -> int:
        """Requests at its server. Behind a closed gate: at least one until the proxy has said that there is none."""
        if self.state is SlotState.READY:
            return self.flow.in_flight
        if self.state is SlotState.DRAINING:
            return 0 if self.is_drained else max(1, self.flow.in_flight)
        return 0

    def facts(
        self,
        *,
        need_bytes: int,
        load_s: float,
        unload_s: float,
        audience: Audience,
        keep_alive_s: float,
        levels: tuple[SleepLevel, ...] = (),
    ) -> SlotFacts:
        """The slot as the decider sees it. `levels`: that its server may be put to sleep at."""
        return SlotFacts(
            id=self.id,
            model=self.model,
            kind=self.entry.kind,
            need_bytes=need_bytes,
            state=self.state,
            generation=self.generation,
            load_s=load_s,
            unload_s=unload_s,
            permitted=permitted(self.entry),
            grants=self.grants,
            awake=self.awake,
            levels=levels if self.level is None else (self.level,),
            level="" if self.level is None else self.level.name,
            ready_at=self.ready_at,
            used_at=self.used_at,
            settled=self.is_settled,
            in_flight=self.in_flight,
            waiting=self.waiting,
            audience=audience,
            band=self.flow.band,
            pinned_at=self.pinned_at,
            keep_alive_s=keep_alive_s,
            unload_ordered=self.unload_ordered,
            renewing=self.renewing,
            closed_at=self.closed_at,
            closing=self.is_closing,
            moved_at=self.moved_at,
            cut=self.was_cut,
            failures=self.failures,
            retry_at=self.retry_at,
        )

    @property
    def is_over(self) -> bool:
        """Whether its server has ended, whatever is being done with it."""
        return self.process is not None and self.process.state is ProcessState.ENDED

    def saw(self, process: SlotProcess) -> None:
        """Takes what the helper says of its server; nothing later is known of a run than its end."""
        if process.run == self.run_before or (self.is_over and self.process and self.process.run == process.run):
            return
        self.process = process
        if process.state is ProcessState.SERVING:
            self.came_up.set()
        elif process.state is ProcessState.ENDED:
            self.went.set()

    # what was heard ---------------------------------------------------------------------------------------------------

    def demanded(self, demand: SlotDemand, now: float) -> None:
        """Takes what the proxy says of the requests that wait for it."""
        self.demands = tuple(
            Demand(each.band, now - each.age_s, now + each.left_s, each.tenant, each.agent) for each in demand.waiting
        )
        self.more_demands = demand.more

    def flowed(self, flow: SlotFlow, now: float) -> None:
        """Takes what the proxy says of the requests at its server."""
        if flow.in_flight or flow.begun or self.flow.in_flight:
            self.used_at = now
        if not flow.begun:
            flow = msgspec.structs.replace(flow, band=self.flow.band)
        self.flow = flow
        self.is_settled = True
        if flow.keep_s:
            self.keep_until = max(self.keep_until, now + flow.keep_s)

    def keep_s(self, own_s: float, now: float) -> float:
        """The time after its last use for which it is kept: as its entry or the pool says (`own_s`), longer where a
        task asked for that, and never shorter."""
        return own_s if now >= self.keep_until else max(own_s, self.keep_until - self.used_at)

    def proxy_changed(self) -> None:
        """Another proxy has connected: what the last one said of requests is void."""
        self.demands, self.more_demands = (), 0
        self.flow = SlotFlow(in_flight=0, band=self.flow.band)

    def measured(self, by_account: dict[str, int | None]) -> None:
        """Takes a measurement of its processes; the charge never falls below it."""
        if self.state not in (SlotState.LOADING, SlotState.READY, SlotState.DRAINING, SlotState.ASLEEP):
            return
        self.grants = tuple(with_measured(grant, by_account.get(grant.account)) for grant in self.grants)
        known = [grant.measured_bytes for grant in self.grants if grant.measured_bytes is not None]
        if len(known) == len(self.grants):
            self.peak_bytes = max(self.peak_bytes, sum(known))

    def load_looked_at(self, by_account: dict[str, int | None], now: float) -> None:
        """Takes a look at its load: `stands` is set once that has stood still for too long."""
        if self.state is not SlotState.LOADING or self.process is None:
            return
        parts = [self.process.bytes, *by_account.values()]
        known = [part for part in parts if part is not None]
        self.movement.saw(cpu_s=self.process.cpu_s, bytes=sum(known) if known else None, now=now)
        if self.movement.stood_s(now) >= self.still_s:
            self.stands.set()

    def charged_as_measured(self) -> None:
        """Charges what was measured, less than what was thought too: its server takes no more from now on."""
        if all(grant.measured_bytes is not None for grant in self.grants):
            self.grants = tuple(Grant(g.account, g.measured_bytes or 0, g.measured_bytes) for g in self.grants)

    # its states -------------------------------------------------------------------------------------------------------

    def loading(self, grants: tuple[Grant, ...], now: float) -> None:
        self.state, self.grants, self.moved_at = SlotState.LOADING, grants, now
        self.generation += 1
        self.backend = msgspec.structs.replace(self.backend, address=self.address)
        self.peak_bytes = 0
        self._never_slept()
        self.never = ""
        self.was_cut, self.is_drained, self.is_settled = False, True, True
        self.run_before = "" if self.process is None else self.process.run
        self.process = None
        self.came_up, self.went = asyncio.Event(), asyncio.Event()
        self.movement, self.stands, self.stall = LoadMovement(), asyncio.Event(), ServerStall()
        self.acceptance = Acceptance()

    def ready(self, backend: BackendInfo, models: list[ModelInfo], now: float) -> None:
        self.is_settled = not self.demands
        self.state, self.backend, self.models = SlotState.READY, backend, models
        self.ready_at = self.used_at = now
        self.failures, self.retry_at, self.error, self.last_lines = 0, 0.0, "", []
        self.order = None
        self.level, self.awake = None, ()
        self.flow = SlotFlow(in_flight=0, band=self.flow.band)

    def draining(self, now: float) -> None:
        self.state, self.closed_at, self.is_drained, self.was_cut = SlotState.DRAINING, now, False, False
        self.is_closing = True

    def opened(self) -> None:
        self.state, self.is_drained, self.is_closing = SlotState.READY, True, False
        self.told_row, self.order = None, None

    def stopping(self, now: float) -> None:
        self.state, self.moved_at = SlotState.STOPPING, now

    def falling_asleep(self, level: SleepLevel, now: float) -> None:
        """All of it stays charged until it is measured back."""
        self.stopping(now)
        self.level = level

    def asleep(self, kept: tuple[Grant, ...], level: SleepLevel) -> None:
        """Its server lives on with `kept`; `level` as it was measured."""
        self.awake, self.grants, self.level = self.grants, kept, level
        self.state, self.is_drained, self.is_closing, self.was_cut = SlotState.ASLEEP, True, False, False
        self.flow = SlotFlow(in_flight=0, band=self.flow.band)

    def waking(self, grants: tuple[Grant, ...], now: float) -> None:
        """Charged with `grants` from now; what it holds of them is what it kept, until it is measured again."""
        held = {grant.account: grant.measured_bytes for grant in self.grants}
        self.grants = tuple(Grant(one.account, one.charged_bytes, held.get(one.account)) for one in grants)
        self.state, self.moved_at, self.never = SlotState.LOADING, now, ""

    def _never_slept(self) -> None:
        self.awake, self.level, self.can_sleep, self.token = (), None, False, ""

    def cold(self) -> None:
        self.state, self.grants = SlotState.COLD, ()
        self._never_slept()
        self.flow = SlotFlow(in_flight=0, band=self.flow.band)
        self.is_drained, self.is_closing, self.was_cut = True, False, False
        self.unload_orders.clear()

    def failed(self, state: SlotState, why: str, lines: list[str], retry_at: float) -> None:
        """Its load, or its server, ended by itself; `state` is cold or failed."""
        self.cold()
        self.state, self.error, self.last_lines = state, why, lines[-LAST_LINES:]
        self.retry_at = 0.0 if math.isinf(retry_at) else retry_at

    # what is told -----------------------------------------------------------------------------------------------------

    def row(self, *, wait_s: float, ready_in_s: float | None, load_s: float = 0.0) -> SlotRow:
        """The slot as the proxy needs to know it."""
        return SlotRow(
            id=self.id,
            generation=self.generation,
            is_open=self.is_open,
            backend=self.backend,
            models=self._offered(),
            wait_s=wait_s,
            ready_in_s=None if self.is_open or self.never or self.barred else ready_in_s,
            never="" if self.is_open else self.barred or self.never,
            unapproved=bool(self.unapproved) and not self.why_not and not self.is_open,
            at_server=self._at_server,
            load_s=round(load_s, 1),
            adapter="" if self.entry.adapter is None else self.entry.adapter.name,
        )

    def _offered(self) -> list[ModelInfo]:
        """Its models by the names that requests use."""
        if (adapter := self.entry.adapter) is None:
            return self.models
        return [msgspec.structs.replace(model, name=adapter.name, parent=adapter.base) for model in self.models]

    @property
    def _at_server(self) -> str:
        """The name at its server, where requests use another one."""
        entry = self.entry
        return "" if entry.at_server == entry.name and entry.adapter is None else entry.at_server

    def is_news(self, row: SlotRow, now: float) -> bool:
        """Whether the proxy does not know this yet; an expected time that only came nearer is no news."""
        told = self.told_row
        if told is None or (told.ready_in_s is None) != (row.ready_in_s is None):
            return True
        if row.ready_in_s is not None and told.ready_in_s is not None:
            if abs(max(0.0, told.ready_in_s - (now - self.told_at)) - row.ready_in_s) >= GATE_WORD_S:
                return True
            row = msgspec.structs.replace(row, ready_in_s=told.ready_in_s)
        return row != told


def permitted(entry: ModelEntry) -> tuple[str, ...]:
    """The accounts that an entry names; none for any."""
    return tuple(name.strip() for name in entry.row.gpus.split(",") if name.strip())


def grant_of(slot: PooledSlot) -> SlotGrant:
    """The grant that the helper is given for a start of this slot."""
    accounts = {grant.account: max(1, grant.charged_bytes // MIB) for grant in slot.grants}
    return SlotGrant(accounts=accounts, generation=slot.generation)


def grants_in(grant: SlotGrant | None) -> tuple[Grant, ...]:
    """The charges of a slot that an earlier daemon loaded."""
    return () if grant is None else tuple(Grant(account, mb * MIB) for account, mb in sorted(grant.accounts.items()))
