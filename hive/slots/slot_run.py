"""One started server of the pool as its two ways (systemd's units, sessions) show it, and what may be asked of them."""

from __future__ import annotations

import re
from typing import NamedTuple, Protocol

from hive.errors import BadRequest
from hive.link.slots import ProcessState, SlotGrant

SLOT_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?")
ACCOUNT = re.compile(r"cpu|(?:GPU|MIG)-[A-Za-z0-9-]{1,80}")
ACCOUNTS_MAX = 64
NUMBER_MAX = 2**31 - 1
GRACE_MAX_S = 300.0
LAST_LINES = 20
"""Lines of a server's output that are told with its end."""
WHY_LINES = 2
"""Of those, in the reason where the supervisor told none: an error and its hint."""
LINE_MAX = 500


class SlotEnd(NamedTuple):
    """The end of a server; the same as in `SlotProcess`. `exit_code` None: nobody knows it."""

    exit_code: int | None
    why: str
    was_oom: bool
    last: list[str]


class SlotUse(NamedTuple):
    """Processes, memory and CPU time of a server now; the same as in `SlotProcess`."""

    pids: list[int]
    bytes: int | None
    cpu_s: float


class RunningSlot(Protocol):
    """A server that has begun. It outlives whoever started it: only `stop` ends it."""

    run: str
    pid: int
    """Of its supervisor."""
    state: ProcessState
    """At its start, or when it was found: `stopping` also for one whose end is not known yet."""
    grant: SlotGrant | None
    socket: str
    """The place where it listens; empty for the slot's own."""

    def age_s(self) -> float: ...

    def lives(self) -> bool:
        """Whether its supervisor runs."""
        ...

    async def serves(self) -> bool:
        """Returns once it answers, or False once it will not."""
        ...

    async def over(self) -> SlotEnd:
        """Returns once it has ended and nothing of it is left."""
        ...

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, after `grace_s` SIGKILL to all of it; returns once nothing is left, also when asked twice.

        Raises TimedOut where SIGKILL does not help.
        """
        ...

    async def look(self) -> SlotUse: ...

    def reaped(self, pid: int, code: int) -> None:
        """Somebody else took the end of `pid`, with this exit code. Ignores other pids."""
        ...

    def let_go(self) -> None:
        """The helper leaves; the server goes on."""
        ...


class SlotStarter(Protocol):
    """One way to run servers."""

    async def prepare(self, slot: str) -> RunningSlot:
        """Returns once a supervisor has begun that waits for its grant: it has been marked, and has no server yet.

        Raises HiveError; then nothing is left.
        """
        ...

    async def start(self, slot: str, grant: SlotGrant, prepared: RunningSlot | None = None) -> RunningSlot:
        """Returns once it has begun; its grant has been written. Raises HiveError; then nothing is left.

        `prepared`: goes on as this start; its grant is written after that.
        """
        ...

    async def find(self, granted: set[str], awaited: set[str]) -> dict[str, RunningSlot]:
        """The servers that an earlier helper started, and those of `granted` that have ended since.

        Supervisors of `awaited`, which wait for a grant that nobody writes any more, are ended.
        """
        ...

    async def log(self, slot: str, lines: int) -> str:
        """The last lines of its last start."""
        ...


def check_id(slot: str) -> None:
    """It becomes a part of paths and of a unit's name. Raises BadRequest."""
    if SLOT_ID.fullmatch(slot) is None:
        raise BadRequest(f"{slot[:64]!r} is no id of a slot: 1 to 32 of a-z, 0-9 and -")


def check_grant(grant: SlotGrant) -> None:
    """It becomes a part of a server's environment and command line. Raises BadRequest.

    >>> check_grant(SlotGrant(accounts={"cpu": 700}))
    >>> check_grant(SlotGrant(accounts={"GPU-1 --evil": 1}))
    Traceback (most recent call last):
    ...
    hive.errors.BadRequest: 'GPU-1 --evil' is no account: `cpu`, or the UUID of a GPU
    """
    if len(grant.accounts) > ACCOUNTS_MAX:
        raise BadRequest(f"a grant names {len(grant.accounts)} accounts, {ACCOUNTS_MAX} at most")
    for account, mb in grant.accounts.items():
        if ACCOUNT.fullmatch(account) is None:
            raise BadRequest(f"{account[:100]!r} is no account: `cpu`, or the UUID of a GPU")
        if not 0 <= mb <= NUMBER_MAX:
            raise BadRequest(f"{mb} MiB of {account} is not from 0 to {NUMBER_MAX}")
    if not 0 <= grant.context <= NUMBER_MAX:
        raise BadRequest(f"a context of {grant.context} tokens is not from 0 to {NUMBER_MAX}")


def last_of(text: str) -> list[str]:
    """The last lines with something in them, none too long for a message.

    >>> last_of("a\\n\\nb\\n")
    ['a', 'b']
    """
    return [line[:LINE_MAX] for line in text.splitlines() if line.strip()][-LAST_LINES:]
