# ruff: noqa: ASYNC110 - other processes send no asyncio events
"""Helpers that let holders of leases in, and programs that come in: all of them real processes and real sockets."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from hive.holders.group_places import GroupPlaces
from hive.holders.hold import HolderPlaces
from hive.holders.lease_holders import LeaseHolders
from hive.host.cgroup import Leaf, Subtree, state_label
from hive.host.memory_group import own_v1_group
from hive.host.process import ProcessTable, identify
from hive.link.leases import HolderState, LeaseGrant, LeaseHolder
from hive.sandbox.client import SandboxClient
from hive.sandbox.lease_sessions import SessionPlaces
from hive.sandbox.server import HelperServer
from hive.settings.table import Paths
from tests.sandbox.harness import runtimes
from tests.waiting import until

LEASE = "l-1"
COME_IN = """
import json, os, sys
from pathlib import Path
from hive.client.lease_entry import enter
from hive.errors import HiveError
try:
    answer = enter(Path(sys.argv[1]), sys.argv[2])
except HiveError as error:
    print(json.dumps({"ok": False, "code": error.code, "message": error.message}), flush=True)
    sys.exit(9)
print(json.dumps(answer | {"pid": os.getpid()}), flush=True)
os.environ.update(answer["environment"])
os.execvp(sys.argv[3], sys.argv[3:])
"""
"""A process that comes in, tells so in a line, and becomes the program after that."""
HELPER = """
import os, signal, sys
from pathlib import Path
from hive.host import systemd
from hive.sandbox import server
from hive.settings.table import Paths, Settings
systemd.BOOTED = Path("/nowhere")
paths, freezer, die = Paths(Path(sys.argv[1]), Path(sys.argv[2])), sys.argv[3], sys.argv[4]
from hive.holders.records import HolderRecords
from hive.holders.group_places import GroupPlaces
from hive.sandbox.lease_sessions import SessionPlaces
seen = {"save": 0, "enter": 0}
def here(when, what):
    if die == f"{when} {what} {seen[what]}":
        os.kill(os.getpid(), signal.SIGKILL)
def counted(what, inner):
    def save(self, record):
        seen[what] += 1
        here("before", what)
        inner(self, record)
        here("after", what)
    return save
def moved(what, inner):
    async def enter(self, *arguments):
        seen[what] += 1
        here("before", what)
        found = await inner(self, *arguments)
        here("after", what)
        return found
    return enter
HolderRecords.save = counted("save", HolderRecords.save)
GroupPlaces.enter = moved("enter", GroupPlaces.enter)
SessionPlaces.enter = moved("enter", SessionPlaces.enter)
if freezer == "signals":
    server.Subtree.find = lambda state: None
server.main(paths, Settings(), None)
"""


def places(paths: Paths, freezer: str) -> list[HolderPlaces]:
    subtree = Subtree.find(paths.state) if freezer == "cgroup" else None
    groups = [] if subtree is None else [GroupPlaces(subtree, state_label(paths.state))]
    return [*groups, SessionPlaces()]


class LeaseDaemon:
    """A daemon's client, with what it was told of leases."""

    def __init__(self, paths: Paths) -> None:
        self.paths = paths
        self.moved: list[LeaseHolder] = []
        self.client = SandboxClient(
            paths.sandbox_socket, role="daemon", epoch="test", on_holder_moved=self.moved.append
        )

    def states(self, id: str = LEASE) -> list[str]:
        return [str(holder.state) for holder in self.moved if holder.id == id]

    async def told(self, state: HolderState, id: str = LEASE) -> LeaseHolder:
        await until(lambda: str(state) in self.states(id))
        return next(one for one in reversed(self.moved) if one.id == id and one.state is state)

    @staticmethod
    def new_grant(id: str = LEASE, **more: Any) -> LeaseGrant:
        """A grant with a nonce of its own."""
        wanted = {"uid": os.geteuid(), "accounts": {"cpu": 700}, "token": 1, **more}
        return LeaseGrant(id=id, nonce=secrets.token_hex(16), **wanted)

    async def grant(self, id: str = LEASE, *, wait_s: float = 60.0, **more: Any) -> LeaseGrant:
        """Expects a holder; its grant."""
        grant = self.new_grant(id, **more)
        await self.client.lease_expect(grant, wait_s=wait_s)
        return grant

    async def holding(self, *command: str, id: str = LEASE, **more: Any) -> Incomer:
        """A program that holds the lease."""
        grant = await self.grant(id, **more)
        incomer = Incomer(self.paths, grant.nonce, *command)
        answer = await incomer.answer()
        assert answer["ok"], answer
        await self.told(HolderState.RUNNING, id)
        return incomer


