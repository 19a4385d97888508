"""Limits of an agent: memory, CPU and processes by control groups, v2 or the v1 hierarchies of a hybrid host.

(Open files are a matter of `spawn`.) What this host or this user cannot enforce is said in words, never passed over.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from pathlib import Path

from hive.domain import Limits
from hive.host.cgroup import Leaf, Subtree, find_mount, mount_of_v1, subtree_name
from hive.host.process import write_control

CONTROLLERS = {"memory_mb": "memory", "cpu": "cpu", "pids": "pids"}
"""Name of a limit → the controller that enforces it."""
CPU_PERIOD_US = 100_000
"""The kernel's default; the least quota it takes is 1,000 µs of it, hence 0.01 of a core."""
ALL = Limits(memory_mb=1, cpu=1, pids=1)

SWAP_KNOBS = ("memory.swap.max", "memory.memsw.limit_in_bytes")

Knobs = list[tuple[str, str]]


def knobs(limits: Limits, *, version: int) -> dict[str, Knobs]:
    """Controller → (file, value) to write, of the limits that are set, for control groups v1 or v2.

    As much swap as memory: all of a deep sleeper fits into it, and one that eats memory does not fill all agents'
    swap before it is killed (48 MiB allowed, 634 MiB written without that limit). v1 counts both together.

    >>> knobs(Limits(memory_mb=64, cpu=0.2), version=2)
    {'memory': [('memory.max', '67108864'), ('memory.swap.max', '67108864')], 'cpu': [('cpu.max', '20000 100000')]}
    >>> knobs(Limits(cpu=0.2, pids=32), version=1)
    {'cpu': [('cpu.cfs_period_us', '100000'), ('cpu.cfs_quota_us', '20000')], 'pids': [('pids.max', '32')]}
    """
    found: dict[str, Knobs] = {}
    if limits.memory_mb is not None:
        size = limits.memory_mb << 20
        if version == 2:
            found["memory"] = [("memory.max", str(size)), ("memory.swap.max", str(size))]
        else:
            found["memory"] = [("memory.limit_in_bytes", str(size)), ("memory.memsw.limit_in_bytes", str(2 * size))]
    if limits.cpu is not None:
        period, quota = str(CPU_PERIOD_US), str(round(limits.cpu * CPU_PERIOD_US))
        if version == 2:
            found["cpu"] = [("cpu.max", f"{quota} {period}")]
        else:
            found["cpu"] = [("cpu.cfs_period_us", period), ("cpu.cfs_quota_us", quota)]
    if limits.pids is not None:
        found["pids"] = [("pids.max", str(limits.pids))]
    return found


def in_words(lacking: Iterable[str]) -> str:
    """The limits that are not enforced, as a clause; empty where all are.

    >>> in_words(["memory_mb", "cpu"]), in_words([])
    ('memory_mb and cpu are not enforced: no control group of that kind may be written here', '')
    """
    names = list(lacking)
    if not names:
        return ""
    subject = " and ".join(filter(None, [", ".join(names[:-1]), names[-1]]))
    verb = "is" if len(names) == 1 else "are"
    return f"{subject} {verb} not enforced: no control group of that kind may be written here"


