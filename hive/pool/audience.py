"""The clients that will probably ask a model again soon. Pure.

No other scheduler of models knows its clients. Hive does: an agent that waits for another model, or sleeps, will not
ask this one now, and a model without an audience may go at once. Of callers without a name only the rate is known.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from hive.pool.state import Audience

RATE_OVER_S = 300.0
"""The rate of requests is a mean that forgets in about this time."""
MOSTLY = 0.4
"""Those who have used a model are its audience if at least this part of its requests was followed soon by another one
of the same client."""
LEARN = 0.2
"""Weight of the newest request in that part: about the last ten count."""


class LastModel(msgspec.Struct, frozen=True):
    """The last model of one agent. `used_at`: its last answer ended; `is_here`: it waits for that model, or is in
    flight there; `is_elsewhere`: the same of another model; `is_awake`: its processes run."""

    agent: str
    model: str
    used_at: float
    is_here: bool = False
    is_elsewhere: bool = False
    is_awake: bool = True


class RequestRate(msgspec.Struct, frozen=True):
    """Requests per second of one model, as a mean that forgets. `at`: of the last request."""

    per_s: float = 0.0
    at: float = 0.0

    def after_request(self, now: float) -> RequestRate:
        """The rate with one request more.

        >>> RequestRate().after_request(0.0).per_s * RATE_OVER_S
        1.0
        """
        return RequestRate(self.now(now) + 1 / RATE_OVER_S, now)

    def now(self, now: float) -> float:
        """Requests per second as seen at `now`.

        >>> round(RequestRate(1.0, 0.0).now(RATE_OVER_S), 2)
        0.37
        """
        return self.per_s * math.exp(-max(0.0, now - self.at) / RATE_OVER_S)


class Returns(msgspec.Struct, frozen=True):
    """The part of a model's requests that the same client followed with another one soon, within `audience_s`.

    A planner that is asked once a task has none, and need not be kept for those who have just had its answer.
    """

    soon: float = 0.5

    def after(self, is_soon: bool) -> Returns:
        """The same after a client's next request, to this model soon or not.

        >>> round(Returns(0.5).after(False).soon, 2), round(Returns(0.5).after(True).soon, 2)
        (0.4, 0.6)
        """
        return Returns(self.soon + LEARN * (is_soon - self.soon))

    @property
    def are_usual(self) -> bool:
        """Whether one who has used the model will probably use it again soon.

        >>> Returns(0.5).are_usual, Returns(0.4).are_usual
        (True, False)
        """
        return self.soon > MOSTLY


class Interest(msgspec.Struct, frozen=True):
    """The requests of one model, as they have come until now. `agents`, `callers`: how those with and without a name
    return; `last_caller_at`: the last request of one without a name; callers without a name are one client together."""

    rate: RequestRate = RequestRate()
    agents: Returns = Returns()
    callers: Returns = Returns()
    last_caller_at: float = -math.inf

    def after_caller(self, now: float, audience_s: float) -> Interest:
        """The same after a request of a caller without a name.

        >>> rare = Interest().after_caller(0.0, 30.0).after_caller(120.0, 30.0)
        >>> rare.callers.are_usual, rare.last_caller_at
        (False, 120.0)
        """
        callers = self.callers
        if self.last_caller_at > -math.inf:
            callers = callers.after(now - self.last_caller_at <= audience_s)
        return Interest(self.rate.after_request(now), self.agents, callers, now)

    def after_agent(self, now: float) -> Interest:
        """The same after a request of an agent."""
        return Interest(self.rate.after_request(now), self.agents, self.callers, self.last_caller_at)

    def left_by_agent(self, *, soon_again: bool) -> Interest:
        """The same once an agent that had used the model has sent its next request, `soon_again` to the same model."""
        return Interest(self.rate, self.agents.after(soon_again), self.callers, self.last_caller_at)


def audience_of(model: str, uses: Iterable[LastModel], interest: Interest, now: float, audience_s: float) -> Audience:
    """The audience of a model.

    Agents count that wait for it or are in flight there; and those that used it last, within `audience_s`, are neither
    asleep nor busy elsewhere, and usually return to it. Callers without a name count as one for `audience_s`, if they
    usually return.

    >>> uses = [LastModel("a", "m", 100.0), LastModel("b", "m", 110.0), LastModel("c", "m", 110.0, is_elsewhere=True)]
    >>> audience_of("m", uses, Interest(), 115.0, audience_s=30.0)
    Audience(users=2, rate_per_s=0.0, ends_at=140.0)
    >>> audience_of("m", uses, Interest(), 135.0, audience_s=30.0).users
    1
    >>> audience_of("m", uses, Interest(agents=Returns(0.1)), 115.0, audience_s=30.0).users
    0
    """
    users, ends_at = 0, 0.0
    for use in uses:
        if use.model != model or not use.is_awake or use.is_elsewhere:
            continue
        until = math.inf if use.is_here else use.used_at + audience_s if interest.agents.are_usual else -math.inf
        if until > now:
            users += 1
            ends_at = max(ends_at, until)
    until = interest.last_caller_at + audience_s
    if interest.callers.are_usual and until > now:
        users += 1
        ends_at = max(ends_at, until)
    return Audience(users, interest.rate.now(now), ends_at)
