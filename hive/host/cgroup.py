"""Control groups v2: a subtree of Hive's own, one leaf per agent, freezer and CPU accounting.

Everything here may be missing (a container with a read-only cgroup mount, a user without delegation):
`Subtree.find` then answers None and agents are stopped by signals instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from hive.errors import HiveError, WrongState
from hive.host.memory import held_by
from hive.host.process import ProcessStat, ProcessTable, identify, read_stat, spawn, write_control

LET_GO_S = 0.5
"""A group was seen to outlive the last of its processes by some milliseconds (Linux 6.18)."""


def find_mount(mounts: str) -> Path | None:
    """The mount point of cgroup v2, by the text of /proc/self/mounts.

    >>> find_mount("cgroup /sys/fs/cgroup/cpu cgroup rw 0 0\\ncgroup2 /sys/fs/cgroup/unified cgroup2 rw 0 0\\n")
    PosixPath('/sys/fs/cgroup/unified')
    >>> find_mount("tmpfs /tmp tmpfs rw 0 0\\n") is None
    True
    """
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) >= 3 and fields[2] == "cgroup2":
            return Path(fields[1])
    return None


def mount_of_v1(controller: str, mounts: str) -> Path | None:
    """The mount point of the v1 hierarchy of `controller`, by the text of /proc/self/mounts.

    >>> mount_of_v1("cpuacct", "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu,cpuacct 0 0\\n")
    PosixPath('/sys/fs/cgroup/cpu')
    """
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) >= 4 and fields[2] == "cgroup" and controller in fields[3].split(","):
            return Path(fields[1])
    return None


def choose_parents(mount: Path, own: str) -> list[Path]:
    """Possible parents of Hive's subtree, best first: never the own cgroup, as its end would be the agents' end too.

    `own`: the path in the `0::` line of /proc/self/cgroup.

    >>> [str(p) for p in choose_parents(Path("/cg"), "/user.slice/user@7.service/app.scope")]
    ['/cg', '/cg/user.slice', '/cg/user.slice/user@7.service']
    >>> [str(p) for p in choose_parents(Path("/cg"), "/")]
    ['/cg']
    """
    above = [part for part in own.split("/") if part][:-1]
    return [mount.joinpath(*above[:depth]) for depth in range(len(above) + 1)]


def own_cgroup(content: str) -> str:
    """The v2 path in the text of /proc/self/cgroup, `/` where there is none.

    >>> own_cgroup("4:memory:/x\\n0::/a/b\\n")
    '/a/b'
    """
    return next((line[3:] for line in content.splitlines() if line.startswith("0::")), "/")


def state_label(state: Path) -> str:
    """Tells what belongs to the Hive of this state directory from what belongs to others on the same host."""
    return hashlib.sha256(os.fsencode(state.resolve())).hexdigest()[:12]


def subtree_name(state: Path) -> str:
    """The name of the control groups of this state directory's Hive, in every hierarchy."""
    return f"hive-up-{state_label(state)}"


