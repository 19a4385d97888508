"""Accepting connections, also on command: the gate must see all connections before an agent is frozen."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Callable

from hive.tasks import spawn
from hive.wire.connection import Connection

BACKLOG = 1024


class SocketListener:
    """Accepts on one listening socket (owned by this object) and makes a Connection of each caller.

    `make` returns None for a caller it refuses: that one is hung up on.

    A plain `add_reader` accept loop instead of `create_server`: `accept_waiting` can then empty the backlog at any
    moment, and the connection exists, with its socket, before the loop has made a transport.
    """

    def __init__(self, sock: socket.socket, make: Callable[[socket.socket], Connection | None]) -> None:
        self._sock = sock
        self._make = make
        self._loop = asyncio.get_running_loop()
        self._closed = False
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self.accept_waiting)

    def accept_waiting(self) -> None:
        """Takes every connection that waits in the backlog now."""
        while not self._closed:
            try:
                sock, _ = self._sock.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._rest()
                return
            sock.setblocking(False)
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        """Makes a Connection of what was accepted."""
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection = self._make(sock)
        if connection is None:
            sock.close()
        else:
            spawn(self._open(connection, sock), name="open connection")

    async def _open(self, connection: Connection, sock: socket.socket) -> None:
        with contextlib.suppress(OSError):  # it left already
            await self._loop.connect_accepted_socket(lambda: connection, sock)

    def _rest(self) -> None:
        """Leaves callers in the backlog for a moment instead of spinning, as there are no more descriptors."""
        self._loop.remove_reader(self._sock.fileno())
        self._loop.call_later(0.1, self._resume)

    def _resume(self) -> None:
        if not self._closed:
            self._loop.add_reader(self._sock.fileno(), self.accept_waiting)

    def close(self, *, empty_first: bool = False) -> None:
        """Stops accepting; with `empty_first` those already in the backlog are still taken."""
        if self._closed:
            return
        if empty_first:
            self.accept_waiting()
        self._closed = True
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()


def listen_tcp(port: int, *, move: bool, address: str = "127.0.0.1") -> socket.socket:
    """A listening socket on an IP address. With `move`, a taken port moves up by one until one is free (design.md §1).

    Raises OSError (EADDRINUSE) where it is taken and may not move, or where this host does not have the address.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            sock.listen(BACKLOG)
            return sock
        except OSError as error:
            sock.close()
            if not move or error.errno != errno.EADDRINUSE or port >= 65535:
                raise
            port += 1
