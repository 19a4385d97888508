"""Sleep of a slot's server: the levels that it is offered, and the verdicts on the memory it gave back and took again.
Pure.

A server that says that it sleeps may hold all its memory still (vllm #32714), and one that says that it woke may be
empty (vllm #21336): so only what is measured counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from hive.pool.accounts import charged_in
from hive.pool.footprints import SleepFootprint
from hive.pool.state import MIB, Grant, MemoryAccount, SleepLevel, SlotFacts

KEPT_BYTES = 2048 * MIB
"""Of a server in each account, until it was measured: its context and graphs (vLLM's users saw 1.1 to 5 GB)."""
KEPT_SHARE = 0.5
"""A level that leaves more than this share of what was held is no way to make room."""
WAKE_BEGIN_S = 1.0
COPY_BYTES_PER_S, READ_BYTES_PER_S = 8e9, 1.5e9
"""Of weights from the host's memory, and from a disk, until a wake was measured."""
RETAKEN_SHARE = 0.5
"""A woken server has at least this share of what it gave back, or it woke empty."""


def offered_level(
    known: SleepFootprint,
    *,
    version: str,
    keeps_weights: bool,
    charged: Sequence[Grant],
    weights_bytes: int,
    host_bytes: int,
    load_s: float,
) -> SleepLevel | None:
    """The level as the decider may use it; None where it was banned for this `version` of the server.

    `charged`: what the server has now; `host_bytes`: of the host, which a server that ends gives back and one that
    sleeps does not. A wake is never thought to be longer than a load.

    >>> grants = (Grant("gpu", 40_000 * MIB),)
    >>> told = {"charged": grants, "weights_bytes": 16_000 * MIB, "host_bytes": 4_000 * MIB, "load_s": 60.0}
    >>> level = offered_level(SleepFootprint("1"), version="0.32.0", keeps_weights=True, **told)
    >>> level.kept_bytes // MIB, level.host_bytes // MIB, round(level.wake_s, 1)
    (2048, 20000, 3.1)
    >>> level = offered_level(SleepFootprint("2"), version="0.32.0", keeps_weights=False, **told)
    >>> level.host_bytes // MIB, round(level.wake_s, 1)
    (4000, 12.2)
    >>> banned = SleepFootprint("1", why_banned="it freed nothing", banned_version="0.14.0")
    >>> offered_level(banned, version="0.14.0", keeps_weights=True, **told) is None
    True
    """
    if known.why_banned and known.banned_version == version:
        return None
    total = sum(grant.charged_bytes for grant in charged)
    kept = known.kept_bytes
    if kept is None:
        kept = min(KEPT_BYTES * len(charged), int(total * KEPT_SHARE))
    wake_s = known.wake_p95_s
    if wake_s is None:
        wake_s = WAKE_BEGIN_S + weights_bytes / (COPY_BYTES_PER_S if keeps_weights else READ_BYTES_PER_S)
        wake_s = min(wake_s, load_s)
    return SleepLevel(known.level, kept, host_bytes + (weights_bytes if keeps_weights else 0), wake_s)


def bytes_left(account: MemoryAccount, slots: Iterable[SlotFacts], own: SlotFacts, measured: int | None) -> int | None:
    """Bytes that a sleeping server has in an account: of its processes as `measured`, else what is used and neither
    charged to others nor foreign. None where nothing tells.

    >>> gpu, own = MemoryAccount("g", 1000, used_bytes=130), SlotFacts("a", "m", 400, grants=(Grant("g", 400),))
    >>> other = SlotFacts("b", "n", 100, grants=(Grant("g", 100),))
    >>> bytes_left(gpu, [own, other], own, 20), bytes_left(gpu, [own, other], own, None)
    (20, 30)
    >>> from msgspec.structs import replace
    >>> bytes_left(replace(gpu, used_bytes=None), [own], own, None) is None
    True
    """
    if measured is not None:
        return measured
    if account.used_bytes is None:
        return None
    others = charged_in(account.id, slots) - charged_in(account.id, [own])
    return max(0, account.used_bytes - others - account.foreign_bytes)


def has_given_back(left: int, held: int, level: SleepLevel, *, is_last_look: bool) -> bool:
    """Whether the memory of a sleeping server is back: less is left than `KEPT_SHARE` of what it held, and before the
    last look no more than the level was thought to keep.

    >>> level = SleepLevel("1", kept_bytes=10, host_bytes=0, wake_s=1.0)
    >>> [has_given_back(left, 100, level, is_last_look=False) for left in (10, 11)]
    [True, False]
    >>> has_given_back(10, 10, level, is_last_look=False)
    False
    >>> [has_given_back(left, 100, level, is_last_look=True) for left in (49, 50)]
    [True, False]
    """
    return left < held * KEPT_SHARE and (is_last_look or left <= level.kept_bytes)


def has_retaken(has: int, kept: int, held_before: int) -> bool:
    """Whether a woken server has its memory again.

    >>> has_retaken(60, 10, 100), has_retaken(20, 10, 100)
    (True, False)
    """
    return has - kept >= (held_before - kept) * RETAKEN_SHARE
