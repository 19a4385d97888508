"""Messages about slots of a llama-server that are parked while an agent sleeps: proxy and daemon."""

from __future__ import annotations

from hive.link.message import LinkMessage

UNPARK_S = 2.0
"""A request waits so long for what its agent left; it is read anew then."""


class AskSlotOf(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, daemon → proxy: the slot whose last user is this agent. Answer: `SlotOf`, or `Failed`: `not_found`."""

    agent: str


class SlotOf(LinkMessage, tag=True, frozen=True, kw_only=True):
    """`server`: the pool's slot, empty for the active backend; `address`: of the server; `slot`: its number there;
    `serial`: another one as soon as any request went there; `group`: the cache group of what is in it."""

    server: str
    address: str
    slot: int
    serial: int
    group: str


class ParkedIs(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Told, daemon → proxy: what this agent left at this server is on the disk, or is no more (`there`).
    `serial`: of its slot when it was saved; 0 where that is not known any more."""

    agent: str
    server: str
    there: bool
    serial: int = 0


class UseParked(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, proxy → daemon: the agent's first request since goes to this slot, which is idle and is kept so. `is_own`:
    what it left is there still; `is_kept`: what is kept may be used. Answer: `Done` once it is there, or
    `Failed` where it is not; with either, what was on the disk is gone."""

    agent: str
    server: str
    address: str
    slot: int
    serial: int
    group: str
    is_own: bool = False
    is_kept: bool = True


class ParkedOver(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Told, daemon → proxy: nothing comes to the slot any more that was asked for by the `UseParked` of this serial."""

    server: str
    slot: int
    serial: int
