"""The one place that permits: `may(caller, act, object)`, for the proxy and the API alike. Pure."""

from __future__ import annotations

from enum import StrEnum

from hive.domain import Caller, CallerKind


class Act(StrEnum):
    """What a caller may want to do; the object is a model name, an agent id or a setting."""

    USE = "use"
    SEE = "see"
    STEER = "steer"


def may(caller: Caller, act: Act, target: str) -> str | None:
    """None where `caller` may do `act` to `target`, else the reason it may not.

    Models are used and seen by those whose tenant is not limited to others; `x` and `x:latest` are one model, any
    other spelling is another one. Steering belongs to operators (roles come with the API on TCP).

    >>> alice = Caller(CallerKind.AGENT, "a1", tenant="acme", models=frozenset({"llama3.2"}))
    >>> may(alice, Act.USE, "llama3.2:latest") is None
    True
    >>> may(alice, Act.USE, "llama3.2:70b")
    'tenant acme may not use the model "llama3.2:70b"'
    >>> may(alice, Act.STEER, "a2")
    'agents may not steer agents'
    """
    if act is Act.STEER:
        return "agents may not steer agents" if caller.kind is CallerKind.AGENT else None
    if caller.models is not None and target.removesuffix(":latest") not in caller.models:
        return f'tenant {caller.tenant} may not {act} the model "{target[:80]}"'
    return None
