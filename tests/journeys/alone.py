"""One real proxy process between stand-ins of daemon and helper: what it holds can be asked."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil

from hive.domain import BackendInfo, BackendKind, ModelInfo, Tier, UsageEvent
from hive.link.helper import AskListeners, Listener
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import (
    Activities,
    AgentRow,
    AskActivity,
    Asleep,
    BackendChanged,
    Close,
    Closed,
    DaemonTable,
    Done,
    Hello,
    Marks,
    Open,
    ProxyTable,
    Wake,
)
from hive.link.server import LinkServer
from hive.link.usage import AgentsActive, UsageBatch
from hive.settings.table import Paths
from hive.store.stream import read_lines

TOKEN = "hm_alone"
AGENT = "alone"
COMMIT_S = 0.1
CONFIG = "[proxy]\nwindow_requests = 100000000\n"


class Alone:
    """The agent `alone` has the token TOKEN and the socket `agent_socket`; the daemon commits usage as it comes."""

    def __init__(self, base: Path, *, backend: str, kind: BackendKind, config: str, tier: Tier) -> None:
        self.paths = Paths(base / "state", base)
        self.paths.state.mkdir(exist_ok=True)
        self._config = base / "hive.conf"
        self._config.write_text(CONFIG + config)
        self.log_path = base / "proxy.log"
        self.agent_socket = base / "a.sock"
        self._backend = BackendInfo(kind=kind, address=backend, up=True)
        self._tier = tier
        self._listening = socket.socket(socket.AF_UNIX)
        self.agent_socket.unlink(missing_ok=True)
        self._listening.bind(str(self.agent_socket))
        self._listening.listen(1024)
        self._daemon_link: Link | None = None
        self._marks: dict[str, int] = {}
        self._batches: list[UsageBatch] = []
        self.events: dict[str, UsageEvent] = {}
        """Events that the daemon has been told, by request id."""
        self._told: set[str] = set()
        self.told_twice = 0
        """Events that came twice over one link."""
        self.active: list[dict[str, float]] = []
        """Activity that the daemon was told."""
        self.wakes = 0
        self.answers_wakes = True
        """Else the agent sleeps until `wake` is called."""
        self.port = 0
        self._generation = 1
        self.process: asyncio.subprocess.Process
        self._here = asyncio.Event()
        self._servers = [
            LinkServer(
                path,
                name=name,
                uids=frozenset({os.getuid()}),
                on_link=on_link,
                on_message=heard,
                on_lost=lambda _: None,
            )
            for path, name, on_link, heard in (
                (self.paths.link_socket, "daemon", self._greet, self._as_daemon),
                (self.paths.sandbox_socket, "helper", lambda _: None, self._as_helper),
            )
        ]

    # the stand-ins ------------------------------------------------------------------------------------------------

    def _greet(self, link: Link) -> None:
        self._daemon_link = link
        self._batches.clear()
        self._told.clear()
        row = AgentRow(
            id=AGENT,
            name=AGENT,
            generation=self._generation,
            gate="open",
            status="running",
            tier=self._tier,
            model_digest=hashlib.sha256(TOKEN.encode()).hexdigest(),
        )
        link.tell(Hello(role="daemon", epoch="d"))
        link.tell(DaemonTable(agents=[row], backend=self._backend, models=[ModelInfo(name="m")], marks=self._marks))

    def _as_daemon(self, _link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        match message:
            case ProxyTable(port=port):
                self.port = port
                self._here.set()
            case Wake() if reply is not None:
                self.wakes += 1
                if self.answers_wakes:
                    self.wake(reply)
            case UsageBatch():
                self._batches.append(message)
            case AgentsActive(agents=agents):
                self.active.append(agents)

    def wake(self, reply: LinkReply | None = None) -> None:
        """The agent runs: told, or as the answer to the proxy's `Wake`."""
        assert self._daemon_link is not None
        (reply or self._daemon_link.tell)(Open(agent=AGENT, generation=self._generation))

    def lose_link(self) -> None:
        """The proxy connects again at once."""
        assert self._daemon_link is not None
        self._daemon_link.close()

    def use_backend(self, address: str) -> None:
        assert self._daemon_link is not None
        self._backend = msgspec.structs.replace(self._backend, address=address)
        self._daemon_link.tell(BackendChanged(backend=self._backend, models=[ModelInfo(name="m")]))

    async def put_to_sleep(self) -> bool:
        """Pauses the agent as the daemon does; the first byte of its next request wakes it. False: it is busy."""
        assert self._daemon_link is not None
        self._generation += 1
        answer = await self._daemon_link.ask_any(Close(agent=AGENT, generation=self._generation), timeout_s=5)
        if isinstance(answer, Closed):
            self._daemon_link.tell(Asleep(agent=AGENT, generation=self._generation))
        return isinstance(answer, Closed)

    def _as_helper(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        if isinstance(message, AskListeners) and reply is not None:
            link.tell(Listener(agent=AGENT, path=str(self.agent_socket)), [self._listening.fileno()])
            reply(Done())

    async def commits(self) -> None:
        """Commits as the real daemon does with SQLite: takes events in and tells how far."""
        while True:
            await asyncio.sleep(COMMIT_S)
            batches, self._batches = self._batches, []
            for batch in batches:
                self._commit(batch)
            if batches and self._daemon_link is not None:
                self._daemon_link.tell(Marks(marks=self._marks))

    def _commit(self, batch: UsageBatch) -> None:
        for told in (one for item in batch.items for one in read_lines(batch.epoch, *item)):
            self._marks[told.epoch] = max(told.last, self._marks.get(told.epoch, 0))
            if told.event is not None:
                self.told_twice += told.event.id in self._told
                self._told.add(told.event.id)
                self.events[told.event.id] = told.event

    # the proxy ----------------------------------------------------------------------------------------------------

    async def start(self, limits: dict[int, int], env: dict[str, str] | None) -> None:
        """`limits`: RLIMIT_… → value, soft and hard, of the proxy's process."""
        command = [sys.executable, "-m", "hive", "proxy", "--port", "0", "--ingress-port", "0"]
        command += ["--state-dir", str(self.paths.state), "--runtime-dir", str(self.paths.runtime)]
        command += ["--config", str(self._config)]

        def limit() -> None:
            for what, value in limits.items():
                resource.setrlimit(what, (value, value))

        with self.log_path.open("ab") as log:
            self.process = await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=log, env=env, preexec_fn=limit
            )
        await self.heard()

    async def heard(self) -> None:
        """Returns when the proxy has said hello to the daemon."""
        await asyncio.wait_for(self._here.wait(), 20)

    @property
    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    @property
    def seen(self) -> psutil.Process:
        return psutil.Process(self.process.pid)

    async def activity(self) -> Activities:
        """Activity of the agents that the daemon is told now."""
        assert self._daemon_link is not None
        return await self._daemon_link.ask(AskActivity(), Activities, timeout_s=10)

    async def gauges(self) -> dict[str, float]:
        """Gauges of the admin socket: `in_flight`, `parked`, …; those with labels are summed up."""
        transport = httpx.AsyncHTTPTransport(uds=str(self.paths.admin_socket), verify=False)
        async with httpx.AsyncClient(transport=transport, trust_env=False) as client:
            text = (await client.get("http://hive/metrics")).text
        lines = text.splitlines()
        kinds = {words[2]: words[3] for line in lines if (words := line.split())[:2] == ["#", "TYPE"]}
        found: dict[str, float] = {}
        for line in lines:
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            if kinds.get(name) == "gauge":
                short = name.removeprefix("hive_proxy_")
                found[short] = found.get(short, 0) + float(value)
        return found

    def descriptors(self) -> dict[str, int]:
        """Open descriptors of the process, counted by kind: `socket`, `anon_inode`, files by name."""
        found: dict[str, int] = {}
        for link in Path(f"/proc/{self.process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                kind = os.readlink(link).partition(":")[0]
                found[kind] = found.get(kind, 0) + 1
        return found

    async def connect(self, listener: str) -> socket.socket:
        """A connected client socket, non-blocking: `unix` (is the agent) or `tcp` (needs TOKEN)."""
        sock = socket.socket(socket.AF_UNIX if listener == "unix" else socket.AF_INET)
        sock.setblocking(False)
        where: Any = str(self.agent_socket) if listener == "unix" else ("127.0.0.1", self.port)
        try:
            await asyncio.get_running_loop().sock_connect(sock, where)
        except BaseException:
            sock.close()
            raise
        return sock

    async def end(self, number: int = signal.SIGTERM) -> int:
        """Sends the signal and returns the exit code."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), 30)

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self._listening.close()


@contextlib.asynccontextmanager
async def alone(
    base: Path,
    *,
    backend: str,
    kind: BackendKind = BackendKind.LLAMA,
    config: str = "",
    tier: Tier = Tier.HIGH,
    limits: dict[int, int] | None = None,
    env: dict[str, str] | None = None,
) -> AsyncIterator[Alone]:
    """A running proxy in the directory `base`, which has a short name. On a failed test its log is printed."""
    async with around(base, backend=backend, kind=kind, config=config, tier=tier) as hive:
        try:
            await hive.start(limits or {}, env)
            yield hive
        except BaseException:
            print(hive.log[-4000:])
            raise
        finally:
            if hasattr(hive, "process") and hive.process.returncode is None:
                await hive.end(signal.SIGKILL)


@contextlib.asynccontextmanager
async def around(
    base: Path,
    *,
    backend: str,
    kind: BackendKind = BackendKind.LLAMA,
    config: str = "",
    tier: Tier = Tier.HIGH,
) -> AsyncIterator[Alone]:
    """Daemon and helper, and no proxy between them yet."""
    hive = Alone(base, backend=backend, kind=kind, config=config, tier=tier)
    commits = asyncio.ensure_future(hive.commits())
    try:
        yield hive
    finally:
        commits.cancel()
        hive.close()
