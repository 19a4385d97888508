"""The work of one server: its unit, how much it does of it in a second, and what a size stands for. Pure."""

from __future__ import annotations

from typing import NamedTuple

from hive.domain import UsageUnit

UNMEASURED_PER_S = 100.0
"""Tokens taken of a server that has worked on nothing yet."""
KEPT_S = 120.0
"""Seconds of work after which what is older counts half."""
LEARNT = 0.2
"""Share of the newest request in what a size is taken for."""
MOST_RATIO = 32.0
"""Times by which what a size is taken for may grow or shrink from its start: to 500 bytes for a second of sound, fewer
than speech needs, and to 512,000. A minute of silence can be a file of 18 KB, and all clients of the line are reckoned
with by what was learnt of one."""


class WorkUnit(NamedTuple):
    """A unit of work in a line. `per_s`: taken of a server that has worked on nothing yet; `per_size`: of the size of a
    request, as long as no request has told."""

    name: str
    per_s: float
    per_size: float = 1.0


TOKENS = WorkUnit("tokens", UNMEASURED_PER_S)
WORK_UNITS = {
    UsageUnit.TOKENS: TOKENS,
    UsageUnit.AUDIO_S: WorkUnit("audio_s", 8.0, 1 / 16_000),
    UsageUnit.IMAGES: WorkUnit("pixel_steps", 2e6),
}
"""By the unit of usage: audio by the bytes of its file, at 128 kbit/s; images by the pixel steps asked for, a pixel in
one step each."""


class WorkRate:
    """Work over the seconds in which at least one request was there.

    >>> rate = WorkRate()
    >>> rate.did(300.0, begun_at=0.0, now=2.0); rate.did(100.0, begun_at=1.0, now=4.0); rate.did(400.0, 8.0, 12.0)
    >>> rate.per_s, rate
    (100.0, <WorkRate 100 tokens/s>)
    """

    __slots__ = ("_busy_s", "_done", "_seen_until", "unit")

    def __init__(self, unit: WorkUnit = TOKENS) -> None:
        self.unit = unit
        self._done = self._busy_s = 0.0
        self._seen_until = 0.0

    def __repr__(self) -> str:
        return f"<WorkRate {self.per_s:.0f} {self.unit.name}/s>"

    @property
    def is_measured(self) -> bool:
        return bool(self._done and self._busy_s)

    @property
    def per_s(self) -> float:
        return self._done / self._busy_s if self._done and self._busy_s else self.unit.per_s

    @property
    def measured(self) -> tuple[float, float]:
        """The work that was done, and the seconds it took; both of lately."""
        return self._done, self._busy_s

    def did(self, work: float, begun_at: float, now: float) -> None:
        """A request has ended that had its place since `begun_at` and cost so much; `now` never falls."""
        self._done += work
        self._busy_s += now - (begun_at if begun_at > self._seen_until else self._seen_until)
        self._seen_until = now
        if self._busy_s > KEPT_S:
            self._done /= 2
            self._busy_s /= 2


class WorkGuess:
    """The work that a request of some size will probably be, before it is known.

    >>> guess = WorkGuess(WORK_UNITS[UsageUnit.AUDIO_S])
    >>> guess.of(32_000)
    2.0
    >>> guess.learn(32_000, 12.0); round(guess.of(32_000), 3)
    4.0
    >>> guess.learn(100, 60.0); round(guess.of(32_000), 3)
    16.0
    """

    __slots__ = ("_least", "_most", "_per_size")

    def __init__(self, unit: WorkUnit) -> None:
        self._per_size = unit.per_size
        self._least, self._most = unit.per_size / MOST_RATIO, unit.per_size * MOST_RATIO

    def __repr__(self) -> str:
        return f"<WorkGuess {self._per_size:g}>"

    def of(self, size: float) -> float:
        return size * self._per_size

    def learn(self, size: float, work: float) -> None:
        """A request of that size was so much work."""
        if size > 0:
            told = min(self._most, max(self._least, work / size))
            self._per_size += LEARNT * (told - self._per_size)
