"""Who is at the other end of the API's socket, and what they may do to Hive."""

from __future__ import annotations

from typing import NamedTuple

from hive.domain import Role
from hive.errors import NotPermitted
from hive.host.accounts import Accounts


class Peer(NamedTuple):
    """A process at the other end of a unix socket, as the kernel recorded it at connect."""

    uid: int
    groups: frozenset[int]


class Person(NamedTuple):
    """Somebody who may do something. `name` is what the audit table says."""

    name: str
    role: Role


def person_of(peer: Peer | None, own_uid: int, accounts: Accounts) -> Person:
    """Root and the user Hive runs as are admin; where services are users of their own the groups of people count too.

    `peer` None: the kernel did not say. Raises NotPermitted.

    >>> installed = Accounts(daemon=900, proxy=901, services=901, operators=900, admins=905)
    >>> person_of(Peer(1000, frozenset({1000, 900})), 900, installed)
    Person(name='uid:1000', role=<Role.OPERATOR: 'operator'>)
    >>> person_of(Peer(0, frozenset({0})), 900, installed).role
    <Role.ADMIN: 'admin'>
    """
    if peer is None:
        raise NotPermitted("an unknown user may not steer this Hive", hint=_hint(own_uid, accounts))
    if peer.uid in (0, own_uid) or accounts.admins in peer.groups:
        return Person(f"uid:{peer.uid}", Role.ADMIN)
    # The proxy is in the group of Redis' socket, which people share: it is nobody here all the same.
    if accounts.operators in peer.groups and peer.uid != accounts.proxy:
        return Person(f"uid:{peer.uid}", Role.OPERATOR)
    raise NotPermitted(f"uid {peer.uid} may not steer this Hive", hint=_hint(own_uid, accounts))


def need(person: Person, role: Role, act: str) -> None:
    """Raises NotPermitted where `person` has not at least this role."""
    if person.role.rank < role.rank:
        raise NotPermitted(
            f"{person.name} is {person.role}, and {act} is for {role}s",
            hint=f"ask as root, or as a member of the group hive-{role}" if role is Role.ADMIN else "",
        )


def _hint(own_uid: int, accounts: Accounts) -> str:
    if accounts.operators is None:
        return f"ask as root or as uid {own_uid}"
    return "ask as root, or be made a member: sudo usermod -aG hive YOU, then log in again"
