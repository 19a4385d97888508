"""The pool's helper, proxy and memory, played: what they answer is set by the test, and every order is kept."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any, cast

from hive.audit.audit_log import AuditLog
from hive.audit.jobs import Jobs
from hive.backends.entries import ModelEntry, entries_of
from hive.domain import BackendInfo, Band, ModelInfo
from hive.errors import LinkLost
from hive.link.helper import BackendIs
from hive.link.pool import (
    CrashBlame,
    LoadCharged,
    SlotBusy,
    SlotClosed,
    SlotDemand,
    SlotDemands,
    SlotFlow,
    SlotFlows,
    SlotRow,
    WaitingDemand,
)
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.pool.state import MIB, MemoryAccount
from hive.pooling.deployments import Deployments
from hive.pooling.footprints import Footprints
from hive.pooling.leases import PoolLeases
from hive.pooling.pool_clients import PoolClients
from hive.pooling.pool_memory import MemoryReading
from hive.pooling.pool_orders import PoolOrders
from hive.pooling.pooling import ModelPool
from hive.settings.pool import ModelRow, PoolSection
from hive.settings.table import Settings
from hive.store import deployments as stored_deployments
from hive.store import leases as stored_leases
from hive.store.database import Database
from hive.store.jobs import StoredJob
from hive.tasks import spawn
from tests.llama import MAKE_MODEL
from tests.pooling.played_holders import PlayedHolders
from tests.waiting import until

GPU = "GPU-0"


@cache
def tiny_model(seed: int) -> Path:
    """A model that is whole; another seed, another model."""
    path = Path(tempfile.mkdtemp(prefix="hive-tiny-")) / f"{seed}.gguf"
    subprocess.run([sys.executable, str(MAKE_MODEL), str(path), "--seed", str(seed)], check=True)
    atexit.register(shutil.rmtree, path.parent)
    return path


class PlayedServers:
    """The helper's slots. `on_moved`: the pool. `comes_up`: what a started server becomes: `serving`, `ended` or
    nothing by itself; `is_there` False: the link is lost."""

    def __init__(self) -> None:
        self.on_moved: Callable[[SlotProcess], None] = lambda _: None
        self.holders = PlayedHolders(self._check)
        self.processes: dict[str, SlotProcess] = {}
        self.started: list[tuple[str, SlotGrant]] = []
        self.stopped: list[str] = []
        self.prepared: list[str] = []
        """The slots of which one was to wait, one after the other."""
        self.comes_up: dict[str, str] = {}
        self.last: dict[str, list[str]] = {}
        self.load_s = self.unload_s = 0.0
        self.is_there = True
        self.services: dict[str, BackendIs] = {}
        """The services of `hive backend` that run, by kind."""
        self._runs = count(1)

    def _check(self) -> None:
        if not self.is_there:
            raise LinkLost("the helper is not connected")

    async def slots(self) -> dict[str, SlotProcess]:
        self._check()
        return dict(self.processes)

    async def slot_start(self, id: str, grant: SlotGrant) -> SlotProcess:
        self._check()
        if id in self.processes:
            return self.processes[id]
        self.started.append((id, grant))
        run = next(self._runs)
        process = SlotProcess(
            id=id, run=str(run), state=ProcessState.STARTING, pid=1000 + run, pids=[1000 + run], grant=grant
        )
        self.processes[id] = process
        if self.comes_up.get(id, "serving") == "serving":
            asyncio.get_running_loop().call_later(self.load_s, self.serve, id)
        elif self.comes_up[id] == "ended":
            asyncio.get_running_loop().call_later(self.load_s, self.end, id)
        return process

    async def slot_log(self, id: str, lines: int) -> str:
        return "\n".join(self.last.get(id, [])[-lines:])

    async def slot_prepare(self, id: str) -> None:
        self._check()
        self.prepared.append(id)

    async def slot_stop(self, id: str, *, grace_s: float) -> None:
        self._check()
        self.stopped.append(id)
        await asyncio.sleep(self.unload_s)
        self.processes.pop(id, None)

    async def look_at_backend(self, kind: str) -> BackendIs:
        self._check()
        return self.services.get(kind, BackendIs(unit=f"{kind}.service", state="inactive"))

    def serve(self, id: str) -> None:
        if id in self.processes:
            self._move(id, state=ProcessState.SERVING)

    def end(self, id: str, **how: Any) -> None:
        """The server ends by itself."""
        if id in self.processes:
            self._move(
                id, state=ProcessState.ENDED, pid=0, pids=[], **({"exit_code": 1, "last": self.last.get(id, [])} | how)
            )
            del self.processes[id]

    def _move(self, id: str, **fields: Any) -> None:
        process = self.processes[id]
        kept = {name: getattr(process, name) for name in process.__struct_fields__}
        self.processes[id] = SlotProcess(**kept | fields)
        if self.is_there:
            self.on_moved(self.processes[id])


class PlayedProxy:
    """The proxy's end. `in_flight`: by slot; a slot with some is busy, and drains when the test says so."""

    def __init__(self) -> None:
        self.told: list[SlotRow] = []
        self.charged: list[LoadCharged] = []
        self.closed: list[tuple[str, float | None]] = []
        self.in_flight: dict[str, int] = {}
        self.blame = CrashBlame(agents=[])
        self.is_there = True

    def slot_is(self, row: SlotRow) -> None:
        self.told.append(row)

    def load_charged(self, load: LoadCharged) -> None:
        assert not self.is_open(load.id), "it counts for those who wait"
        self.charged.append(load)

    def slots(self, rows: list[SlotRow]) -> None:
        self.told += rows

    async def close_slot(
        self, id: str, generation: int, *, wait_s: float, drain_s: float | None
    ) -> SlotClosed | SlotBusy:
        if not self.is_there:
            raise LinkLost("the proxy is not connected")
        self.closed.append((id, drain_s))
        if drain_s is None and self.in_flight.get(id):
            return SlotBusy(in_flight=self.in_flight[id])
        began = time.monotonic()
        while self.in_flight.get(id):
            if time.monotonic() - began > (drain_s or 0.0):
                return SlotClosed(cut=self.in_flight.pop(id))
            await asyncio.sleep(0.005)
        return SlotClosed()

    async def slot_crashed(self, id: str, generation: int) -> CrashBlame:
        self.in_flight.pop(id, None)
        return self.blame

    def is_open(self, id: str) -> bool:
        """Whether the last word on this slot was that it is open."""
        return any(row.id == id for row in self.told) and self.last_row(id).is_open

    def last_row(self, id: str) -> SlotRow:
        return [row for row in self.told if row.id == id][-1]


