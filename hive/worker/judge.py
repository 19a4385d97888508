"""Verdict over one inference server: go on, fail a request, or end the server. Pure.

Only data events are progress: llama-server sends pings, and answers /health with 200, while its compute loop is stuck.
A request that is late fails alone. The server is ended if *no* request moved and its process burnt no CPU for
`prefill_liveness_timeout_s`, so that no single request can bring down the others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from hive.worker.profile import TimeoutProfile

BURNS_SHARE = 0.01
"""Share of a core from which on a process counts as working; pings of four streams cost 0.0002."""


class FailReason(StrEnum):
    """Causes of a failed request, the five of seeds/001 first; some are causes of the end of a server, too."""

    WORKER_RESTARTED = "worker_restarted"
    STALL_TIMEOUT = "stall_timeout"
    CONNECT_FAILED = "connect_failed"
    HEADERS_TIMEOUT = "headers_timeout"
    SERVER_DIED = "server_died"
    TTFT_TIMEOUT = "ttft_timeout"
    ABSOLUTE_TIMEOUT = "absolute_timeout"
    STREAM_INCOMPLETE = "stream_incomplete"
    """The server lives and broke off its answer."""
    BACKEND_ERROR = "backend_error"
    """The server answered with an error of its own."""
    REPEATED_LINE_LOOP = "repeated_line_loop"
    DIALOGUE_FAILED = "dialogue_failed"
    """The code that decides about the turns of the request raised an error."""


class InFlight(msgspec.Struct, frozen=True, kw_only=True):
    """One request under way. Times are of one monotonic clock, None for what has not come."""

    asked_at: float
    connected_at: float | None = None
    headed_at: float | None = None
    data_at: float | None = None
    """The last data event; comments and pings do not count."""
    waited_for_head_s: float = 0.0
    """Time in which it could have had its head; see `has_place`."""
    began_at: float | None = None
    """Beginning of the whole request, where this is a later turn of it."""
    is_answered: bool = False
    """True once this turn's answer is whole: the server owes nothing, and the next turn is the caller's to come."""

    @property
    def moved_at(self) -> float | None:
        """Last thing the server did for it. A connection is none: the kernel accepts for a server that hangs."""
        return self.data_at if self.data_at is not None else self.headed_at


class ServerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One look at a server. `requests`: those under way, by id."""

    is_alive: bool
    requests: Mapping[int, InFlight] = {}
    burnt_at: float | None = None
    """Last time its process was seen to burn CPU."""
    owed_since: float | None = None
    """Time since which something is owed, None where nothing is. What was `left_owed` counts until something moves."""
    moved_at: float | None = None
    """Last time that the server did something for a request that is over."""
    is_refusing: bool = False
    """True where it lives and nobody listens at its socket."""


class Verdict(msgspec.Struct, frozen=True):
    """`failed`: requests that fail now, and why. `end`: why the server is to be ended; None: it goes on."""

    failed: Mapping[int, FailReason] = {}
    end: FailReason | None = None


def judge(facts: ServerFacts, profile: TimeoutProfile, *, now: float) -> Verdict:
    """Verdict at `now`. Where the server is ended, each of its requests is among `failed`.

    >>> waits = InFlight(asked_at=0, connected_at=0, headed_at=1, data_at=5)
    >>> def look(now, **facts):
    ...     verdict = judge(ServerFacts(**facts), TimeoutProfile(), now=now)
    ...     return {key: reason.value for key, reason in verdict.failed.items()}, verdict.end and verdict.end.value
    >>> look(60, is_alive=True, requests={1: waits}, owed_since=5, burnt_at=5)
    ({}, None)
    >>> look(66, is_alive=True, requests={1: waits}, owed_since=5, burnt_at=5)
    ({1: 'stall_timeout'}, None)
    >>> look(126, is_alive=True, owed_since=5, burnt_at=5)
    ({}, 'stall_timeout')
    >>> look(6, is_alive=False, requests={1: waits})
    ({1: 'server_died'}, 'server_died')
    """
    if not facts.is_alive:
        return Verdict(dict.fromkeys(facts.requests, FailReason.SERVER_DIED), FailReason.SERVER_DIED)
    late = {
        key: reason
        for key, request in facts.requests.items()
        if (reason := lateness(request, profile, now)) is not None
    }
    if facts.is_refusing:
        others = dict.fromkeys(facts.requests, FailReason.WORKER_RESTARTED)
        return Verdict(others | late, FailReason.CONNECT_FAILED)
    if stands_still(facts, profile, now=now):
        return Verdict(dict.fromkeys(facts.requests, FailReason.STALL_TIMEOUT) | late, FailReason.STALL_TIMEOUT)
    return Verdict(late)


