"""Messages about leases, memory for programs that are no model: daemon and helper.

The daemon decides who is granted what. The helper alone moves a process into the lease's control group, sees its end,
and ends it; it takes the process from the socket it was asked at, never from a number in a message.
"""

from __future__ import annotations

from enum import StrEnum

import msgspec

from hive.link.message import LinkMessage


class LeaseGrant(msgspec.Struct, frozen=True, kw_only=True):
    """A lease as its holder is let in. `accounts`: UUIDs of GPUs, or `cpu`, each with the MiB charged there. `token`:
    its number, never used again; `nonce`: what the caller shows at lease.sock, valid once. `uid`: the only user that
    may show it. `max_s`: ends it after so long, None for never; `label`: what it is called in lists."""

    id: str
    token: int
    nonce: str
    uid: int
    accounts: dict[str, int]
    max_s: float | None = None
    grace_s: float = 60.0
    label: str = ""


class HolderState(StrEnum):
    """State of a lease's holder, as the helper sees it. `expected`: nobody has shown the nonce yet."""

    EXPECTED = "expected"
    RUNNING = "running"
    ENDING = "ending"
    ENDED = "ended"


class LeaseHolder(msgspec.Struct, frozen=True, kw_only=True):
    """The processes of one lease. `pid`: the one that was let in, 0 before and after; `pids`: all there are.

    `bytes`: anonymous and shared memory of the host now, None if it is not known; `enforced`: how its limit on a GPU is
    kept (`dmem`), empty where it is told and not enforced; `held_by`: `scope`, `cgroup` or `session`, what tells its
    end. `why`: the reason of an end that the helper caused. The helper keeps an ended one until it is forgotten.
    """

    id: str
    token: int
    state: HolderState
    grant: LeaseGrant | None = None
    pid: int = 0
    pids: list[int] = []
    age_s: float = 0.0
    bytes: int | None = None
    enforced: str = ""
    held_by: str = ""
    why: str = ""


class LeaseExpect(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Let the caller in that shows this grant's nonce at lease.sock within `wait_s`. Answer: `Done`;
    `HolderMoved` tells when it is in, or that nobody came (`ended`)."""

    grant: LeaseGrant
    wait_s: float = 30.0


class LeaseEnd(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. SIGTERM (and SIGCONT) to all of this lease, after `grace_s` SIGKILL. Answer: `Done` at once, also where
    nothing is there; `HolderMoved` tells its end."""

    id: str
    why: str
    grace_s: float = 60.0


class LeaseForget(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. The daemon has booked the end of this lease. Answer: `Done`."""

    id: str


class AskLeases(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Every lease the helper knows of. Answer: `LeasesHeld`."""


class LeasesHeld(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `AskLeases`."""

    holders: list[LeaseHolder]


class HolderMoved(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Helper → daemon: the holder of this lease is now in another state."""

    holder: LeaseHolder
