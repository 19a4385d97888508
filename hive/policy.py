"""The one place that permits: `may(caller, act, object)`, for the proxy and the API alike. Pure."""

from __future__ import annotations

from enum import StrEnum

from hive.domain import Caller, CallerKind, Role


class Act(StrEnum):
    """An act of a caller; the object is a model's name, or the request to the API.

    A model is used, and seen in a list. At the API one reads metrics, looks, steers agents, or administers Hive itself.
    """

    USE = "use"
    SEE = "see"
    SCRAPE = "scrape"
    LOOK = "look"
    STEER = "steer"
    ADMINISTER = "administer"


USE, SEE = Act.USE, Act.SEE
LEAST = {
    Act.SCRAPE: Role.SCRAPER,
    Act.LOOK: Role.VIEWER,
    Act.STEER: Role.OPERATOR,
    Act.ADMINISTER: Role.ADMIN,
}
"""The least role for each act at the API."""


def may(caller: Caller, act: Act, target: str) -> str | None:
    """None where `caller` may do `act` to `target`, else the reason it may not.

    Models are used and seen by agents of tenants that are not limited to others; `x` and `x:latest` are one model, any
    other spelling is another one. At the API a person may what the role permits; no other caller has a role.

    >>> alice = Caller(CallerKind.AGENT, "a1", tenant="acme", models=frozenset({"llama3.2"}))
    >>> may(alice, Act.USE, "llama3.2:latest") is None
    True
    >>> may(alice, Act.USE, "llama3.2:70b")
    'tenant acme may not use the model "llama3.2:70b"'
    >>> may(alice, Act.STEER, "POST /api/agents/a2/stop")
    'agents may not steer: POST /api/agents/a2/stop'
    >>> ann = Caller(CallerKind.PERSON, "uid:1000", role=Role.OPERATOR)
    >>> may(ann, Act.STEER, "POST /api/agents") is None
    True
    >>> may(ann, Act.ADMINISTER, "DELETE /api/jobs/1")
    'uid:1000 is operator, and DELETE /api/jobs/1 is for admins'
    """
    if act is not USE and act is not SEE:
        return _may_as(caller, act, target)
    if caller.models is not None and target.removesuffix(":latest") not in caller.models:
        return f'tenant {caller.tenant} may not {act} the model "{target[:80]}"'
    return None


def _may_as(caller: Caller, act: Act, target: str) -> str | None:
    least = LEAST[act]
    if caller.kind is not CallerKind.PERSON or caller.role is None:
        return f"{caller.kind}s may not {act}: {target}"
    if caller.role.rank < least.rank:
        return f"{caller.id} is {caller.role}, and {target} is for {least}s"
    return None