class PlayedMemory:
    """One GPU of `total_mb`. A server takes `takes_mb` of its slot, else what it was granted, while it runs; after its
    end `left_mb` stay for good. `is_known` False: NVML does not answer; `is_idle`: it tells that nothing runs there."""

    def __init__(self, servers: PlayedServers, total_mb: int) -> None:
        self._servers = servers
        self.total_mb = total_mb
        self.takes_mb: dict[str, int] = {}
        self.left_mb = 0
        self.foreign_mb = 0
        self.is_known = True
        self.is_idle = False

    async def look(
        self,
        processes: Mapping[str, SlotProcess],
        *,
        programs: Collection[str] = (),
        unseen: Mapping[str, Mapping[str, int]] | None = None,
        overdue: Collection[str] = (),
        is_fresh: bool = False,
    ) -> MemoryReading:
        by_slot: dict[str, dict[str, int | None]] = {}
        used = self.foreign_mb + self.left_mb
        for id in unseen or {}:
            by_slot[id] = {GPU: self.takes_mb.get(id, 0) * MIB if self.is_known else None}
            used += self.takes_mb.get(id, 0)
        for id, process in processes.items():
            if process.state is not ProcessState.ENDED and (process.grant is not None or id in self.takes_mb):
                granted = process.grant.accounts if process.grant is not None else {}
                mb = self.takes_mb.get(id, sum(granted.values()))
                by_slot[id] = {GPU: mb * MIB if self.is_known else None}
                used += mb
        account = MemoryAccount(
            GPU,
            self.total_mb * MIB,
            reserve_bytes=0,
            used_bytes=used * MIB if self.is_known else None,
            foreign_bytes=self.foreign_mb * MIB,
        )
        idle = frozenset({GPU}) if self.is_idle else frozenset[str]()
        return MemoryReading((account,), {GPU: "NVIDIA Played"}, by_slot, idle_gpus=idle)


class PlayedAudit:
    """The audit log's acts."""

    def __init__(self) -> None:
        self.acts: list[tuple[str, dict[str, Any]]] = []
        self.by: list[tuple[str, str]] = []
        """(act, actor) of each."""

    def note(self, act: str, *, target: str = "", actor: str = "hive", detail: dict[str, Any] | None = None) -> None:
        self.acts.append((act, detail or {}))
        self.by.append((act, actor))


