"""The command line in this process, talking to a real daemon in a thread of it."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from hive.agents.lifecycle import AgentLifecycle
from hive.cli.main import main
from hive.domain import BackendInfo, BackendKind, Cluster, ModelInfo, RuntimeKind, Tier, UsageEvent
from hive.host import memory
from hive.link.messages import Activity
from hive.sandbox.server import HelperServer
from hive.settings.table import InferenceSection, Proxy, Settings, TenantRow
from hive.store import usage
from tests.control.box import AWAKE, Box
from tests.control.threaded_box import ThreadedBox, threaded_box
from tests.fakes.played_runtime import SWAP_BYTES, PlayedRuntime
from tests.fakes.programs import Program, fake_ollama
from tests.waiting import until

CLOSED_PORT = 1
"""Nobody listens there."""
OUTPUT = "one\\ntwo\\n\\033]0;evil\\007three\\n"
"""Lines that alice and busy-bob print when they start, for printf."""
COMMAND = ["/bin/sh", "-c", f"printf '{OUTPUT}'; exec sleep 1000"]
BUSY = Activity(in_flight=1)
SETTINGS = Settings(
    inference=InferenceSection(enabled="false", aliases="fast = llama3.2:q4_0", quantization_routing=True),
    proxy=Proxy(responses_kept_mb=1),
    tenants={"acme": TenantRow(models="fast")},
    agents=AWAKE.agents,
)
DEMO = BackendInfo(
    kind=BackendKind.DEMO,
    label="demo backend (canned text)",
    address="/r/demo.sock",
    up=True,
    version="1",
    places=4,
    places_from="/props total_slots",
    warning="the backend queues 3 requests itself",
)
NUMBERS = itertools.count(1)
"""Of ended requests."""


class Said(NamedTuple):
    """The end of one call."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        return json.loads(self.err)


class Hive:
    """`hive("agent", "list")` calls the command line; `socket` is where the daemon listens."""

    def __init__(self, socket: Path, capture: pytest.CaptureFixture[str], daemon: ThreadedBox | None = None) -> None:
        self.socket = socket
        self._capture = capture
        self._daemon = daemon

    @property
    def daemon(self) -> ThreadedBox:
        assert self._daemon is not None
        return self._daemon

    @property
    def box(self) -> Box:
        return self.daemon.box

    def __call__(self, *words: str) -> Said:
        self._capture.readouterr()
        code = main(words)
        out, err = self._capture.readouterr()
        return Said(code, out, err)


@pytest.fixture
def no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hive:
    """A command line that is told of a socket nobody listens at."""
    monkeypatch.setenv("HIVE_SOCKET", str(tmp_path / "hive.sock"))
    return Hive(tmp_path / "hive.sock", capsys)


@pytest.fixture
def proxy_port() -> int:
    """The port at which the proxy is said to listen."""
    return CLOSED_PORT


@pytest.fixture
def ingress_port() -> int:
    """The port at which the proxy is said to listen for callers of agents."""
    return CLOSED_PORT


@pytest.fixture
def host_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel's figures of a host with 8 GiB and 1 GiB of swap on zram, in which one agent may be paged out."""
    free = (1 << 30) - SWAP_BYTES
    monkeypatch.setattr(memory, "read_memory", lambda: memory.MemInfo(1 << 33, 1 << 32, 1 << 30, free))
    monkeypatch.setattr(memory, "read_pressure", lambda: memory.Pressure(0.0, 0.0))
    zram = memory.ZramDevice("/dev/zram0", "lz4", 1 << 30, SWAP_BYTES, SWAP_BYTES // 4)
    monkeypatch.setattr(memory, "read_zrams", lambda: [zram])


@pytest.fixture
def hive(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], proxy_port: int, ingress_port: int
) -> Iterator[Hive]:
    """A command line beside a daemon with the agents `alice` and `busy-bob`, who never becomes quiet."""
    with threaded_box() as daemon:
        daemon.do(begin(daemon.box, proxy_port, ingress_port))
        monkeypatch.setenv("HIVE_SOCKET", str(daemon.socket))
        yield Hive(daemon.socket, capsys, daemon)


