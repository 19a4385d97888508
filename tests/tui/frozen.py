"""One look that never changes, and a Source that gives it: what the pictures of `hive top` are taken of."""

from __future__ import annotations

from collections.abc import Collection, Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from hive.client.client import Client
from hive.conditions import FoundCondition, condition
from hive.control.views import gpus_view
from hive.errors import DependencyDown, HiveError
from hive.host.nvml import Nvml
from hive.tui.snapshot import (
    AgentLine,
    BackendRow,
    ClusterLine,
    EventLine,
    GpuRow,
    MemoryLine,
    PoolAccountLine,
    PoolLook,
    PoolShare,
    PoolSlotLine,
    QueueLine,
    Snapshot,
    TenantQueueLine,
)
from hive.tui.source import Source
from tests.fakes.fake_nvml import GIB, NOT_AVAILABLE, Gpu, Library, in_place_of, with_mig

AT = 1_800_000_000.0
"""2027-01-15 08:00:00 UTC."""
PROGRAMS = {4711: "VLLM::EngineCor", 4712: "VLLM::Worker_TP", 5000: "python3"}
VLLM = BackendRow(
    kind="vllm",
    label="vLLM 0.32 at 127.0.0.1:8000",
    address="127.0.0.1:8000",
    version="0.32",
    up=True,
    slots=64,
    warning="",
    models=["llama-3.1-70b"],
    switching="",
)
CLUSTER = msgspec.structs.replace(
    VLLM,
    label="vLLM at 10.245.0.3:3001",
    address="10.245.0.3:3001",
    slots=8,
    cluster=ClusterLine(label="vLLM Router", running=1, wanted=2, nodes=2, down=["10.245.0.2"], waiting=3),
)
"""The router is well, one of its two workers is gone."""
QUEUE = QueueLine(
    running=10,
    waiting=4,
    slots=64,
    tenants=[TenantQueueLine("acme", 7, 3), TenantQueueLine("beta", 3, 1), TenantQueueLine("default", 0, 0)],
)


def row(name: str, status: str = "running", **fields: Any) -> AgentLine:
    given: dict[str, Any] = {
        "id": f"{name}-0123456789abcdef",
        "name": name,
        "status": status,
        "depth": "awake",
        "tier": "medium",
        "tenant": "default",
        "model": None,
        "runtime": "process",
        **dict.fromkeys(("in_flight", "parked", "requests", "tokens_in", "tokens_out", "wakes", "pauses"), 0),
        "tokens_per_s": 0.0,
        "last_wake_ms": None,
        "last_wake_cause": None,
        "rss_bytes": 90 << 20,
        "saved_bytes": 0,
        "idle_s": 1.0,
        "since": AT - 65,
        "why": "1 s until idle",
    }
    return AgentLine(**given | fields)


AGENTS = [
    row(
        "alice",
        tier="high",
        tenant="acme",
        model="llama-3.1-70b",
        runtime="docker",
        in_flight=3,
        requests=212,
        tokens_in=81_200,
        tokens_out=40_310,
        tokens_per_s=83.4,
        rss_bytes=812 << 20,
        idle_s=0.0,
        why="3 requests in flight",
        wakes=12,
        pauses=12,
        last_wake_ms=1.4,
        last_wake_cause="ingress",
    ),
    row(
        "bob",
        "paused",
        depth="deep",
        tenant="beta",
        tokens_out=900,
        rss_bytes=9 << 20,
        saved_bytes=164 << 20,
        idle_s=3_700.0,
        since=AT - 3_400,
        why="deep sleep; 90 % of its memory is in swap",
    ),
    row("carol", "paused", depth="light", idle_s=42.0, why="light sleep, deep in 18 s", tokens_out=12),
    row("dave", "error", rss_bytes=None, idle_s=None, why="exited with 1 after 3 s: no such file config.json"),
    row("erin", "stopped", tier="low", rss_bytes=None, idle_s=90_000.0, why="stopped by operator"),
    row("frank", "created", rss_bytes=None, idle_s=None, why=""),
    row("grace", "resuming", depth="deep", tenant="beta", idle_s=600.0, why="woken by ingress"),
    row("a-name-that-is-longer-than-its-column", runtime="firecracker", tenant="a-tenant-with-a-name"),
]
EVENTS = [
    EventLine(AT - 64, "agent.paused", "carol pausing → paused: idle: quiet for 30 s"),
    EventLine(AT - 40, "agent.error", "dave running → error: exited with 1 after 3 s"),
    EventLine(AT - 30, "agent.pausing", "bob running → pausing: idle: quiet for 300 s"),
    EventLine(AT - 29, "agent.paused", "bob pausing → paused: idle: quiet for 300 s"),
    EventLine(AT - 10, "backend.switched", "uid:0 llama → vllm"),
    EventLine(AT - 1, "agent.resuming", "grace paused → resuming: woken by ingress"),
]


