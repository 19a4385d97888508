"""The daemon's end of the process of model jobs: started at the first job, ended when it has none for a while."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from hive.errors import DependencyDown, HiveError
from hive.host.process import spawn
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage

log = logging.getLogger("hive.daemon")

CONNECT_S = 10.0
"""systemd starts it at the first byte; a socket that takes no connection for so long is as good as none."""
END_S = 3.0
_VARIABLES = ("PATH", "LANG", "LC_ALL", "TZ", "HOME", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX")
"""All of the daemon's environment that it gets: there may be secrets in the rest."""

Hear = Callable[[LinkMessage, LinkReply | None], None]


class JobProcessLink:
    """At most one process. `hear(message, reply)` gets what it says; `on_lost` is called when it is gone."""

    def __init__(self, socket_path: Path | None, *, hear: Hear, on_lost: Callable[[], None]) -> None:
        """`socket_path`: where systemd listens for it; None where the daemon starts it itself."""
        self._socket_path = socket_path
        self._hear = hear
        self._on_lost = on_lost
        self._link: Link | None = None
        self._opening = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        """One that was started here, until it has ended."""
        self._gone = asyncio.Event()

    def __repr__(self) -> str:
        return f"<JobProcessLink {self._link!r}>"

    @property
    def pid(self) -> int | None:
        """Of one that was started here."""
        return None if self._process is None else self._process.pid

    @property
    def is_up(self) -> bool:
        return self._link is not None

    async def link(self) -> Link:
        """The link, made where there is none. Raises DependencyDown."""
        async with self._opening:
            if self._link is None:
                sock = self._started() if self._socket_path is None else await self._connected(self._socket_path)
                self._link = Link(sock, name="jobs", on_message=self._message, on_lost=self._lost)
            return self._link

    def tell(self, message: LinkMessage) -> None:
        """Tells the process, if there is one."""
        if self._link is not None:
            self._link.tell(message)

    def close(self) -> None:
        """Ends it: without its link it has nothing to do."""
        if self._link is not None:
            self._link.close()

    def kill(self) -> None:
        """Ends one that hangs; systemd's watchdog does where systemd has started it."""
        log.warning("jobs_hang killed=%s", self._process is not None)
        if self._process is not None:
            self._process.kill()
        self.close()

    async def ended(self) -> None:
        """Ends it, and returns when one that was started here has ended; kills it where that takes long."""
        self.close()
        if (process := self._process) is None:
            return
        try:
            async with asyncio.timeout(END_S):
                await self._gone.wait()
        except TimeoutError:
            log.warning("jobs_killed pid=%d", process.pid)
            process.kill()
            await self._gone.wait()

    def _message(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        if link is self._link:
            self._hear(message, reply)

    def _lost(self, link: Link) -> None:
        if link is self._link:
            self._link = None
            self._on_lost()

    async def _connected(self, path: Path) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            async with asyncio.timeout(CONNECT_S):
                await asyncio.get_running_loop().sock_connect(sock, str(path))
        except (OSError, TimeoutError) as error:
            sock.close()
            why = getattr(error, "strerror", None) or f"it did not answer within {CONNECT_S:g} s"
            raise DependencyDown(
                f"the process of model jobs cannot be reached at {path}: {why}",
                hint="systemctl status hive-jobs.socket hive-jobs.service",
            ) from None
        return sock

    def _started(self) -> socket.socket:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            process = spawn(
                [sys.executable, "-P", "-m", "hive", "jobs", "--link-fd", str(theirs.fileno())],
                env={name: os.environ[name] for name in _VARIABLES if name in os.environ},
                keep_fds=[theirs.fileno()],
                pdeathsig=signal.SIGKILL,
                no_new_privs=True,
            )
        except HiveError as error:
            ours.close()
            raise DependencyDown(f"the process of model jobs did not start: {error.message}") from None
        finally:
            theirs.close()
        log.info("jobs_started pid=%d", process.pid)
        self._reap(process)
        return ours

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        loop = asyncio.get_running_loop()
        pidfd = os.pidfd_open(process.pid)
        gone = self._gone = asyncio.Event()
        self._process = process

        def ended() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            code = process.wait()
            if self._process is process:
                self._process = None
            gone.set()
            log.info("jobs_ended pid=%d exit=%d", process.pid, code)

        loop.add_reader(pidfd, ended)