def end_incomers(paths: Paths) -> None:
    """Ends what a test left: the holders of this Hive's leases, and those that came in vain."""
    mark = f"HIVE_LEASE_MARK={state_label(paths.state)}.".encode()
    for pid, found in ProcessTable().environments.items():
        if any(entry.startswith(mark) for entry in found) and (who := identify(pid)) is not None:
            who.send(signal.SIGKILL)
    while Incomer.started:
        process = Incomer.started.pop().process
        process.kill()
        process.wait(60)
        if process.stdout is not None:
            process.stdout.close()
    own = own_v1_group("memory", Path("/proc/self/cgroup").read_text(), Path("/proc/self/mounts").read_text())
    for group in [] if own is None else own.glob(f"hive-lease-{state_label(paths.state)}-*"):
        Leaf(group).remove()


class Incomer:
    """A process that comes in, and then is `command`."""

    started: ClassVar[list[Incomer]] = []

    def __init__(self, paths: Paths, nonce: str, *command: str, **options: Any) -> None:
        words = [sys.executable, "-P", "-c", COME_IN, str(paths.lease_socket), nonce, *command]
        if before := options.pop("before", None):
            words = [*before, *words]
        self.process = subprocess.Popen(
            words, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2], **options
        )
        Incomer.started.append(self)

    @property
    def pid(self) -> int:
        return self.process.pid

    async def answer(self) -> dict[str, Any]:
        line = await asyncio.to_thread(self._line)
        found: dict[str, Any] = json.loads(line)
        return found

    def _line(self) -> str:
        assert self.process.stdout is not None
        return str(self.process.stdout.readline())

    async def line(self) -> str:
        """The next line that the program writes."""
        return (await asyncio.to_thread(self._line)).strip()

    async def ended(self) -> int:
        return await asyncio.to_thread(self.process.wait, 60)


@asynccontextmanager
async def connected(paths: Paths) -> AsyncIterator[LeaseDaemon]:
    daemon = LeaseDaemon(paths)
    try:
        await until(lambda: daemon.client.connected)
        yield daemon
    finally:
        daemon.client.close()
        await asyncio.sleep(0)


@asynccontextmanager
async def helper(paths: Paths, freezer: str, **options: Any) -> AsyncIterator[HelperServer]:
    """In this process; holders of its leases are ended with it."""
    paths.state.mkdir(mode=0o711, exist_ok=True)
    found = HelperServer(paths, runtimes(paths, freezer), leases=LeaseHolders(paths, places(paths, freezer), **options))
    await found.open()
    try:
        yield found
    finally:
        if not found.left:
            async with connected(paths) as daemon:
                await end_all(daemon)
            await found.leave()


async def end_all(daemon: LeaseDaemon) -> None:
    for id in await daemon.client.leases():
        await daemon.client.lease_end(id, "the test is over", grace_s=0)
    for id in await daemon.client.leases():
        await gone(daemon, id)
        await daemon.client.lease_forget(id)


async def gone(daemon: LeaseDaemon, id: str = LEASE) -> LeaseHolder:
    """The holder, once it has ended, also where its end was told to another daemon."""
    async with asyncio.timeout(60):
        while (holder := (await daemon.client.leases())[id]).state is not HolderState.ENDED:
            await asyncio.sleep(0.01)
    return holder


class LeaseHelper:
    """`hive sandbox` as a process of its own, for what only a death shows."""

    started: ClassVar[list[LeaseHelper]] = []

    def __init__(self, paths: Paths, freezer: str, *, die: str = "") -> None:
        """`die`: it kills itself there, as `before save 2`: the second time that it writes a record."""
        words = [sys.executable, "-c", HELPER, str(paths.state), str(paths.runtime), freezer, die]
        self.process = subprocess.Popen(words)
        LeaseHelper.started.append(self)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(60)

    def leave(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
