"""The subject of the proxy's benchmarks: Hive's proxy as a process with a stand-in for its daemon, and its peers.

Loopback and unix sockets only. `Peers` starts what is asked for and ends all of it.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from hive.domain import BackendInfo, BackendKind, ModelInfo, Tier
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import AgentRow, DaemonTable, Hello, Marks, ProxyTable
from hive.link.server import LinkServer
from hive.link.usage import UsageBatch
from hive.settings.table import Paths

HERE = Path(__file__).parent
TOKEN = "hm_benchmark"
CONF = """
[proxy]
window_requests = 100000000
tier_high_concurrency = 100000
queue_depth = 100000
agent_connections_max = 100000
"""
"""Nothing is limited, everything is looked at."""
LITELLM_CONF = """
model_list:
  - model_name: m
    litellm_params:
      model: {provider}/m
      api_base: http://127.0.0.1:{port}/v1
      api_key: none
general_settings:
  master_key: {token}
"""
START_S = 20.0
LITELLM_START_S = 90.0


class Peer(NamedTuple):
    """One process that answers on a port. `pid` 0: nothing stands between, so nothing is measured of it."""

    name: str
    pid: int
    port: int

    @property
    def cpu_s(self) -> float:
        """CPU time of the process and its children so far (utime + stime): unlike latency it does not drift with the
        machine's load."""
        return sum(times.user + times.system for times in (each.cpu_times() for each in self._processes))

    @property
    def rss_bytes(self) -> int:
        return int(psutil.Process(self.pid).memory_info().rss)

    def pin(self, cpus: Sequence[int]) -> None:
        """Lets it run on these processors only, its children too."""
        for each in self._processes:
            each.cpu_affinity(list(cpus))

    @property
    def _processes(self) -> list[psutil.Process]:
        process = psutil.Process(self.pid)
        return [process, *process.children(recursive=True)]


class Daemon:
    """Stands in for the daemon on the link: tells the proxy one agent and the backend, and acknowledges usage."""

    def __init__(
        self,
        paths: Paths,
        backend: str,
        *,
        kind: BackendKind = BackendKind.LLAMA,
        other_tenant: bool = False,
    ) -> None:
        self._backend = backend
        self._kind = kind
        self._other_tenant = other_tenant
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        LinkServer(
            paths.link_socket,
            name="daemon",
            uids=frozenset({os.getuid()}),
            on_link=self._here,
            on_message=self._heard,
            on_lost=lambda _: None,
        )

    def _here(self, link: Link) -> None:
        digest = hashlib.sha256(TOKEN.encode()).hexdigest()
        row = AgentRow(
            id="bench", name="bench", generation=1, gate="open", status="running", tier=Tier.HIGH, model_digest=digest
        )
        agents = [row]
        if self._other_tenant:
            agents.append(msgspec.structs.replace(row, id="other", name="other", tenant="other", model_digest=""))
        backend = BackendInfo(kind=self._kind, address=self._backend, up=True)
        link.tell(Hello(role="daemon", epoch="bench"))
        link.tell(DaemonTable(agents=agents, backend=backend, models=[ModelInfo(name="m")], marks={}))

    def _heard(self, link: Link, message: LinkMessage, _reply: LinkReply | None) -> None:
        if isinstance(message, ProxyTable) and not self.port.done():
            self.port.set_result(message.port)
        if isinstance(message, UsageBatch):  # what the real daemon does after its transaction
            link.tell(Marks(marks={message.epoch: message.items[-1].last}))


