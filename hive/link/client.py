"""The dialling side of a link: connects, and connects again whenever the link is lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from hive.errors import LinkLost
from hive.link.link import Link, OnLost, OnMessage

RETRY_S = 0.05
"""Between attempts: a unix connect to a missing socket costs 10 µs, and every wake waits for this link."""


class LinkClient:
    """Keeps one link to `path`. `on_link(link)` is called after every (re)connect, before any message of it."""

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        on_link: Callable[[Link], None],
        on_message: OnMessage,
        on_lost: OnLost | None = None,
    ) -> None:
        self.path = path
        self._name = name
        self._on_link = on_link
        self._on_message = on_message
        self._on_lost = on_lost
        self._closed = False
        self._link: Link | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._dial)

    @property
    def link(self) -> Link:
        """The live link. Raises LinkLost where there is none now."""
        if self._link is None:
            raise LinkLost(f"{self._name} is not connected")
        return self._link

    @property
    def connected(self) -> bool:
        return self._link is not None

    def _dial(self) -> None:
        if self._closed:
            return
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        try:
            sock.connect(str(self.path))
        except OSError:
            sock.close()
            self._loop.call_later(RETRY_S, self._dial)
            return
        self._link = Link(sock, name=self._name, on_message=self._on_message, on_lost=self._gone)
        self._on_link(self._link)

    def _gone(self, link: Link) -> None:
        self._link = None
        if self._on_lost is not None:
            self._on_lost(link)
        if not self._closed:
            self._loop.call_later(RETRY_S, self._dial)

    def close(self) -> None:
        """Closes the link and dials no more."""
        self._closed = True
        if self._link is not None:
            self._link.close()
