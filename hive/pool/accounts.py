"""The books of memory: what is charged in each account, and what is free. Pure.

A slot is charged from the decision to load it until its memory is measured back, with the larger of what was estimated
and what was measured. What is not known is never taken for nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

from hive.pool.state import Grant, MemoryAccount, Rules, SlotFacts, SlotState


def charge_bytes(estimated_bytes: int, peak_bytes: int | None) -> int:
    """The charge of a slot: never less than what it was seen to take.

    >>> charge_bytes(5000, None), charge_bytes(5000, 4000), charge_bytes(5000, 6000)
    (5000, 5000, 6000)
    """
    return estimated_bytes if peak_bytes is None else max(estimated_bytes, peak_bytes)


def with_measured(grant: Grant, measured_bytes: int | None) -> Grant:
    """The grant after a measurement: one that takes more than its charge is charged what it takes.

    >>> with_measured(Grant("g", 5000), 6000)
    Grant(account='g', charged_bytes=6000, measured_bytes=6000)
    >>> with_measured(Grant("g", 5000), None)
    Grant(account='g', charged_bytes=5000, measured_bytes=None)
    """
    return Grant(grant.account, charge_bytes(grant.charged_bytes, measured_bytes), measured_bytes)


def charged_in(account: str, slots: Iterable[SlotFacts]) -> int:
    """Bytes charged in one account."""
    return sum(grant.charged_bytes for slot in slots for grant in slot.grants if grant.account == account)


def _not_yet_allocated(account: str, slots: Iterable[SlotFacts]) -> int:
    """Bytes charged that no measurement can show yet. Of a slot that is loading and not measured it is all of them."""
    missing = 0
    for slot in slots:
        for grant in slot.grants:
            if grant.account == account:
                if grant.measured_bytes is not None:
                    missing += max(0, grant.charged_bytes - grant.measured_bytes)
                elif slot.state is SlotState.LOADING:
                    missing += grant.charged_bytes
    return missing


def free_bytes(account: MemoryAccount, slots: Sequence[SlotFacts], rules: Rules) -> int:
    """Bytes that may be charged to one more load; negative where more is charged or used than there is.

    The smaller of two: by the measurement (total - used - what is charged and not yet allocated), and by the books
    (total - reserve - charged - foreign with its margin). Where nothing is measured the books decide alone.

    >>> slots = [SlotFacts("a", "m", 400, grants=(Grant("g", 400, 300),))]
    >>> account = MemoryAccount("g", total_bytes=1000, reserve_bytes=50)
    >>> free_bytes(account, slots, Rules())
    550
    >>> from msgspec.structs import replace
    >>> free_bytes(replace(account, used_bytes=500, foreign_bytes=100), slots, Rules())
    400
    """
    foreign = int(account.foreign_bytes * rules.foreign_margin)
    by_books = account.total_bytes - account.reserve_bytes - charged_in(account.id, slots) - foreign
    if account.used_bytes is None:
        return by_books
    return min(by_books, account.total_bytes - account.used_bytes - _not_yet_allocated(account.id, slots))


def foreign_peak(peak_bytes: int, used_bytes: int | None, own: Iterable[Grant]) -> int:
    """The peak of foreign memory after one more look. One own grant that is not known leaves the peak as it was: what
    is ours and what is not cannot be told apart then.

    >>> foreign_peak(100, 900, [Grant("g", 700, 600)]), foreign_peak(100, 620, [Grant("g", 700, 600)])
    (300, 100)
    >>> foreign_peak(100, None, []), foreign_peak(100, 900, [Grant("g", 700)])
    (100, 100)
    """
    if used_bytes is None:
        return peak_bytes
    measured = 0
    for grant in own:
        if grant.measured_bytes is None:
            return peak_bytes
        measured += grant.measured_bytes
    return max(peak_bytes, used_bytes - measured)


class MemoryBack(StrEnum):
    """Verdict on the memory of a server that has ended."""

    BACK = "back"
    WAIT = "wait"
    FOREIGN = "foreign"


def memory_back(
    account: MemoryAccount, slots: Sequence[SlotFacts], stopped: SlotFacts, waited_s: float, rules: Rules
) -> tuple[MemoryBack, int]:
    """Verdict on the memory of `stopped` (still among `slots`), and the bytes that have not come back.

    Compared with the books, not with a rise: a crashed server's memory is back before anybody looks (ollama #11997).
    Back is: used is at most what the others, foreign ones included, are charged, and a tenth of what it held. After
    `free_s` the rest is booked as foreign. Where nothing is measured the books are believed after `free_s`.

    >>> gone = SlotFacts("a", "m", 400, state=SlotState.STOPPING, grants=(Grant("g", 400, 0),))
    >>> gpu = MemoryAccount("g", 1000, 0, used_bytes=30)
    >>> memory_back(gpu, [gone], gone, 0.1, Rules())
    (<MemoryBack.BACK: 'back'>, 0)
    >>> from msgspec.structs import replace
    >>> [memory_back(replace(gpu, used_bytes=390), [gone], gone, s, Rules())[0].value for s in (1, 11)]
    ['wait', 'foreign']
    >>> memory_back(replace(gpu, used_bytes=900, strangers_bytes=870), [gone], gone, 0.1, Rules())[0].value
    'back'
    """
    held = charged_in(account.id, [stopped])
    if account.used_bytes is None:
        return (MemoryBack.BACK if waited_s >= rules.free_s else MemoryBack.WAIT), 0
    others = charged_in(account.id, slots) - held
    rest = max(0, account.used_bytes - others - max(account.foreign_bytes, account.strangers_bytes))
    if rest <= held // 10:
        return MemoryBack.BACK, 0
    return (MemoryBack.FOREIGN if waited_s >= rules.free_s else MemoryBack.WAIT), min(rest, held)
