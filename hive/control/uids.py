"""Under which users processes live: a removed agent's uid is not given out while one of its processes is left."""

from __future__ import annotations

import asyncio
import os
import time
from typing import NamedTuple

LOOK_AGAIN_S = 10.0
"""With 10,000 processes a look takes some 40 ms: not at each of a thousand agents that are made one after the other."""


class UidsSeen(NamedTuple):
    """`in_use`: as of `at`, Unix seconds. No process runs under a uid that was free then and given to no agent."""

    in_use: frozenset[int]
    at: float


class UidLook:
    """Looks at most every LOOK_AGAIN_S. What an agent gave back since the last look it does not vouch for."""

    def __init__(self) -> None:
        self._seen: UidsSeen | None = None
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<UidLook {self._seen and self._seen.at}>"

    async def look(self) -> UidsSeen:
        async with self._turn:
            began = time.time()
            if self._seen is None or not self._seen.at <= began < self._seen.at + LOOK_AGAIN_S:
                self._seen = UidsSeen(await asyncio.to_thread(uids_in_use), began)
            return self._seen


def uids_in_use() -> frozenset[int]:
    """Real, effective and saved uids of every process. Reads all of /proc: not on the loop."""
    in_use: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            in_use.update(_uids_of(name))
    return frozenset(in_use)


def _uids_of(pid: str) -> list[int]:
    """The owner of its directory is its effective uid, whatever it hides; reading all three takes five times as long.

    They differ of programs that are root's by their mode, and of those that are read. Agents cannot gain privileges:
    theirs are one.
    """
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
        if uid:
            return [uid]
        with open(f"/proc/{pid}/status", "rb") as file:
            line = next((line for line in file if line.startswith(b"Uid:")), b"Uid: 0")
    except OSError:
        return []  # it ended
    return [int(number) for number in line.split()[1:]]
