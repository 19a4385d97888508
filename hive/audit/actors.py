"""Actors as the audit table has them: where each came from, and the name of a person at the time.

No Redis here: orders are written by the API, which loads without it.
"""

from __future__ import annotations

from hive.audit.auth import API_TOKEN, INTERNAL
from hive.host.accounts import NAMES
from hive.store.audit import USER


def origin_of(actor: str) -> str:
    """Origin of an act: a person at the API's socket or on TCP, the proxy, or Hive itself.

    Which address asked on TCP is in the row of the order.

    >>> origin_of("uid:0"), origin_of("token:ci"), origin_of("proxy"), origin_of("idle")
    ('socket', 'tcp', 'proxy', 'hive')
    """
    if actor.startswith("uid:"):
        return "socket"
    if actor.startswith("token:") or actor in (INTERNAL, API_TOKEN):
        return "tcp"
    return "proxy" if actor == "proxy" else "hive"


def user_of(actor: str) -> dict[str, str]:
    """Name of a person, kept beside the number: users are renamed and removed; nothing where none is known.

    >>> user_of("idle")
    {}
    """
    name = NAMES.of(actor)
    return {USER: name} if name else {}
