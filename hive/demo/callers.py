"""The demo of `hive up --demo`: three sample agents, and callers that keep waking them and check their answers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from hive.client.calls import AsyncClient
from hive.demo.agents import DEMO_AGENTS, DemoAgent
from hive.demo.port_claims import PortClaims
from hive.domain import ALIVE, AgentSpec, Tier
from hive.errors import HiveError
from hive.host.http_call import calling, dialled
from hive.http_answer import CallFailed, encode_request
from hive.settings.table import Paths
from hive.tasks import spawn

log = logging.getLogger("hive.demo")

READY_S = 90.0
"""Longest time for a sample agent to build its heap and listen; a second or two on an idle machine."""
TURN_S = 330.0
ANSWER_MAX_BYTES = 1024 * 1024
START_S = 30.0
SETTINGS = {"sleep.check_s": 1, "sleep.minimum_awake_s": 1}
"""Settings of the demo where hive.conf has none: agents fall asleep within seconds (design.md §3)."""

SAYINGS = (
    "The heather on the north slope is in bloom.",
    "Two hives were moved to the orchard this morning.",
    "It rained all night and nobody flew out.",
    "The queen of hive four is marked with a blue dot.",
    "A swarm hangs in the old pear tree.",
)


class Turn(msgspec.Struct, frozen=True):
    """The answer of an agent to `POST /turn`, as far as the demo checks it."""

    turn: int
    state_ok: bool


def judge(previous: int | None, turn: Turn) -> str | None:
    """The fault in a turn that came after turn `previous` (None: unknown), None where there is none.

    >>> judge(3, Turn(4, True)), judge(None, Turn(9, True))
    (None, None)
    >>> judge(3, Turn(1, True)), judge(3, Turn(4, False))
    ('turn 1 came after turn 3: it forgot', 'its memory is not what it was')
    """
    if not turn.state_ok:
        return "its memory is not what it was"
    if previous is not None and turn.turn != previous + 1:
        return f"turn {turn.turn} came after turn {previous}: it forgot"
    return None


def demo_spec(name: str, agent: DemoAgent, *, port: int) -> AgentSpec:
    """The spec of one sample agent; the daemon tells it its port, its dialect and how to reach the model."""
    return AgentSpec(
        name=name,
        command=["/usr/bin/python3", *agent.arguments],
        port=port,
        tier=Tier(agent.tier),
        idle_s=agent.idle_s,
    )


class Demo:
    """Sets the agents up and drives them until cancelled. `errors` counts wrong or missing answers."""

    def __init__(self, daemon: AsyncClient, paths: Paths, *, ingress_port: int) -> None:
        self.errors = 0
        self._daemon = daemon
        self._paths = paths
        self._ingress_port = ingress_port
        self._leaving = asyncio.Event()
        self._drivers: list[asyncio.Task[None]] = []
        self._ports = PortClaims()

    def __repr__(self) -> str:
        return f"<Demo {len(self._drivers)} agents, {self.errors} errors>"

    async def set_up(self) -> None:
        """Applies, fills and starts the agents, then lets callers come. Raises HiveError."""
        existing = {view["name"]: view for view in (await self._daemon.get("/api/agents"))["agents"]}
        for name, agent in DEMO_AGENTS.items():
            others = {view["port"] for other, view in existing.items() if other != name}
            port = self._ports.take(existing.get(name), others)
            spec = demo_spec(name, agent, port=port)
            await bring_up(self._daemon, self._paths, spec, agent)
            self._drivers.append(spawn(self._drive(spec), name=f"demo-{name}"))

    async def finish(self, *, within_s: float) -> None:
        """Lets no more callers come and waits for the turns that are on their way, so that all sums are whole."""
        self._leaving.set()
        self._ports.close()
        if self._drivers:
            _, late = await asyncio.wait(self._drivers, timeout=within_s)
            for driver in late:
                driver.cancel()

    async def _drive(self, spec: AgentSpec) -> None:
        """One caller after the other, each so late that the agent has fallen asleep meanwhile."""
        idle_s = spec.idle_s or 0.0
        tokens = await self._daemon.get(f"/api/agents/{spec.name}/tokens")
        if not await self._listens(spec):
            return
        previous = await self._one_turn(spec.name, str(tokens["ingress"]), None)
        while not await self._leaves_within(random.uniform(idle_s + 2, idle_s + 8)):
            previous = await self._one_turn(spec.name, str(tokens["ingress"]), previous)

    async def _one_turn(self, name: str, token: str, previous: int | None) -> int | None:
        """The number of the turn that was taken; None where it is not known whether one was."""
        address = f"127.0.0.1:{self._ingress_port}"
        fields = {"Host": address, "X-Hive-Token": token, "Content-Type": "application/json", "Connection": "close"}
        body = msgspec.json.encode({"say": random.choice(SAYINGS)})
        request = encode_request("POST", f"/agents/{name}/turn", fields, body)
        try:
            async with asyncio.timeout(TURN_S), calling(dialled(address), request) as call:
                status, said = await call.status(), await call.body(ANSWER_MAX_BYTES)
            if not 200 <= status < 300:
                self._count(name, f"status {status}: {said[:300].decode(errors='replace')}")
                return None
            turn = msgspec.json.decode(said, type=Turn)
        except (CallFailed, OSError, msgspec.DecodeError) as error:
            self._count(name, f"{type(error).__name__}: {error}")
            return None
        wrong = judge(previous, turn)
        if wrong is not None:
            self._count(name, wrong)
        return turn.turn

    def _count(self, name: str, wrong: str) -> None:
        self.errors += 1
        log.error("demo_turn_failed agent=%s why=%s", name, wrong)

    async def _listens(self, spec: AgentSpec) -> bool:
        """Waits until the agent has built its heap and listens. False, and an error, where it never does."""
        until = asyncio.get_running_loop().time() + READY_S
        while asyncio.get_running_loop().time() < until:
            if await accepts(spec.port or 0):
                return True
            if await self._leaves_within(0.2):
                return False
        self._count(spec.name, f"it does not listen on port {spec.port} after {READY_S:g} s")
        return False

    async def _leaves_within(self, pause_s: float) -> bool:
        """Sleeps so long; True as soon as the demo ends."""
        try:
            async with asyncio.timeout(pause_s):
                await self._leaving.wait()
        except TimeoutError:
            return False
        return True


async def bring_up(daemon: AsyncClient, paths: Paths, spec: AgentSpec, agent: DemoAgent) -> None:
    """Applies, fills and starts one sample agent; one that lives on is left as it is. Raises HiveError."""
    path = f"/api/agents/{spec.name}"
    applied = await daemon.put(path, msgspec.json.encode(spec), within_s=START_S)
    view = applied["agent"]
    if view["status"] in ALIVE:
        if not applied.get("restart_needed"):
            return  # it lived on, or another `--demo` left it running
        await daemon.post(f"{path}/stop", within_s=START_S)
    copy_files(agent.files, paths.home(view["id"]), uid=view["uid"])
    await daemon.post(f"{path}/start", within_s=START_S)


async def accepts(port: int) -> bool:
    """Whether somebody listens at 127.0.0.1:`port`."""
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def copy_files(files: Mapping[str, str], home: Path, *, uid: int | None) -> None:
    """Puts `files` (source → name) into a stopped agent's home, its own; a home not made yet is made.

    The home belongs to the agent, so it may have left a link under one of these names: nothing in it is followed.
    Raises HiveError.
    """
    try:
        with contextlib.suppress(FileExistsError):
            home.mkdir(mode=0o700)  # the helper gives it to the agent at its first start
        directory = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        try:
            for source, name in files.items():
                _copy(Path(source), name, directory, uid)
        finally:
            os.close(directory)
    except OSError as error:
        raise HiveError(f"cannot copy the sample agents into {home}: {error}") from error


def _copy(source: Path, name: str, directory: int, uid: int | None) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(name, flags, 0o600, dir_fd=directory), "wb") as file:
        file.write(source.read_bytes())
        if uid is not None:
            os.fchown(file.fileno(), uid, uid)


def demo_config(user_text: str, given: Sequence[str]) -> str:
    """hive.conf with the demo's settings added, except for those `given` already (`section.key`).

    >>> demo_config("[sleep]\\ncheck_s = 5\\n", ["sleep.check_s"]).splitlines()[-2:]
    ['[sleep]', 'minimum_awake_s = 1']
    """
    missing = {key: value for key, value in SETTINGS.items() if key not in given}
    lines = []
    for key, value in missing.items():
        section, _, name = key.partition(".")
        lines.append(f"[{section}]\n{name} = {value}\n")
    return f"{user_text}\n# added by hive up --demo\n{''.join(lines)}"
