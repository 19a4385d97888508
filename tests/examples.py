"""The part that is tried of what there is without end or with little difference: by `HIVE_EXAMPLES`.

Nothing: a quarter of the examples of hypothesis, every n-th case of tests with `breadth`, none that is `wide`. `1/2`,
`2/2` and so on: that part of all, as in .ci/run, which takes another one for another commit. `all`: all. A number: so
many examples of hypothesis.
"""

from __future__ import annotations

import os
import re
from zlib import crc32

LEAST = 50


def told() -> str:
    return os.environ.get("HIVE_EXAMPLES", "")


def is_all() -> bool:
    """Whether this run tries all there is."""
    return told() == "all"


def part() -> tuple[int, int] | None:
    """(1, 2) for the first of two parts; None where all or nothing of what is `wide` is tried."""
    found = re.fullmatch(r"([1-9])/([1-9])", told())
    return (int(found[1]), int(found[2])) if found else None


def examples(wanted: int) -> int:
    """So many where all is tried; else a part, and not less than `LEAST` for that."""
    if told().isdecimal():
        return int(told())
    _, parts = part() or (1, 4)
    return wanted if is_all() else max(wanted // parts, min(wanted, LEAST))


def stride(wanted: int) -> int:
    """The distance from a case that is tried to the next one: 1 where all is tried, else `wanted` or the parts' number.

    For tests with a real process for each of many cases, as many as a run like any other has no time for.
    """
    _, parts = part() or (1, wanted)
    return 1 if is_all() else min(wanted, parts)


def is_tried(case: int, wanted: int) -> bool:
    """Whether the case with that number, from 0, is one of those with that stride; the first of all always is."""
    number, _ = part() or (1, 1)
    return case == 0 or (case - number + 1) % stride(wanted) == 0


def is_in_part(test: str) -> bool:
    """Whether a `wide` test is tried, by its name without its parameters."""
    found = part()
    return is_all() or (found is not None and crc32(test.encode()) % found[1] == found[0] - 1)
