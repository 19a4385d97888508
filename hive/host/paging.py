"""The means to page out memory of other processes on this host, as this user; where there is none, the reason."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from hive.errors import NotSupported
from hive.host.memory import Swap, advise_pageout, read_memory
from hive.host.process import write_control

NOT_PERMITTED = "deep sleep: not permitted here"
NO_SWAP = "deep sleep: this host has no swap"
NO_SWAP_HINT = "turn on swap: a swap file, or zram (compressed, in RAM)"
CAPABILITIES = {"CAP_SYS_PTRACE": 19, "CAP_SYS_NICE": 23}
"""Capabilities for paging out another user's process (process_madvise(2)), and their bits in `CapEff`."""


class Means(NamedTuple):
    """A way to page out. `how`: `reclaim` or `madvise`. `reclaim`: the cgroup's file, to get an amount and
    `arguments`."""

    how: str
    reclaim: Path | None = None
    arguments: str = ""


def why_not(leaf: Path | None) -> str:
    """The reason that nothing can be paged out here, as a sentence; empty where it can. Looks only, changes nothing.

    `leaf`: a cgroup as the agents' ones will be.
    """
    try:
        choose(leaf)
    except NotSupported as refused:
        return refused.message
    return ""


def choose(leaf: Path | None) -> Means:
    """The best of what is permitted: reclaim of anonymous memory only, advice range by range, reclaim of everything.

    The last takes the cgroup's share of mapped files along, so it is for users without any other right. Raises
    NotSupported.
    """
    if not read_memory().swap_total_bytes:
        raise NotSupported(NO_SWAP, hint=NO_SWAP_HINT)
    reclaim = None if leaf is None else leaf / "memory.reclaim"
    if reclaim is not None and _takes(reclaim, b"0 swappiness=max"):
        return Means("reclaim", reclaim, " swappiness=max")
    if not (why_no_advice := _why_no_advice()):
        return Means("madvise")
    if reclaim is not None and _takes(reclaim, b"0"):
        return Means("reclaim", reclaim)
    raise NotSupported(f"{NOT_PERMITTED} ({why_no_advice}, or a delegated cgroup with the memory controller)")


def is_on_a_disk(swaps: Sequence[Swap]) -> bool:
    """Whether what was paged out is rather on a disk (a file, a partition) than in zram, by what is used of each.

    >>> zram, file = Swap("/dev/zram0", "partition", 900, 5, 100), Swap("/swap", "file", 900, 7, -2)
    >>> is_on_a_disk([zram, file]), is_on_a_disk([zram]), is_on_a_disk([file]), is_on_a_disk([])
    (True, False, True, False)
    """
    on_disk = sum(swap.used_bytes for swap in swaps if not swap.is_zram)
    return on_disk > sum(swap.used_bytes for swap in swaps if swap.is_zram)


def _takes(reclaim: Path, nothing: bytes) -> bool:
    """Whether this kernel and this user may reclaim so; asked with an amount of 0, which reclaims nothing.

    `swappiness=max` (anonymous memory only) is known from Linux 6.16 on, EINVAL before.
    """
    try:
        write_control(reclaim, nothing)
    except OSError:
        return False
    return True


def _why_no_advice() -> str:
    """The rights missing for `process_madvise`, as a clause; empty where this process has them.

    The call itself is tried last: without CAP_SYS_NICE older kernels (seen: 6.1) refuse it on one's own memory too.
    """
    with open("/proc/self/status") as status, open("/proc/self/uid_map") as uid_map:
        missing = missing_capabilities(status.read(), uid_map.read())
    if missing:
        return f"it takes {' and '.join(missing)}"
    own = os.pidfd_open(os.getpid())
    try:
        advise_pageout(own, 0, 0)
    except OSError:
        return "it takes process_madvise(2), which this kernel lacks or forbids"
    finally:
        os.close(own)
    return ""


def missing_capabilities(status: str, uid_map: str) -> list[str]:
    """The `CAPABILITIES` that a process lacks, by its /proc/<pid>/status and uid_map.

    All of them in a user namespace: what root has there does not count for this.

    >>> missing_capabilities("CapEff:\\t0000000000800000\\n", "0 0 4294967295\\n")
    ['CAP_SYS_PTRACE']
    >>> missing_capabilities("CapEff:\\t000001ffffffffff\\n", "0 1000 1\\n")
    ['CAP_SYS_PTRACE', 'CAP_SYS_NICE']
    """
    effective = next((int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapEff:")), 0)
    if uid_map.split() != ["0", "0", "4294967295"]:
        effective = 0
    return [name for name, bit in CAPABILITIES.items() if not effective >> bit & 1]