def lateness(request: InFlight, profile: TimeoutProfile, now: float) -> FailReason | None:
    """Reason for which this request fails by itself; None: it may go on.

    >>> lateness(InFlight(asked_at=0), TimeoutProfile(), 2.5).value
    'connect_failed'
    """
    began_at = request.asked_at if request.began_at is None else request.began_at
    if _is_over(now - began_at, profile.absolute_timeout_s):
        return FailReason.ABSOLUTE_TIMEOUT
    if request.is_answered:
        return None
    if request.connected_at is None:
        return FailReason.CONNECT_FAILED if now - request.asked_at > profile.connect_timeout_s else None
    if request.data_at is not None:
        return FailReason.STALL_TIMEOUT if _is_over(now - request.data_at, profile.idle_stream_timeout_s) else None
    if _is_over(now - request.asked_at, profile.ttft_timeout_s):
        return FailReason.TTFT_TIMEOUT
    if request.headed_at is None and _is_over(request.waited_for_head_s, profile.headers_timeout_s):
        return FailReason.HEADERS_TIMEOUT
    return None


def stands_still(facts: ServerFacts, profile: TimeoutProfile, *, now: float) -> bool:
    """Whether something is owed, no request moved and no CPU was burnt for `prefill_liveness_timeout_s`.

    >>> facts = ServerFacts(is_alive=True, owed_since=0, burnt_at=100)
    >>> stands_still(facts, TimeoutProfile(), now=200), stands_still(facts, TimeoutProfile(), now=221)
    (False, True)
    """
    if facts.owed_since is None:
        return False
    times = [facts.owed_since, facts.burnt_at, facts.moved_at, *(one.moved_at for one in facts.requests.values())]
    last = max(time for time in times if time is not None)
    return _is_over(now - last, profile.prefill_liveness_timeout_s)


def left_owed(request: InFlight, burnt_at: float | None, *, still_from: float | None) -> bool:
    """Whether a request that failed here is owed still: the server did nothing for it and burnt no CPU of late.

    `still_from`: beginning of the last time over which CPU was measured, None where there was none since it asked.
    A server that hangs does not recover by being given up on; one that worked to the last was only late. What it burnt
    when it took the request says nothing of the time after.

    >>> left_owed(InFlight(asked_at=5), 7, still_from=8), left_owed(InFlight(asked_at=5), 10, still_from=8)
    (True, False)
    >>> left_owed(InFlight(asked_at=5, data_at=9), 7, still_from=8)
    False
    """
    if request.is_answered:
        return False
    after = request.asked_at if still_from is None else max(request.asked_at, still_from)
    return not any(at is not None and at > after for at in (burnt_at, request.moved_at))


def has_place(asked_at: float, others: Sequence[InFlight], *, places: int) -> bool:
    """Whether a server with `places` can work on this request while the `others` are under way: older ones go first,
    unless they have been answered.

    llama-server sends no head before a place is free, and that is nobody's fault.

    >>> older = InFlight(asked_at=1)
    >>> has_place(2, [older], places=1), has_place(2, [older], places=2), has_place(0, [older], places=1)
    (False, True, True)
    """
    return sum(other.asked_at < asked_at and not other.is_answered for other in others) < places


def burns(cpu_s: float, over_s: float) -> bool:
    """Whether so much CPU time in so many seconds is work.

    >>> burns(0.04, 5), burns(0.06, 5)
    (False, True)
    """
    return cpu_s > BURNS_SHARE * over_s


def _is_over(passed_s: float, limit_s: float | None) -> bool:
    return limit_s is not None and passed_s > limit_s
