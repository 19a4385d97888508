"""One template as the helper holds it: the dialogue with its fork server, and the children that wait to be released.

A template is never believed. It hands over a pidfd, not a number; what the process is, the kernel says, and the caller
looks before `release`. A child that is not released ends by itself with 125: its socket is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from hive.errors import DependencyDown, HiveError, NotSupported, TimedOut, WrongState
from hive.host.process import Identity, identify, wait_until_over
from hive.link.specs import TemplateSpec
from hive.runtimes.entering import readable
from hive.runtimes.template_check import OpenFile, pid_of

log = logging.getLogger("hive.sandbox")

PACKET_BYTES = 64 * 1024
IMPORTS_S = 120.0
"""From the start of a template until it is ready: torch takes 20 s on a slow disk."""
FORK_S = 10.0
"""From asking for a child until it has set itself up: 20 ms, more on a busy machine."""
END_S = 2.0


class StartOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The first message to a fork server: what it makes of itself.

    `script`: empty, or the one that it runs until `hive.ready()`. `user_namespace`: it enters one of its own and waits
    for `mapped`; `own_network`: with an empty network besides.
    `filter`: as in `ForkOrder`, for itself, before its first import.
    """

    imports: list[str]
    warm: list[str]
    script: str = ""
    user_namespace: bool = False
    own_network: bool = False
    pin: bool = False
    filter: str | None = None


class ForkOrder(msgspec.Struct, frozen=True, kw_only=True):
    """A child that is to be made. `run` names it; `argv`: FILE, `-m` or `-c` with what follows; `env`: complete.
    `limits`: (RLIMIT_…, soft, hard).

    `filter`: a seccomp program in base64 (`struct sock_filter`s), loaded last before the child says that it is there.
    `place`: what hive/templates/unit_setup.py does besides, with the descriptors that come with it.
    """

    run: str
    argv: list[str]
    env: dict[str, str]
    cwd: str
    uid: int | None = None
    gid: int | None = None
    umask: int = 0o77
    limits: list[tuple[int, int, int]] = []
    own_network: bool = False
    filter: str | None = None
    place: dict[str, Any] | None = None


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A fork server's word that it is ready. All of it is its own claim, shown and never relied upon.

    `sources`: its script, and the modules beside that which it has imported.
    """

    threads: int = 1
    imports_s: float = 0.0
    python: str = ""
    packages: list[str] = []
    sources: list[str] = []
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
        """The reason why no template of this spec can be run here, in words; empty where it can."""

    def order(self, spec: TemplateSpec) -> StartOrder:
        """The first message to its fork server."""

    async def start(self, spec: TemplateSpec, control: socket.socket) -> TemplateProcess:
        """Starts the fork server with `spec.python`, `control` being the descriptor that it is told.

        The caller closes `control`. Raises HiveError.
        """


class WaitingChild:
    """A process that a template made, which waits until it is released; see template_check.py for what is looked at.

    `pidfd` came from the child itself; `pid` is what the kernel says it stands for. `socket`: its end of the
    socket, to be found among its descriptors.
    """

    def __init__(self, main: Identity, pidfd: int, line: socket.socket, its: OpenFile) -> None:
        self.main = main
        self.pid = main.pid
        self.pidfd = pidfd
        self.socket = its
        self._line = line

    def __repr__(self) -> str:
        return f"<WaitingChild {self.pid}>"

    async def release(self) -> None:
        """Lets it run the script. Raises WrongState where it has ended, or said something else meanwhile."""
        if has_ended(self.pidfd) or select.select([self._line], [], [], 0)[0]:
            raise WrongState("it did not wait for its release")
        try:
            self._line.send(b'{"go": {}}')
        except OSError as error:
            raise WrongState(f"it does not hear: {error.strerror}") from error

    def kill(self) -> None:
        """SIGKILL, by the pidfd."""
        if self.pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    async def end(self) -> None:
        """Kills it and waits until it has ended: only then its control group is free for another."""
        self.kill()
        await wait_until_over(lambda: self.pidfd < 0 or has_ended(self.pidfd), END_S)

    def take_pidfd(self) -> int:
        """The pidfd, the caller's from then on."""
        taken, self.pidfd = self.pidfd, -1
        return taken

    def close(self) -> None:
        """Closes its socket (not released, it ends by itself) and the pidfd, unless that was taken."""
        self._line.close()
        if self.pidfd >= 0:
            os.close(self.take_pidfd())


