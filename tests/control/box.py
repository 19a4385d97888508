"""A daemon, a helper and their directories, for tests: real processes and a real database, a proxy as is asked for.

`Box.start_proxy` is its end of the link only (fakes/proxy_peer.py); `Box.start_real_proxy` is a process with ingress.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hive.agents.lifecycle import AgentLifecycle
from hive.control.frontdesk import FrontDesk
from hive.daemon import Daemon
from hive.domain import AgentSpec, RuntimeKind
from hive.errors import HiveError
from hive.host.process import read_stat
from hive.link.messages import Activity
from hive.sandbox.process import ProcessRuntime
from hive.sandbox.server import HelperServer
from hive.settings.table import Agents, InferenceSection, Paths, Settings, Sleep
from hive.settings.table import DaemonSection as DaemonSettings
from tests.fakes.proxy_peer import ProxyPeer

AWAKE = Settings(
    inference=InferenceSection(auto_sleep_enabled=False, enabled="false"),
    sleep=Sleep(check_s=0.05, minimum_awake_s=0, cpu_quiet_percent=50),
    agents=Agents(stop_grace_s=1),
    daemon=DaemonSettings(backend_check_s=0.05),
)
SLEEPY = Settings(
    inference=InferenceSection(auto_sleep_idle_seconds=0.2, enabled="false"), sleep=AWAKE.sleep, agents=AWAKE.agents
)
SLEEPER = ["/bin/sh", "-c", "env > environment; echo up; exec sleep 1000"]


async def until(question: Callable[[], object], *, within_s: float = 20) -> None:
    """Returns when the answer is yes."""
    for _ in range(int(within_s / 0.01)):
        if question():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen")


def is_alive(pid: int) -> bool:
    """Whether it runs; one that ended and that nobody has waited for yet does not."""
    process = read_stat(pid)
    return process is not None and process.alive


class Box:
    """A state and a runtime directory, and the processes that use them."""

    def __init__(self, directory: Path) -> None:
        self.paths = Paths(directory / "s", directory / "r")
        self.helper: HelperServer | None = None
        self.daemon: Daemon | None = None
        self.proxies: list[ProxyPeer] = []
        self._proxy_process: subprocess.Popen[bytes] | None = None

    @property
    def desk(self) -> FrontDesk:
        assert self.daemon is not None
        return self.daemon.desk()

    @property
    def proxy(self) -> ProxyPeer:
        return self.proxies[-1]

    async def start_helper(self) -> None:
        self.helper = HelperServer(
            self.paths, {RuntimeKind.PROCESS: ProcessRuntime(self.paths, subtree=None, log_max_bytes=1_000_000)}
        )
        await self.helper.open()

    async def stop_helper(self) -> None:
        assert self.helper is not None
        await self.helper.leave()
        self.helper = None

    async def start_daemon(self, settings: Settings = AWAKE, **options: Any) -> None:
        self.daemon = Daemon(self.paths, settings, **options)
        await self.daemon.open()
        for proxy in self.proxies:
            if not proxy.closed:
                await proxy.until_table()
                await until(lambda: self.desk.health()["proxy"]["connected"])

    async def stop_daemon(self) -> None:
        assert self.daemon is not None
        for proxy in self.proxies:
            proxy.table = None
        await self.daemon.close()
        self.daemon = None

    async def start_proxy(self, *, port: int = 11435, seen: dict[str, Activity] | None = None) -> ProxyPeer:
        proxy = ProxyPeer(self.paths.link_socket, epoch=f"p{len(self.proxies)}", port=port)
        proxy.seen = seen or {}
        self.proxies.append(proxy)
        await proxy.until_table()
        await until(lambda: self.desk.health()["proxy"] == {"connected": True, "port": port, "ingress_port": 8480})
        return proxy

    async def start_real_proxy(self) -> None:
        """A proxy process, on free ports; what it says is in `proxy.log`. Returns when the daemon knows its ports."""
        self.spawn_real_proxy()
        await until(lambda: self.desk.health()["proxy"]["connected"])

    def spawn_real_proxy(self) -> None:
        command = [sys.executable, "-m", "hive", "proxy", "--port", "0", "--ingress-port", "0"]
        command += ["--state-dir", str(self.paths.state), "--runtime-dir", str(self.paths.runtime)]
        with (self.paths.state / "proxy.log").open("ab") as log:
            self._proxy_process = subprocess.Popen(command, stdout=log, stderr=log)

    async def kill_real_proxy(self) -> None:
        """kill -9. Returns when the daemon knows."""
        assert self._proxy_process is not None
        self._proxy_process.kill()
        await asyncio.to_thread(self._proxy_process.wait)
        self._proxy_process = None
        if self.daemon is not None:
            await until(lambda: not self.desk.health()["proxy"]["connected"])

    async def everything(self, settings: Settings = AWAKE, **options: Any) -> None:
        await self.start_helper()
        await self.start_daemon(settings, **options)
        await self.start_proxy()

    async def create(self, name: str = "bob", command: list[str] = SLEEPER, **fields: Any) -> dict[str, Any]:
        return await self.desk.create(AgentSpec(name=name, command=command, **fields), "uid:0")

    def life(self, agent: str) -> AgentLifecycle:
        assert self.daemon is not None
        return self.daemon.roster.find(agent)

    async def truth(self, agent: str) -> str:
        assert self.daemon is not None
        stats = await self.daemon.world.helper.stat([agent])
        return stats[agent].state if agent in stats else "unknown"

    async def until(self, agent: str, status: str) -> dict[str, Any]:
        for _ in range(2000):
            view = await self.desk.view(agent)
            if view["status"] == status:
                return view
            await asyncio.sleep(0.01)
        raise AssertionError(f"{view['name']} is {view['status']} ({view['reason']}), not {status}")

    async def environment(self, agent: str) -> dict[str, str]:
        path = self.paths.home(agent) / "environment"
        await until(lambda: path.exists() and "HIVE_AGENT=" in path.read_text())
        return dict(line.split("=", 1) for line in path.read_text().splitlines() if "=" in line)

    async def end(self) -> None:
        for proxy in self.proxies:
            proxy.close()
        if self.daemon is not None:
            for view in await self.desk.views():
                with contextlib.suppress(HiveError):
                    await self.desk.remove(view["id"], "uid:0")
            await self.stop_daemon()
        if self._proxy_process is not None:
            await self.kill_real_proxy()
        if self.helper is not None:
            await self.stop_helper()
        await asyncio.sleep(0.02)  # both sides of each link have seen its end


def daemon_process(box: Box, **options: Any) -> subprocess.Popen[str]:
    program = (
        "import sys; from pathlib import Path; from hive.settings.table import InferenceSection, Paths, Settings;"
        "from hive.daemon import main; settings = Settings(inference=InferenceSection(enabled='false'));"
        "sys.exit(main(Paths(Path(sys.argv[1]), Path(sys.argv[2])), settings,"
        " move_api=True, watch_fd=int(sys.argv[3]) if len(sys.argv) > 3 else None))"
    )
    arguments = [str(box.paths.state), str(box.paths.runtime), *map(str, options.get("pass_fds", ()))]
    return subprocess.Popen([sys.executable, "-c", program, *arguments], stderr=subprocess.PIPE, text=True, **options)


class Caller:
    """The API, asked as `hive up` asks it."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    async def ask(self, method: str, target: str, body: Any) -> Any:
        import httpx

        transport = httpx.AsyncHTTPTransport(uds=str(self._socket), verify=False, trust_env=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://hive", trust_env=False) as client:
            for _ in range(500):
                with contextlib.suppress(httpx.ConnectError):
                    response = await client.request(method, target, json=body, timeout=20)
                    assert response.status_code < 300, response.text
                    return response.json()
                await asyncio.sleep(0.01)
        raise AssertionError("nobody listens")

    async def until_proxy(self) -> None:
        """Returns when a proxy is connected to the daemon."""
        for _ in range(1000):
            if (await self.ask("GET", "/api/health", None))["proxy"]["connected"]:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("no proxy has connected")
