"""A pool of vLLM's models on one GPU: processes that stand in for vLLM (tests/fakes/fake_sleeping_vllm.py), started by
the command that Hive starts vLLM with; helper, proxy and the GPU's driver are played."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import httpx
import msgspec

from hive.audit.jobs import Jobs
from hive.backends.entries import ModelEntry, entries_of
from hive.backends.entry_launch import launch_entry
from hive.backends.entry_sleep import why_no_sleep
from hive.domain import BackendKind
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.pool.footprints import SAMPLES
from hive.pool.state import MIB, MemoryAccount
from hive.pooling.footprints import Footprints
from hive.pooling.pool_clients import PoolClients
from hive.pooling.pool_memory import MemoryReading
from hive.pooling.pooling import ModelPool
from hive.pooling.slot_server import describe
from hive.settings.pool import ModelRow, PoolSection
from hive.settings.table import Settings
from hive.store import pool as stored
from hive.store.database import Database
from hive.tasks import spawn
from tests.pooling.pool_world import GPU, PlayedAudit, PlayedProxy, PlayedServers, PoolWorld, leases_of, registry_of

KIND = "NVIDIA Played"
LOAD_S = 30.0
SERVER = Path(__file__).parents[1] / "fakes" / "fake_sleeping_vllm.py"


def model_directory(path: Path, weights_mb: int) -> Path:
    """A model as Hugging Face lays it out: its weights are a hole of so many MiB."""
    path.mkdir()
    (path / "config.json").write_text('{"model_type": "llama"}')
    (path / "tokenizer.json").write_text("{}")
    size = weights_mb * MIB
    tensors = {
        "__metadata__": {"name": path.name},  # another model, another digest
        "w": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]},
    }
    header = json.dumps(tensors).encode()
    with (path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(file.tell() + size)
    return path


class SleepingServers(PlayedServers):
    """Servers that are processes. `settings`: as the supervisor of one that is started now reads them."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.directory = directory
        self.settings = Settings()
        self.entries: dict[str, ModelEntry] = {}
        self.children: dict[str, subprocess.Popen[bytes]] = {}
        self._watches: list[asyncio.Task[None]] = []

    def socket(self, id: str) -> Path:
        return self.directory / f"{id}.sock"

    async def slots(self) -> dict[str, SlotProcess]:
        self._check()
        for id, process in self.processes.items():
            self.processes[id] = msgspec.structs.replace(process, bytes=self.held(id).get("host"))
        return dict(self.processes)

    async def slot_start(self, id: str, grant: SlotGrant) -> SlotProcess:
        self._check()
        if id in self.processes:
            return self.processes[id]
        self.comes_up[id] = "when it answers"
        process = await super().slot_start(id, grant)
        self._begin(id, grant)
        self._watches.append(spawn(self._watch(id, self.children[id]), name=f"watch {id}"))
        return process

    def _begin(self, id: str, grant: SlotGrant) -> None:
        made = launch_entry(
            self.entries[id],
            grant.accounts,
            grant.context,
            self.settings.inference,
            os.environ,
            socket=self.socket(id),
            state=self.directory,
            weights_bytes=sum(file.stat().st_size for file in self.entries[id].path.glob("*.safetensors")),
            may_sleep=not why_no_sleep(self.entries[id], self.settings.pool, grant.accounts),
        )
        for left in (".held", ".asked", ".fault"):
            Path(f"{self.socket(id)}{left}").unlink(missing_ok=True)
        self.children[id] = subprocess.Popen([sys.executable, *made.command], env=made.environment)

    async def _watch(self, id: str, child: subprocess.Popen[bytes]) -> None:
        while child.poll() is None:
            if self.processes.get(id) and self.processes[id].state is ProcessState.STARTING and await self._serves(id):
                self.serve(id)
            await asyncio.sleep(0.02)
        if self.children.get(id) is child and id in self.processes:
            self.end(id, exit_code=child.returncode)

    async def _serves(self, id: str) -> bool:
        transport = httpx.AsyncHTTPTransport(uds=str(self.socket(id)))
        with contextlib.suppress(httpx.HTTPError):
            async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
                return (await client.get("/health")).status_code == 200
        return False

    async def slot_stop(self, id: str, *, grace_s: float) -> None:
        await super().slot_stop(id, grace_s=grace_s)
        if (child := self.children.pop(id, None)) is not None:
            child.kill()
            await asyncio.to_thread(child.wait)

    def kill(self, id: str) -> None:
        """kill -9; the helper tells of it."""
        self.children[id].kill()

    def held(self, id: str) -> dict[str, int]:
        """Bytes that its process holds of GPU and host; nothing once it has ended."""
        child = self.children.get(id)
        if child is None or child.poll() is not None:
            return {}
        with contextlib.suppress(FileNotFoundError):
            return cast("dict[str, int]", json.loads(Path(f"{self.socket(id)}.held").read_text()))
        return {}

    def asked(self, id: str) -> list[str]:
        """The requests that its process was sent, but for the harmless ones: path and body."""
        with contextlib.suppress(FileNotFoundError):
            return Path(f"{self.socket(id)}.asked").read_text().splitlines()
        return []

    def fault(self, id: str, name: str) -> None:
        """From now on this goes wrong there."""
        Path(f"{self.socket(id)}.fault").write_text(name)

    def close(self) -> None:
        for watch in self._watches:
            watch.cancel()
        for child in self.children.values():
            child.kill()
            child.wait()