class Template:
    """One fork server that is ready."""

    def __init__(self, spec: TemplateSpec, process: TemplateProcess, control: socket.socket, ready: Ready) -> None:
        self.spec = spec
        self.process = process
        self.ready = ready
        self.since = time.time()
        self._control = control

    def __repr__(self) -> str:
        return f"<Template {self.spec.name} {self.process.main.pid}{'' if self.is_alive() else ' ended'}>"

    @classmethod
    async def start(cls, spec: TemplateSpec, places: TemplatePlaces) -> Template:
        """Starts it and waits until it is ready. Raises HiveError with a sentence that says why it is not."""
        if why_not := places.why_not(spec):
            raise NotSupported(why_not)
        control, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        control.setblocking(False)
        try:
            with its:
                process = await places.start(spec, its)
        except BaseException:
            control.close()
            raise
        try:
            async with asyncio.timeout(IMPORTS_S):
                ready = await _until_ready(control, process, places.order(spec))
        except BaseException as error:
            control.close()
            await process.kill()
            words = process.last_words()
            process.close()
            if isinstance(error, TimeoutError):
                late = f": {spec.script} has not called hive.ready()" if spec.script else ""
                raise TimedOut(f"it was not ready within {IMPORTS_S:g} s{late}{_said(words)}") from error
            if isinstance(error, EOFError | OSError):
                raise DependencyDown(f"it ended before it was ready{_said(words)}") from error
            raise
        return cls(spec, process, control, ready)

    def is_alive(self) -> bool:
        """Whether it can make children; False once its process has ended, or `end` was called."""
        return self._control.fileno() >= 0 and not has_ended(self.process.ended_fd)

    async def fork(self, order: ForkOrder, *, log_fd: int, fds: Sequence[int] = ()) -> WaitingChild:
        """A child that has set itself up and waits. Its stdout and stderr are `log_fd`, its stdin /dev/null.

        Raises NotSupported for an order that is too long, HiveError by the child's own word, and `Distrusted` where the
        template is silent, has ended, or says what it should not; then no child is left.
        """
        packet = msgspec.json.encode({"fork": order})
        if len(packet) > PACKET_BYTES:
            raise NotSupported(f"its environment and arguments are longer than {PACKET_BYTES} bytes")
        line, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        line.setblocking(False)
        try:
            with its:
                end = OpenFile.of_descriptor(its.fileno())
                socket.send_fds(self._control, [packet], [log_fd, its.fileno(), *fds])
            async with asyncio.timeout(FORK_S):
                content, descriptors = await _hear(line)
            return _waiting(content, descriptors, line, end)
        except BaseException as error:
            line.close()
            if isinstance(error, TimeoutError | BlockingIOError):
                raise Distrusted(f"it made no child within {FORK_S:g} s") from error
            if isinstance(error, EOFError | OSError):
                raise Distrusted("it ended, or its child did") from error
            raise

    async def end(self) -> None:
        """Ends it; its children go on."""
        if self._control.fileno() >= 0:
            self._control.close()
            await self.process.kill()
            self.process.close()


class Distrusted(DependencyDown):
    """A template that does not do what it was asked."""


async def _until_ready(control: socket.socket, process: TemplateProcess, order: StartOrder) -> Ready:
    control.send(msgspec.json.encode({"start": order}))
    if order.user_namespace:
        _one_of(await _hear(control), "unshared")
        await process.map_users()
        control.send(b'{"mapped": {}}')
    try:
        return msgspec.convert(_one_of(await _hear(control), "ready"), Ready)
    except msgspec.ValidationError as error:
        raise Distrusted(f"its answer is none: {error}") from error


def _one_of(heard: tuple[dict[str, Any], list[int]], word: str) -> Any:
    content, descriptors = heard
    for fd in descriptors:
        os.close(fd)
    if "failed" in content:
        raise HiveError(_sentence(content["failed"]))
    if word not in content:
        raise Distrusted(f"it did not say {word}")
    return content[word]


def _waiting(content: dict[str, Any], descriptors: list[int], line: socket.socket, its: OpenFile) -> WaitingChild:
    """Of what a child said only the descriptor counts: the kernel says whom it stands for."""
    main = None
    with contextlib.suppress(WrongState):
        main = identify(pid_of(descriptors[0])) if len(descriptors) == 1 else None
    if main is not None and "failed" not in content:
        return WaitingChild(main, descriptors[0], line, its)
    for fd in descriptors:
        os.close(fd)
    if "failed" in content:
        raise HiveError(_sentence(content["failed"]))
    raise Distrusted("its child did not hand over itself")


async def _hear(sock: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The next packet and what came with it. Raises EOFError, Distrusted for one that is no object of JSON."""
    while True:
        await readable(sock.fileno())
        with contextlib.suppress(BlockingIOError):
            data, descriptors, _, _ = socket.recv_fds(sock, PACKET_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
            break
    if not data:
        raise EOFError
    try:
        return msgspec.json.decode(data, type=dict[str, Any]), list(descriptors)
    except msgspec.MsgspecError as error:
        for fd in descriptors:
            os.close(fd)
        raise Distrusted("it says what is no JSON") from error


def has_ended(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def _sentence(said: object) -> str:
    """The words of somebody else, fit for a log line and a terminal."""
    return "".join(each if each.isprintable() else " " for each in str(said))[:500]


def _said(words: str) -> str:
    return f"; it said: {_sentence(words)}" if words else ""
