"""The caller of the API, and the caller's rights in Hive."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from hive.domain import Caller, CallerKind, Role
from hive.errors import NotPermitted, Unauthorized
from hive.host.accounts import NAMES, Accounts
from hive.policy import Act, may

ACTS = {
    Role.SCRAPER: Act.SCRAPE,
    Role.VIEWER: Act.LOOK,
    Role.OPERATOR: Act.STEER,
    Role.ADMIN: Act.ADMINISTER,
}
"""The act that a row for this role permits."""
INTERNAL, API_TOKEN = "internal", "api-token"
"""Names of the tokens that are no rows of the table."""
MAKE_ONE = "an admin makes one: hive token create NAME --role viewer"
_BEARER = re.compile(rb"(?i:bearer) +([!-~]+)")
"""RFC 6750, section 2.1, but for the characters: HIVE_INTERNAL_TOKEN may have any. The scheme is in any case (RFC 9110,
section 11.1)."""


class SocketPeer(NamedTuple):
    """A process at the other end of a unix socket, as the kernel recorded it at connect."""

    uid: int
    groups: frozenset[int]


class Person(NamedTuple):
    """A caller with a role. `name` is the actor in the audit table."""

    name: str
    role: Role


def person_of(peer: SocketPeer | None, own_uid: int, accounts: Accounts) -> Person:
    """Root and the user Hive runs as are admin; where services are users of their own the groups of people count too.

    `peer` None: the kernel did not say. Raises NotPermitted.

    >>> installed = Accounts(daemon=900, proxy=901, services=901, operators=900, admins=905)
    >>> person_of(SocketPeer(1000, frozenset({1000, 900})), 900, installed)
    Person(name='uid:1000', role=<Role.OPERATOR: 'operator'>)
    >>> person_of(SocketPeer(0, frozenset({0})), 900, installed).role
    <Role.ADMIN: 'admin'>
    """
    if peer is None:
        raise NotPermitted("an unknown user may not steer this Hive", hint=_hint(own_uid, accounts))
    if peer.uid in (0, own_uid) or accounts.admins in peer.groups:
        return Person(f"uid:{peer.uid}", Role.ADMIN)
    # The proxy is nobody here, whatever groups it is put into.
    if accounts.operators in peer.groups and peer.uid != accounts.proxy:
        return Person(f"uid:{peer.uid}", Role.OPERATOR)
    raise NotPermitted(f"uid {peer.uid} may not steer this Hive", hint=_hint(own_uid, accounts))


def bearer_of(fields: Sequence[bytes]) -> str:
    """The token in the values of a request's Authorization fields. Raises Unauthorized.

    >>> bearer_of([b"Bearer hive_abc"])
    'hive_abc'
    """
    if not fields:
        raise Unauthorized("the API on TCP wants a token", hint=f"Authorization: Bearer TOKEN; {MAKE_ONE}")
    found = _BEARER.fullmatch(fields[0])
    if len(fields) > 1 or found is None:
        raise Unauthorized("there is no token in this Authorization field", hint="Authorization: Bearer TOKEN")
    return found[1].decode()


def need(person: Person, role: Role) -> None:
    """Raises NotPermitted where `person` may not do what takes this role. A user is called by the name learnt last.

    >>> need(Person("token:ci", Role.VIEWER), Role.OPERATOR)
    Traceback (most recent call last):
    hive.errors.NotPermitted: token:ci is viewer, and this is for operators
    """
    caller = Caller(CallerKind.PERSON, NAMES.of(person.name) or person.name, role=person.role)
    if reason := may(caller, ACTS[role], "this"):
        hint = "ask as root, or as a member of the group hive-admin, or with a token of that role"
        raise NotPermitted(reason, hint=hint if role is Role.ADMIN else f"a token of the role {role} may")


def _hint(own_uid: int, accounts: Accounts) -> str:
    if accounts.operators is None:
        return f"ask as root or as uid {own_uid}"
    return "ask as root, or be made a member: sudo usermod -aG hive YOU, then log in again"