@pytest.fixture
def ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starts of `crasher` are told when it has ended already, however long that takes it."""
    for name in ("start", "restart"):
        monkeypatch.setattr(AgentLifecycle, name, told_late(getattr(AgentLifecycle, name)))


def told_late(order: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    async def ordered(life: AgentLifecycle, actor: str) -> None:
        await order(life, actor)
        if life.agent.name == "crasher":
            await until(lambda: life.status == "error")

    return ordered


@contextmanager
def beside_ollama(proxy_port: int = CLOSED_PORT) -> Iterator[tuple[ThreadedBox, Program]]:
    """A daemon with alice and busy-bob beside an Ollama with some models. What is pulled there as `slow` never ends."""
    models = ("llama3.2:q4_0", "llama3.2:q8_0", "odd\x1b[2J", "tiny", "meta/x")
    with fake_ollama("--layer-bytes", "4000000", "--held", "slow", *models) as ollama, threaded_box() as daemon:
        alice = {"model": "fast", "tier": Tier.LOW, "tenant": "acme"}
        daemon.do(begin(daemon.box, proxy_port, alice=alice, backend=(BackendKind.OLLAMA, ollama.address)))
        daemon.do(until(lambda: daemon.box.inference()["running"]))
        yield daemon, ollama


@pytest.fixture(scope="module")
def shared_proxy_port() -> int:
    return CLOSED_PORT


@pytest.fixture(scope="module")
def shared_daemon(shared_proxy_port: int) -> Iterator[ThreadedBox]:
    """One such daemon for all tests of a module, which do not mind what the others have done."""
    with beside_ollama(shared_proxy_port) as (daemon, _):
        yield daemon


@pytest.fixture
def shared_hive(
    shared_daemon: ThreadedBox, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Hive:
    monkeypatch.setenv("HIVE_SOCKET", str(shared_daemon.socket))
    return Hive(shared_daemon.socket, capsys, shared_daemon)


async def begin(
    box: Box,
    proxy_port: int,
    ingress_port: int = CLOSED_PORT,
    *,
    alice: Mapping[str, Any] | None = None,
    backend: tuple[str, str] | None = None,
) -> None:
    """`alice`: more of her description."""
    runtime = PlayedRuntime(box.paths, subtree=None, log_max_bytes=100_000)
    box.helper = HelperServer(box.paths, {RuntimeKind.PROCESS: runtime, RuntimeKind.DOCKER: runtime})
    await box.helper.open()
    await box.start_daemon(SETTINGS, backend=backend)
    proxy = await box.start_proxy(port=proxy_port, ingress_port=ingress_port)
    for name, port in (("alice", 9000), ("busy-bob", 9010)):
        found = await box.create(name, COMMAND, port=port, **(alice or {} if name == "alice" else {}))
        proxy.seen[found["id"]] = BUSY
    proxy.busy[found["id"]] = "1 request in flight"
    for name in ("alice", "busy-bob"):
        await until(lambda name=name: b"three" in read_output(box, name))  # type: ignore[misc]


def read_output(box: Box, name: str) -> bytes:
    path = box.output(name).path
    return path.read_bytes() if path.exists() else b""


async def insert(box: Box, table: str, **values: Any) -> None:
    """One row, as the daemon's own would be."""
    assert box.daemon is not None
    statement = f"INSERT INTO {table} ({', '.join(values)}) VALUES ({', '.join('?' * len(values))})"
    await box.daemon._database.write(lambda conn: conn.execute(statement, tuple(values.values())))


async def spend(box: Box, agent: str, count: int = 1, *, at: float | None = None, **fields: Any) -> str:
    """Requests of an agent that have ended; the id of the last. `agent`: its name, or the id of one that is gone."""
    assert box.daemon is not None
    agent_id, _ = box.services.roster.identified(agent)
    common: dict[str, Any] = {"tenant": "default", "model": "tiny", "backend": "vllm", "status": 200, **fields}
    events = [
        UsageEvent(
            id=f"ended-{number}",
            epoch="p1",
            event_no=number,
            agent_id=agent_id,
            endpoint="/v1/chat/completions",
            created_at=time.time() if at is None else at,
            **common,
        )
        for number in islice(NUMBERS, count)
    ]
    await box.daemon._database.write(lambda conn: usage.insert(conn, events))
    return events[-1].id


def show_cluster(box: Box, cluster: Cluster) -> None:
    """The daemon has found a cluster."""
    box.services.effects.backend = replace(DEMO, cluster=cluster)


def show_backend(box: Box, *models: str) -> None:
    """The daemon has found a backend that offers these models."""
    box.services.effects.backend = DEMO
    box.services.effects.models = [ModelInfo(name=name, size_bytes=2_000_000_000, owned_by="hive") for name in models]
