"""Who is at the other end of the API's socket, and whether they may steer Hive."""

from __future__ import annotations

from hive.errors import NotPermitted


def actor_of(peer_uid: int | None, own_uid: int) -> str:
    """The name of the peer in the audit table: root and the user Hive runs as are admin, nobody else is anything.

    `peer_uid` is what the kernel recorded at connect, None where it did not say. Raises NotPermitted.

    >>> actor_of(0, 1000), actor_of(1000, 1000)
    ('uid:0', 'uid:1000')
    """
    if peer_uid is None or peer_uid not in (0, own_uid):
        who = "an unknown user" if peer_uid is None else f"uid {peer_uid}"
        raise NotPermitted(f"{who} may not steer this Hive", hint=f"ask as root or as uid {own_uid}")
    return f"uid:{peer_uid}"
