"""The listening side of sd_notify(3), for servers that no systemd started: ready, and why they end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from pathlib import Path

MESSAGE_MAX = 4096


class NotifySocket:
    """Listens at `path`, also anew where an earlier helper did: what is still to be said is heard here.

    `is_ready` is set once READY=1 came; `status`: the last STATUS=; `is_leaving`: STOPPING=1 came, and `status` is why.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._path = path
        self.is_ready = asyncio.Event()
        self.is_leaving = False
        self.status = ""
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            path.unlink(missing_ok=True)
            self._sock.bind(os.fspath(path))
            path.chmod(0o600)
        except OSError:
            self._sock.close()
            raise
        asyncio.get_running_loop().add_reader(self._sock, self.read)

    def __repr__(self) -> str:
        return f"<NotifySocket {self._path}{' ready' if self.is_ready.is_set() else ''}>"

    def read(self) -> None:
        """Takes all that was said until now, also by a process that has ended."""
        while True:
            try:
                message = self._sock.recv(MESSAGE_MAX)
            except (BlockingIOError, OSError):
                return
            for line in message.decode(errors="replace").splitlines():
                self._hear(*line.partition("=")[::2])

    def _hear(self, name: str, value: str) -> None:
        match name, value:
            case "READY", "1":
                self.is_ready.set()
            case "STOPPING", "1":
                self.is_leaving, self.status = True, ""
            case "STATUS", _:
                self.status = value

    def close(self, *, remove: bool) -> None:
        """`remove`: nobody has anything to say any more; else the next helper listens here."""
        if self._sock.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._sock)
            self._sock.close()
            if remove:
                with contextlib.suppress(OSError):
                    self._path.unlink()
