"""Under which users processes live: a removed agent's uid is not given out while one of its processes is left."""

from __future__ import annotations

import psutil


def uids_in_use() -> set[int]:
    """Real, effective and saved uids of every process. Reads all of /proc: not on the loop."""
    in_use: set[int] = set()
    for process in psutil.process_iter(["uids"]):
        if (uids := process.info["uids"]) is not None:
            in_use.update(uids)
    return in_use
