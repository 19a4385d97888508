"""Room for leases: the GPUs that one is placed on, the share that leases may hold, and what is too large. Pure.

A lease has as many bytes on each of its GPUs, all of them in one decision. One that is not preemptible cannot be asked
to leave, so all such together hold at most a share of a GPU, unless an asker wants it whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations

from hive.pool.placement import permitted_accounts
from hive.pool.state import CPU, MIB, Claim, Grant, LeaseTerms, MemoryAccount, PoolFacts, SlotFacts
from hive.pool.turns import NEVER

MOST_GROUPS = 1000
"""Groups of GPUs that are looked at for one lease; a box with so many ways to choose has others like them."""


def is_capped(slot: SlotFacts) -> bool:
    """Whether the share of leases holds for it."""
    return slot.lease is not None and not slot.lease.preemptible and not slot.lease.is_whole


def share_bytes(account: MemoryAccount, share: float) -> int:
    """Bytes that leases which cannot be asked to leave may hold in an account.

    >>> share_bytes(MemoryAccount("g", 1001), 0.5)
    500
    """
    return int(account.total_bytes * share)


def share_left(account: MemoryAccount, slots: Iterable[SlotFacts], claims: Sequence[Claim], share: float) -> int:
    """Bytes left of that share.

    >>> job = SlotFacts("l-1", "a job", 30, grants=(Grant("g", 30),), lease=LeaseTerms())
    >>> share_left(MemoryAccount("g", 100), [job], (), 0.5)
    20
    """
    left = share_bytes(account, share)
    claimed = {claim.slot: claim.grants for claim in claims}
    for slot in slots:
        if is_capped(slot):
            grants = slot.grants or claimed.get(slot.id, ())
            left -= sum(grant.charged_bytes for grant in grants if grant.account == account.id)
    return left


def share_free_at(account: MemoryAccount, slots: Iterable[SlotFacts], need_bytes: int, share: float) -> float:
    """The time at which so much of the share is free at the latest; NEVER if that has no end.

    >>> jobs = [SlotFacts(f"l-{n}", "", 1, grants=(Grant("g", 25),), lease=LeaseTerms(until=n * 60.0)) for n in (1, 2)]
    >>> [share_free_at(MemoryAccount("g", 100), jobs, need, 0.5) for need in (10, 40, 60)]
    [60.0, 120.0, inf]
    """
    held: list[tuple[float, int]] = []
    for slot in slots:
        if is_capped(slot) and slot.lease is not None:
            bytes = sum(grant.charged_bytes for grant in slot.grants if grant.account == account.id)
            held.append((NEVER if slot.lease.until is None else slot.lease.until, bytes))
    left = share_bytes(account, share) - sum(bytes for _, bytes in held)
    at = 0.0
    for until, bytes in sorted(held):
        if left >= need_bytes:
            return at
        at, left = until, left + bytes
    return at if left >= need_bytes else NEVER


def place_each(need_bytes: int, free: Mapping[str, int], count: int) -> tuple[Grant, ...] | None:
    """So many accounts that have the bytes each, those that fit tightest; None if there are not so many.

    >>> [grant.account for grant in place_each(30, {"x": 80, "y": 40, "z": 20}, 1) or ()]
    ['y']
    >>> [grant.account for grant in place_each(30, {"x": 80, "y": 40, "z": 20}, 2) or ()]
    ['x', 'y']
    >>> place_each(30, {"x": 80, "y": 40, "z": 20}, 3) is None
    True
    """
    fitting = sorted((bytes, account) for account, bytes in free.items() if bytes >= need_bytes)[:count]
    if len(fitting) < count:
        return None
    return tuple(Grant(account, need_bytes) for account in sorted(account for _, account in fitting))


def lease_groups(accounts: Sequence[str], count: int) -> Iterator[tuple[str, ...]]:
    """The groups of so many accounts.

    >>> list(lease_groups(["x", "y", "z"], 2))
    [('x', 'y'), ('x', 'z'), ('y', 'z')]
    """
    for number, group in enumerate(combinations(accounts, count)):
        if number == MOST_GROUPS:
            return
        yield group


def why_too_large(facts: PoolFacts, slot: SlotFacts) -> str:
    """The arithmetic by which a lease can never be granted, a sentence; empty where it can be.

    What is pinned stays, and so does the service of `hive backend`; foreign memory and other leases may end.

    >>> gpu = MemoryAccount("GPU-1", 80 * MIB, 10 * MIB)
    >>> pin = SlotFacts("a", "a", 1, grants=(Grant("GPU-1", 20 * MIB),), pinned_at=0.0)
    >>> job = SlotFacts("l-1", "l-1", 60 * MIB, lease=LeaseTerms(is_whole=True))
    >>> why_too_large(PoolFacts((pin,), (gpu,)), job)
    'it asks for 60 MiB on a GPU, and GPU-1 can have 50: 80 - 10 reserved - 20 pinned (a)'
    >>> import msgspec
    >>> why_too_large(PoolFacts((), (gpu,)), msgspec.structs.replace(job, lease=LeaseTerms()))
    'it asks for 60 MiB on a GPU, and leases that are not preemptible may hold 40 on GPU-1: 0.5 of 80'
    >>> why_too_large(PoolFacts((), (gpu,)), msgspec.structs.replace(job, lease=LeaseTerms(2, is_whole=True)))
    'it asks for 2 GPUs, and there is 1'
    >>> why_too_large(PoolFacts((pin,), (gpu,)), msgspec.structs.replace(job, need_bytes=50 * MIB))
    ''
    """
    terms = slot.lease or LeaseTerms()
    accounts = [account for account in facts.accounts if account.id in permitted_accounts(slot, facts.accounts)]
    if len(accounts) < terms.accounts:
        there = f"there {'is' if len(accounts) == 1 else 'are'} {len(accounts)}"
        return f"it asks for {terms.accounts} GPUs, and {there}"
    shown = []
    for account in accounts:
        most, sum_of = _most(facts, account)
        within = share_bytes(account, facts.rules.lease_share) if is_capped(slot) else most
        if within < most:
            share = f"{facts.rules.lease_share:g} of {account.total_bytes // MIB}"
            told = f"leases that are not preemptible may hold {within // MIB} on {_name(account.id)}: {share}"
            shown.append((within, told))
        else:
            shown.append((most, f"{_name(account.id)} can have {most // MIB}: {sum_of}"))
    shown.sort(key=lambda pair: -pair[0])
    most, told = shown[terms.accounts - 1]
    if slot.need_bytes <= most:
        return ""
    where = "of the host's memory" if accounts[0].id == CPU else "on a GPU"
    if terms.accounts > 1:
        where = f"on each of {terms.accounts} GPUs"
    return f"it asks for {slot.need_bytes // MIB} MiB {where}, and {told}"


def _name(account: str) -> str:
    return "the host" if account == CPU else account


def _most(facts: PoolFacts, account: MemoryAccount) -> tuple[int, str]:
    """The most that can ever be free in an account, and the sum it comes from."""
    most = account.total_bytes - account.reserve_bytes
    told = f"{account.total_bytes // MIB}"
    if account.reserve_bytes:
        told += f" - {account.reserve_bytes // MIB} reserved"
    for slot in facts.slots:
        pinned = sum(grant.charged_bytes for grant in slot.grants if grant.account == account.id)
        if slot.pinned_at is not None and pinned:
            most -= pinned
            told += f" - {pinned // MIB} pinned ({slot.model})"
    return most, told
