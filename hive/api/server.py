"""The API, listening: one uvicorn on the daemon's unix socket and, where it is to, on TCP."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import uvicorn

from hive.api.app import build
from hive.api.connections import ApiConnection, Crowd
from hive.api.middleware import TcpEntry
from hive.api.relay import answered
from hive.host import accounts
from hive.host.accounts import Accounts
from hive.link.runner import RunnerCall, RunnerSaid
from hive.link.server import bind_private
from hive.tasks import spawn

if TYPE_CHECKING:
    from hive.api.services import Services

STOP_S = 2.0
"""Longest time for open answers to end when the server stops."""


class Tcp(NamedTuple):
    """A socket that listens (the server's from now on), and the rules for its callers."""

    sock: socket.socket
    door: TcpEntry


class ApiServer:
    """`close` ends it: streams end, answers under way get `STOP_S`."""

    def __init__(
        self, services: Services, path: Path, people: Accounts, *, pause_timeout_s: float, tcp: Tcp | None
    ) -> None:
        self._stopping = asyncio.Event()
        self._path = path
        socks = [bind_private(path, group=people.operators, takes_files=False)]
        self._inode = os.stat(path).st_ino
        if tcp is not None:
            socks.append(tcp.sock)
        door = None if tcp is None else tcp.door
        self._app = app = build(services, people, door, pause_timeout_s=pause_timeout_s, stopping=self._stopping)
        self._uvicorn = _Uvicorn(
            uvicorn.Config(
                app,
                http=cast(Any, partial(ApiConnection, crowd=Crowd())),
                ws="none",
                lifespan="off",
                log_config=None,
                log_level=logging.ERROR,
                access_log=False,
                server_header=False,
                date_header=False,
                timeout_graceful_shutdown=int(STOP_S),
            )
        )
        self._serving = spawn(self._uvicorn.serve(sockets=socks), name="api")

    @property
    def is_serving(self) -> bool:
        return not self._serving.done()

    async def relayed(self, call: RunnerCall) -> RunnerSaid:
        """The answer to a request that the proxy relays from the runner's listener. Raises HiveError."""
        return await answered(self._app, call)

    async def ready(self) -> None:
        """Returns when connections are accepted."""
        await self._uvicorn.listening.wait()

    async def close(self) -> None:
        """Stops listening, removes the socket file if it is still ours, ends every answer."""
        with contextlib.suppress(OSError):
            if os.stat(self._path).st_ino == self._inode:
                self._path.unlink()
        self._stopping.set()
        self._uvicorn.leave.set()
        await self._serving


async def serve(
    services: Services,
    path: Path,
    people: Accounts | None = None,
    *,
    pause_timeout_s: float = 30.0,
    tcp: Tcp | None = None,
) -> ApiServer:
    """Serves the API on a unix socket at `path`, and on `tcp`, in the running loop; returns when it accepts.

    Without `people` only root and this process's own user are answered (mode 0600), with it their groups too (0660);
    everyone else gets 403. Raises OSError where it cannot bind.
    """
    server = ApiServer(services, path, people or accounts.own(), pause_timeout_s=pause_timeout_s, tcp=tcp)
    await server.ready()
    return server


class _Uvicorn(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()
        self.leave = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    async def main_loop(self) -> None:
        """uvicorn's own wakes up ten times a second, for a date we do not send and a signal we do not use."""
        await self.on_tick(0)
        await self.leave.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals belong to the daemon."""
        yield
