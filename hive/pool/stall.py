"""Standstill of a server in use: nothing of it computes, neither on a core nor on its GPUs. Pure.

Of a GPU the driver tells only the share of the last second in which something ran on it, whosever that was. So a server
is judged while all of its GPUs idle; one beside another that computes is not, nor where the driver does not tell.
"""

from __future__ import annotations

COMPUTES_S = 0.01
"""CPU time between two looks, a second apart; a supervisor's own probes take less."""


class ServerStall:
    """The looks at one server.

    >>> stall = ServerStall()
    >>> stall.saw(cpu_s=7.0, gpus_idle=True, now=0.0)
    >>> stall.saw(cpu_s=7.001, gpus_idle=True, now=100.0); stall.stood_s(100.0)
    100.0
    >>> stall.saw(cpu_s=7.001, gpus_idle=False, now=101.0); stall.stood_s(101.0)
    0.0
    """

    __slots__ = ("_cpu_s", "_moved_at")

    def __init__(self) -> None:
        self._cpu_s = 0.0
        self._moved_at: float | None = None

    def __repr__(self) -> str:
        return f"<ServerStall moved at {self._moved_at}>"

    def saw(self, *, cpu_s: float, gpus_idle: bool, now: float) -> None:
        """Takes one look: CPU time used so far, 0 where that is unknown; `gpus_idle`: it is known that nothing ran on
        any GPU of it. What cannot be seen is no standing still."""
        if self._moved_at is None or not cpu_s or not gpus_idle or abs(cpu_s - self._cpu_s) > COMPUTES_S:
            self.moved(cpu_s, now)

    def moved(self, cpu_s: float, now: float) -> None:
        """It got on, or nothing was asked of it."""
        self._cpu_s, self._moved_at = cpu_s, now

    def stood_s(self, now: float) -> float:
        """Seconds since it was seen to get on; 0 before the first look."""
        return 0.0 if self._moved_at is None else now - self._moved_at
