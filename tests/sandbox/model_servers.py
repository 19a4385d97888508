"""Helpers that start servers of the pool, for tests: the real supervisor and warden, with a scripted server."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from hive.host.cgroup import Subtree
from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from hive.runtimes.process import log_pipes_of
from hive.sandbox.client import SandboxClient
from hive.sandbox.server import HelperServer
from hive.sandbox.slot_sessions import SlotSessions
from hive.settings.table import Paths
from hive.slots.model_slots import ModelSlots
from tests.sandbox.harness import alive, runtimes
from tests.waiting import until

SERVER = Path(__file__).parents[1] / "fakes" / "scripted_server.py"
A, B = "model-a-00000001", "b-00000002"
GRANT = SlotGrant(accounts={"cpu": 700}, context=2048)
SUPERVISOR = """
import asyncio, os, pathlib, sys
from hive.backends.command_line import Launch
from hive.errors import HiveError
from hive.host.notify import Notifier
from hive.link.slots import mark_of
from hive.worker.lifeline import Lifeline
from hive.worker.profile import TimeoutProfile
from hive.worker.supervisor import supervise
from hive.worker.waiting import is_awaited, wait_for_grant
grant, limit_s = pathlib.Path(sys.argv[1]), float(sys.argv[2])
line = Lifeline.forked(grace_s=2.0)
if is_awaited(grant, mark_of(grant)):
    if not wait_for_grant(grant, mark_of(grant), warden=line.process.pid, limit_s=limit_s):
        sys.exit(0)
notifier = Notifier(os.environ, pid=os.getpid())
environment = {name: value for name, value in os.environ.items() if not name.startswith("HIVE_")}
print("the supervisor begins", flush=True)
launch = Launch(tuple(sys.argv[4:]), environment, (), pathlib.Path(sys.argv[3]))
try:
    sys.exit(asyncio.run(supervise(launch, TimeoutProfile(load_timeout_s=60), notifier, line=line)))
except HiveError as error:
    sys.exit(f"refused: {error.message}")
"""
HELPER = """
import sys
from pathlib import Path
from hive.host import systemd
from hive.sandbox import server
from hive.settings.table import Paths, Settings
from tests.sandbox.model_servers import command, SlotSessions, A, B
systemd.BOOTED = Path("/nowhere")
paths, freezer, flags = Paths(Path(sys.argv[1]), Path(sys.argv[2])), sys.argv[3], sys.argv[4:]
if freezer == "signals":
    server.Subtree.find = lambda state: None
server.described = lambda paths, config: {A, B}
SlotSessions._run_model = lambda self, slot: command(paths, *flags)(slot)
server.main(paths, Settings(), None)
"""


def pids_file(paths: Paths) -> Path:
    return paths.state.with_name("pids")


def pids(paths: Paths) -> list[int]:
    """All servers and their children that ever ran."""
    file = pids_file(paths)
    return [int(line) for line in file.read_text().split()] if file.exists() else []


def left(paths: Paths) -> list[int]:
    return [pid for pid in pids(paths) if alive(pid)]


def command(paths: Paths, *flags: str, waits_s: float = 300) -> Callable[[str], list[str]]:
    """The starter of a slot's server in a test. `waits_s`: longest wait of a prepared one."""

    def made(slot: str) -> list[str]:
        socket = str(paths.slot_socket(slot))
        server = [sys.executable, "-I", "-S", str(SERVER), "--socket", socket, "--pids", str(pids_file(paths)), *flags]
        return [sys.executable, "-P", "-c", SUPERVISOR, str(paths.slot_grant(slot)), str(waits_s), socket, *server]

    return made


class PoolDaemon:
    """A daemon's client, with what it was told of slots."""

    def __init__(self, paths: Paths, role: str = "daemon") -> None:
        self.moved: list[SlotProcess] = []
        self.client = SandboxClient(paths.sandbox_socket, role=role, epoch="test", on_slot_moved=self.moved.append)

    def states(self, slot: str = A) -> list[str]:
        return [str(process.state) for process in self.moved if process.id == slot]

    async def told(self, state: ProcessState, slot: str = A) -> SlotProcess:
        """The server, once it was told to be so."""
        await until(lambda: str(state) in self.states(slot))
        return next(process for process in reversed(self.moved) if process.id == slot and process.state is state)

    async def serving(self, slot: str = A) -> SlotProcess:
        """Starts it; the server, once it serves."""
        await self.client.slot_start(slot, GRANT)
        return await self.told(ProcessState.SERVING, slot)


@asynccontextmanager
async def connected(paths: Paths, role: str = "daemon") -> AsyncIterator[PoolDaemon]:
    daemon = PoolDaemon(paths, role)
    try:
        await until(lambda: daemon.client.connected)
        yield daemon
    finally:
        daemon.client.close()
        await asyncio.sleep(0)


@asynccontextmanager
async def helper(
    paths: Paths, freezer: str, *flags: str, known: Callable[[], set[str]] | None = None, **options: object
) -> AsyncIterator[HelperServer]:
    """In this process. What it started is ended with it."""
    paths.state.mkdir(mode=0o711, exist_ok=True)
    subtree = Subtree.find(paths.state) if freezer == "cgroup" else None
    made = options.pop("command", None) or command(paths, *flags)
    pipes = log_pipes_of(paths, 100_000)
    starter = SlotSessions(paths, pipes, subtree=subtree, command=made)  # type: ignore[arg-type]
    found = HelperServer(paths, runtimes(paths, freezer), slots=ModelSlots(paths, starter, known or (lambda: {A, B})))
    await found.open()
    try:
        yield found
    finally:
        if not found.left:
            async with connected(paths) as daemon:
                for slot in await daemon.client.slots():
                    await daemon.client.slot_stop(slot, grace_s=0)
            await found.leave()


class PoolHelper:
    """`hive sandbox` as a process of its own that starts servers of the pool."""

    def __init__(self, paths: Paths, freezer: str, *flags: str) -> None:
        words = [sys.executable, "-c", HELPER, str(paths.state), str(paths.runtime), freezer, *flags]
        self.process = subprocess.Popen(words, cwd=Path(__file__).parents[2])

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
