"""Agents, helpers and clients for the tests of the helper: all of them real processes and real sockets."""

# ruff: noqa: ASYNC240 - other processes send no asyncio events; a test's loop may wait for its disk
from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from hive.domain import RuntimeKind
from hive.host import parent
from hive.host.cgroup import Subtree
from hive.host.limits import Fences
from hive.host.process import Identity, ProcessTable, identify
from hive.link.helper import Ended
from hive.link.specs import SandboxSpec, TemplateSpec
from hive.runtimes.log_pipes import reading
from hive.runtimes.process import ProcessRuntime
from hive.runtimes.runtime import Runtime
from hive.sandbox.client import SandboxClient
from hive.sandbox.server import HelperServer
from hive.settings.table import Paths
from tests.waiting import until

AGENT_UID = 71000 + os.getpid() % 1000 * 2000
"""Another one in every run: where there is no cgroup, processes of the uid count as the agent's."""
PYTHON = "/usr/bin/python3"
BURN = [PYTHON, "-S", "-c", "while True: pass"]
SLEEP = ["sleep", "1000"]
A = "a1b2c3d4e5f6"
B = "b1b2c3d4e5f6"

OpenHelper = Callable[..., Awaitable[HelperServer]]


def kill_all_under(paths: Paths) -> None:
    """Ends what a failed test may have left: exactly the processes whose HOME is in this state directory."""
    prefix = b"HOME=" + os.fsencode(paths.state)
    snapshot = ProcessTable()
    for pid, entries in snapshot.environments.items():
        if any(entry.startswith(prefix) for entry in entries):
            Identity.of(snapshot.processes[pid]).send(signal.SIGKILL)
    subtree = Subtree.find(paths.state)
    if subtree is not None:
        for leaf in subtree.leaves():
            leaf.kill()
            leaf.thaw()
            while leaf.pids():
                pass
            leaf.remove()
        subtree.remove()
    Fences(paths.state, subtree).remove()
    _let_go_of_pipes(paths)
    until = time.monotonic() + 10
    while (reader := reading(paths.log_pipes)) and time.monotonic() < until:
        time.sleep(0.005)  # it ends after them, and writes into these directories until then
    if reader and (who := identify(reader)) is not None:
        who.send(signal.SIGKILL)


def _let_go_of_pipes(paths: Paths) -> None:
    """A helper of this process holds them until its reader has them all; its loop may have ended before."""
    for entry in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith(f"{paths.log_pipes}/"):
                os.close(int(entry))


def runtime(paths: Paths, freezer: str, *, log_max_bytes: int = 4096) -> ProcessRuntime:
    paths.state.mkdir(mode=0o711, exist_ok=True)
    subtree = Subtree.find(paths.state) if freezer == "cgroup" else None
    if freezer == "cgroup" and subtree is None:
        pytest.skip("no writable cgroup v2 here")
    return ProcessRuntime(paths, subtree=subtree, log_max_bytes=log_max_bytes)


def runtimes(paths: Paths, freezer: str) -> dict[RuntimeKind, Runtime]:
    """The program of a helper in a test."""
    return {RuntimeKind.PROCESS: runtime(paths, freezer)}


class Daemon:
    """A client with everything it was told."""

    def __init__(self, paths: Paths, *, role: str = "daemon") -> None:
        self.ended: list[Ended] = []
        self.thawed_alone: list[tuple[str, str]] = []
        self.connected = 0
        self.client = SandboxClient(
            paths.sandbox_socket,
            role=role,
            epoch="test",
            on_ended=self.ended.append,
            on_thawed_alone=lambda agent, reason: self.thawed_alone.append((agent, reason)),
            on_connected=self._on_connected,
        )

    def _on_connected(self) -> None:
        self.connected += 1


class HelperProcess:
    """`hive sandbox` as a process of its own, for what only a death shows. Its agents are never units of systemd.

    Nothing is cut off their logs: on a busy machine an agent that talks wrote more than the usual bound before its test
    was over, and the lines that the test counts were gone.
    """

    PROGRAM = """
import sys
from pathlib import Path
from hive.host import systemd
from hive.sandbox import server
from hive.settings.table import Agents, Paths, Sandbox, Settings
systemd.BOOTED = Path("/nowhere")
state, runtime, freezer, watch, policy = sys.argv[1:]
if freezer == "signals":
    server.Subtree.find = lambda state: None
settings = Settings(agents=Agents(log_max_bytes=1 << 30), sandbox=Sandbox(policy=policy))
server.main(Paths(Path(state), Path(runtime)), settings, int(watch) if watch else None)
"""

    def __init__(self, paths: Paths, freezer: str, *, watch_fd: int | None = None, policy: str = "") -> None:
        arguments = [str(paths.state), str(paths.runtime), freezer, "" if watch_fd is None else str(watch_fd), policy]
        self.process = subprocess.Popen(
            [sys.executable, "-c", self.PROGRAM, *arguments], pass_fds=() if watch_fd is None else (watch_fd,)
        )

    def end(self, signum: int) -> int:
        self.process.send_signal(signum)
        return self.process.wait(60)


def uid_of(agent: str) -> int | None:
    """Every agent has a uid of its own where this may be."""
    return AGENT_UID + sum(agent.encode()) if os.geteuid() == 0 else None


def spec(paths: Paths, agent: str, command: list[str], **more: object) -> SandboxSpec:
    plain = SandboxSpec(
        name="a", command=command, env={}, home=str(paths.home(agent)), log=str(paths.log(agent)), uid=uid_of(agent)
    )
    return msgspec.structs.replace(plain, **more)


def template(paths: Paths, **more: object) -> TemplateSpec:
    """A template of the system's Python, as root with a block of uids around those of A and B."""
    uid = uid_of(A)
    plain = TemplateSpec(name="t", python=PYTHON, imports=["json"], first_uid=None if uid is None else uid - 100)
    return msgspec.structs.replace(plain, **more)


def template_spec(paths: Paths, agent: str, command: list[str], **more: object) -> SandboxSpec:
    """An agent of a template, without a network where it would otherwise have the host's."""
    plain = spec(paths, agent, command, template=template(paths), egress=[] if os.geteuid() == 0 else None)
    return msgspec.structs.replace(plain, **more)


@contextlib.contextmanager
def sub_reaper() -> Iterator[None]:
    """This process takes the ends of orphans below it meanwhile, as `hive up` does."""
    parent.become_subreaper()
    try:
        yield
    finally:
        parent.prctl(parent.PR_SET_CHILD_SUBREAPER, 0)


async def read_when_written(path: Path) -> str:
    """The first whole line somebody writes there."""
    await until(lambda: path.exists() and "\n" in path.read_text())
    return path.read_text().splitlines()[0]


def alive(pid: int) -> bool:
    who = identify(pid)
    stat = None if who is None else who.stat()
    return stat is not None and stat.alive


async def cpu_us_after(daemon: Daemon, agent: str, wait_s: float) -> int:
    """CPU time the helper reports for an agent, `wait_s` from now."""
    await asyncio.sleep(wait_s)
    return (await daemon.client.stat([agent]))[agent].cpu_us


async def running(daemon: Daemon, paths: Paths, command: list[str], agent: str = A) -> int:
    """Defines and starts an agent; its pid."""
    await daemon.client.define(agent, spec(paths, agent, command))
    return (await daemon.client.start(agent)).pid
