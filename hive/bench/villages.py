"""Agents in a box, kept in one of two ways: as plain processes, and under a Hive that is in the box itself."""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from hive.bench.agent_programs import NOBODY, Chosen, plain_env
from hive.bench.box import MemoryBox
from hive.bench.driver import CalledAgent, ask, waves
from hive.client.client import Client
from hive.errors import HiveError, TimedOut
from hive.host.process import children_of, spawn

FIRST_PORT = 20_000
"""Below the ephemeral range (32768 and up), so that no outgoing connection sits on it."""
LAST_PORT = 32_000
START_S = 120.0
"""From the start of an agent to its first answer; where memory is short it may never come."""
UP_S = 90.0
DOWN_S = 60.0
NO_TIME = "there was no time to start more"
AT_ONCE = 3
"""Agents that start at the same time."""
CONF = """
[proxy]
window_requests = 10000000
backend_concurrency = 1000
[sleep]
check_s = 0.5
minimum_awake_s = 0
deep_after_s = 0.5
wake_reserve_mb = {reserve_mb}
[inference]
auto_sleep_enabled = true
auto_sleep_idle_seconds = 1
"""
"""Sleep comes soon, so that a run of minutes stands for a day; nobody is refused for asking often."""
TEMPLATE = "bench"
WARM_TURNS = 3
"""An agent's turns before `hive.ready()`."""


class Village(Protocol):
    """Agents in a box. `targets`: where each takes its turns, in the order of their starts. `serving`: pids of Hive."""

    targets: list[CalledAgent]
    serving: list[int]

    async def open(self) -> None:
        """Starts what there is besides agents. Raises HiveError."""

    async def grow(self, agents: int, *, until: float = math.inf) -> str:
        """Starts agents until there are so many; why there are fewer, empty where there are not.

        After `until` (monotonic seconds) none is started; the reason is then `NO_TIME`.
        """

    async def rest(self) -> None:
        """Returns once whoever would sleep does, or after a while."""

    async def why_not_as_meant(self) -> str:
        """The reason why agents are kept in another way than they were meant to; empty where they are not."""

    async def close(self) -> None:
        """Ends all of it."""


class VillageGround(NamedTuple):
    """The things that every village of a run stands on: the box, the run's directory, the stub's port."""

    box: MemoryBox
    directory: Path
    stub_port: int


class FreePorts:
    """Free ports, each given once.

    >>> ports = FreePorts(20_000, 20_100)
    >>> one, other = next(ports), next(ports)
    >>> 20_000 <= one < other <= 20_100
    True
    """

    def __init__(self, first: int, last: int) -> None:
        self._left = iter(range(first, last + 1))

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        for port in self._left:
            with socket.socket() as sock:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                with contextlib.suppress(OSError):
                    sock.bind(("127.0.0.1", port))
                    return port
        raise StopIteration


async def until_it_answers(target: CalledAgent, *, within_s: float = START_S) -> bool:
    """Whether it answers a GET in time."""
    until = time.monotonic() + within_s
    while time.monotonic() < until:
        if await ask("GET", target, "/", within_s=within_s) == 200:
            return True
        await asyncio.sleep(0.1)
    return False


