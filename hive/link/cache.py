"""Message about the prompt cache: the epochs that flushes have raised, told to the proxy."""

from __future__ import annotations

from hive.link.message import LinkMessage


class UseCacheEpochs(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, or told, daemon → proxy. All epochs, by key; `fresh`: names of slots whose servers are to use nothing that
    they keep, empty for the active backend.

    Answer: `Done`. No request is sent from then on that was read with earlier ones.
    """

    numbers: dict[str, int]
    fresh: list[str]
