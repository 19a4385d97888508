"""Messages about adapters: the names that requests may use, and what answers to each: daemon and proxy.

The daemon tells all of them at once, each time: what a name means changes in one step.
"""

from __future__ import annotations

import msgspec

from hive.link.message import LinkMessage


class AdapterRoute(msgspec.Struct, frozen=True, kw_only=True):
    """One adapter by the name that requests use. `base`: the model that it is on.

    `at_server`: the name by which its server knows exactly its weights; `slot`: the slot of the pool with that server,
    empty for the inference server in use. Where `at_server` is empty it is not loaded: `instead` is the model that
    answers then, else it is refused, for a moment only where `is_coming`.
    """

    name: str
    base: str
    at_server: str = ""
    slot: str = ""
    instead: str = ""
    is_coming: bool = False


class AdaptersAre(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Daemon → proxy: every adapter there is. Requests that wait are read again where theirs is another one now."""

    adapters: list[AdapterRoute]


class DrainAdapter(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, daemon → proxy: until no request with this name of an adapter is at the slot (empty: at the server in use),
    for at most `drain_s`. Answer: `AdapterDrained`. Nothing is closed: no name leads there any more."""

    slot: str
    at_server: str
    drain_s: float


class AdapterDrained(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `DrainAdapter`. `left`: requests that are there still."""

    left: int = 0
