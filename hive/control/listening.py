"""The TCP listener of the API."""

from __future__ import annotations

import errno
import socket
from dataclasses import dataclass
from typing import NamedTuple

from hive.errors import ConfigError

BACKLOG = 256


class WantedAddress(NamedTuple):
    """An IP address, and a port of it; with `move` a taken one moves up by one until one is free (design.md §1)."""

    address: str
    port: int
    move: bool


@dataclass
class ListenPlace:
    """The address of the listener. `port` None: nowhere, or not yet."""

    address: str
    port: int | None = None


def listen(wanted: WantedAddress) -> socket.socket:
    """A listening socket there.

    Raises ConfigError where it is taken and may not move, is not permitted, or this host does not have the address.
    """
    try:
        return _bound(wanted)
    except OSError as error:
        raise ConfigError(
            f"port {wanted.port} of {wanted.address} for the API cannot be taken: {error.strerror}",
            hint=f"find its holder with `ss -ltnp 'sport = :{wanted.port}'`, or set another in [api] (0: none)",
        ) from None


def _bound(wanted: WantedAddress) -> socket.socket:
    address, port, move = wanted
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    while True:
        # Its protocol is named: asyncio (3.11) sets TCP_NODELAY only where it is, and an answer has two pieces.
        sock = socket.socket(
            family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK, socket.IPPROTO_TCP
        )
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((address, port))
            sock.listen(BACKLOG)  # at once: two that are bound and do not listen yet would not notice each other
            return sock
        except OSError as error:
            sock.close()
            if not move or error.errno != errno.EADDRINUSE or port >= 65535:
                raise
            port += 1