class PlainVillage:
    """Agents as plain processes: the kernel alone, and nobody sleeps."""

    def __init__(self, ground: VillageGround, chosen: Chosen) -> None:
        self.targets: list[CalledAgent] = []
        self.serving: list[int] = []
        self._ground = ground
        self._chosen = chosen
        self._ports = FreePorts(FIRST_PORT, LAST_PORT)
        self._children: list[subprocess.Popen[bytes]] = []

    def __repr__(self) -> str:
        return f"<PlainVillage {len(self._children)} agents>"

    async def open(self) -> None:
        """There is nothing but agents."""

    async def grow(self, agents: int, *, until: float = math.inf) -> str:
        for wave in waves(agents - len(self.targets), AT_ONCE):
            if time.monotonic() > until:
                return NO_TIME
            started = [self._start() for _ in wave]
            if not all(await asyncio.gather(*(until_it_answers(target, within_s=self._start_s) for target in started))):
                return self._why(started)
            self.targets += started
        return ""

    @property
    def _start_s(self) -> float:
        return START_S

    def _start(self) -> CalledAgent:
        port = next(self._ports)
        log = os.open(self._ground.directory / "agents.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            child = spawn(
                self._chosen.command(self._ground.directory / "programs"),
                env={
                    **plain_env(),
                    **self._chosen.env,
                    "HOME": "/tmp",
                    "HIVE_AGENT_PORT": str(port),
                    "OPENAI_BASE_URL": f"http://127.0.0.1:{self._ground.stub_port}/v1",
                    "OPENAI_API_KEY": "none",
                },
                cwd="/tmp",
                uid=NOBODY,
                stdout_fd=log,
                limit_dirs=[self._ground.box.plain],
                pdeathsig=signal.SIGKILL,
            )
        finally:
            os.close(log)
        self._children.append(child)
        return CalledAgent(f"a{len(self._children)}", "127.0.0.1", port)

    def _why(self, started: Sequence[CalledAgent]) -> str:
        if killed := self._ground.box.killed():
            return f"{killed} killed for memory"
        ended = [child.returncode for child in self._children if child.poll() is not None]
        said = tail(self._ground.directory / "agents.log")
        return (
            f"{len(ended)} ended by themselves: {said}"
            if ended
            else f"{len(started)} did not answer within {START_S:g} s"
        )

    async def rest(self) -> None:
        """Nobody sleeps."""

    async def why_not_as_meant(self) -> str:
        return ""

    async def close(self) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()
        self._children.clear()
        self.targets.clear()


