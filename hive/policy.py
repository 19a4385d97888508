"""The one place that permits: `may(caller, act, object)`, for the proxy and the API alike. Pure."""

from __future__ import annotations

from enum import StrEnum

from hive.domain import Caller, CallerKind


class Act(StrEnum):
    """What a caller may want to do; the object is a model name, an agent id or a setting."""

    USE = "use"
    SEE = "see"
    STEER = "steer"


def may(caller: Caller, act: Act, target: str) -> str | None:  # noqa: ARG001 - models get owners with issue B
    """None where `caller` may do `act` to `target`, else the reason it may not.

    Agents may use models and see them; steering belongs to operators (roles come with the API on TCP).

    >>> alice = Caller(CallerKind.AGENT, "a1")
    >>> may(alice, Act.USE, "llama3.2") is None
    True
    >>> may(alice, Act.STEER, "a2")
    'agents may not steer agents'
    """
    if act is Act.STEER and caller.kind is CallerKind.AGENT:
        return "agents may not steer agents"
    return None
