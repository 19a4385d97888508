"""Fields of vLLM's own in a request, which other servers that stand before vLLMs describe as well. Pure."""

from __future__ import annotations

import msgspec

from hive.backends.spec import Fields
from hive.domain import Band
from hive.models.salts import salt

SALT, PRIORITY = "cache_salt", "priority"
BANDS = {Band.HIGH: b"0", Band.NORMAL: b"10", Band.LOW: b"20"}
"""A lower number goes first."""


def salt_field(group: str, tag: str, flushed: tuple[str, ...]) -> Fields:
    """The salt of a group; another one after each flush of it.

    >>> before, after = (salt_field("tenant a", "", (epoch,)) for epoch in ("all 1", "all 2"))
    >>> before[0][0], before == after
    ('cache_salt', False)
    """
    return ((SALT, msgspec.json.encode(salt(group, tag, *flushed))),)


def priority_field(band: Band) -> Fields:
    """The place in its own queue.

    >>> priority_field(Band.HIGH)
    (('priority', b'0'),)
    """
    return ((PRIORITY, BANDS[band]),)
