"""The wait of a child that ended before it is started again. Pure."""

from __future__ import annotations

FIRST_S = 0.2
LONGEST_S = 2.0
"""So that even a process that keeps ending is back, and record and truth agree again, within 5 s."""
STEADY_S = 3.0
"""A child that lived this long has recovered: the next end counts as the first."""


def next_delay_s(previous_s: float | None, *, lived_s: float) -> float:
    """Seconds until the next start; `previous_s` is what the start before waited, None for the first end.

    >>> next_delay_s(None, lived_s=0.1), next_delay_s(0.2, lived_s=0.1), next_delay_s(1.6, lived_s=1.0)
    (0.2, 0.4, 2.0)
    >>> next_delay_s(2.0, lived_s=3.0)
    0.2
    """
    if previous_s is None or lived_s >= STEADY_S:
        return FIRST_S
    return min(previous_s * 2, LONGEST_S)
