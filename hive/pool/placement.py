"""The choice of accounts for a load: one if it fits into one, else a proportional split. Pure.

GPUs are named by their UUIDs, never by their numbers. A grant is all or nothing: one decision for all its accounts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from hive.pool.state import CPU, Grant, MemoryAccount, SlotFacts

MOST_SPLIT = 8
"""Accounts of one box among which all ways to split are tried; beyond, only all of them together."""


def permitted_accounts(slot: SlotFacts, accounts: Sequence[MemoryAccount]) -> list[str]:
    """The accounts a slot may be placed in: those its entry names, else all GPUs, else the host's memory.

    >>> gpus, host = [MemoryAccount("x", 1), MemoryAccount("y", 1)], MemoryAccount("cpu", 1)
    >>> [permitted_accounts(SlotFacts("a", "m", 1), accounts) for accounts in (gpus, [host])]
    [['x', 'y'], ['cpu']]
    >>> permitted_accounts(SlotFacts("a", "m", 1, permitted=("cpu",)), [*gpus, host])
    ['cpu']
    """
    ids = [account.id for account in accounts]
    if slot.permitted:
        return [id for id in ids if id in slot.permitted]
    return [id for id in ids if id != CPU] or ids


def tightest(need_bytes: int, free: Mapping[str, int]) -> str | None:
    """The account that fits and has the least left over.

    >>> tightest(30, {"x": 80, "y": 40, "z": 20}), tightest(100, {"x": 80})
    ('y', None)
    """
    fitting = [(bytes, account) for account, bytes in free.items() if bytes >= need_bytes]
    return min(fitting)[1] if fitting else None


def groups(accounts: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """The groups of two and more accounts that a model may be split over, the small ones first.

    >>> list(groups(["x", "y", "z"]))
    [('x', 'y'), ('x', 'z'), ('y', 'z'), ('x', 'y', 'z')]
    """
    gpus = [account for account in accounts if account != CPU]
    if len(gpus) > MOST_SPLIT:
        yield tuple(gpus)
        return
    for size in range(2, len(gpus) + 1):
        yield from combinations(gpus, size)


def split(need_bytes: int, free: Mapping[str, int], margin_bytes: int) -> tuple[Grant, ...] | None:
    """A proportional split over all of these accounts, each with `margin_bytes` for its driver; None if it does
    not fit.

    An account that has no more free than the margin is left out.

    >>> [(grant.account, grant.charged_bytes) for grant in split(60, {"x": 50, "y": 30}, 10)]
    [('x', 50), ('y', 30)]
    >>> split(61, {"x": 50, "y": 30}, 10) is None
    True
    """
    usable = {account: bytes - margin_bytes for account, bytes in free.items() if bytes > margin_bytes}
    total = sum(usable.values())
    if total < need_bytes or len(usable) < 2:
        return None
    grants = []
    left = need_bytes
    for number, (account, bytes) in enumerate(usable.items(), start=1):
        part = left if number == len(usable) else min(left, -(-need_bytes * bytes // total))
        grants.append(Grant(account, part + margin_bytes))
        left -= part
    return tuple(grants)


def place(need_bytes: int, free: Mapping[str, int], margin_bytes: int) -> tuple[Grant, ...] | None:
    """The grants for a load into what is free: the tightest single account, else the smallest group; None if none fits.

    >>> [grant.account for grant in place(60, {"x": 50, "y": 30, "z": 10}, 10) or ()]
    ['x', 'y']
    """
    single = tightest(need_bytes, free)
    if single is not None:
        return (Grant(single, need_bytes),)
    for group in groups(list(free)):
        grants = split(need_bytes, {account: free[account] for account in group}, margin_bytes)
        if grants is not None:
            return grants
    return None
