"""The number of examples hypothesis tries: a quarter in a run like any other, all where `HIVE_EXAMPLES` is `all`."""

from __future__ import annotations

import os

LEAST = 50


def is_all() -> bool:
    """Whether this run tries all there is, as .ci/run does."""
    return os.environ.get("HIVE_EXAMPLES", "") == "all"


def examples(wanted: int) -> int:
    """So many where `HIVE_EXAMPLES` is `all`, as in .ci/run; else a quarter, and not less than `LEAST` for that.

    A number there is how many there are of each.
    """
    told = os.environ.get("HIVE_EXAMPLES", "")
    if told.isdecimal():
        return int(told)
    return wanted if is_all() else max(wanted // 4, min(wanted, LEAST))


def stride(wanted: int) -> int:
    """The distance from a case that is tried to the next one: 1 where `HIVE_EXAMPLES` is `all`, else `wanted`.

    For tests with a real process for each of many cases, as many as a run like any other has no time for.
    """
    return 1 if is_all() else wanted