class SleepingMemory:
    """One GPU of `total_mb`, whose driver tells what each process holds; `is_known` False: it tells nothing."""

    def __init__(self, servers: SleepingServers, total_mb: int) -> None:
        self._servers = servers
        self.total_mb = total_mb
        self.is_known = True

    def used(self) -> int:
        return sum(self._servers.held(id).get("gpu", 0) for id in self._servers.children)

    async def look(self, processes: Mapping[str, SlotProcess], **_: Any) -> MemoryReading:
        by_slot: dict[str, dict[str, int | None]] = {
            id: {GPU: self._servers.held(id).get("gpu") if self.is_known else None} for id in processes
        }
        used = self.used() if self.is_known else None
        account = MemoryAccount(GPU, self.total_mb * MIB, reserve_bytes=0, used_bytes=used)
        return MemoryReading((account,), {GPU: KIND}, by_slot)


class SleepWorld(PoolWorld):
    """Models of `weights_mb` and `vram_mb` each on a GPU that has room for one of them."""

    servers: SleepingServers
    memory: SleepingMemory  # type: ignore[assignment]

    def __init__(
        self,
        directory: Path,
        sockets: Path,
        *models: str,
        total_mb: int = 300,
        vram_mb: int = 200,
        weights_mb: int = 40,
        rows: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        described = {
            name: ModelRow(
                backend=BackendKind.VLLM,
                file=str(model_directory(directory / name, weights_mb)),
                vram_mb=vram_mb,
                **(rows or {}),
            )
            for name in models
        }
        quick = {"patience_normal_s": 0.05, "free_s": 0.5, "drain_s": 0.3, "audience_s": 0.0, "host_ram_mb": 1024}
        self.settings = Settings(pool=PoolSection(**(quick | settings)), models=described)
        self.settings = msgspec.structs.replace(
            self.settings, inference=msgspec.structs.replace(self.settings.inference, vllm_program=str(SERVER))
        )
        self.database = Database.open(directory / "pool.db")
        self.entries = entries_of(self.settings)
        self.servers = SleepingServers(sockets)
        self.servers.settings, self.servers.entries = self.settings, self.entries
        self.proxy = PlayedProxy()
        self.memory = SleepingMemory(self.servers, total_mb)
        self.audit = PlayedAudit()
        self.rules: set[str] = set()
        self.jobs = Jobs(self.database, cast("Any", self.audit))
        self.pool = self.make()
        self._running = None
        self._orders = None

    def make(self, pins: Mapping[str, bool] | None = None) -> ModelPool:
        self.leases, self.deployments = leases_of(self), registry_of(self)
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
            footprints=Footprints(self.database, lambda: self.settings, self.database.read_now(stored.footprints)),
            clients=PoolClients(lambda: self.settings),
            address_of=lambda entry: str(self.servers.socket(entry.id)),
            pins=pins or {},
            describe=describe,
            why_not_approved=self.deployments.why_not_approved,
            **given,
        )
        self.servers.on_moved = pool.slot_moved
        return pool

    async def begin(self) -> None:
        """Loads are known to take 30 s, which a wake is cheaper than, however quick the stand-ins are."""
        for entry in self.entries.values():
            await self.pool.footprints.facts_of(entry)
            for _ in range(SAMPLES):
                bytes = entry.row.vram_mb * MIB
                await self.pool.footprints.after_load(entry, KIND, bytes, bytes, LOAD_S)
        await super().begin()

    async def end(self) -> None:
        await super().end()
        self.servers.close()

    async def loaded(self, model: str) -> None:
        """Asks for a model, and returns once it is ready and nobody uses it."""
        self.ask(model)
        await self.until(model, "ready")
        self.use(model, 0)

    def acts(self, model: str) -> list[str]:
        """Acts on this model in the audit log."""
        return [act for act, detail in self.audit.acts if detail.get("name") == model]

    def asked(self, model: str) -> list[str]:
        """Paths that its server was asked for, harmless ones aside."""
        return [line.partition(" ")[0] for line in self.servers.asked(self.id(model))]

    def charged_mb(self, model: str) -> int:
        return sum(grant.charged_bytes for grant in self.pool.find(model).grants) // MIB

    def held_mb(self, model: str) -> int:
        return self.servers.held(self.id(model)).get("gpu", 0) // MIB

    def pool_is_whole(self) -> None:
        """The books are what runs: nothing charged for what does not live, and never less than what is held."""
        for slot in self.pool.slots.values():
            held = self.servers.held(slot.id).get("gpu", 0)
            charged = sum(grant.charged_bytes for grant in slot.grants)
            assert charged >= held, slot
            assert bool(charged) == (slot.id in self.servers.children), slot
