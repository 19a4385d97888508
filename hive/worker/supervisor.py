"""Supervision of one server as a service: it tells systemd how the server is, and ends when the server is to end.

It never starts anything again: whoever started it decides that. The process that runs this is the unit's main process;
the server lives behind a warden, so that nothing is left whichever of them is killed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

from hive.backends.command_line import Launch
from hive.errors import BackendTimeout, HiveError, WrongState
from hive.host.cgroup import Leaf
from hive.host.notify import Notifier
from hive.tasks import spawn
from hive.worker.child import ServerProcess
from hive.worker.judge import FailReason
from hive.worker.lifeline import Lifeline
from hive.worker.place import check, free
from hive.worker.profile import TimeoutProfile
from hive.worker.readiness import HEALTH, until_it_answers
from hive.worker.stream import Progress, status_of
from hive.worker.watching import ServerWatch

log = logging.getLogger("hive.worker")
STALLED_EXIT = 75
"""EX_TEMPFAIL of sysexits.h: the server hung and was ended."""
STATUS_LINES = 3
STATUS_MAX = 600
"""Characters of the reason and the server's last lines that systemd is told."""


class Probe:
    """A question for the server's health that is asked again and again. The judge treats it as a request.

    llama-server answers it while its compute loop is stuck, so it finds servers that hang as a whole: stopped,
    swapped out, in a deadlock.
    """

    def __init__(self, server: ServerProcess, socket: Path, profile: TimeoutProfile) -> None:
        self._socket = socket
        self._every_s = profile.liveness_probe_interval_s
        self._asked: Progress | None = None
        self._task: asyncio.Task[int | None] | None = None
        self.watch = ServerWatch(
            server, profile, places=1, requests=self._requests, fail=self._fail, clock=time.monotonic
        )

    async def go_on(self) -> None:
        """Asks until it is cancelled."""
        while True:
            self._asked = Progress(time.monotonic)
            self._task = spawn(status_of(self._socket, HEALTH, self._asked), name="probe")
            self.watch.wake()
            try:
                await asyncio.wait([self._task])
            finally:
                self._task.cancel()
            asked, self._asked = self._asked, None
            if asked is not None:
                self.watch.moved(asked)
            await asyncio.sleep(self._every_s)

    def _requests(self) -> dict[int, Progress]:
        return {} if self._asked is None else {0: self._asked}

    def _fail(self, late: Mapping[int, FailReason]) -> None:
        if late and self._task is not None:
            self._asked = None
            self._task.cancel()


async def supervise(
    launch: Launch,
    profile: TimeoutProfile,
    notifier: Notifier,
    *,
    leaf: Leaf | None = None,
    output_fd: int = 1,
    line: Lifeline | None = None,
) -> int:
    """The server's life: started, ready, watched, ended. Returns the exit code of the service.

    0 after SIGTERM or SIGINT, the server's own where it ended by itself (1 where that was 0: nobody asked it to), and
    STALLED_EXIT. Its output goes to `output_fd`. `line`: a warden that waits for its order. Raises HiveError where it
    does not come up; nothing is left then.
    """
    check(launch.needed)
    if launch.socket is None:
        raise WrongState("a supervised server listens on a unix socket")
    free(launch.socket)
    server = ServerProcess(
        launch.command, launch.environment, leaf=leaf, on_output=lambda data: _copy(output_fd, data), line=line
    )
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    life = spawn(_life(server, launch, profile, notifier), name="server-life")
    stop = spawn(asked.wait(), name="stop-asked")
    try:
        await asyncio.wait({life, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not life.done():
            notifier.stopping()
            return 0
        reason = life.result()
        if isinstance(reason, HiveError):
            raise reason
        await server.end()
        notifier.stopping(_told(reason, server))
        log.error("server_ended reason=%s exit=%s", reason, server.code)
        return STALLED_EXIT if reason is not FailReason.SERVER_DIED else server.code or 1
    except HiveError as error:
        await server.end()
        notifier.stopping(_told(error.message, server))
        raise
    finally:
        life.cancel()
        stop.cancel()
        await server.end()
        launch.socket.unlink(missing_ok=True)
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


async def _life(
    server: ServerProcess, launch: Launch, profile: TimeoutProfile, notifier: Notifier
) -> FailReason | HiveError:
    """Returns the reason for the server's end, or the error with which it did not come up."""
    try:
        return await _served(server, launch, profile, notifier)
    except HiveError as error:
        return error


async def _served(server: ServerProcess, launch: Launch, profile: TimeoutProfile, notifier: Notifier) -> FailReason:
    assert launch.socket is not None
    await server.start()
    beats = spawn(_beat(notifier), name="watchdog")
    try:
        await _come_up(server, launch.socket, profile)
        notifier.ready(f"serves, pid {server.pid}")
        probe = Probe(server, launch.socket, profile)
        probing = spawn(probe.go_on(), name="probing")
        try:
            return await probe.watch.until_over()
        finally:
            probing.cancel()
    finally:
        beats.cancel()


async def _come_up(server: ServerProcess, socket: Path, profile: TimeoutProfile) -> None:
    try:
        async with asyncio.timeout(profile.load_timeout_s):
            await until_it_answers(server, socket, time.monotonic)
    except TimeoutError:
        raise BackendTimeout(f"the server did not answer within {profile.load_timeout_s:g} s") from None


async def _beat(notifier: Notifier) -> None:
    """Feeds systemd's watchdog, from the loop in which the judge runs: where that stands still, so does this."""
    while notifier.watchdog_s is not None:
        notifier.alive()
        await asyncio.sleep(notifier.watchdog_s / 3)


def _told(reason: str, server: ServerProcess) -> str:
    """Reason and last lines, as one line, without what systemd would take for an assignment."""
    last = " | ".join(server.log.last(STATUS_LINES))
    return f"{reason}: exit code {server.code}: {last}"[:STATUS_MAX].replace("=", " ")


def _copy(fd: int, data: bytes) -> None:
    """To the journal, which reads at once; what it does not take is lost."""
    try:
        os.write(fd, data)
    except OSError:
        return
