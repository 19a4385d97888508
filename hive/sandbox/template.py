"""One template as the helper holds it: the dialogue with its fork server, and the children that wait to be released.

A template is never believed. It hands over a pidfd, not a number; what the process is, the kernel says, and the caller
looks before `release`. A child that is not released ends by itself with 125: its socket is closed.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hive.host.process import Identity
from hive.link.specs import TemplateSpec

log = logging.getLogger("hive.sandbox")

PROGRAM = Path(__file__).parents[1] / "templates" / "fork_server.py"
"""The fork server, run by the template's own Python."""
CONTROL_FD = 3
"""The fork server's end of its socket."""
PACKET_BYTES = 64 * 1024
IMPORTS_S = 120.0
"""From the start of a template until it is ready: torch takes 20 s on a slow disk."""
FORK_S = 10.0
"""From asking for a child until it has set itself up: 20 ms, more on a busy machine."""
END_S = 2.0


class StartOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a fork server: what it makes of itself.

    `user_namespace`: it enters one of its own and waits for `mapped`; `own_network`: with an empty network besides.
    """

    imports: list[str]
    warm: list[str]
    user_namespace: bool = False
    own_network: bool = False
    pin: bool = False


class ForkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A child that is to be made. `run` names it; `argv`: FILE, `-m` or `-c` with what follows; `env`: complete.

    `filter`: a seccomp program in base64 (`struct sock_filter`s), loaded last before the child says that it is there.
    `confine`: what hive/templates/confine.py does besides, which gets the descriptors after the first three.
    """

    run: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    uid: int | None = None
    gid: int | None = None
    umask: int = 0o77
    own_network: bool = False
    files: int | None = None
    filter: str | None = None
    confine: dict[str, Any] | None = None


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A fork server's word that it is ready. All of it is its own claim, shown and never relied upon."""

    threads: int = 1
    imports_s: float = 0.0
    python: str = ""
    packages: list[str] = []
    notes: list[str] = []


class TemplateProcess(Protocol):
    """The process of one template, where it runs: a child of the helper, or a unit of systemd."""

    main: Identity
    ended_fd: int
    """A pidfd: readable once it ended."""
    group: Path | None
    """Its control group, None where it has none."""

    async def map_users(self) -> None:
        """Maps its block of uids into the user namespace it entered. Raises HiveError."""

    def last_words(self) -> str:
        """The last line it printed; empty where that is not known."""

    async def kill(self) -> bool:
        """SIGKILL to all of it, never to its children; whether nothing of it is left."""

    def close(self) -> None:
        """After its end, or when the helper leaves: gives back what was held."""


class TemplatePlaces(Protocol):
    """A way to run templates on this host."""

    def why_not(self, spec: TemplateSpec) -> str:
        """Why no template of this spec can be run here, in words; empty where it can."""

    def order(self, spec: TemplateSpec) -> StartOrder:
        """What the fork server is told first."""

    async def start(self, spec: TemplateSpec, control: socket.socket) -> TemplateProcess:
        """Starts `spec.python PROGRAM` with `control` as descriptor 3. The caller closes `control`. Raises HiveError."""


class WaitingChild:
    """A process that a template made, which waits until it is released; see why_not_release (template_check.py).

    `pidfd` came from the child itself; `pid` is what the kernel says it stands for.
    """

    def __init__(self, pid: int, pidfd: int, line: socket.socket) -> None:
        raise NotImplementedError

    pid: int
    pidfd: int
    main: Identity
    socket_inode: int
    """Of its end of the socket, to be found among its descriptors."""

    async def release(self) -> None:
        """Lets it run the script. Raises WrongState where it has ended, or said something else meanwhile."""
        raise NotImplementedError

    def kill(self) -> None:
        """SIGKILL, by the pidfd."""
        raise NotImplementedError

    def take_pidfd(self) -> int:
        """The pidfd, the caller's from then on."""
        raise NotImplementedError

    def close(self) -> None:
        """Closes its socket (not released, it ends by itself) and the pidfd, unless that was taken."""
        raise NotImplementedError


class Template:
    """One fork server that is ready."""

    spec: TemplateSpec
    process: TemplateProcess
    ready: Ready
    since: float

    @classmethod
    async def start(cls, spec: TemplateSpec, places: TemplatePlaces) -> Template:
        """Starts it and waits until it is ready. Raises HiveError with a sentence that says why it is not."""
        raise NotImplementedError

    def is_alive(self) -> bool:
        raise NotImplementedError

    async def fork(self, order: ForkOrder, *, log_fd: int, fds: Sequence[int] = ()) -> WaitingChild:
        """A child that has set itself up and waits. Its stdout and stderr are `log_fd`, its stdin /dev/null.

        Raises HiveError: `failed` by its own word, TimedOut, DependencyDown where the template has ended or says what
        it should not; then no child is left.
        """
        raise NotImplementedError

    async def end(self) -> None:
        """Ends it; its children go on."""
        raise NotImplementedError
