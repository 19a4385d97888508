"""Orders that are refused again and again: the first are rows of the audit table, the rest of a minute is one. Pure.

A caller without rights could else fill the table, and each of its rows would cost a write to the disk.
"""

from __future__ import annotations

from collections import Counter

import msgspec

from hive.store.audit import USER, AuditRecord

FIRST = 10
"""Refusals a minute that are rows of their own, for each person and act."""
MINUTE_S = 60.0


class _Again:
    """The refusals after the first ones of one person, act and minute."""

    def __init__(self) -> None:
        self.rows = 0
        self.outcomes: Counter[str] = Counter()
        self.targets: set[str] = set()
        self.first_at = 0.0
        self.last: AuditRecord | None = None

    def add(self, row: AuditRecord) -> None:
        self.first_at = self.first_at or row.at
        self.outcomes[row.outcome] += 1
        if len(self.targets) < 2:
            self.targets.add(row.target)
        self.last = row

    def row(self) -> AuditRecord | None:
        """One for all of them; None where there are none."""
        if self.last is None:
            return None
        detail = {"refused_again": self.outcomes.total(), "from": self.first_at, "outcomes": dict(self.outcomes)}
        detail |= {name: self.last.detail[name] for name in (USER,) if name in self.last.detail}
        target = self.last.target if len(self.targets) == 1 else "hive"
        outcome = self.outcomes.most_common(1)[0][0]
        return msgspec.structs.replace(self.last, target=target, outcome=outcome, detail=detail)


class RefusalCounter:
    """Refusals within this minute, by person and act.

    >>> counter = RefusalCounter()
    >>> row = AuditRecord(at=60, actor="token:ci", act="order.stop", target="a", origin="tcp", outcome="not_permitted")
    >>> sum(counter.is_row(row) for _ in range(200))
    10
    >>> counter.take(now=119.9)
    []
    >>> [(row.act, row.outcome, row.detail["refused_again"]) for row in counter.take(now=120.0)]
    [('order.stop', 'not_permitted', 190)]
    """

    def __init__(self) -> None:
        self._minutes: dict[tuple[str, str, int], _Again] = {}

    def __repr__(self) -> str:
        waiting = sum(again.outcomes.total() for again in self._minutes.values())
        return f"<RefusalCounter {waiting} waiting>"

    def is_row(self, row: AuditRecord) -> bool:
        """Whether it is to be a row of its own; else it is counted."""
        again = self._minutes.setdefault((row.actor, row.act, int(row.at // MINUTE_S)), _Again())
        again.rows += 1
        if again.rows <= FIRST:
            return True
        again.add(row)
        return False

    def take(self, *, now: float | None = None) -> list[AuditRecord]:
        """The rows of the minutes that are over, or of all with None; they are told once."""
        minute = None if now is None else int(now // MINUTE_S)
        over = [key for key in self._minutes if key[2] != minute]
        rows = [self._minutes.pop(key).row() for key in over]
        return [row for row in rows if row is not None]