class Subtree:
    """`hive-up-<hash of the state directory>`: the directory all leaves of one Hive are in."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<Subtree {self.path}>"

    @classmethod
    def find(cls, state: Path) -> Subtree | None:
        """The subtree of this state directory, made where missing; None where nothing can be made or entered."""
        mount = find_mount(Path("/proc/self/mounts").read_text())
        if mount is None:
            return None
        name = subtree_name(state)
        for parent in choose_parents(mount, own_cgroup(Path("/proc/self/cgroup").read_text())):
            subtree = cls(parent / name)
            try:
                subtree.path.mkdir(exist_ok=True)
            except OSError:
                continue
            if subtree._can_be_entered():
                return subtree
            subtree.remove()
        return None

    def _can_be_entered(self) -> bool:
        """Tried with a real process: a user may own a directory and still not be allowed to move into it."""
        leaf = Leaf(self.path / f"probe-{os.getpid()}")
        try:
            leaf.make()
            spawn(["true"], env={"PATH": os.defpath}, cgroup_dir=leaf.path).wait()
            return (leaf.path / "cgroup.freeze").exists()
        except (OSError, HiveError):
            return False
        finally:
            leaf.remove()

    def leaf(self, agent: str) -> Leaf:
        return Leaf(self.path / agent)

    def leaves(self) -> list[Leaf]:
        """The leaves that exist now."""
        try:
            return [Leaf(entry) for entry in self.path.iterdir() if entry.is_dir()]
        except OSError:
            return []

    def remove(self) -> None:
        """Removes the directory if no leaf is left in it."""
        with contextlib.suppress(OSError):
            self.path.rmdir()


class Leaf:
    """The cgroup of one agent: every process it starts stays in here, through any number of forks and re-parentings.

    (A process of the same uid as the owner of the subtree could move itself out; agents with a uid of their own
    cannot.)
    """

    how = "cgroup"

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"<Leaf {self.path.name} {len(self.pids())} processes{' frozen' if self.is_frozen() else ''}>"

    def make(self) -> None:
        """A new, empty, thawed leaf with counters at zero. Raises WrongState where processes are in the old one."""
        self.remove()
        try:
            self.path.mkdir()
        except FileExistsError:
            raise WrongState(f"processes are left in {self.path.name}: {self.pids()}") from None

    async def let_go(self) -> None:
        """Removes it, and waits a moment where the kernel still holds it for processes that are dead already."""
        until = time.monotonic() + LET_GO_S
        self.remove()
        while self.path.exists() and not self.pids() and time.monotonic() < until:
            await asyncio.sleep(0.005)
            self.remove()

    def pids(self) -> list[int]:
        """Living processes in it and in groups below it."""
        return [stat.pid for stat in self._stats()]

    def _stats(self) -> list[ProcessStat]:
        return [stat for directory in self._directories() for stat in self._stats_in(directory)]

    def _directories(self) -> Iterator[str]:
        """The directories of groups below it first; hardly any has one, and its links tell so for less than a walk."""
        try:
            is_alone = os.stat(self.path).st_nlink == 2
        except OSError:
            return iter(())
        return iter((str(self.path),)) if is_alone else (found for found, _, _ in os.walk(self.path, topdown=False))

    @staticmethod
    def _stats_in(directory: str) -> list[ProcessStat]:
        try:
            with open(f"{directory}/cgroup.procs", "rb") as file:
                pids = [int(line) for line in file.read().split()]
        except OSError:
            return []
        return [stat for pid in pids if (stat := read_stat(pid)) is not None and stat.alive]

    def freeze(self) -> None:
        """Asks the kernel to freeze all of it; `is_frozen` says when that is so."""
        self._write("cgroup.freeze", "1")

    def thaw(self) -> None:
        self._write("cgroup.freeze", "0")

    def is_frozen(self) -> bool:
        return "frozen 1" in self._read("cgroup.events")

    def is_thawed(self) -> bool:
        return not self.is_frozen()

    def signal(self, signum: int) -> None:
        """Sends `signum` to every process in it, and to no other.

        The pidfds come first, then the members are read again: a pid still listed is the process its pidfd holds.
        """
        opened = [(pid, fd) for pid in self.pids() if (who := identify(pid)) and (fd := who.open()) is not None]
        still_in = set(self.pids())
        for pid, fd in opened:
            if pid in still_in:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    signal.pidfd_send_signal(fd, signum)
            os.close(fd)

    def kill(self) -> None:
        """SIGKILL to all of it, frozen or not. Without `cgroup.kill` (before Linux 5.14) one may fork away: repeat."""
        try:
            self._write("cgroup.kill", "1")
        except OSError:
            self.signal(signal.SIGKILL)

    def usage(self, snapshot: ProcessTable) -> tuple[int, int, int, int]:  # noqa: ARG002 - other groups need the walk
        """(CPU time in µs of everything that ever ran in it, RSS in bytes, living processes, bytes in swap)."""
        cpu_us = self.cpu_us()
        stats = self._stats()
        swap_bytes = held_by(stat.pid for stat in stats).swap_bytes
        return cpu_us, sum(stat.rss_bytes for stat in stats), len(stats), swap_bytes

    def cpu_us(self) -> int:
        """CPU time in µs of everything that ever ran in it."""
        return next((int(line.split()[1]) for line in self._read("cpu.stat").splitlines() if line), 0)

    def looks_frozen(self, snapshot: ProcessTable) -> bool:  # noqa: ARG002 - as above
        return self.is_frozen()

    def was_asked_to_freeze(self) -> bool:
        """Whether it is frozen, or a freeze has begun."""
        return self._read("cgroup.freeze").strip() == "1"

    def remove(self) -> None:
        """Removes it, and groups below it, if no process is in; else it stays."""
        for directory in self._directories():
            with contextlib.suppress(OSError):
                os.rmdir(directory)

    def _read(self, name: str) -> str:
        """The content of one control file, empty where the leaf is gone."""
        try:
            with open(f"{self.path}/{name}", encoding="ascii") as file:
                return file.read()
        except OSError:
            return ""

    def _write(self, name: str, value: str) -> None:
        """A leaf that is gone needs no writing. Raises OSError."""
        try:
            write_control(self.path / name, value.encode())
        except OSError:
            if self.path.exists():
                raise
