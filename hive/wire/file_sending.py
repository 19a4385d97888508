"""Sending a request whose body has a file in it: the kernel copies it from the file to the socket.

The transport of a connection writes only what is in memory, and uvloop has no `sendfile`. So the socket is written to
through a descriptor of its own, which the loop watches; nothing else is written to the connection meanwhile.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable

import msgspec

AT_ONCE = 256 * 1024
"""Bytes after which others get their turn."""


class FileBody(msgspec.Struct, frozen=True):
    """A request with a file in it: `before` it (the head too), `size` bytes of the file from its beginning, `after`."""

    before: bytes
    descriptor: int
    size: int
    after: bytes

    def __repr__(self) -> str:
        return f"<FileBody {len(self.before)} + {self.size} + {len(self.after)} B>"


class FileSending:
    """One such request on its way into a socket. It just ends where the other side takes no more of it, as that is seen
    by who reads there: the other side may have answered, too."""

    __slots__ = ("_body", "_loop", "_on_unreadable", "_own", "_sent")

    def __init__(self, sock: socket.socket, body: FileBody, on_unreadable: Callable[[OSError], None]) -> None:
        """`sock`: a stream socket that does not block, with nothing waiting to be written. `on_unreadable`: called, at
        most once, if the file cannot be read."""
        self._body = body
        self._own = os.dup(sock.fileno())
        self._sent = 0
        self._on_unreadable = on_unreadable
        self._loop = asyncio.get_running_loop()
        self._loop.add_writer(self._own, self._go_on)

    def __repr__(self) -> str:
        return f"<FileSending {self._sent}/{self._all} B>"

    @property
    def _all(self) -> int:
        body = self._body
        return len(body.before) + body.size + len(body.after)

    @property
    def is_done(self) -> bool:
        return self._sent == self._all

    def _go_on(self) -> None:
        try:
            until = self._sent + AT_ONCE
            while self._sent < min(until, self._all):
                self._sent += self._write()
        except (BlockingIOError, InterruptedError):
            return
        except ConnectionError:
            self.stop()
        except OSError as error:
            self.stop()
            self._on_unreadable(error)
        if self.is_done:
            self.stop()

    def _write(self) -> int:
        body, at = self._body, self._sent
        if at < len(body.before):
            return os.write(self._own, memoryview(body.before)[at:])
        at -= len(body.before)
        if at < body.size:
            count = os.sendfile(self._own, body.descriptor, at, min(AT_ONCE, body.size - at))
            if not count:
                raise OSError(errno.EIO, "it is shorter than it was")
            return count
        return os.write(self._own, memoryview(body.after)[at - body.size :])

    def stop(self) -> None:
        """Writes no more; may be called any time."""
        own, self._own = self._own, -1
        if own >= 0:
            self._loop.remove_writer(own)
            os.close(own)
