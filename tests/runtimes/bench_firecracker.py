"""The virtual machines' bench for the conformance suite: the fake Firecracker, in jails where this is root.

`HIVE_FIRECRACKER`, `HIVE_JAILER` and `HIVE_FIRECRACKER_GUESTS` run it on the real ones (see firecracker_programs.py).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec

from hive.domain import FirecrackerSpec, RuntimeKind
from hive.host.cgroup import Subtree
from hive.host.limits import Fences
from hive.link.specs import SandboxSpec
from hive.runtimes.firecracker import FirecrackerRuntime
from hive.runtimes.jail import bind_in
from hive.runtimes.machine import RunningMachine
from hive.runtimes.runtime import RunningAgent
from hive.sandbox.server import make_directories
from hive.settings.table import Paths, Sandbox
from tests.fakes.firecracker_programs import VERSION, Programs, make_programs
from tests.runtimes.benches import printed
from tests.sandbox import harness

KINDS = {"idle": "idle", "burn": "burn", "exit7": "exit7", "stubborn": "stubborn"}
MARK = f"HIVE_MARK={secrets.token_hex(16)}"
MEMORY_MB = 32
"""Less than the least limit a test sets."""


class FirecrackerBench:
    """See `Bench`. `jailed`: through the jailer, which takes root."""

    def __init__(self, paths: Paths, *, jailed: bool = os.geteuid() == 0, version: str = VERSION) -> None:
        top = paths.state.parent
        self.name = f"firecracker {'jailed' if jailed else 'direct'}"
        self.programs: Programs = make_programs(top / "fc", version=version)
        self.jails = top / "jails"
        self.jails.mkdir(mode=0o711, exist_ok=True)
        self.settings = Sandbox(
            firecracker=str(self.programs.firecracker),
            jailer=str(self.programs.jailer) if jailed else "",
            chroot_base=str(self.jails),
        )
        self.jailed = jailed
        self.paths = paths
        self.runtime = self.new_runtime()
        self._held: list[RunningMachine] = []
        self._socks: list[socket.socket] = []

    def new_runtime(self, *, kvm: Path | None = None, **settings: str) -> FirecrackerRuntime:
        """Another one of the same Hive, as its next helper has it."""
        changed = msgspec.structs.replace(self.settings, **settings)
        return FirecrackerRuntime(self.paths, changed, log_max_bytes=65536, kvm=kvm or self.programs.kvm)

    def spec(self, agent: str, kind: str, **more: object) -> SandboxSpec:
        """`kind`: one of `KINDS`, or with the fake what its guest runs, a line for each program."""
        machine = FirecrackerSpec(
            kernel=str(self.programs.kernel), rootfs=str(self.programs.guest(kind)), memory_mb=MEMORY_MB
        )
        plain = harness.spec(self.paths, agent, [], runtime=RuntimeKind.FIRECRACKER, firecracker=machine)
        return msgspec.structs.replace(plain, **more)

    async def start(self, agent: str, kind: str, **more: object) -> RunningMachine:
        """Prepared, its socket bound, started."""
        spec = self.spec(agent, kind, **more)
        await self.runtime.prepare(agent, spec)
        self.bind(agent, spec)
        running = await self.runtime.start(agent, spec, mark=MARK)
        assert isinstance(running, RunningMachine)
        return self.hold(running)

    def bind(self, agent: str, spec: SandboxSpec) -> socket.socket:
        """The agent's socket, as the helper makes it; nobody accepts on it yet."""
        place = self.runtime.place(agent, spec)
        assert place.jail is not None
        owner = None if spec.uid is None else (spec.uid, spec.uid)
        sock = bind_in(place.jail, place.path, owner=owner)
        self._socks.append(sock)
        return sock

    def hold(self, running: RunningAgent | None) -> RunningMachine:
        """It ends with the bench."""
        assert isinstance(running, RunningMachine)
        self._held.append(running)
        return running

    async def close(self) -> None:
        for running in self._held:
            if running.ended_fd >= 0:
                await running.kill()
                await running.reap()
                running.close()
        for sock in self._socks:
            sock.close()
        subtree = Subtree.find(self.paths.state)
        Fences(self.paths.state, subtree).remove()
        if subtree is not None:
            for leaf in subtree.leaves():
                await leaf.let_go()
            subtree.remove()

    def console(self, agent: str) -> str:
        try:
            return self.paths.log(agent).read_text(errors="replace")
        except FileNotFoundError:
            return ""

    def top(self, agent: str) -> Path:
        """The directory of a machine."""
        return self.jails / "firecracker" / agent if self.jailed else self.paths.state / "vm" / agent

    def cannot(self, what: str) -> str:
        return {
            "mark": "the jailer clears the environment" if self.jailed else "",
            "find": "it is found by its jail, whatever its mark" if self.jailed else "",
            "log": "on the console the VMM and the guest's kernel speak too",
            "exit_code": "what a guest's program ended with does not leave the guest",
        }.get(what, "")

    async def printed(self, spec: SandboxSpec) -> str:
        return printed(spec)


@contextlib.asynccontextmanager
async def open_bench(paths: Paths) -> AsyncIterator[FirecrackerBench]:
    make_directories(paths)
    bench = FirecrackerBench(paths)
    yield bench
    await bench.close()


@contextlib.asynccontextmanager
async def open_direct(paths: Paths) -> AsyncIterator[FirecrackerBench]:
    """Without a jailer: how it runs for a user, and as root where none is set."""
    make_directories(paths)
    bench = FirecrackerBench(paths, jailed=False)
    yield bench
    await bench.close()
