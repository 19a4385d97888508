"""Memory: somewhere for sleepers to go, and none of it shared between tenants."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, wrong
from hive.doctor.checks.target import Subject
from hive.errors import NotPermitted, NotSupported, WrongState
from hive.host import zram
from hive.host.memory import MemInfo, Swap, ZramDevice, read_memory, read_swaps, read_zrams
from hive.host.process import write_control

GIB = 1024**3
ENOUGH = 0.5
"""Of what zram.plan would have: less, and only a few agents can sleep deep."""
FULL = 0.1
"""Less than this share of swap free is full: the next page-out fails."""
KSM = Path("/sys/kernel/mm/ksm")
HOSTS_OWN = "in this container nobody can end that, its host can"
UNMERGE = b"2"
"""Stops it and takes apart what it has merged (admin-guide/mm/ksm.rst); 0 would leave that."""


# --- swap --------------------------------------------------------------------------------------------------------


def look_at_swap(subject: Subject) -> CheckVerdict:  # noqa: ARG001 - the same for all
    return judge_swap(read_memory(), read_swaps(), read_zrams(), why_not=zram.why_not())


def judge_swap(
    memory: MemInfo, swaps: Sequence[Swap] | None, zrams: Sequence[ZramDevice], *, why_not: str = ""
) -> CheckVerdict:
    """`why_not`: why none can be set up on this host (hive.host.zram.why_not); then it is said, and not offered.

    >>> judge_swap(MemInfo(GIB, GIB, 0, 0), [], []).reason
    'none: agents sleep light only, and keep all of their RAM'
    >>> judge_swap(MemInfo(GIB, GIB, 0, 0), [], [], why_not="no zram here")[1:3]
    ('none: agents sleep light only, and keep all of their RAM; no zram here', '')
    """
    if swaps is None or memory.total_bytes is None:
        return skipped("the kernel does not say (a container?)")
    if not swaps:
        return wrong("swap_missing", why_not=why_not)
    wanted = memory.total_bytes * zram.SHARE
    total = sum(swap.size_bytes for swap in swaps)
    free = total - sum(swap.used_bytes for swap in swaps)
    said = [_said(swap, zrams) for swap in swaps]
    if total < wanted * ENOUGH:
        return wrong("swap_small", swaps=said, wanted_bytes=wanted, why_not=why_not)
    if free < total * FULL:
        return wrong("swap_full", swaps=said, why_not=why_not)
    return passed("; ".join(said))


def _said(swap: Swap, zrams: Sequence[ZramDevice]) -> str:
    """One swap in words; of a disk, that it keeps what was in memory."""
    used = f"{swap.used_bytes / swap.size_bytes:.0%} used" if swap.size_bytes else "empty"
    if not swap.is_zram:
        return f"{swap.path} {_gib(swap.size_bytes)}, {used}, on a disk that keeps what agents had in memory"
    algorithm = next((device.algorithm for device in zrams if device.device == swap.path), "?")
    return f"{Path(swap.path).name} {_gib(swap.size_bytes)} ({algorithm}), {used}"


def _gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"


def add_zram(subject: Subject) -> str:
    """Raises NotPermitted, NotSupported, WrongState, HiveError."""
    if not subject.is_root:
        raise NotPermitted("only root turns swap on")
    if why_not := zram.why_not():
        raise NotSupported(why_not)
    wanted = zram.plan(read_memory(), read_swaps())
    if wanted is None:
        raise WrongState("there is swap enough: it is full because agents are in it")
    device = zram.set_up(wanted.size_bytes)
    before = zram.read_single_pages()
    alone = "" if before is None else f"; vm.page-cluster is 0 for it, as long ({before} before)"
    return f"{device} of {_gib(wanted.size_bytes)} is swap now, until the next boot{alone}"


# --- merged pages ------------------------------------------------------------------------------------------------


def look_at_ksm(subject: Subject) -> CheckVerdict:
    run = (KSM / "run").read_text().strip() if KSM.exists() else ""
    sharing = (KSM / "pages_sharing").read_text().strip() if run else "0"
    why_not = HOSTS_OWN if run and os.statvfs(KSM).f_flag & os.ST_RDONLY else ""
    return judge_ksm(run, int(sharing), is_appliance=subject.is_appliance, why_not=why_not)


def judge_ksm(run: str, sharing: int, *, is_appliance: bool, why_not: str = "") -> CheckVerdict:
    """`run`: 0 off, 1 on, 2 off and taken apart; empty for a kernel without it. `sharing`: pages merged into another.
    `why_not`: why it cannot be turned off here.

    >>> judge_ksm("0", 0, is_appliance=True).reason
    'off'
    """
    if not run:
        return passed("this kernel has none")
    if run == "1":
        return wrong("ksm_on", up=not is_appliance, why_not=why_not)
    if run == "0" and sharing:
        return wrong("ksm_merged", pages=sharing, why_not=why_not)
    return passed("off")


def end_ksm(subject: Subject) -> str:
    """Raises NotPermitted."""
    if not subject.is_root:
        raise NotPermitted("only root turns it off")
    write_control(KSM / "run", UNMERGE)
    return "KSM is off, and what it had merged is apart again, until the next boot"


CHECKS = (
    Check("memory.swap", "Swap, best as zram, for agents that sleep deep.", look_at_swap, add_zram),
    Check("memory.ksm", "The kernel does not merge equal pages of agents.", look_at_ksm, end_ksm),
)