def gpus_of(library: Library) -> list[GpuRow]:
    """The daemon's words over this driver: NVIDIA's own wrapper is asked."""
    with in_place_of(library):
        seen = Nvml(load=lambda: __import__("pynvml")).look()
    return msgspec.convert(gpus_view(seen, lambda pid: PROGRAMS.get(pid, ""))["gpus"], list[GpuRow])


def one_gpu() -> list[GpuRow]:
    processes = [(4711, 92 * GIB), (4712, 1 * GIB), (5000, 12 * GIB), (6000, NOT_AVAILABLE)]
    return gpus_of(Library(Gpu(used=107 * GIB, busy=87, processes=processes)))


def eight_gpus() -> list[GpuRow]:
    """One is lost, one is nobody's."""
    gpus = [
        Gpu(used=(10 + 15 * number) * GIB, busy=12 * number, processes=[(4712, (8 + 15 * number) * GIB)])
        for number in range(8)
    ]
    gpus[3].is_lost = True
    gpus[5] = Gpu(used=GIB // 2)
    return gpus_of(Library(*gpus))


def mig() -> list[GpuRow]:
    def part(name: bytes, total: int, used: int, pid: int | None = None) -> Gpu:
        processes = [] if pid is None else [(pid, (used - 1) * GIB)]
        return Gpu(name=b"NVIDIA H200 MIG " + name, total=total * GIB, used=used * GIB, processes=processes)

    parts = {"_0": part(b"3g.71gb", 70, 61, 4711), "_2": part(b"1g.18gb", 17, 4, 5000), "_3": part(b"1g.18gb", 17, 0)}
    return gpus_of(Library(with_mig(privileged=False, **parts)))


def lost() -> list[GpuRow]:
    """One of two; the other does not name its processes."""
    secretive = Gpu(used=20 * GIB, refuses={"GetComputeRunningProcesses": 4, "GetUtilizationRates": 3})
    return gpus_of(Library(secretive, Gpu(is_lost=True)))


def pool(gpus: Sequence[GpuRow] = ()) -> PoolLook:
    """Five models on these GPUs, or in the host's memory; one is being loaded for three requests."""

    def account(id: str, name: str, total_bytes: int) -> PoolAccountLine:
        return PoolAccountLine(id, name, total_bytes, 63 * GIB, 41 * GIB, 50 * GIB, 9 * GIB, total_bytes - 72 * GIB)

    accounts = [account(gpu.uuid, gpu.name, gpu.total_bytes or 0) for gpu in gpus]
    slots = [
        PoolSlotLine(
            model="qwen3-8b",
            state="ready",
            memory_bytes=7 * GIB,
            in_flight=3,
            audience=2,
            turn_ends_in_s=63.0,
            load_s=4.0,
        ),
        PoolSlotLine(model="qwen3-32b", state="loading", memory_bytes=22 * GIB, waiting=3, load_s=47.0, loading_s=14.0),
        PoolSlotLine(model="embed-gte", state="ready", memory_bytes=GIB, pinned=True, load_s=1.0, why="It is pinned"),
        PoolSlotLine(model="llama-3.1-70b", state="cold", why="Nobody has asked for it", load_s=90.0),
        PoolSlotLine(model="模型-7b", state="failed", why="3 loads in a row have failed", load_s=9.0),
    ]
    accounts = accounts or [account("cpu", "host memory", 128 * GIB)]
    shares = [
        PoolShare(one.id, "model", slot.model, slot.memory_bytes)
        for one in accounts
        for slot in slots
        if not slot.pinned
    ]
    return PoolLook(
        accounts, slots, shares=[*shares, *(PoolShare(one.id, "lease", "l-3", 8 * GIB) for one in accounts)]
    )


def look(**fields: Any) -> Snapshot:
    given: dict[str, Any] = {
        "at": AT,
        "source": "daemon",
        "place": "/run/hive/hive.sock",
        "hive_version": "0.1.0",
        "isolation": "full",
        "problems": [],
        "conditions": [],
        "backend": VLLM,
        "queue": QUEUE,
        "memory": MemoryLine(64 << 30, 41 << 30, 16 << 30, 9 << 30),
        "gpus": [],
        "gpus_why_not": "no NVIDIA driver is loaded",
        "requests": 1_200,
        "tokens_out": 99_000,
        "wakes": 214,
        "wake_ms": 1.4,
        "agents": AGENTS,
        "events": EVENTS,
    }
    return Snapshot(**given | fields)


def short_cluster() -> Snapshot:
    """One of two replicas runs."""
    told: dict[str, Any] = {
        "engine": "vLLM Router",
        "at": CLUSTER.address,
        "running": 1,
        "wanted": 2,
        "down": "10.245.0.2",
    }
    queue = msgspec.structs.replace(QUEUE, running=8, slots=8)
    return look(backend=CLUSTER, queue=queue, **_wrong(condition("cluster_short", **told)))


def wrong(*texts: str) -> dict[str, Any]:
    """The fields of what is wrong."""
    return _wrong(*(condition("unnamed", text=text) for text in texts))


def _wrong(*conditions: FoundCondition) -> dict[str, Any]:
    return {"problems": [one.text for one in conditions], "conditions": [*conditions]}


def down() -> Snapshot:
    """SQLite's words: nothing that only a daemon knows."""
    unknown = dict.fromkeys(("in_flight", "parked", "tokens_per_s", "rss_bytes", "saved_bytes", "wakes", "pauses"))
    return look(
        source="store",
        place="/var/lib/hive/daemon/hive.db",
        hive_version="",
        isolation="",
        **_wrong(condition("shown_from_database", how="is down", path="/var/lib/hive/daemon/hive.db")),
        backend=None,
        memory=None,
        wakes=None,
        wake_ms=None,
        agents=[msgspec.structs.replace(agent, **unknown) for agent in AGENTS],
    )


def lease(number: int, **fields: Any) -> dict[str, Any]:
    """A lease as `GET /api/leases` tells it: one in line behind all before it, unless `fields` says otherwise."""
    given: dict[str, Any] = {
        "id": f"l-{number}",
        "state": "waiting",
        "mb": 8192,
        "gpus": [],
        "wanted_gpus": 1,
        "band": "normal",
        "label": "python train.py",
        "user": "uid:1000",
        "why": "qwen3-8b is in its way",
        "preemptible": False,
        "place": number,
        "before": [f"l-{one}" for one in range(1, number)],
        "ready_in_s": 34.0,
        "bound_s": 120.0,
        "since": AT - 65,
        **dict.fromkeys(("granted_at", "until", "used_mb")),
        "held_by": "",
    }
    return given | fields


def leases(gpu: str = "cpu") -> list[dict[str, Any]]:
    """Two that wait and three that hold memory of this GPU, one of them past its time to live."""
    holds = {"place": None, "before": [], "ready_in_s": 0.0, "bound_s": 0.0, "gpus": [gpu], "granted_at": AT - 3_000}
    running = holds | {"state": "running", "why": "it is held", "until": AT + 20_000}
    return [
        lease(1),
        lease(2, wanted_gpus=2, label="", ready_in_s=None, bound_s=None, user="token:ci"),
        lease(3, **running, used_mb=6_300, held_by="scope", label="jupyter \x1b[2J lab"),
        lease(4, **running | {"state": "ending"}, preemptible=True, held_by="scope", band="low"),
        lease(5, **running | {"state": "overdue", "why": "its time to live is over"}, label="comfyui"),
    ]


class FrozenClient(Client):
    """Answers what the page of an agent and that of leases ask."""

    leases: Sequence[dict[str, Any]] = ()

    def lines(self, path: str, **query: Any) -> Generator[bytes, None, None]:
        yield from (b"listening on 9000\n", b"asked: what is in the news?\n", b"answered in 812 ms\n")

    def get(self, path: str, **query: Any) -> dict[str, Any]:
        if path == "/api/usage":
            return USAGE[query["by"]]
        if path == "/api/leases":
            return {"leases": self.leases}
        found = next(agent for agent in AGENTS if path == f"/api/agents/{agent.id}")
        return {"status": found.status, "why": f"awake: {found.why}", "messages_waiting": 2}


_SPENT = {"requests": 9, "cached_tokens": 0, "unknown": 0, "cut": 0, "far": 0}
USAGE: dict[str, dict[str, Any]] = {
    "hour": {
        "token_tracking": True,
        "hours": [
            {"hour": AT - 3600 * ago, "tokens_in": 4_000 + 3_000 * (ago % 5), "tokens_out": 1_000, **_SPENT}
            for ago in range(0, 20, 1)
        ],
    },
    "model": {
        "models": [
            {"model": "llama-3.1-70b", "tokens_in": 81_200, "tokens_out": 40_310, **_SPENT},
            {"model": "qwen3-32b", "tokens_in": 9_000, "tokens_out": 12_000, **_SPENT},
            {"model": "模型-7b", "tokens_in": 500, "tokens_out": 100, **_SPENT},
        ],
    },
}


class Frozen(Source):
    """Gives these looks one after the other, and the last one again and again; an error among them is raised."""

    def __init__(self, *looks: Snapshot | HiveError) -> None:
        super().__init__([Path("/nowhere")], None, uid=0, env={})
        self.leases: Sequence[dict[str, Any]] = ()
        self._looks: Sequence[Snapshot | HiveError] = looks
        self.taken = 0
        self.shown: Collection[str] | None = None

    @property
    def client(self) -> Client:
        found = self._looks[max(0, min(self.taken, len(self._looks)) - 1)]
        if isinstance(found, HiveError) or not found.is_live:
            raise DependencyDown("no Hive answers at /nowhere")
        client = FrozenClient(Path("/nowhere"))
        client.leases = self.leases
        return client

    def look(self, shown: Collection[str] | None = None) -> Snapshot:
        found = self._looks[min(self.taken, len(self._looks) - 1)]
        self.taken += 1
        self.shown = shown
        if isinstance(found, HiveError):
            raise found
        return found
