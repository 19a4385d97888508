"""The box of a density run: a memory cgroup that stands for a machine, with all of Hive and all agents inside.

v2, or v1's memory hierarchy on a hybrid host. What zram takes is not charged by the kernel to the group that was paged
out, so it is taken off the limit again and again (`fit`). A Hive inside sees the box as the root of its control groups
(`inside`), so that no group it makes lies beside the box.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from hive.errors import HiveError, NotSupported
from hive.host.cgroup import find_mount, mount_of_v1
from hive.host.limits import oom_kills
from hive.host.memory import read_zram
from hive.host.memory_box import V1, V2, given_back
from hive.host.process import identify, write_control
from hive.host.rollup import read_rollups

MIB = 1024 * 1024
RESERVE_BYTES = 4 * MIB
"""The limit is set anew ten times a second; between two of them zram may grow by about as much."""
OVERRUN_SHARE = 0.02
"""A kernel that cannot reclaim so fast keeps the old limit: the box then holds more than it has."""
ENDS_WITHIN_S = 20.0
NAME = "hive-bench-"
INSIDE = """
set -e
mount --bind {box} {mount}
if [ {leaf} ]; then mkdir -p {mount}/hive; echo $$ > {mount}/hive/cgroup.procs; fi
exec "$@"
"""
"""Runs by `unshare`: the box takes the place of the root of its hierarchy. In v2 a group with groups below it holds no
processes, so Hive moves into one of its own."""


class MemoryBox:
    """A memory cgroup of `size_bytes`. `device`: the zram swap whose memory belongs to the box too, empty for none."""

    def __init__(self, path: Path, size_bytes: int, *, is_v1: bool, device: str = "") -> None:
        self.path = path
        self.size_bytes = size_bytes
        self.is_v1 = is_v1
        self._device = device
        self._limit_name, self._used_name, self._stat_prefix = V1 if is_v1 else V2
        self._most_over = 0

    def __repr__(self) -> str:
        return f"<MemoryBox {self.path.name} {self.used_bytes() // MIB} + {self.zram_bytes() // MIB} MiB>"

    @classmethod
    def make(cls, label: str, size_bytes: int, *, device: str = "", swaps: bool = True) -> MemoryBox:
        """An empty box. `swaps` false: nothing of it is ever swapped, whatever swap the host has.

        Raises NotSupported where no memory cgroup may be written here.
        """
        path, is_v1 = place(label, Path("/proc/self/mounts").read_text())
        try:
            path.mkdir(exist_ok=True)
            box = cls(path, size_bytes, is_v1=is_v1, device=device)
            if not swaps:
                box._never_swap()
            box.fit()
        except OSError as error:
            raise NotSupported(
                f"no memory cgroup can be made here: {error.strerror}",
                hint="run it on the machine itself: most containers may not make one",
            ) from error
        return box

    def _never_swap(self) -> None:
        """v1 never swaps a group with swappiness 0; v2 has a limit of swap."""
        name, value = ("memory.swappiness", b"0") if self.is_v1 else ("memory.swap.max", b"0")
        write_control(self.path / name, value)

    @property
    def plain(self) -> Path:
        """The directory that plain processes enter; in v2 only groups without children hold processes."""
        if self.is_v1:
            return self.path
        leaf = self.path / "plain"
        leaf.mkdir(exist_ok=True)
        return leaf

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command line of a program that sees this box as the root of memory cgroups; it must be started in it."""
        script = INSIDE.format(box=self.path, mount=self.path.parent, leaf="" if self.is_v1 else "yes")
        return ["unshare", "--mount", "--cgroup", "sh", "-c", script, "sh", *command]

    def fit(self) -> None:
        """Sets the limit to what zram has not taken; a kernel that cannot reclaim so fast keeps the old limit."""
        left = max(self.size_bytes - self.zram_bytes() - RESERVE_BYTES, MIB)
        with contextlib.suppress(OSError):
            write_control(self.path / self._limit_name, str(left).encode())
        self._most_over = max(self._most_over, self.charged_bytes() + self.zram_bytes() - self.size_bytes)

    def was_overrun(self) -> bool:
        """Whether it held more than it has since the last call of this."""
        over, self._most_over = self._most_over, 0
        return over > self.size_bytes * OVERRUN_SHARE

    def empty(self) -> None:
        """Swaps out what the kernel takes, once: what an agent costs that nobody asks. Takes seconds."""
        with contextlib.suppress(OSError):
            if self.is_v1:
                write_control(self.path / "memory.force_empty", b"1")
            else:
                write_control(self.path / "memory.reclaim", str(self.charged_bytes()).encode())

    def charged_bytes(self) -> int:
        """All that the kernel counts of it, pages of files too."""
        with contextlib.suppress(OSError, ValueError):
            return int((self.path / self._used_name).read_text())
        return 0

    def used_bytes(self) -> int:
        """The same without the pages of files, which the kernel takes back."""
        with contextlib.suppress(OSError):
            stat = (self.path / "memory.stat").read_text()
            return max(0, self.charged_bytes() - given_back(stat, self._stat_prefix))
        return 0

    def zram_bytes(self) -> int:
        """RAM that the zram device takes."""
        found = read_zram(self._device) if self._device else None
        return 0 if found is None else found.memory_bytes

    def held_by(self, pids: Iterable[int]) -> int:
        """RAM that these processes hold: their share of each page, and of the zram device what their swap takes in it.

        What others in the box give back, or take, changes nothing of it. Page tables are not in it, and in zram all
        counts as compressed alike.
        """
        found = read_zram(self._device) if self._device else None
        squeezed = found.memory_bytes / found.original_bytes if found is not None and found.original_bytes else 0.0
        rollups = read_rollups(pids, wanted=()) or []
        shares = (
            (each.get("Pss_Anon", 0) + each.get("Pss_Shmem", 0), min(1.0, squeezed) * each.get("SwapPss", 0))
            for each in rollups
        )
        return round(sum(map(sum, shares)))

    def killed(self) -> int:
        """Number of processes the kernel killed in it because it was full. v2 counts groups below it by itself."""
        groups = [Path(found) for found, _, _ in os.walk(self.path)] if self.is_v1 else [self.path]
        return sum(oom_kills(group) for group in groups)

    def pids(self) -> list[int]:
        """All processes in it and in groups below it."""
        return pids_under(self.path)

    def remove(self) -> None:
        """Kills what is in it and removes it. Raises HiveError where something does not end."""
        end_group(self.path)


