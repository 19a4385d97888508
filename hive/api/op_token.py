"""The word of the signers, as a request brings it: a header, or a member of the body where the runner API says so."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.requests import Request

from hive.api.caller import SOCKET, actor, note, origin
from hive.api.params import BODY
from hive.audit.approval import Approval
from hive.control.governance import GovernedAct
from hive.errors import BadRequest, NotPermitted, OpTokenInvalid

if TYPE_CHECKING:
    from hive.api.services import Services

OP_TOKEN, BREAK_GLASS = "X-Hive-Op-Token", "X-Hive-Break-Glass"
"""Headers. The second one is root's, on the unix socket."""
SAYS = {
    OP_TOKEN: "The word of the operation's signers, as `hive op submit` sends it, where governance.toml wants it.",
    BREAK_GLASS: "A reason to do it without their word: root on the unix socket alone, and noted.",
}
PATTERNS = {OP_TOKEN: re.compile("^[!-~]+$"), BREAK_GLASS: re.compile("^[!-~]([ -~]*[!-~])?$")}
"""Of the values, as the API's description has them."""
MEMBER = "verifiedOpToken"
"""The member of a body of the runner API; all others are what is signed."""


async def approved(services: Services, request: Request, operation: str, params: Mapping[str, Any]) -> Approval:
    """The approval of an order of Hive's own API; it is noted in the order's row. Raises as `Governor.approve`."""
    reason = _only(request, BREAK_GLASS)
    if reason and origin(request) != SOCKET:
        raise NotPermitted("only root on the unix socket may break the glass")
    act = GovernedAct(operation, params, token=_only(request, OP_TOKEN), break_glass=reason)
    return await _asked(services, request, act)


async def approved_body(
    services: Services, request: Request, operation: str, **of_path: str
) -> tuple[dict[str, Any], Approval]:
    """The params of an order of the runner API, all of its body but the token and what its path names, and its
    approval. There is no breaking of glass. The body is an object, or empty: `body_of` has read it. Raises as
    `Governor.approve`."""
    members = msgspec.json.decode(request.scope[BODY] or b"{}", type=dict[str, msgspec.Raw])
    token = members.pop(MEMBER, None)
    params = {**of_path, **{name: msgspec.json.decode(raw) for name, raw in members.items()}}
    act = GovernedAct(operation, params, token="" if token is None else _text(token))
    return params, await _asked(services, request, act)


async def _asked(services: Services, request: Request, act: GovernedAct) -> Approval:
    approval = await services.governance.approve(act, actor(request))
    if approval.by:
        note(request, approved_by=approval.by)
    return approval


def _only(request: Request, name: str) -> str:
    """The value of a header that is there once; empty where it is not. Raises BadRequest."""
    found = request.headers.getlist(name)
    if len(found) > 1:
        raise BadRequest(f"{name}: given {len(found)} times")
    if not found:
        return ""
    if not PATTERNS[name].fullmatch(value := found[0].strip()):
        raise BadRequest(f"{name}: printable ASCII characters are expected, one at least")
    return value


def _text(token: msgspec.Raw) -> str:
    """The token in a member: text, or an object as the original form has it, byte for byte."""
    value = msgspec.json.decode(token)
    if value is None or isinstance(value, str):
        return value or ""
    if not isinstance(value, dict):
        raise OpTokenInvalid(f"{MEMBER} is neither text nor an object")
    return bytes(token).decode().strip()
