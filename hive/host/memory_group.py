"""Memory of a control group, or of processes without one: what only they hold, files that the kernel may drop left out.

A group counts each page once, however many processes of it have it; without a group the kernel divides a page among
those that have it (PSS). Where neither can be read it is None, never 0.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from hive.host.cgroup import mount_of_v1
from hive.host.rollup import read_rollups

_V1 = ("total_rss", "total_shmem")
_V2 = ("anon", "shmem")
_PSS = ("Pss_Anon", "Pss_Shmem")


def parse_group(text: str) -> int | None:
    """Anonymous and shared memory in bytes by the text of `memory.stat`, of v1 or v2; None where it does not say.

    >>> parse_group("anon 4096\\nfile 9000\\nshmem 100\\n"), parse_group("rss 1\\ntotal_rss 7\\ntotal_shmem 2\\n")
    (4196, 9)
    >>> parse_group("") is None
    True
    """
    found = dict(line.split(" ", 1) for line in text.splitlines() if " " in line)
    for names in (_V1, _V2):
        if all(found.get(name, "").isdigit() for name in names):
            return sum(int(found[name]) for name in names)
    return None


def held_by_group(group: Path) -> int | None:
    """Anonymous and shared memory in bytes of all in this group (its directory, in v1's memory hierarchy or in v2)."""
    try:
        return parse_group((group / "memory.stat").read_text())
    except OSError:
        return None


def held_by_processes(pids: Iterable[int]) -> int | None:
    """Anonymous and shared memory in bytes of these processes; None where one of them may not be looked at.

    A process that is gone holds none. The kernel walks all of each one's memory: 10 ms for some gigabytes.
    """
    found = read_rollups(pids, wanted=_PSS)
    return None if found is None else sum(sizes[name] for sizes in found for name in _PSS)


def own_v1_group(controller: str, cgroups: str, mounts: str) -> Path | None:
    """The directory of this process in the v1 hierarchy of `controller`, by the texts of /proc/self/cgroup and mounts.

    >>> own_v1_group("memory", "4:memory:/a\\n0::/\\n", "cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\\n")
    PosixPath('/sys/fs/cgroup/memory/a')
    >>> own_v1_group("memory", "0::/\\n", "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\\n") is None
    True
    """
    mount = mount_of_v1(controller, mounts)
    if mount is None:
        return None
    for line in cgroups.splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            return mount / path.lstrip("/")
    return None


def make_below_own(name: str) -> Path | None:
    """A group of its own in v1's memory hierarchy, below this process's: what bounds this process bounds it too.

    None where there is no such hierarchy (v2 has it in the one that there is), or none may be made.
    """
    own = own_v1_group("memory", Path("/proc/self/cgroup").read_text(), Path("/proc/self/mounts").read_text())
    if own is None:
        return None
    with contextlib.suppress(OSError):
        (own / name).mkdir(exist_ok=True)
        return own / name
    return None
