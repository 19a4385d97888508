"""The running `hive up`: its children, the wait for each, the demo, and the end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence

from hive.client.calls import Answer, AsyncClient
from hive.demo.callers import Demo
from hive.domain import ALIVE
from hive.errors import HiveError
from hive.files.ports import Ports, Remembered, remember
from hive.host.parent import become_subreaper
from hive.sandbox.client import SandboxClient
from hive.tasks import spawn
from hive.up import banner, directories, ending, readiness, services
from hive.up.children import Child
from hive.up.lines import worth_telling
from hive.up.reaper import Reaper
from hive.up.screen import Screen
from hive.up.services import UpPlan
from hive.up.signals import Interrupts, unless

log = logging.getLogger("hive.up")

TABLE_EVERY_S = 1.0
TABLE_SHARE = 4.0
"""A list of agents that took long is asked for again after so many times that long."""
LAST_TURN_S = 10.0
SETTLE_S = 3.0
"""Longest time for the last usage to get from the proxy into SQLite before the sums are read."""


class Supervisor:
    """One run. `ports.got` are those to try; `inherit` is what every child keeps open (lock and watched pipe)."""

    def __init__(
        self,
        plan: UpPlan,
        *,
        ports: Remembered,
        screen: Screen,
        inherit: Sequence[int],
        stop_grace_s: float,
        drain_s: float,
        default_state: bool,
        again: str,
    ) -> None:
        self._plan = plan
        self._asked = ports.asked
        self._ports = ports.got
        self._screen = screen
        self._inherit = inherit
        self._stop_grace_s = stop_grace_s
        self._drain_s = drain_s
        self._default_state = default_state
        self._again = again
        self._children: dict[str, Child] = {}
        self._may_move = True
        self._ends_models = False
        self._demo: Demo | None = None
        self._before: Answer = {}
        self._farewell = ""

    def __repr__(self) -> str:
        return f"<Supervisor {', '.join(map(repr, self._children.values()))}>"

    async def run(self, *, demo: bool, exit_after_s: float | None, json: bool) -> int:
        """Comes up, stays until told to end (or for `exit_after_s`), ends. The exit code; raises HiveError."""
        become_subreaper()
        self._interrupts = Interrupts()
        self._reaper = Reaper(self._on_orphan)
        self._daemon = AsyncClient(self._plan.paths.api_socket)
        epoch = secrets.token_hex(8)
        self._helper = SandboxClient(self._plan.paths.sandbox_socket, role="up", epoch=epoch)
        try:
            health = await unless(self._interrupts.asked, self._come_up(), name="come-up")
            if health is not None:
                await self._stay(health, demo=demo, exit_after_s=exit_after_s, json=json)
            self._screen.leaves()
            if self._helper.connected:
                self._screen.goes_on(f"agents stop, within {self._stop_grace_s:g} s; Ctrl-C again does not wait …")
                log.info("agents_stopping grace_s=%g: Ctrl-C again does not wait", self._stop_grace_s)
                await ending.stop_agents(self._daemon, self._helper, self._interrupts, grace_s=self._stop_grace_s)
                self._ends_models = True
        finally:
            # Where Hive could not come up, agents and models of an earlier run live on.
            await self._end()
        if self._farewell:
            self._screen.tell(self._farewell)
        return 130 if self._interrupts.hurry.is_set() else 0

    # --- coming up ---------------------------------------------------------------------------------------------------

    async def _come_up(self) -> Answer:
        """Starts every process; returns the daemon's health once all of them answer."""
        plan = self._plan
        directories.write_socket(plan.paths)
        redis = None if plan.redis else self._start("redis", lambda: services.redis_command(plan.paths))
        helper = self._start("sandbox", lambda: services.sandbox_command(plan))
        if plan.starts_demo:
            backend = self._start("backend", lambda: services.demo_backend_command(plan))
            await readiness.answers(backend, lambda: readiness.demo_backend_answers(plan.demo_socket))
        if redis is not None:
            await readiness.answers(redis, lambda: readiness.redis_answers(plan.paths.redis_socket))
        await readiness.answers(helper, lambda: readiness.helper_answers(self._helper))
        daemon = self._start("daemon", lambda: services.daemon_command(plan, api_port=self._ports.api))
        proxy = self._start("proxy", lambda: services.proxy_command(plan, self._ports, move=self._may_move))
        await readiness.answers(daemon, lambda: readiness.daemon_answers(self._daemon))
        health: Answer = await readiness.answers(proxy, lambda: readiness.proxy_answers(self._daemon))
        await self._settle_ports(ports_of(health))
        self._before = await self._daemon.get("/api/stats")
        return health

    def _start(self, name: str, argv: Callable[[], Sequence[str]]) -> Child:
        # Redis knows nothing of the pipe; it holds the lock like the others until it has let go of its socket.
        child = Child(name, argv, reaper=self._reaper, say=self._say, inherit=self._inherit)
        self._children[name] = child
        self._screen.goes_on(f"Hive comes up: {', '.join(self._children)} …")
        child.start()
        return child

    def _say(self, name: str, text: str) -> None:
        if (told := worth_telling(name, text)) is not None:
            self._screen.say(name, told)

    async def _settle_ports(self, got: Ports) -> None:
        """Keeps the ports from now on. Agents that live with others in their environment the daemon starts anew."""
        wanted, self._ports = self._ports, got
        remember(self._plan.paths.state / "ports.json", Remembered(asked=self._asked, got=got))
        self._may_move = False
        if got.is_elsewhere(wanted):
            log.warning("ports_taken wanted='%s' got='%s': another program listens there", wanted, got)
        adopted = [view for view in (await self._daemon.get("/api/agents"))["agents"] if view["status"] in ALIVE]
        if adopted:
            log.info("agents_adopted count=%d", len(adopted))

    # --- being up ----------------------------------------------------------------------------------------------------

    async def _stay(self, health: Answer, *, demo: bool, exit_after_s: float | None, json: bool) -> None:
        paths, asked = self._plan.paths, self._interrupts.asked
        told = banner.banner(
            health,
            paths,
            command=banner.command_here(),
            default_state=self._default_state,
            why_not_deep=self._plan.why_not_deep,
            redis=self._plan.redis,
            width=self._screen.width,
        )
        showing: asyncio.Task[None] | None = None
        if demo:
            self._screen.goes_on("the sample agents start …")
            self._demo = Demo(self._daemon, paths, ingress_port=self._ports.ingress)
            await unless(asked, self._demo.set_up(), name="demo")
        self._screen.tell(told)
        if demo:
            showing = spawn(self._show_table(banner.headline(health)), name="table")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(exit_after_s):
                await asked.wait()
        if json:
            self._screen.result(await self._summary())
        else:
            await self._take_leave()
        if showing is not None:
            showing.cancel()
            await asyncio.wait((showing,))
        self._screen.close()
        if self._demo is not None:
            await self._demo.finish(within_s=0.0)

    async def _show_table(self, head: str) -> None:
        while True:
            began = time.monotonic()
            with contextlib.suppress(HiveError):  # the daemon may be starting again; its end was told
                views = (await self._daemon.get("/api/agents"))["agents"]
                self._screen.show(views, now=time.monotonic(), head=head)
            await asyncio.sleep(max(TABLE_EVERY_S, TABLE_SHARE * (time.monotonic() - began)))

    async def _take_leave(self) -> None:
        """Writes the closing sentence while there is a daemon to ask."""
        with contextlib.suppress(HiveError):  # a daemon that is gone has nothing to tell
            did = summary(await self._daemon.get("/api/stats"), self._before, {}, demo_errors=0)
            self._farewell = banner.farewell(did, command=banner.command_here(), which=self._again)

    async def _summary(self) -> dict[str, object]:
        """The figures of this Hive's run, once no turn is on its way and the sums stand still."""
        errors = 0
        if self._demo is not None:
            await self._demo.finish(within_s=LAST_TURN_S)
            errors = self._demo.errors
        stats = await self._settled_stats()
        health = await self._daemon.get("/api/health")
        return summary(stats, self._before, health, demo_errors=errors)

    async def _settled_stats(self) -> Answer:
        stats = await self._daemon.get("/api/stats")
        until = time.monotonic() + SETTLE_S
        while time.monotonic() < until:
            await asyncio.sleep(SETTLE_S / 6)
            before, stats = stats, await self._daemon.get("/api/stats")
            if stats["requests"] == before["requests"]:
                break
        return stats

    def _on_orphan(self, pid: int, code: int) -> None:
        """A process came to us because its parent ended: perhaps an agent of a helper that was killed."""
        log.info("orphan_ended pid=%d exit=%d", pid, code)
        self._helper.reaped(pid, code)

    # --- the end -----------------------------------------------------------------------------------------------------

    async def _end(self) -> None:
        log.info("leaving")
        self._screen.goes_on("Hive ends …")
        models_of = self._helper if self._ends_models else None
        await ending.stop_children(self._children, self._interrupts, drain_s=self._drain_s, models_of=models_of)
        await ending.kill_descendants()
        self._helper.close()
        self._reaper.close()
        self._interrupts.close()


def ports_of(health: Answer) -> Ports:
    """
    >>> ports_of({"proxy": {"port": 11435, "ingress_port": 8480}, "api": {"listen": "127.0.0.1", "port": None}})
    Ports(proxy=11435, ingress=8480, api=0)
    """
    return Ports(health["proxy"]["port"], health["proxy"]["ingress_port"], health["api"]["port"] or 0)


def summary(stats: Answer, before: Answer, health: Answer, *, demo_errors: int) -> dict[str, object]:
    """The JSON object of `--exit-after --json`, from `/api/stats`, now and when Hive was up, and `/api/health`.

    The daemon counts requests and tokens of all time, the rest since it started; told is what this run did.
    """
    backend = health.get("backend") or {}
    return {
        "agents": stats["agents"],
        **{name: stats[name] - before[name] for name in ("requests", "tokens_in", "tokens_out")},
        **{name: stats[name] for name in ("pauses", "wakes", "wake_ms")},
        "errors": stats["errors"] + demo_errors,
        "backend": backend.get("kind"),
        "isolation": health.get("isolation"),
    }