class PoolWorld:
    """A pool of models with these MiB each, on one GPU."""

    def __init__(self, directory: Path, models: Mapping[str, int], *, total_mb: int, **settings: Any) -> None:
        rows = {}
        for seed, (name, mb) in enumerate(models.items()):
            shutil.copy(tiny_model(seed), directory / f"{name}.gguf")
            rows[name] = ModelRow(file=str(directory / f"{name}.gguf"), vram_mb=mb)
        quick = {
            "patience_normal_s": 0.05,
            "patience_high_s": 0.02,
            "free_s": 0.3,
            "drain_s": 0.3,
            "audience_s": 0.0,
        } | settings
        self.settings = Settings(pool=PoolSection(**quick), models=rows)
        self.database = Database.open(directory / "pool.db")
        self.servers = PlayedServers()
        self.proxy = PlayedProxy()
        self.memory = PlayedMemory(self.servers, total_mb)
        self.audit = PlayedAudit()
        self.rules: set[str] = set()
        """The operations that a rule asks signatures for."""
        self.entries: dict[str, ModelEntry] = entries_of(self.settings)
        self.jobs = Jobs(self.database, cast("AuditLog", self.audit))
        self.pool = self.make()
        self._running: asyncio.Task[None] | None = None
        self._orders: PoolOrders | None = None

    def make(self, pins: Mapping[str, bool] | None = None) -> ModelPool:
        """A pool as a daemon makes it; the world around it stays as it is."""
        footprints = Footprints(self.database, lambda: self.settings, {})
        self.deployments = registry_of(self)
        self.leases = leases_of(self)
        given: Any = {
            "leases": self.leases,
            "helper": self.servers,
            "proxy_link": self.proxy,
            "memory": self.memory,
            "audit_log": self.audit,
        }
        pool = ModelPool(
            self.entries,
            settings=lambda: self.settings,
            footprints=footprints,
            clients=PoolClients(lambda: self.settings),
            address_of=lambda entry: f"/nowhere/{entry.id}.sock",
            pins=pins or {},
            describe=describe,
            why_not_approved=self.deployments.why_not_approved,
            **given,
        )
        self.servers.on_moved = pool.slot_moved
        return pool

    @property
    def orders(self) -> PoolOrders:
        """The orders to the pool of this daemon."""
        if self._orders is None or self._orders.pool is not self.pool:
            given: Any = {"audit_log": self.audit, "helper": self.servers, "deployments": self.deployments}
            self._orders = PoolOrders(self.pool, why_off="", jobs=self.jobs, database=self.database, **given)
        return self._orders

    async def follow(self, job: StoredJob) -> StoredJob:
        """The job, once it has ended."""
        return await self.jobs.get(job.id, wait_s=20)

    async def begin(self) -> None:
        self._running = spawn(self.pool.run(), name="pool")
        await self.pool.known()

    async def kill(self) -> None:
        """The daemon is gone; servers and proxy stay as they are."""
        assert self._running is not None
        self._running.cancel()
        await self.pool.close()

    async def again(self, pins: Mapping[str, bool] | None = None, *, wait: bool = True) -> None:
        """The next daemon; it knows what runs, unless `wait` is False."""
        self.pool = self.make(pins)
        self.proxy.told.clear()
        if wait:
            await self.begin()
        else:
            self._running = spawn(self.pool.run(), name="pool")

    async def end(self) -> None:
        await self.kill()
        self.database.close()

    def id(self, model: str) -> str:
        return self.pool.find(model).id

    def ask(self, model: str, *, band: Band = Band.NORMAL, agent: str = "a1", tenant: str = "default") -> None:
        """A request for this model waits at the proxy."""
        demand = WaitingDemand(band=band, tenant=tenant, agent=agent, age_s=0.0, left_s=300.0)
        self.pool.demands(SlotDemands(slots={self.id(model): SlotDemand(in_flight=0, waiting=[demand])}))

    def leave(self, model: str) -> None:
        """Nobody waits for this model any more."""
        self.pool.demands(SlotDemands(slots={self.id(model): SlotDemand(in_flight=0, waiting=[])}))

    def use(self, model: str, in_flight: int, *, agents: list[str] | None = None) -> None:
        """So many requests are at the model's server now."""
        id = self.id(model)
        self.proxy.in_flight[id] = in_flight
        self.leave(model)
        self.pool.flows(SlotFlows(slots={id: SlotFlow(in_flight=in_flight, agents=agents or [], begun=in_flight)}))

    def state(self, model: str) -> str:
        return str(self.pool.find(model).state)

    async def until(self, model: str, state: str) -> None:
        """Returns when the model is in this state."""
        await until(lambda: self.state(model) == state)


def registry_of(world: PoolWorld) -> Deployments:
    """The registry as a daemon makes it, of what its database has."""
    rows, audit_log = world.database.read_now(stored_deployments.living), cast("AuditLog", world.audit)
    return Deployments(rows, database=world.database, audit_log=audit_log, has_rule=lambda name: name in world.rules)


def leases_of(world: PoolWorld) -> PoolLeases:
    """The leases as a daemon makes them, of what its database has."""
    holders = getattr(world.servers, "holders", None)
    given: Any = {"audit_log": world.audit, "helper": world.servers if holders is None else holders}
    rows = world.database.read_now(stored_leases.living)
    leases = PoolLeases(rows, settings=lambda: world.settings, database=world.database, **given)
    if holders is not None:
        holders.on_moved = leases.holder_moved
    return leases


async def describe(entry: ModelEntry, address: str, settings: Settings) -> tuple[BackendInfo, ModelInfo | None]:
    """A server that says what every one of its kind does."""
    return BackendInfo(kind=entry.kind, address=address, up=True, places=4), None
