"""The gate of one agent: open while it is awake, closed while it sleeps; requests park before a closed one.

Pure state: the time comes in, actions are returned or go through `Outside`. The protocol is in design.md §4: the daemon
asks `close`, freezes, asks `still_closed`, says `asleep`; the first byte of a request wakes.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum
from typing import Protocol

from hive.domain import AgentStatus, WakeCause
from hive.errors import AgentAsleep, HiveError
from hive.terminal_text import counted

UNREAD_MAX_S = 60.0
"""An answer the peer has not read keeps it awake for at most this long (design.md §4.1)."""


class GateState(StrEnum):
    OPEN = "open"
    CLOSED = "closed"
    ASLEEP = "asleep"
    REFUSED = "refused"


_OPEN = GateState.OPEN
"""By a name of its own: an enum class looks for a member in Python, 0.4 µs each time (3.11)."""


class Parked(Protocol):
    """A request before a closed gate. Exactly one of the two is called, once."""

    def on_gate_open(self) -> None: ...

    def on_gate_refused(self, error: HiveError) -> None: ...


class WakeCaller(Protocol):
    """The daemon, as a gate needs it."""

    def wake(self, agent: str, cause: WakeCause) -> None:
        """Asks the daemon for a wake, as a request waits (one ask at a time is enough; the gate asks once per
        closing)."""
        ...

    def tell_quiet(self, agent: str) -> None: ...


class Outside(WakeCaller, Protocol):
    """The daemon and the sockets, as a gate needs them."""

    def wake_ended(self, agent: str, *, awake: bool) -> None:
        """Tells that no request waits for this agent's wake any more: it is awake, or will not be woken. Called also if
        none waited."""
        ...

    def why_busy_outside(self, agent: str, now: float, *, unread_counts: bool) -> str | None:
        """The reason to stay awake that its connections and listener show, looked up in the kernel, or None."""
        ...


def not_awake(status: str, why: str = "") -> AgentAsleep:
    """
    >>> not_awake("stopped").message, not_awake("error", "exited with 1").message
    ('the agent is stopped', 'the agent has ended with an error: exited with 1')
    """
    if status != AgentStatus.ERROR:
        return AgentAsleep(f"the agent is {status}", retry_after_s=5)
    return AgentAsleep(
        f"the agent has ended with an error{why and f': {why}'}",
        hint="its owner sees why in its log: hive agent logs NAME",
        retry_after_s=5,
    )


class Gate:
    """One agent's gate. `in_flight` and `ingress` count requests begun and not ended.

    >>> from unittest.mock import Mock
    >>> gate = Gate("a1", Mock(why_busy_outside=lambda *a, **k: None), parked_max=2)
    >>> gate.close(1, now=0.0), gate
    (None, <Gate closed g1, 0 in flight, 0 ingress, 0 parked>)
    """

    __slots__ = (
        "_outside",
        "_parked",
        "_waking",
        "agent",
        "generation",
        "in_flight",
        "ingress",
        "last_active",
        "owes_quiet",
        "parked_max",
        "state",
        "status",
        "why",
    )

    def __init__(self, agent: str, outside: Outside, *, parked_max: int) -> None:
        self.agent = agent
        self.state = GateState.OPEN
        self.generation = 0
        self.status = "unknown"
        self.why = ""
        self.parked_max = parked_max
        self.in_flight = 0
        self.ingress = 0
        self.last_active: float | None = None
        self.owes_quiet = False
        self._parked: dict[Parked, None] = {}
        self._waking = False
        self._outside = outside

    def __repr__(self) -> str:
        counts = f"{self.in_flight} in flight, {self.ingress} ingress, {len(self._parked)} parked"
        return f"<Gate {self.state} g{self.generation}, {counts}>"

    @property
    def parked(self) -> int:
        return len(self._parked)

    @property
    def needs_wake(self) -> bool:
        """Whether the next request would be the one to ask for a wake."""
        return self.state in (GateState.CLOSED, GateState.ASLEEP) and not self._waking

    @property
    def word(self) -> str:
        """The agent's state in one word for callers: `awake`, `asleep`, `waking`, or else the daemon's own word.

        >>> from unittest.mock import Mock
        >>> Gate("a1", Mock(), parked_max=2).word
        'awake'
        """
        if self.state is GateState.OPEN:
            return "awake"
        if self._waking:
            return "waking"
        if self.state is GateState.ASLEEP:
            return "asleep"
        return "pausing" if self.status == "running" else self.status

    # requests -----------------------------------------------------------------------------------------------------

    def begin(self, request: Parked, now: float, *, ingress: bool = False) -> bool:
        """A request begins. True: the gate is open. False: it is parked and a wake is under way.

        Raises Asleep where the agent cannot be woken or too many wait; the request counts all the same until `end`.
        """
        self.last_active = now
        if ingress:
            self.ingress += 1
        else:
            self.in_flight += 1
        if self.state is _OPEN:
            return True
        if self.state is GateState.REFUSED:
            raise self.refusal()
        if len(self._parked) >= self.parked_max:
            waiting = counted(len(self._parked), "request already waits", "requests already wait")
            raise AgentAsleep(f"{waiting} for this agent to wake", retry_after_s=1)
        self._parked[request] = None
        if not self._waking:
            self._waking = True
            self._outside.wake(self.agent, WakeCause.INGRESS if ingress else WakeCause.REQUEST)
        return False

    def end(self, now: float, *, ingress: bool = False) -> None:
        """Ends a request that began, with any result."""
        self.last_active = now
        if ingress:
            self.ingress -= 1
        else:
            self.in_flight -= 1
        if self.owes_quiet:
            self.settle(now)

    def unpark(self, request: Parked) -> None:
        """Takes a request out of the parked ones (its client left, or its deadline passed)."""
        self._parked.pop(request, None)

    def settle(self, now: float) -> bool:
        """Pays the `Quiet` owed to the daemon if the agent is quiet by now. True where nothing is owed any more."""
        if self.owes_quiet and self.why_busy(now) is None:
            self.owes_quiet = False
            self._outside.tell_quiet(self.agent)
        return not self.owes_quiet

    def why_busy(self, now: float) -> str | None:
        """The reason why the agent must stay awake, or None."""
        if self.ingress:
            return f"{counted(self.ingress, 'caller is', 'callers are')} open"
        if self.in_flight:
            return f"{counted(self.in_flight, 'request is', 'requests are')} in flight"
        recent = self.last_active is not None and now - self.last_active <= UNREAD_MAX_S
        return self._outside.why_busy_outside(self.agent, now, unread_counts=recent)

    # the daemon's questions and orders ----------------------------------------------------------------------------

    def close(self, generation: int, now: float) -> str | None:
        """Closes if nothing of the agent is on the host. None: closed. Else the reason; then one `Quiet` is owed."""
        if generation < self.generation:
            return "a newer generation is known"
        self.generation = generation
        reason = self.why_busy(now)
        if reason is not None:
            self.owes_quiet = True
            return reason
        self.state = GateState.CLOSED
        self._waking = False
        return None

    def still_closed(self, generation: int, now: float) -> str | None:
        """Asked once more after the freeze. None: closed and nothing came. The gate opens only by the daemon's word."""
        if generation != self.generation or self.state is not GateState.CLOSED:
            return "the gate is no longer closed for this generation"
        return self.why_busy(now)

    def asleep(self, generation: int) -> None:
        """The pause is committed."""
        if generation == self.generation and self.state is GateState.CLOSED:
            self.state = GateState.ASLEEP

    def open(self, generation: int) -> None:
        """The agent runs."""
        self.move(GateState.OPEN, generation, "running")

    def refuse(self, generation: int, status: str, why: str = "") -> None:
        """The agent will not be woken."""
        self.move(GateState.REFUSED, generation, status, why)

    def refusal(self) -> AgentAsleep:
        """The error for a request of an agent that will not be woken."""
        return not_awake(self.status, self.why)

    def move(self, state: GateState, generation: int, status: str, why: str = "") -> None:
        """The daemon's word on where the gate stands; an older generation is ignored."""
        if generation < self.generation:
            return
        self.generation = generation
        self.status, self.why = status, why
        self.state = state
        self._waking = False
        if state in (GateState.OPEN, GateState.REFUSED):
            self._outside.wake_ended(self.agent, awake=state is GateState.OPEN)
        if state is GateState.OPEN:
            for request in self._flush():
                request.on_gate_open()
        elif state is GateState.REFUSED:
            for request in self._flush():
                request.on_gate_refused(self.refusal())
        elif self._parked:
            self.wake_again()

    def wake_again(self) -> None:
        """Asks for a wake once more: requests are still parked, and the first ask was lost."""
        if self._parked and not self._waking and self.state in (GateState.CLOSED, GateState.ASLEEP):
            self._waking = True
            self._outside.wake(self.agent, WakeCause.INGRESS if self.ingress else WakeCause.REQUEST)

    def wake_failed(self) -> None:
        """The ask got no answer; the next request, or the next table, asks again."""
        self._waking = False

    def not_woken(self, status: str) -> None:
        """Refuses the parked requests: the agent cannot be woken in its present state. The next request asks again."""
        self._waking = False
        self._outside.wake_ended(self.agent, awake=False)
        for request in self._flush():
            request.on_gate_refused(not_awake(status))

    def link_lost(self) -> None:
        """Handles the loss of the daemon: a gate that was closed for a pause that was never committed opens; requests
        of a sleeping agent stay parked."""
        self._waking = False
        self.owes_quiet = False
        if self.state is GateState.CLOSED:
            self.state = GateState.OPEN
            self._outside.wake_ended(self.agent, awake=False)
            for request in self._flush():
                request.on_gate_open()

    def _flush(self) -> Iterable[Parked]:
        parked, self._parked = list(self._parked), {}
        return parked