def place(label: str, mounts: str) -> tuple[Path, bool]:
    """Path of the box and whether it is one of v1, by the text of /proc/self/mounts. Raises NotSupported.

    >>> place("x", "cgroup /m cgroup rw,memory 0 0\\ncgroup2 /u cgroup2 rw 0 0\\n")
    (PosixPath('/m/hive-bench-x'), True)
    >>> place("x", "cgroup2 /cg cgroup2 rw 0 0\\n")
    (PosixPath('/cg/hive-bench-x'), False)
    """
    v1, v2 = mount_of_v1("memory", mounts), find_mount(mounts)
    if v1 is not None:
        return v1 / f"{NAME}{label}", True
    if v2 is None:
        raise NotSupported("there are no memory cgroups on this host", hint="mount cgroup2 at /sys/fs/cgroup")
    return v2 / f"{NAME}{label}", False


def enable_memory(mount: Path) -> None:
    """Asks for the memory controller in the groups of this v2 mount; it is on already where systemd runs."""
    with contextlib.suppress(OSError):
        write_control(mount / "cgroup.subtree_control", b"+memory")


def pids_under(group: Path) -> list[int]:
    found: list[int] = []
    for directory, _, _ in os.walk(group):
        with contextlib.suppress(OSError):
            found += map(int, Path(directory, "cgroup.procs").read_text().split())
    return found


def end_group(group: Path) -> None:
    """Kills every process in this group, frozen or not, and removes it with all below. Raises HiveError."""
    until = time.monotonic() + ENDS_WITHIN_S
    while (pids := pids_under(group)) and time.monotonic() < until:
        for pid in pids:
            who = identify(pid)
            # Between two looks a pid may have become another process: only who is in the group still is meant.
            if who is not None and pid in pids_under(group):
                who.send(signal.SIGKILL)
        time.sleep(0.02)
    while group.exists():
        for directory, _, _ in os.walk(group, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        if not group.exists():
            return
        if time.monotonic() > until:
            raise HiveError(f"{group} cannot be removed: processes {pids_under(group)} do not end")
        time.sleep(0.02)