class HiveVillage:
    """Agents of a Hive, which is in the box with them. `template`: where the one stops that they are forked from, after
    its imports (`packages`) or in the agents' own script (`ready`); empty where there is none."""

    def __init__(self, ground: VillageGround, chosen: Chosen, *, template: str = "") -> None:
        self.targets: list[CalledAgent] = []
        self.serving: list[int] = []
        self._ground = ground
        self._chosen = chosen
        self._template = template
        self._ports = FreePorts(FIRST_PORT, LAST_PORT)
        self._state = ground.directory / "state"
        self._up: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._ingress_port = 0

    def __repr__(self) -> str:
        return f"<HiveVillage {len(self.targets)} agents{' of a template' if self._template else ''}>"

    async def open(self) -> None:
        config = self._ground.directory / "hive.conf"
        config.write_text(self._conf())
        ports = [f"--{name}={next(self._ports)}" for name in ("port", "ingress-port", "api-port")]
        command = [sys.executable, "-m", "hive", "up", "--state-dir", str(self._state), "--config", str(config)]
        command += ["--backend", f"http://127.0.0.1:{self._ground.stub_port}", *ports]
        log = os.open(self._ground.directory / "up.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._up = spawn(
                self._ground.box.inside(command),
                env={name: value for name, value in os.environ.items() if not name.startswith("HIVE_")},
                stdout_fd=log,
                limit_dirs=[self._ground.box.path],
                pdeathsig=signal.SIGTERM,
            )
        finally:
            os.close(log)
        await self._until_up(self._up)
        self.serving = [self._up.pid, *children_of(self._up.pid)]

    def _conf(self) -> str:
        text = CONF.format(reserve_mb=self._ground.box.size_bytes // 20 >> 20)
        return text + (self._template_conf() if self._template else "")

    def _template_conf(self) -> str:
        program, env = self._chosen.program, plain_env()  # read once, so as its agents'
        keys = {"python": self._chosen.interpreter, "imports": ", ".join(program.imports), "warm": program.warm}
        if self._template == "ready":
            keys = {"python": keys["python"], "script": self._chosen.command(self._ground.directory / "programs")[1]}
            env["BENCH_WARM_TURNS"] = str(WARM_TURNS)
        keys["env"] = " ".join(f"{name}={value}" for name, value in env.items())
        return "".join([f"\n[template {TEMPLATE}]\n", *(f"{key} = {value}\n" for key, value in keys.items())])

    async def _until_up(self, up: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + UP_S
        while up.poll() is None and time.monotonic() < until:
            with contextlib.suppress(HiveError, OSError):
                client = Client(Path((self._state / "socket").read_text().strip()))
                health = await asyncio.to_thread(client.get, "/api/health")
                if health["proxy"]["connected"] and health["helper"]["connected"]:
                    self._client, self._ingress_port = client, int(health["proxy"]["ingress_port"])
                    return
            await asyncio.sleep(0.2)
        how = f"ended with {up.returncode}" if up.returncode is not None else f"is not up after {UP_S:g} s"
        raise TimedOut(f"the Hive in the box {how}: {tail(self._ground.directory / 'up.log')}")

    async def grow(self, agents: int, *, until: float = math.inf) -> str:
        for wave in waves(agents - len(self.targets), AT_ONCE):
            if time.monotonic() > until:
                return NO_TIME
            first = len(self.targets)
            try:
                started = await asyncio.gather(*(self._start(f"a{first + number}") for number in range(len(wave))))
            except HiveError as error:
                return self._why(error.message)
            if not all(await asyncio.gather(*(until_it_answers(target) for target in started))):
                return self._why(f"{len(started)} did not answer within {START_S:g} s")
            self.targets += started
        return ""

    async def _start(self, name: str) -> CalledAgent:
        spec: dict[str, Any] = {
            "name": name,
            "command": self._chosen.command(self._ground.directory / "programs"),
            "env": {**plain_env(), **self._chosen.env},
            "port": next(self._ports),
            "model": "stub",
        }
        if self._template:
            spec |= {"template": TEMPLATE, "egress": []}  # as root a template cannot enter the host's network
        await self._post("/api/agents", spec)
        await self._post(f"/api/agents/{name}/start")
        tokens = await self._get(f"/api/agents/{name}/tokens")
        return CalledAgent(name, "127.0.0.1", self._ingress_port, f"/agents/{name}", str(tokens["ingress"]))

    def _why(self, said: str) -> str:
        killed = self._ground.box.killed()
        return f"{killed} killed for memory" if killed else f"{said}; {tail(self._ground.directory / 'up.log')}"

    async def _get(self, path: str) -> Any:
        assert self._client is not None
        return await asyncio.to_thread(self._client.get, path)

    async def _post(self, path: str, body: object = None) -> Any:
        assert self._client is not None
        return await asyncio.to_thread(self._client.post, path, body or {}, timeout_s=START_S)

    async def rest(self) -> None:
        """All are in deep sleep, or 20 s are over."""
        until = time.monotonic() + 20
        while time.monotonic() < until:
            with contextlib.suppress(HiveError):
                agents = (await self._get("/api/agents?limit=500"))["agents"]
                if all(agent["depth"] == "deep" for agent in agents):
                    return
            await asyncio.sleep(0.3)

    async def why_not_as_meant(self) -> str:
        if not self._template:
            return ""
        try:
            found = await self._get(f"/api/templates/{TEMPLATE}")
        except HiveError as error:
            return f"the template cannot be asked: {error.message}"
        forked, agents = len(found.get("agents", ())), len(self.targets)
        if forked >= agents:
            return ""
        why = found.get("why") or "their logs say why"
        return f"{agents - forked} of {agents} agents were not forked from the template; {why}"

    async def close(self) -> None:
        if self._up is None:
            return
        if self._up.poll() is None:
            self._up.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self._up.wait, DOWN_S)
        if self._up.poll() is None:
            self._up.kill()
            self._up.wait()
        self._up = self._client = None
        self.targets.clear()


def tail(log: Path, size: int = 300) -> str:
    """The last words of a log, on one line."""
    try:
        return " ".join(log.read_text(errors="replace")[-size:].split())
    except OSError:
        return "no log"


def why_no_templates() -> str:
    """The reason that this Hive has no templates, empty where it has them."""
    from hive.domain import AgentSpec

    names = {field.name for field in msgspec.structs.fields(AgentSpec)}
    return "" if "template" in names else "this Hive has no templates"


def why_no_ready_state() -> str:
    """The reason that this Hive has no ready state, empty where it has one."""
    from hive.settings.templates import TemplateRow

    names = {field.name for field in msgspec.structs.fields(TemplateRow)}
    return why_no_templates() or ("" if "script" in names else "this Hive has no ready state")
