"""The gate of one inference server: closed while it is switched, loaded, or not there. The daemon closes and opens it.

Requests wait for it in the line of its slot, which has no places then, so that no request loses its position. Requests
that otherwise take no place wait there too. The gate only says how long they may wait, and makes the refusal of a
request that finds no position in the line, whose wait cannot hold, or that has waited in vain. Pure.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from hive.errors import BackendSwitching, ModelCold, NotApproved, Saturated

SWITCHED_S = 5.0
"""`Retry-After` where there is no room to wait: a llama-server is switched to within a second or two, vLLM in 30 s."""
RETRY_MAX_S = 120.0
"""Longest `Retry-After` of a cold model (decision 034)."""
UNKNOWN_S = 30.0
"""`Retry-After` for a model that nobody can say when to expect."""


class Switching(NamedTuple):
    """The server is switched. `until`: the end of all waits, on the monotonic clock. `towards`: what it becomes."""

    until: float
    towards: str


class Cold(NamedTuple):
    """The model is not loaded. Each request waits for at most `wait_s` of its own.

    `ready_at`: when it is expected, on the monotonic clock; None if that cannot be said yet. `never`: why there is no
    end to be seen, a clause; such a wait is refused at once, `unapproved`: for want of a signed order. `is_lost`:
    nothing listens at its address any more, and the daemon has not said so yet.
    """

    model: str
    wait_s: float
    ready_at: float | None = None
    never: str = ""
    is_lost: bool = False
    unapproved: bool = False


class SlotGate:
    """One server's gate.

    >>> gate = SlotGate()
    >>> gate.close(Switching(until=60.0, towards="vllm")); gate
    <SlotGate closed towards vllm>
    >>> gate.refusal(10.0).message
    'the inference server is being switched to vllm, and too many requests wait for it'
    >>> gate.close(Cold("qwen3", wait_s=300.0, ready_at=47.0)); gate.until_for(10.0), gate.why_in_vain(10.0)
    (310.0, None)
    >>> gate.refusal(10.0).message, gate.refusal(10.0).retry_after_s
    ('the model qwen3 is not loaded yet, and too many requests wait for it', 37.0)
    """

    __slots__ = ("_reason", "is_closed", "is_cold")

    def __init__(self) -> None:
        self._reason: Switching | Cold | None = None
        self.is_closed = False
        self.is_cold = False
        """True while it is closed because the model is not loaded, so that a request for it is a demand to load it."""

    def __repr__(self) -> str:
        match self._reason:
            case None:
                return "<SlotGate open>"
            case Switching(towards=towards):
                return f"<SlotGate closed towards {towards}>"
            case Cold(model=model):
                return f"<SlotGate closed, {model} is cold>"

    @property
    def is_lost(self) -> bool:
        """Whether it is closed only because nothing listens there; the daemon's last word is that it is open."""
        return isinstance(self._reason, Cold) and self._reason.is_lost

    @property
    def reason(self) -> Switching | Cold | None:
        """The reason that it is closed; None while it is open."""
        return self._reason

    def close(self, reason: Switching | Cold) -> None:
        """Closes the gate. If it is closed already, waiting requests wait by the new reason."""
        self._reason = reason
        self.is_closed, self.is_cold = True, isinstance(reason, Cold)

    def open(self) -> None:
        self._reason = None
        self.is_closed = self.is_cold = False

    def until_for(self, since: float) -> float:
        """The end of the wait of a request that began to wait at `since`; 0 where the gate is open."""
        match self._reason:
            case None:
                return 0.0
            case Switching(until=until):
                return until
            case Cold(wait_s=wait_s):
                return since + wait_s

    def why_in_vain(
        self, now: float, since: float | None = None, by: float = math.inf
    ) -> ModelCold | NotApproved | None:
        """The refusal of a wait that cannot hold: of one that began at `since`, else of one that begins now. `by`: the
        end of all that the request may take.

        >>> gate = SlotGate()
        >>> gate.close(Cold("qwen3", wait_s=300.0, ready_at=47.0))
        >>> gate.why_in_vain(10.0, 5.0, by=30.0).message
        'the model qwen3 is not loaded yet: it is expected in 37 s, and the request has 20 s left'
        """
        reason = self._reason
        if not isinstance(reason, Cold):
            return None
        if reason.never:
            return _never(reason, now)
        if reason.ready_at is not None and reason.ready_at > (now if since is None else since) + reason.wait_s:
            left_s = reason.ready_at - now
            why = f"it is expected in {left_s:.0f} s, and a request waits for at most {reason.wait_s:g} s"
            return ModelCold(f"{_what(reason)}: {why}", retry_after_s=_retry_after_s(reason, now))
        if reason.ready_at is not None and reason.ready_at > by:
            why = (
                f"it is expected in {reason.ready_at - now:.0f} s, and the request has {max(0.0, by - now):.0f} s left"
            )
            return ModelCold(f"{_what(reason)}: {why}", retry_after_s=_retry_after_s(reason, now))
        return None

    def refusal(self, now: float, since: float | None = None) -> Saturated | NotApproved:
        """The refusal of a request that finds no position in the line, or that has waited until the end (`since`)."""
        reason = self._reason
        if isinstance(reason, Cold):
            if reason.never:
                return _never(reason, now)
            waited = since is not None and now >= since + reason.wait_s
            why = f"it was not within {reason.wait_s:g} s" if waited else "too many requests wait for it"
            return ModelCold(f"{_what(reason)}, and {why}", retry_after_s=_retry_after_s(reason, now))
        why = "that takes too long" if reason is None or now >= reason.until else "too many requests wait for it"
        return BackendSwitching(f"{_what(reason)}, and {why}", retry_after_s=SWITCHED_S)

    def cut(self) -> Saturated:
        """The error of a request that was at the server and did not end in time."""
        reason = self._reason
        if isinstance(reason, Cold):
            return ModelCold(f"the model {reason.model} gives way to another one, and this did not end in time")
        return BackendSwitching(f"{_what(reason)}, and this did not end in time", retry_after_s=SWITCHED_S)


def _never(reason: Cold, now: float) -> ModelCold | NotApproved:
    """The refusal of a wait without an end to be seen.

    >>> _never(Cold("qwen3", 300.0, never="no signed load of it is on record", unapproved=True), 0.0).code
    'model_not_approved'
    """
    if reason.unapproved:
        return NotApproved(f"{_what(reason)}: {reason.never}")
    return ModelCold(f"{_what(reason)}: {reason.never}", retry_after_s=_retry_after_s(reason, now))


def _what(reason: Switching | Cold | None) -> str:
    if isinstance(reason, Cold):
        return f"the model {reason.model} is not loaded {'any more' if reason.is_lost else 'yet'}"
    return f"the inference server is being switched to {reason.towards if reason is not None else 'another one'}"


def _retry_after_s(reason: Cold, now: float) -> float:
    if reason.ready_at is None:
        return UNKNOWN_S
    return min(RETRY_MAX_S, max(1.0, reason.ready_at - now))
