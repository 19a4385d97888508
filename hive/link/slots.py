"""Messages about the servers of the pool's slots: daemon and helper.

The daemon names a slot by its id, never a command, a path or a unit; the helper starts what root's configuration
describes under that id. It starts and stops, and decides nothing: a server that ended stays ended.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

import msgspec

from hive.link.message import LinkMessage


class SlotGrant(msgspec.Struct, frozen=True, kw_only=True):
    """The memory and the limits a slot's server is started with. `accounts`: UUIDs of GPUs, or `cpu`, each with the
    MiB charged there; `context`: tokens, at most the entry's, 0 for the entry's. `generation`: of the slot with this
    start; a daemon that comes later finds it here."""

    accounts: dict[str, int]
    context: int = 0
    generation: int = 0


def mark_of(grant: Path) -> Path:
    """The file beside a grant to come for which a prepared supervisor may wait: only while it is there.

    >>> mark_of(Path("/run/hive/pool/q-1.json")).as_posix()
    '/run/hive/pool/q-1.awaited'
    """
    return grant.with_suffix(".awaited")


class ProcessState(StrEnum):
    """State of a slot's server, as the helper sees it. `starting`: it does not answer yet."""

    STARTING = "starting"
    SERVING = "serving"
    STOPPING = "stopping"
    ENDED = "ended"


class SlotProcess(msgspec.Struct, frozen=True, kw_only=True):
    """The server of one slot. `pid`: of its supervisor, 0 once it has ended; `pids`: all of its processes.

    `run`: a name of this start, another one for each; `age_s`: since it began; `socket`: where it listens, empty for
    the slot's own place. `bytes`: anonymous and shared memory of the host now, `peak_bytes`: the most seen, both None
    where unknown; `cpu_s`: used by all its processes. After the end: `exit_code`, `why` (the reason in words),
    `was_oom` (the kernel killed it for memory), `last` (its last lines).

    A model of Ollama has no process of its own: `gpu_bytes` is what Ollama says that it holds on GPUs, None for all
    others. `was_dropped`: Ollama gave it up by itself, or is gone, which is no crash of the model's.
    """

    id: str
    run: str
    state: ProcessState
    pid: int = 0
    pids: list[int] = []
    age_s: float = 0.0
    socket: str = ""
    grant: SlotGrant | None = None
    bytes: int | None = None
    peak_bytes: int | None = None
    cpu_s: float = 0.0
    exit_code: int | None = None
    why: str = ""
    was_oom: bool = False
    last: list[str] = []
    gpu_bytes: int | None = None
    was_dropped: bool = False


class SlotStart(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Start the server of this slot. Answer: `SlotIsRunning` once it has begun; `SlotMoved` tells when it serves.

    Where it runs already nothing is started, and the answer is what runs. Raises NotFound for an id that root's
    configuration does not know.
    """

    id: str
    grant: SlotGrant


class SlotPrepare(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Have a supervisor of this slot wait, begun and without a grant, so that its start takes less time; the one
    of any other slot that waits is ended. Empty: none waits. Answer: `Done` once it has begun.

    It ends by itself where it is not asked for again in time. Raises NotFound as `SlotStart`.
    """

    id: str


class SlotStop(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. SIGTERM to the server of this slot, after `grace_s` SIGKILL to all of it. Answer: `Done` once nothing of it
    is left, also where nothing was there."""

    id: str
    grace_s: float = 10.0


class AskSlots(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. Every slot with a server, or with one that ended and was not told of. Answer: `SlotsRunning`."""


class SlotIsRunning(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `SlotStart`."""

    process: SlotProcess


class SlotsRunning(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `AskSlots`."""

    processes: list[SlotProcess]


class SlotMoved(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Helper → daemon: this slot's server is now in another state."""

    process: SlotProcess


class AskServerProgram(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. The program of the server that is this process, which began at `start_ticks` since boot. Answer:
    `ServerProgramIs`. Raises NotFound for a process that is gone, or is not of the servers' user."""

    pid: int
    start_ticks: int


class ServerProgramIs(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `AskServerProgram`: size, time of change and number of its file; `options`: words and variables by
    which what is in a slot differs."""

    size: int
    mtime_ns: int
    inode: int
    options: list[str]


class AskSlotLog(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask. The last lines that the server of this slot wrote. Answer: `BackendLog`."""

    id: str
    lines: int
