"""The memory of the box that Hive's processes share: the host's, or less where a control group above them limits it.

A container has such a limit at the root it sees, a test or a session in a group of its own. The groups of Hive's own
services are none: a limit of the daemon's unit is not one of the models' servers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from hive.host.cgroup import find_mount, mount_of_v1, own_cgroup
from hive.host.memory import parse_meminfo

UNLIMITED = 1 << 60
"""A limit of v1 that is none: 2^63 less a page."""
OWN_UNITS = ("hive-", "hive.")
V1, V2 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"), ("memory.max", "memory.current", "")
"""Files of a group with its limit and its use, and what the names in its memory.stat begin with."""


class BoxMemory(NamedTuple):
    """Bytes; None is unknown. `available_bytes`: what new work may take, as the kernel counts it."""

    total_bytes: int | None
    available_bytes: int | None


def read_box(proc: Path = Path("/proc")) -> BoxMemory:
    """The memory of the box, now. It reads a handful of the kernel's files: some 100 µs."""
    seen = parse_meminfo(_read(proc / "meminfo"))
    total, available = seen.total_bytes, seen.available_bytes
    for group, names in groups_above(_read(proc / "self/mounts"), _read(proc / "self/cgroup")):
        limit = group_limit(_read(group / names[0]))
        if limit is None:
            continue
        total = limit if total is None else min(total, limit)
        used = _read(group / names[1]).strip()
        if used.isdigit() and available is not None:
            left = limit - int(used) + given_back(_read(group / "memory.stat"), names[2])
            available = max(0, min(available, left))
    return BoxMemory(total, available)


def groups_above(mounts: str, cgroups: str) -> Iterator[tuple[Path, tuple[str, str, str]]]:
    """Every group of memory this process is in, from its own up to the root it sees, without those of Hive's own units.

    `mounts`, `cgroups`: the texts of /proc/self/mounts and /proc/self/cgroup. A container may name a path that it
    cannot see: then there are no files there, and the root's count.

    >>> [str(group) for group, _ in groups_above("cgroup2 /cg cgroup2 rw 0 0", "0::/a.slice/hive-daemon.service")]
    ['/cg/a.slice', '/cg']
    >>> [str(group) for group, _ in groups_above("cgroup /m cgroup rw,memory 0 0", "4:memory:/x/y")]
    ['/m/x/y', '/m/x', '/m']
    """
    v1, v2 = mount_of_v1("memory", mounts), find_mount(mounts)
    own = next((line.split(":", 2)[2] for line in cgroups.splitlines() if ":memory:" in line), "/")
    for mount, path, names in ((v1, own, V1), (v2, own_cgroup(cgroups), V2)):
        if mount is None:
            continue
        parts = [part for part in path.split("/") if part and part != ".."]
        if parts and parts[-1].startswith(OWN_UNITS) and parts[-1].endswith(".service"):
            parts.pop()
        for depth in range(len(parts), -1, -1):
            yield mount.joinpath(*parts[:depth]), names


def group_limit(text: str) -> int | None:
    """The bytes of memory.max or memory.limit_in_bytes; None for no limit.

    >>> group_limit("1048576\\n"), group_limit("max\\n"), group_limit("9223372036854771712\\n"), group_limit("")
    (1048576, None, None, None)
    """
    told = text.strip()
    return int(told) if told.isdigit() and int(told) < UNLIMITED else None


def given_back(stat: str, begin: str) -> int:
    """Bytes of memory.stat that the kernel takes back from a group that wants more: the pages of files.

    >>> given_back("anon 9\\ninactive_file 2\\nactive_file 3\\n", ""), given_back("inactive_file 1\\n", "total_")
    (5, 0)
    """
    wanted = (f"{begin}inactive_file", f"{begin}active_file")
    pairs = (line.split() for line in stat.splitlines())
    return sum(int(pair[1]) for pair in pairs if len(pair) == 2 and pair[0] in wanted and pair[1].isdigit())


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="surrogateescape")
    except OSError:
        return ""
