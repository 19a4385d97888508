"""RAM that a control group is charged with, and PSS where there is no such group: each page once, whoever shares it.

The kernel charges a page to the group that touched it first, so the pages an agent shares with an older one are the
older one's. PSS divides them. A sum of RSS counts them in each process and is nobody's truth.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from hive.host.rollup import read_rollups

_OF_V2 = ("memory.current", "inactive_file", "swapcached")
_OF_V1 = ("memory.usage_in_bytes", "total_inactive_file", "total_swapcached")


class Charge(NamedTuple):
    """`held_bytes`: RAM charged, files that nobody uses left out. `swap_cached_bytes`: the part of that with a copy in
    swap: the kernel takes it as soon as somebody needs room, and not before."""

    held_bytes: int
    swap_cached_bytes: int


def parse_charge(used: str, stat: str, *, version: int) -> Charge | None:
    """The charge by the texts of `memory.current` and `memory.stat` (v2), or of v1's; None where they do not say.

    What lies in the swap cache is in the kernel's sum already (seen on Linux 6.18, v1 and v2: 65 MiB before a page-out
    to a swap file and after it), so nothing is added.

    >>> parse_charge("9000\\n", "anon 5000\\ninactive_file 1000\\nswapcached 2000\\n", version=2)
    Charge(held_bytes=8000, swap_cached_bytes=2000)
    >>> parse_charge("9000\\n", "inactive_file 1\\ntotal_inactive_file 4000\\n", version=1)
    Charge(held_bytes=5000, swap_cached_bytes=0)
    >>> parse_charge("", "", version=2) is None
    True
    """
    _, unused, cached = _OF_V2 if version == 2 else _OF_V1
    if not used.strip().isdigit():
        return None
    found = dict(line.split(" ", 1) for line in stat.splitlines() if line.startswith((f"{unused} ", f"{cached} ")))
    return Charge(max(0, int(used) - int(found.get(unused, 0))), int(found.get(cached, 0)))


def read_charge(group: Path) -> Charge | None:
    """The charge of all in this group: its directory in v2, or in v1's memory hierarchy; None without a controller.

    Some 40 µs.
    """
    for version, (name, *_) in ((2, _OF_V2), (1, _OF_V1)):
        if used := _text(group / name):
            return parse_charge(used, _text(group / "memory.stat"), version=version)
    return None


class Pss(NamedTuple):
    """Memory of processes, pages they share divided among those that have them."""

    held_bytes: int
    swap_bytes: int


def read_pss(pids: Iterable[int]) -> Pss | None:
    """PSS of these processes together; None where one of them may not be looked at, or none is left.

    The kernel walks all of their memory: some milliseconds for 100 MiB. Off the loop.
    """
    found = read_rollups(pids, wanted=("Pss",))
    if not found:
        return None
    return Pss(sum(sizes["Pss"] for sizes in found), sum(sizes.get("SwapPss", 0) for sizes in found))


def _text(path: Path) -> str:
    """The content of one file of the kernel, empty where it, or its group, is gone."""
    try:
        with open(path, encoding="ascii") as file:
            return file.read()
    except OSError:
        return ""
