"""A daemon, a helper and their directories, for tests: real processes and a real database, a proxy as is asked for.

`Box.start_proxy` is its end of the link only (fakes/proxy_peer.py); `Box.start_real_proxy` is a process with ingress.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.tokens import TokenKind
from hive.api.services import Services
from hive.audit.feed import Events
from hive.control import views
from hive.control.pull_order import PullOrder
from hive.control.tail import Output
from hive.daemon import Daemon
from hive.domain import AgentSpec, Role, RuntimeKind
from hive.errors import HiveError
from hive.host.process import read_stat
from hive.link.messages import Activity
from hive.runtimes.process import ProcessRuntime
from hive.sandbox.server import HelperServer
from hive.settings.table import Agents, InferenceSection, Paths, Settings, Sleep
from hive.settings.table import DaemonSection as DaemonSettings
from hive.shapes.agents import AgentView
from hive.store.audit import AuditRecord, Filter
from tests.approvals import SWITCH
from tests.fakes.proxy_peer import ProxyPeer
from tests.waiting import until

AWAKE = Settings(
    inference=InferenceSection(auto_sleep_enabled=False, enabled="false"),
    sleep=Sleep(check_s=0.05, minimum_awake_s=0, cpu_quiet_percent=50),
    agents=Agents(stop_grace_s=1),
    daemon=DaemonSettings(backend_check_s=0.05),
)
SLEEPY = Settings(
    inference=InferenceSection(auto_sleep_idle_seconds=0.2, enabled="false"), sleep=AWAKE.sleep, agents=AWAKE.agents
)
OWN_READERS = 2
"""The daemon's own readers of events: deliveries and prewarming."""
PAUSE_TIMEOUT_S = 12.0
"""Of the daemon behind the tests of the API."""
SLEEPER = ["/bin/sh", "-c", "env > environment; echo up; exec sleep 1000"]


