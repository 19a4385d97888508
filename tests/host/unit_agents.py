"""Agents for the tests inside a machine with systemd, and fixtures: loaded by `-p host.unit_agents`.

Each agent has an id of its own; what it found out it writes into its home, or prints into the journal.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import RuntimeKind
from hive.host import systemd
from hive.host.cgroup import find_mount, mount_of_v1
from hive.link.specs import SandboxSpec
from hive.runtimes.unit import UnitRuntime
from hive.runtimes.unit_plan import agent_of, unit_of
from hive.sandbox.server import HelperServer
from hive.sandbox.supervised_agent import FreezeLimits as Waits
from hive.settings.table import Paths, Settings
from tests.sandbox.harness import Daemon
from tests.waiting import until

pytest.register_assert_rewrite("tests.runtimes.test_conformance")
PATHS = Paths(state=Path("/var/lib/hive"), runtime=Path("/run/hive"))
GROUPS = (find_mount(Path("/proc/self/mounts").read_text()) or Path()) / "hive.slice/hive-agents.slice"
SETTINGS = Settings().sandbox
PYTHON = "/usr/bin/python3"
SLEEP = ["sleep", "1000"]
BURN = [PYTHON, "-c", "while True: pass"]
POLITE = [
    PYTHON,
    "-c",
    "import os, signal, time\n"
    "signal.signal(signal.SIGTERM, lambda *_: (open('bye', 'w').write('bye\\n'), os._exit(3)))\n"
    "open('ready', 'w').write('1\\n')\n"
    "while True: time.sleep(0.01)",
]
"""Says goodbye on SIGTERM; a signal just before a long sleep would be heard after it. Not by an exception: raised while
the file `ready` is closed, Python drops it, and the program would go on."""
HELPER = """
import asyncio
from pathlib import Path
from hive.domain import RuntimeKind
from hive.sandbox.server import HelperServer
from hive.runtimes.unit import UnitRuntime
from hive.settings.table import Paths, Settings
async def main():
    paths = Paths(Path("/var/lib/hive"), Path("/run/hive"))
    runtime = UnitRuntime(paths, Settings().sandbox, log_max_bytes=4096)
    await HelperServer(paths, {RuntimeKind.PROCESS: runtime}, templates=runtime.templates).open()
    await asyncio.Event().wait()
asyncio.run(main())
"""
_ids = count(1)

Connect = Callable[[], Awaitable[Daemon]]


def new_id() -> str:
    return f"a{next(_ids):07d}"


def spec_of(agent: str, command: list[str], **more: Any) -> SandboxSpec:
    uid = 71000 + int(agent[1:])
    home, log = str(PATHS.home(agent)), str(PATHS.log(agent))
    plain = SandboxSpec(name=f"agent-{agent}", command=command, env={}, home=home, log=log, uid=uid)
    return msgspec.structs.replace(plain, **more)


def reporter(body: str) -> list[str]:
    """A program that puts what `body` leaves in `found` into report.json in its home, and then sleeps."""
    program = f"import json, os, socket, time\nfound = {{}}\n{body}\n"
    program += "json.dump(found, open('report.new', 'w')); os.rename('report.new', 'report.json'); time.sleep(1000)"
    return [PYTHON, "-c", program]


async def report_of(agent: str) -> dict[str, Any]:
    path = PATHS.home(agent) / "report.json"
    await until(path.exists)
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def show(agent: str, *names: str) -> dict[str, str]:
    command = ["systemctl", "show", unit_of(agent), *(f"--property={name}" for name in names)]
    return systemd.parse_show(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def group_of(agent: str) -> Path:
    return GROUPS / unit_of(agent)


def has_controller(name: str) -> bool:
    """Whether units here have this controller, of v2 or of v1."""
    mounts = Path("/proc/self/mounts").read_text()
    unified = find_mount(mounts)
    in_v2 = unified is not None and name in (unified / "cgroup.controllers").read_text().split()
    return in_v2 or (is_hybrid() and mount_of_v1(name, mounts) is not None)


def is_hybrid() -> bool:
    """Whether systemd has v1's control groups beside those of v2."""
    return Path("/sys/fs/cgroup/unified").exists()


def ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


@pytest.fixture
def runtime() -> UnitRuntime:
    return UnitRuntime(PATHS, SETTINGS, log_max_bytes=4096)


@pytest.fixture
async def helper(runtime: UnitRuntime) -> AsyncIterator[HelperServer]:
    helper = HelperServer(PATHS, {RuntimeKind.PROCESS: runtime}, limits=Waits(), templates=runtime.templates)
    await helper.open()
    yield helper
    if not helper.left:
        await helper.leave()


@pytest.fixture
async def connect() -> AsyncIterator[Connect]:
    daemons: list[Daemon] = []

    async def connect_() -> Daemon:
        daemons.append(Daemon(PATHS))
        await until(lambda: daemons[-1].client.connected)
        return daemons[-1]

    yield connect_
    for daemon in daemons:
        daemon.client.close()
    await asyncio.sleep(0)


@pytest.fixture
async def daemon(helper: HelperServer, connect: Connect) -> Daemon:
    return await connect()


@pytest.fixture
def helper_process() -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def start() -> subprocess.Popen[bytes]:
        started.append(subprocess.Popen([sys.executable, "-c", HELPER]))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """Stops what a test started, and sees that it can be stopped."""
    yield
    for group in GROUPS.glob("hive-agent@*") if GROUPS.exists() else ():
        assert agent_of(group.name)
        subprocess.run(["systemctl", "kill", "--signal=SIGKILL", group.name], check=False)
        subprocess.run(["systemctl", "stop", group.name], check=False)
    subprocess.run(["systemctl", "reset-failed"], check=True)
    shutil.rmtree(PATHS.sandbox_table, ignore_errors=True)
    PATHS.sandbox_lock.unlink(missing_ok=True)


async def started(daemon: Daemon, agent: str, command: list[str], **more: Any) -> int:
    await daemon.client.define(agent, spec_of(agent, command, **more))
    return (await daemon.client.start(agent)).pid


async def asleep(daemon: Daemon, agent: str, generation: int = 1) -> None:
    await daemon.client.freeze(agent, generation)
    await daemon.client.confirm(agent, generation)
