"""Grants of leases as the daemon sends them: what the helper makes of one is a part of paths and of a unit's name."""

from __future__ import annotations

import re

from hive.errors import BadRequest
from hive.link.leases import LeaseGrant

LEASE_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
ACCOUNT = re.compile(r"cpu|(?:GPU|MIG)-[A-Za-z0-9-]{1,80}")
ACCOUNTS_MAX = 64
NUMBER_MAX = 2**31 - 1
NONCE = re.compile(r"[A-Za-z0-9_-]{16,128}")
GRACE_MAX_S = 3600.0
WAIT_MAX_S = 3600.0
WHY_MAX = 300


def check_lease_id(id: str) -> None:
    """Raises BadRequest."""
    if LEASE_ID.fullmatch(id) is None:
        raise BadRequest(f"{id[:64]!r} is no id of a lease: 1 to 32 of a-z, 0-9 and -")


def check_grace(grace_s: float) -> None:
    """Raises BadRequest."""
    if not 0 <= grace_s <= GRACE_MAX_S:
        raise BadRequest(f"a grace of {grace_s:g} s is not from 0 to {GRACE_MAX_S:g}")


def check_lease(grant: LeaseGrant, wait_s: float) -> None:
    """Raises BadRequest.

    >>> check_lease(LeaseGrant(id="l-1", token=1, nonce="a" * 32, uid=1000, accounts={"cpu": 700}), 30)
    >>> check_lease(LeaseGrant(id="../l", token=1, nonce="a" * 32, uid=1000, accounts={}), 30)
    Traceback (most recent call last):
    ...
    hive.errors.BadRequest: '../l' is no id of a lease: 1 to 32 of a-z, 0-9 and -
    """
    check_lease_id(grant.id)
    check_grace(grant.grace_s)
    if NONCE.fullmatch(grant.nonce) is None:
        raise BadRequest("a nonce has 16 to 128 of A-Z, a-z, 0-9, _ and -")
    if not 0 <= grant.uid < NUMBER_MAX * 2:
        raise BadRequest(f"{grant.uid} is no uid")
    if not 0 < wait_s <= WAIT_MAX_S:
        raise BadRequest(f"a wait of {wait_s:g} s is not up to {WAIT_MAX_S:g}")
    if grant.max_s is not None and not grant.max_s > 0:
        raise BadRequest(f"a lease of {grant.max_s:g} s is none")
    if len(grant.accounts) > ACCOUNTS_MAX:
        raise BadRequest(f"a grant names {len(grant.accounts)} accounts, {ACCOUNTS_MAX} at most")
    for account, mb in grant.accounts.items():
        if ACCOUNT.fullmatch(account) is None:
            raise BadRequest(f"{account[:100]!r} is no account: `cpu`, or the UUID of a GPU")
        if not 0 <= mb <= NUMBER_MAX:
            raise BadRequest(f"{mb} MiB of {account} is not from 0 to {NUMBER_MAX}")


def one_line_of(why: str) -> str:
    """A reason as it goes into logs and onto a terminal: nothing that either would obey.

    >>> one_line_of("ends:\\x1b[2J l-2\\nwaits")
    'ends: [2J l-2 waits'
    """
    return "".join(char if char.isprintable() else " " for char in why)[:WHY_MAX].strip()
