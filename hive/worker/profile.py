"""Timeouts of one supervised server: the seed's seven, and when it is started again. Pure."""

from __future__ import annotations

import msgspec

from hive.errors import BadRequest

_OPTIONAL = (
    "headers_timeout_s",
    "ttft_timeout_s",
    "prefill_liveness_timeout_s",
    "idle_stream_timeout_s",
    "absolute_timeout_s",
)


class TimeoutProfile(msgspec.Struct, frozen=True, kw_only=True):
    """Times in seconds, the same for every request of a worker; None: no limit. Raises BadRequest for what is none.

    >>> TimeoutProfile(ttft_timeout_s=1800).look_every_s
    0.5
    >>> TimeoutProfile(connect_timeout_s=0)
    Traceback (most recent call last):
    hive.errors.BadRequest: connect_timeout_s is 0: it must be more than 0 seconds
    """

    connect_timeout_s: float = 2.0
    headers_timeout_s: float | None = 300.0
    """Until the head of the answer; it runs only while the server has a place for the request. llama-server sends the
    head with the first token, so prompts that are read for longer need more, or None."""
    ttft_timeout_s: float | None = None
    """Until the first data of the answer, from the request on."""
    prefill_liveness_timeout_s: float | None = 120.0
    """Longest time in which no request moves and the process burns no CPU, before the server is ended."""
    idle_stream_timeout_s: float | None = 60.0
    """Between two pieces of data of one answer. Comments and pings are no data."""
    absolute_timeout_s: float | None = None
    """A whole request."""
    liveness_probe_interval_s: float = 5.0
    """Between two looks at the CPU time of the process."""
    load_timeout_s: float = 600.0
    """From the start of the process to its first token."""
    backoff_first_s: float = 1.0
    backoff_longest_s: float = 60.0
    crash_limit: int = 5
    """So many ends within `crash_window_s`, and it is not started again."""
    crash_window_s: float = 120.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is None and name in _OPTIONAL:
                continue
            if name == "crash_limit":
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise BadRequest(f"crash_limit is {value!r}: it must be a whole number from 1")
            elif not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < float("inf"):
                raise BadRequest(f"{name} is {value!r}: it must be more than 0 seconds")
        if self.backoff_first_s > self.backoff_longest_s:
            raise BadRequest("backoff_first_s is longer than backoff_longest_s")

    @property
    def look_every_s(self) -> float:
        """Seconds between two looks of the judge: a quarter of the shortest time watched over, 20 ms at least."""
        times = (
            self.connect_timeout_s,
            self.headers_timeout_s,
            self.ttft_timeout_s,
            self.prefill_liveness_timeout_s,
            self.idle_stream_timeout_s,
            self.absolute_timeout_s,
            4 * self.liveness_probe_interval_s,
        )
        return max(0.02, min(time for time in times if time is not None) / 4)