def is_alive(pid: int | None) -> bool:
    """Whether it runs; one that ended and that nobody has waited for yet does not."""
    process = None if pid is None else read_stat(pid)
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
    def services(self) -> Services:
        assert self.daemon is not None
        return self.daemon.services

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
                await until(lambda: self.services.proxy_link.session is not None)

    async def stop_daemon(self) -> None:
        assert self.daemon is not None
        for proxy in self.proxies:
            proxy.table = None
        await self.daemon.close()
        self.daemon = None

    async def start_proxy(
        self, *, port: int = 11435, ingress_port: int = 8480, seen: dict[str, Activity] | None = None
    ) -> ProxyPeer:
        epoch = f"p{len(self.proxies)}"
        proxy = ProxyPeer(self.paths.link_socket, epoch=epoch, port=port, ingress_port=ingress_port)
        proxy.seen = seen or {}
        self.proxies.append(proxy)
        await proxy.until_table()
        gates = self.services.proxy_link
        await until(lambda: gates.session is not None and (gates.port, gates.ingress_port) == (port, ingress_port))
        return proxy

    async def start_real_proxy(self) -> None:
        """A proxy process, on free ports; what it says is in `proxy.log`. Returns when the daemon knows its ports."""
        self.spawn_real_proxy()
        await until(lambda: self.services.proxy_link.session is not None)

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
            await until(lambda: self.services.proxy_link.session is None)

    async def everything(self, settings: Settings = AWAKE, **options: Any) -> None:
        await self.start_helper()
        await self.start_daemon(settings, **options)
        await self.start_proxy()

    async def create(self, name: str = "bob", command: list[str] = SLEEPER, **fields: Any) -> AgentView:
        return await self.services.agents.create(AgentSpec(name=name, command=command, **fields), "uid:0")

    def life(self, agent: str) -> AgentLifecycle:
        assert self.daemon is not None
        return self.daemon.roster.find(agent)

    # Asked of the services, as the handlers of hive/api do --------------------------------------------------------

    async def view(self, ref: str) -> dict[str, Any]:
        return dict(await self.services.agent_views.of(self.life(ref), pss=True))

    async def start(self, ref: str, actor: str) -> dict[str, Any]:
        await self.life(ref).start(actor)
        return await self.view(ref)

    async def stop(self, ref: str, actor: str) -> dict[str, Any]:
        await self.life(ref).stop(actor)
        return await self.view(ref)

    async def restart(self, ref: str, actor: str) -> dict[str, Any]:
        await self.life(ref).restart(actor)
        return await self.view(ref)

    async def resume(self, ref: str, actor: str) -> dict[str, Any]:
        await self.life(ref).resume(actor)
        return await self.view(ref)

    async def pause(self, ref: str, *, timeout_s: float, now: bool, deep: bool = False, actor: str) -> dict[str, Any]:
        await self.life(ref).pause(timeout_s=timeout_s, now=now, deep=deep, actor=actor)
        return await self.view(ref)

    async def keep_awake(self, ref: str, for_s: float, actor: str) -> dict[str, Any]:
        await self.life(ref).keep_awake(time.time() + for_s if for_s else None, actor)
        return await self.view(ref)

    async def send(self, ref: str, text: str, actor: str) -> dict[str, Any]:
        message = await self.services.message_delivery.send(self.life(ref), text, actor)
        return {**views.of_agent(self.life(ref)), **views.message_view(message)}

    async def messages(self, ref: str) -> dict[str, Any]:
        found, why = await self.services.message_delivery.undelivered(self.life(ref))
        return {"why": why, "messages": [views.message_view(message) for message in found]}

    async def message(self, ref: str, message_id: str, *, wait_s: float) -> dict[str, Any]:
        found = await self.services.message_delivery.get(self.life(ref), message_id, within_s=wait_s)
        return dict(views.message_view(found))

    async def schedule(self, ref: str, when: str, every: str | None, note: str, actor: str) -> dict[str, Any]:
        added = await self.services.scheduler.add(self.life(ref), when, every, note, actor)
        return dict(views.schedule_view(added, self.services.scheduler.zone()))

    def schedules(self, ref: str) -> list[dict[str, Any]]:
        scheduler = self.services.scheduler
        return [dict(views.schedule_view(one, scheduler.zone())) for one in scheduler.of(self.life(ref).agent.id)]

    def tokens(self, ref: str) -> dict[str, Any]:
        agent, services = self.life(ref).agent, self.services
        tokens = {kind: services.effects.token(agent, kind) for kind in TokenKind}
        port, ingress_port = services.proxy_link.known_port, services.proxy_link.ingress_port
        socket = str(self.paths.agent_socket(agent.id))
        return dict(views.tokens_view(agent.name, tokens, port=port, ingress_port=ingress_port, socket=socket))

    def output(self, ref: str) -> Output:
        return self.services.runtimes.output_of(self.life(ref).agent, self.paths)

    def inference(self) -> dict[str, Any]:
        services, job = self.services, self.services.switcher.job
        switch = None if job is None else views.job_view(job, time.time())
        return dict(views.inference_view(services.effects.backend, services.effects.models, services.settings, switch))

    async def job(self, job_id: str, *, wait_s: float) -> dict[str, Any]:
        return dict(views.job_view(await self.services.jobs.get(job_id, wait_s=wait_s), time.time()))

    async def switch(self, to: str, actor: str) -> dict[str, Any]:
        return dict(views.job_view(await self.services.switcher.begin(to, actor, approval=SWITCH), time.time()))

    async def pull_model(self, order: PullOrder, actor: str) -> dict[str, Any]:
        return dict(views.job_view(await self.services.models.pull(order, actor), time.time()))

    async def remove_model(self, model: str, *, force: bool, actor: str) -> dict[str, Any]:
        return dict(views.job_view(await self.services.models.remove(model, force=force, actor=actor), time.time()))

    async def cancel_job(self, job_id: str) -> dict[str, Any]:
        models = self.services.models
        cancelling = models.cancel(job_id) if models.has(job_id) else self.services.switcher.cancel(job_id)
        return dict(views.job_view(await cancelling, time.time()))

    @property
    def feed(self) -> Events:
        """The events as they go to the API's readers."""
        return self.services.audit_log._events

    @property
    def followers(self) -> int:
        """The API's readers of events."""
        return len(self.feed._readers) - OWN_READERS

    async def orders(self) -> list[AuditRecord]:
        """Orders in the audit table, the oldest first."""
        found = await self.services.audit_log.page(Filter(act="order.*"), 1000)
        return [entry.row for entry in reversed(found)]

    async def audit(self, asked: Filter) -> list[dict[str, Any]]:
        return [dict(views.audit_view(entry)) for entry in await self.services.audit_log.page(asked, 1000)]

    async def api_token(self, name: str, role: Role, expires_in_s: float | None, actor: str) -> str:
        """A new token itself."""
        now = time.time()
        expires_at = None if expires_in_s is None else now + expires_in_s
        _, secret = await self.services.api_tokens.create(name, role, expires_at=expires_at, actor=actor, now=now)
        return secret

    async def truth(self, agent: str) -> str:
        assert self.daemon is not None
        stats = await self.daemon.effects.helper.stat([agent])
        return stats[agent].state if agent in stats else "unknown"

    async def until(self, agent: str, status: str) -> dict[str, Any]:
        for _ in range(2000):
            view = await self.view(agent)
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
            for view in await self.services.agent_views.all():
                with contextlib.suppress(HiveError):
                    await self.services.agents.remove(view["id"], "uid:0")
            await self.stop_daemon()
        if self._proxy_process is not None:
            await self.kill_real_proxy()
        if self.helper is not None:
            await self.stop_helper()
        await asyncio.sleep(0.02)  # both sides of each link have seen its end


class HeldStops:
    """Holds the stops of agents up until `go` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun = 0
        self.go = asyncio.Event()
        stop = AgentLifecycle.stop

        async def held(life: AgentLifecycle, actor: str, *, by: str = "operator") -> None:
            self.begun += 1
            await self.go.wait()
            await stop(life, actor, by=by)

        monkeypatch.setattr(AgentLifecycle, "stop", held)


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
