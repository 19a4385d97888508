"""Progress of a load: a server that uses no CPU and takes no memory stands still, whatever it waits for. Pure.

A llama-server that reads its weights takes memory with each block, also from a slow disk; a vLLM that compiles for
minutes burns CPU. What they print says no more than that, and neither tells how far it is: llama-server answers
/health with 503 as long as it loads, also where it hangs.
"""

from __future__ import annotations

from hive.pool.state import MIB

STILL_S = 60.0
"""A load that stands still for so long has ended."""
OVER_S = 5.0
"""Shortest time over which CPU time says something."""
WORKS_SHARE = 0.02
"""Share of a core from which on it works. Its supervisor, which asks it for its health four times a second, takes up to
0.01 besides."""
GROWS_BYTES = MIB


class LoadMovement:
    """The signs of one load.

    >>> load = LoadMovement()
    >>> load.saw(cpu_s=0.5, bytes=100 * MIB, now=0.0)
    >>> load.saw(cpu_s=0.5, bytes=140 * MIB, now=50.0); load.stood_s(50.0)
    0.0
    >>> load.saw(cpu_s=0.6, bytes=140 * MIB, now=110.0); load.stood_s(110.0)
    60.0
    >>> load.saw(cpu_s=9.0, bytes=140 * MIB, now=120.0); load.stood_s(120.0)
    0.0
    """

    __slots__ = ("_bytes", "_cpu_at", "_cpu_s", "_moved_at")

    def __init__(self) -> None:
        self._moved_at: float | None = None
        self._bytes = 0
        self._cpu_s = self._cpu_at = 0.0

    def __repr__(self) -> str:
        return f"<LoadMovement moved at {self._moved_at}>"

    def saw(self, *, cpu_s: float, bytes: int | None, now: float) -> None:
        """Takes one look: CPU time used so far, 0 where that is unknown; memory in all places together, None where it
        is unknown. What cannot be seen is no standing still."""
        if self._moved_at is None or not cpu_s or bytes is None or abs(bytes - self._bytes) >= GROWS_BYTES:
            self._moved(cpu_s, bytes or 0, now)
            return
        over_s = now - self._cpu_at
        if over_s >= OVER_S:
            if cpu_s - self._cpu_s > WORKS_SHARE * over_s:
                self._moved(cpu_s, bytes, now)
            self._cpu_s, self._cpu_at = cpu_s, now

    def _moved(self, cpu_s: float, bytes: int, now: float) -> None:
        self._moved_at = self._cpu_at = now
        self._cpu_s, self._bytes = cpu_s, bytes

    def stood_s(self, now: float) -> float:
        """Seconds since it was seen to get on; 0 before the first look."""
        return 0.0 if self._moved_at is None else now - self._moved_at
