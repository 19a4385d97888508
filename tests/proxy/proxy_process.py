"""`hive proxy` as a process of its own; the test is its daemon, its helper, its backend, and systemd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from hive.domain import BackendInfo, BackendKind, ModelInfo, Tier
from hive.link.helper import AskListeners
from hive.link.helper import Listener as ListenerIs
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import AgentRow, DaemonTable, Done, Hello, ProxyTable
from hive.link.server import LinkServer, bind_private
from hive.settings.table import Paths
from tests.fakes import systemd
from tests.fakes.systemd import Ear
from tests.proxy.harness import INGRESS_TOKEN, MODEL_TOKEN, Backend, Client, digest
from tests.waiting import until

ALICE = "a1a1a1a1a1a1"
LOOK_S = 0.5
CONFIG = """
[proxy]
window_requests = 1000000
tier_low_concurrency = 100
drain_s = 5
"""


class House:
    """Everything around the proxy: one agent, alice, with its socket kept here as the helper keeps it."""

    def __init__(self, base: Path) -> None:
        self.paths = Paths(base / "state", base / "r")
        self.paths.state.mkdir()
        self.paths.agent_socket(ALICE).parent.mkdir(parents=True)
        self.config = base / "hive.conf"
        self.config.write_text(CONFIG)
        self.ear = Ear(base / "notify")
        self.backend = Backend()
        self.tables: list[ProxyTable] = []
        self.link: Link | None = None
        self.helper: Link | None = None
        self._uids = frozenset({os.geteuid()})
        self._alice = bind_private(self.paths.agent_socket(ALICE))
        self._servers: list[LinkServer] = []
        self._proxies: list[Proxy] = []

    async def start(self) -> None:
        await self.backend.start()
        for path, name, greet, hear in (
            (self.paths.link_socket, "daemon", self._proxy_here, self._from_proxy),
            (self.paths.sandbox_socket, "helper", lambda link: None, self._ask_helper),
        ):
            server = LinkServer(
                path, name=name, uids=self._uids, on_link=greet, on_message=hear, on_lost=lambda link: None
            )
            self._servers.append(server)

    def _proxy_here(self, link: Link) -> None:
        self.link = link
        row = AgentRow(
            id=ALICE,
            name="alice",
            generation=1,
            gate="open",
            status="running",
            tier=Tier.LOW,
            model_digest=digest(MODEL_TOKEN),
            ingress_digest=digest(INGRESS_TOKEN),
        )
        link.tell(Hello(role="daemon", epoch="d1", pid=os.getpid()))
        link.tell(
            DaemonTable(
                agents=[row],
                backend=BackendInfo(kind=BackendKind.LLAMA, address=self.backend.address, up=True),
                models=[ModelInfo(name="m")],
                marks={},
            )
        )

    def _from_proxy(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        if isinstance(message, ProxyTable):
            self.tables.append(message)

    def _ask_helper(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        if isinstance(message, AskListeners):
            assert reply is not None
            self.helper = link
            link.tell(ListenerIs(agent=ALICE, path=str(self.paths.agent_socket(ALICE))), [self._alice.fileno()])
            reply(Done())

    async def proxy(self, *handed: tuple[str, socket.socket], env: dict[str, str] | None = None) -> Proxy:
        """Starts one; returns when it has said READY=1."""
        count = len(self.tables)
        proxy = Proxy(self, handed, env or {})
        self._proxies.append(proxy)
        await proxy.hears("READY=1")
        if self._servers:
            await until(lambda: len(self.tables) > count)
        return proxy

    def hang_up(self) -> None:
        """Neither daemon nor helper is there any more."""
        while self._servers:
            self._servers.pop().close()

    async def close(self) -> None:
        for proxy in self._proxies:
            proxy.process.kill()
            proxy.process.wait()
        self.hang_up()
        self._alice.close()
        self.ear.close()
        await self.backend.stop()


@contextlib.asynccontextmanager
async def house(base: Path) -> AsyncIterator[House]:
    """A house without a proxy yet; what was started in it is gone afterwards."""
    found = House(base)
    await found.start()
    try:
        yield found
    finally:
        while Client.opened:
            Client.opened.pop().close()
        await found.close()
        await asyncio.sleep(0.01)


def command(paths: Paths, config: Path, *more: str) -> list[str]:
    where = ["--state-dir", str(paths.state), "--runtime-dir", str(paths.runtime), "--config", str(config)]
    return [sys.executable, "-P", "-m", "hive", "proxy", *where, "--port", "0", "--ingress-port", "0", *more]


class Proxy:
    """One process. `said()` is its stderr so far."""

    def __init__(self, house: House, handed: Sequence[tuple[str, socket.socket]], env: dict[str, str]) -> None:
        self._house = house
        self._log = house.config.with_name("proxy.log")
        self._begin = self._log.stat().st_size if self._log.exists() else 0
        with self._log.open("ab") as log:
            self.process = systemd.start(
                command(house.paths, house.config), handed, env={**house.ear.env, **env}, stderr=log
            )

    @property
    def port(self) -> int:
        return self._house.tables[-1].port

    @property
    def ingress_port(self) -> int:
        return self._house.tables[-1].ingress_port

    def said(self) -> str:
        return self._log.read_bytes()[self._begin :].decode()

    async def hears(self, state: str) -> list[str]:
        """Waits for what it tells systemd; what it told before is dropped."""
        async with asyncio.timeout(60):
            while True:
                lines = await asyncio.get_running_loop().run_in_executor(None, self._house.ear.hears, LOOK_S)
                if lines[0] == state:
                    return lines
                assert lines != [""] or self.process.poll() is None, f"ended before {state}: {self.said()}"

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    async def ended(self) -> int:
        """Waits for its end; the exit code."""
        return await asyncio.get_running_loop().run_in_executor(None, self.process.wait, 20)

    async def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return await self.ended()

    async def admin(self, target: str) -> tuple[int, bytes]:
        """The answer of the admin socket."""
        reader, writer = await asyncio.open_unix_connection(str(self._house.paths.admin_socket))
        try:
            writer.write(b"GET %b HTTP/1.1\r\nHost: hive\r\nConnection: close\r\n\r\n" % target.encode())
            head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
            return int(head.split(b" ")[1]), body
        finally:
            writer.close()

    async def metric(self, sample: str, **labels: str) -> float:
        """One sample of a scrape, 0.0 where it is not there."""
        _, text = await self.admin("/metrics")
        for family in text_string_to_metric_families(text.decode()):
            for entry in family.samples:
                if entry.name == sample and entry.labels == labels:
                    return entry.value
        return 0.0

    async def has(self, sample: str, expected: float, **labels: str) -> None:
        """Waits until a scrape says so."""
        async with asyncio.timeout(60):
            while await self.metric(sample, **labels) != expected:  # noqa: ASYNC110 - another process sends no events
                await asyncio.sleep(0.01)

    async def queue(self) -> Any:
        return json.loads((await self.admin("/queue"))[1])


def run(*handed: tuple[str, socket.socket], base: Path, **env: str) -> subprocess.CompletedProcess[str]:
    """A proxy that is expected to end by itself: its exit code and what it said."""
    paths = Paths(base / "state", base / "r")
    for directory in (paths.state, paths.runtime):
        directory.mkdir(exist_ok=True)
    config = base / "hive.conf"
    config.write_text(CONFIG)
    process = systemd.start(
        command(paths, config), handed, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    out, err = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)
