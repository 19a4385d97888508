"""The lag of the event loop's timers: told to callbacks, and to systemd's watchdog if all is well."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hive.host.notify import Notifier

log = logging.getLogger("hive.host")

SAMPLE_S = 0.05
"""Between looks. Each costs 5 µs, and a stall is seen with the chance of its length by this."""
STALL_S = 1.0
"""A loop that comes so late to a timer is not well: no request was served in between."""


class Pulse:
    """A timer that fires for ever and looks how late it is; begins at once, ends with `close`.

    `what_is_wrong()` is what else is looked at before the watchdog is fed: empty where all is well.
    """

    def __init__(
        self,
        notifier: Notifier,
        *,
        on_lag: Callable[[float], None] | None = None,
        what_is_wrong: Callable[[], str],
        sample_s: float = SAMPLE_S,
    ) -> None:
        self._notifier = notifier
        self._on_lag = on_lag
        self._what_is_wrong = what_is_wrong
        self._sample_s = sample_s
        self._loop = asyncio.get_running_loop()
        self._due = self._fed_at = self._loop.time()
        self.last_lag_s = 0.0
        self._beat()

    def __repr__(self) -> str:
        return f"<Pulse {self.last_lag_s * 1000:.1f} ms late>"

    def _beat(self) -> None:
        now = self._loop.time()
        self.last_lag_s = lag_s = max(0.0, now - self._due)
        if self._on_lag is not None:
            self._on_lag(lag_s)
        if is_feeding_time(now, self._fed_at, self._notifier.watchdog_s):
            self._fed_at = now
            self._feed(lag_s)
        self._due = now + self._sample_s
        self._timer = self._loop.call_at(self._due, self._beat)

    def _feed(self, lag_s: float) -> None:
        wrong = f"the loop is {lag_s:.1f} s late" if lag_s >= STALL_S else self._what_is_wrong()
        if wrong:
            log.error("watchdog_not_fed reason=%r", wrong)
        else:
            self._notifier.alive()

    def close(self) -> None:
        self._timer.cancel()


def is_feeding_time(now: float, fed_at: float, watchdog_s: float | None) -> bool:
    """Whether the watchdog is to be fed: three times in the time it waits, so that two looks may go wrong.

    >>> is_feeding_time(now=9.0, fed_at=0.0, watchdog_s=30.0), is_feeding_time(now=10.0, fed_at=0.0, watchdog_s=30.0)
    (False, True)
    """
    return watchdog_s is not None and now - fed_at >= watchdog_s / 3


@contextmanager
def watched(notifier: Notifier, what_is_wrong: Callable[[], str]) -> Iterator[None]:
    """Feeds the watchdog meanwhile, where there is one; looks no more often than that takes."""
    if notifier.watchdog_s is None:
        yield
        return
    pulse = Pulse(notifier, what_is_wrong=what_is_wrong, sample_s=notifier.watchdog_s / 3)
    try:
        yield
    finally:
        pulse.close()