class Peers:
    """Everything that runs during a benchmark, in a directory of its own. An async context manager.

    Every process may have as many descriptors as this one may.
    """

    def __init__(self) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hive-bench-")
        self.directory = Path(self._directory.name)
        self._started: list[subprocess.Popen[bytes]] = []

    async def __aenter__(self) -> Peers:
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in reversed(self._started):
            process.terminate()
        for process in self._started:
            process.wait(15)
        self._directory.cleanup()

    def run(self, *command: str, log: str = "") -> subprocess.Popen[bytes]:
        """Starts a program that ends with the benchmark. `log`: a file for what it prints."""
        with open(self.directory / log if log else os.devnull, "wb") as out:
            self._started.append(subprocess.Popen(command, stdout=out, stderr=out if log else None))
        return self._started[-1]

    def nginx(self, role: str, name: str = "", *, backend: int = 0, answer: str = "") -> Peer:
        """nginx as the fixed answer (`role` backend) or as the proxy before it. `name`: of a further one."""
        port = free_port()
        conf = (HERE / "nginx.conf").read_text()
        other = "proxy" if role == "backend" else "backend"
        before, _, rest = conf.partition(f"# BEGIN {other}")
        conf = before + rest.partition(f"# END {other}")[2]
        name = name or role
        for word, value in {
            "DIR": str(self.directory),
            "NAME": name,
            "PORT": str(port),
            "BACKEND": str(backend or port),
            "ANSWER": answer,
        }.items():
            conf = conf.replace(word, value)
        path = self.directory / f"{name}.conf"
        path.write_text(conf)
        process = self.run("nginx", "-c", str(path), "-p", str(self.directory), "-e", "stderr")
        wait_for_port(port)
        return Peer("nginx", process.pid, port)

    async def hive(self, backend: int, *, kind: BackendKind = BackendKind.LLAMA, other_tenant: bool = False) -> Peer:
        """Hive's proxy, whole: spool, link, and an agent of the highest tier with TOKEN.

        `other_tenant`: there is another one, from whom its prompts are kept apart.
        """
        paths = Paths(self.directory / "state", self.directory / "run")
        paths.state.mkdir()
        paths.runtime.mkdir()
        conf = self.directory / "hive.conf"
        conf.write_text(CONF)
        daemon = Daemon(paths, f"127.0.0.1:{backend}", kind=kind, other_tenant=other_tenant)
        process = self.run(
            *(sys.executable, "-m", "hive", "proxy"),
            *("--state-dir", str(paths.state), "--runtime-dir", str(paths.runtime)),
            *("--config", str(conf), "--port", "0", "--ingress-port", "0"),
            log="hive.log",
        )
        try:
            port = await asyncio.wait_for(daemon.port, START_S)
        except TimeoutError:
            raise SystemExit(f"hive proxy did not start:\n{(self.directory / 'hive.log').read_text()}") from None
        wait_for_port(port)
        return Peer("hive", process.pid, port)

    async def litellm(self, venv: Path, backend: int, *, provider: str = "openai") -> Peer:
        """LiteLLM's proxy from a virtual environment of its own (`pip install 'litellm[proxy]'`), one worker.

        `provider`: by which of its ways it asks the backend.
        """
        port = free_port()
        conf = self.directory / "litellm.yaml"
        conf.write_text(LITELLM_CONF.format(port=backend, token=TOKEN, provider=provider))
        os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet for a price list
        process = self.run(
            *(str(venv / "bin" / "litellm"), "--config", str(conf), "--port", str(port), "--num_workers", "1"),
            *("--host", "127.0.0.1", "--telemetry", "False"),
            log="litellm.log",
        )
        await self._listens(port, "litellm.log", LITELLM_START_S)
        return Peer("litellm", process.pid, port)

    async def router(self, venv: Path, backends: Sequence[int]) -> Peer:
        """vLLM's router from its virtual environment (tests/tools/setup_router.sh), before these ports."""
        port = free_port()
        process = self.run(
            *(str(venv / "bin" / "vllm-router"), "--host", "127.0.0.1", "--port", str(port)),
            *("--worker-urls", *(f"http://127.0.0.1:{backend}" for backend in backends), "--policy", "cache_aware"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--log-level", "warning"),
            log="router.log",
        )
        await self._listens(port, "router.log")
        return Peer("router", process.pid, port)

    async def _listens(self, port: int, log: str, within_s: float = START_S) -> None:
        try:
            await asyncio.to_thread(wait_for_port, port, within_s)
        except OSError:
            raise SystemExit(f"it did not start:\n{(self.directory / log).read_text()}") from None


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for_port(port: int, within_s: float = START_S) -> None:
    deadline = time.monotonic() + within_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def percentile(values: Sequence[float], part: float) -> float:
    """The value that `part` (0 to 1) of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))]


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """The median, and in brackets the extremes."""
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"