def oom_kills(memory_group: Path) -> int:
    """Number of processes the kernel killed in this group because it was full; 0 where the kernel does not say."""
    for name in ("memory.events", "memory.oom_control"):
        with contextlib.suppress(OSError):
            for line in (memory_group / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    return 0


class Fence:
    """The control groups that hold one agent within its limits.

    `dirs`: those its processes enter besides their leaf. `lacking`: what of its limits is not enforced, in words.
    """

    def __init__(self, *, dirs: Iterable[Path] = (), memory: Path | None = None, lacking: str = "") -> None:
        self.dirs = list(dirs)
        self.lacking = lacking
        self.memory = memory
        """The group that counts its memory and nobody else's; None where none does."""

    def __repr__(self) -> str:
        return f"<Fence {len(self.dirs)} groups{f', {self.lacking}' if self.lacking else ''}>"

    def oom_kills(self) -> int:
        """Number of its processes the kernel killed because they used more memory than they may."""
        return 0 if self.memory is None else oom_kills(self.memory)

    def memory_mb(self) -> int | None:
        """The memory it may use in MiB, by the kernel; None where nothing bounds it."""
        if self.memory is None:
            return None
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # v2 says `max` for no limit
                return int((self.memory / name).read_text()) >> 20
        return None

    def remove(self) -> None:
        """Removes the groups of its own, which must be empty by now; else they stay."""
        for directory in self.dirs:
            Leaf(directory).remove()


class Fences:
    """The place of each limit's enforcement on this host; groups are made only for an agent that has a limit."""

    def __init__(self, state: Path, subtree: Subtree | None) -> None:
        """`subtree`: of the agents' leaves, None where there is none; v1 groups then have its name all the same."""
        self._state = state
        self._subtree = subtree
        self._enabled: frozenset[str] | None = None

    def __repr__(self) -> str:
        return f"<Fences beside {self._subtree!r}>"

    def lacking(self, limits: Limits = ALL) -> str:
        """The parts of `limits` that cannot be enforced here, in words; of all limits there are by default."""
        wanted = knobs(limits, version=2)
        return in_words(
            name
            for name, controller in CONTROLLERS.items()
            if controller in wanted and controller not in self._enabled_v2() and self._v1_group(controller) is None
        )

    def make(self, agent: str, limits: Limits, leaf: Leaf | None) -> Fence:
        """Groups that enforce `limits`: v2 in `leaf` (made already), else of their own.

        Raises WrongState where processes of an earlier start are left in one, OSError; then none is left.
        """
        groups = self._v1_groups(agent, limits)
        # Two controllers of one hierarchy have one directory.
        fence = Fence(
            dirs=dict.fromkeys(groups.values()), memory=self._memory(groups, leaf), lacking=self.lacking(limits)
        )
        try:
            for group in fence.dirs:
                group.parent.mkdir(exist_ok=True)
                Leaf(group).make()
            for controller, written in knobs(limits, version=1).items():
                if (directory := groups.get(controller)) is not None:
                    _write(directory, written)
            for controller, written in knobs(limits, version=2).items():
                if leaf is not None and controller in self._enabled_v2():
                    _write(leaf.path, written)
        except BaseException:
            fence.remove()
            raise
        return fence

    def find(self, agent: str, limits: Limits, leaf: Leaf | None) -> Fence:
        """The groups that an earlier helper made for this agent, for any limits it had then."""
        groups = {controller: group for controller, group in self._v1_groups(agent, ALL).items() if group.is_dir()}
        return Fence(
            dirs=dict.fromkeys(groups.values()), memory=self._memory(groups, leaf), lacking=self.lacking(limits)
        )

    def _memory(self, groups: dict[str, Path], leaf: Leaf | None) -> Path | None:
        return leaf.path if leaf is not None and "memory" in self._enabled_v2() else groups.get("memory")

    def _v1_groups(self, agent: str, limits: Limits) -> dict[str, Path]:
        """Controller → the agent's directory, of the limits v1 has to enforce and can."""
        return {
            controller: group / agent
            for controller in knobs(limits, version=1)
            if controller not in self._enabled_v2() and (group := self._v1_group(controller)) is not None
        }

    def remove(self) -> None:
        """Removes what is left of Hive's name in the v1 hierarchies; a group that has processes stays."""
        for controller in set(CONTROLLERS.values()):
            if (group := self._v1_group(controller)) is not None:
                Leaf(group).remove()

    def _enabled_v2(self) -> frozenset[str]:
        """The controllers all leaves of the subtree have. Only leaves have processes there, as v2 demands."""
        if self._enabled is None:
            self._enabled = frozenset() if self._subtree is None else frozenset(_enable(self._subtree.path))
        return self._enabled

    def _v1_group(self, controller: str) -> Path | None:
        """Hive's directory in the hierarchy of this controller, where the subtree is in v2; None where it may not be.

        It may not exist yet.
        """
        mounts = Path("/proc/self/mounts").read_text()
        mount = mount_of_v1(controller, mounts)
        if mount is None:
            return None
        unified = find_mount(mounts)
        if self._subtree is None or unified is None:
            group = mount / subtree_name(self._state)
        else:
            group = mount / self._subtree.path.relative_to(unified)
        return group if os.access(group if group.exists() else group.parent, os.W_OK) else None


def enable(subtree: Subtree) -> list[str]:
    """Asks for the controllers of limits in all leaves of the subtree; those that are there."""
    return _enable(subtree.path)


def _enable(subtree: Path) -> list[str]:
    """Asks for the controllers in the subtree, where need be in the directory above first; those that are there."""
    for directory in (subtree.parent, subtree):
        for controller in CONTROLLERS.values():
            if controller not in _controllers(subtree / "cgroup.subtree_control"):
                with contextlib.suppress(OSError):
                    write_control(directory / "cgroup.subtree_control", f"+{controller}".encode())
    return _controllers(subtree / "cgroup.subtree_control")


def _controllers(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


def _write(group: Path, written: Knobs) -> None:
    """A kernel that does not account for swap has no files for it."""
    for name, value in written:
        if name not in SWAP_KNOBS or (group / name).exists():
            write_control(group / name, value.encode())
