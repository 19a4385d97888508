"""Every call of the proxy to the outside, counted by its kind; the N-th of a kind can be made to fail.

At the level of the operating system: below all that the proxy uses, a socket is connected, read and written, a file
opened and written, and nothing escapes the count. Only on asyncio's own loop, which has its transports in Python.
"""

from __future__ import annotations

import errno
import os
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest

ERRORS: dict[str, OSError] = {
    "accept": OSError(errno.EMFILE, "Too many open files"),
    "connect": ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"),
    "send": BrokenPipeError(errno.EPIPE, "Broken pipe"),
    "receive": ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
    "pair": OSError(errno.EMFILE, "Too many open files"),
    "watch": OSError(errno.EMFILE, "Too many open files"),
    "open": OSError(errno.ENOSPC, "No space left on device"),
    "write": OSError(errno.ENOSPC, "No space left on device"),
}
"""The error for the last word of a kind."""
CALLS = {
    "send": ("send", "sendmsg"),
    "receive": ("recv", "recv_into", "recvmsg"),
}


class FaultPoints:
    """`addresses`: those the proxy connects to, `doors`: those it listens at, by kind; `spool`: the directory of its
    files."""

    def __init__(self, *, addresses: dict[object, str], doors: dict[object, str], spool: Path) -> None:
        self.counts: Counter[str] = Counter()
        self.failed = False
        self._addresses = addresses
        self.doors = doors
        self._spool = str(spool)
        self._whose: WeakKeyDictionary[socket.socket, str] = WeakKeyDictionary()
        self._files: set[int] = set()
        self._victim: tuple[str, int] | None = None

    def __repr__(self) -> str:
        return f"<FaultPoints {dict(self.counts)}>"

    def fail(self, kind: str, number: int) -> None:
        """The `number`-th call of this kind from now on fails, once."""
        self.counts.clear()
        self._victim = kind, number

    def _point(self, whose: str, what: str) -> None:
        kind = f"{whose} {what}"
        self.counts[kind] += 1
        if self._victim == (kind, self.counts[kind]):
            self._victim, self.failed = None, True
            raise ERRORS[what]

    # the calls ----------------------------------------------------------------------------------------------------

    def _connect(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def connect(sock: socket.socket, address: object) -> Any:
            if (whose := self._addresses.get(address)) is not None:
                self._whose[sock] = whose
                self._point(whose, "connect")
            return real(sock, address)

        return connect

    def _accept(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def accept(sock: socket.socket) -> Any:
            whose = self.doors.get(sock.getsockname())
            if whose is None:
                return real(sock)
            self._point(whose, "accept")
            accepted, address = real(sock)
            self._whose[accepted] = whose
            return accepted, address

        return accept

    def _of_socket(self, what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(sock: socket.socket, *arguments: Any) -> Any:
            if (whose := self._whose.get(sock)) is not None:
                self._point(whose, what)
            return real(sock, *arguments)

        return call

    def _pair(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def socketpair(*arguments: Any) -> Any:
            self._point("reader", "pair")
            ours, theirs = real(*arguments)
            self._whose[ours] = "reader"
            return ours, theirs

        return socketpair

    def _watch(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def pidfd_open(*arguments: Any) -> Any:
            self._point("reader", "watch")
            return real(*arguments)

        return pidfd_open

    def _open(self, real: Callable[..., int]) -> Callable[..., int]:
        def open_file(path: Any, *arguments: Any, **more: Any) -> int:
            if not str(path).startswith(self._spool) or not str(path).endswith(".jsonl"):
                return real(path, *arguments, **more)
            self._point("spool", "open")
            descriptor = real(path, *arguments, **more)
            self._files.add(descriptor)
            return descriptor

        return open_file

    def _write(self, real: Callable[..., int]) -> Callable[..., int]:
        def write(descriptor: int, data: bytes) -> int:
            if descriptor in self._files:
                self._point("spool", "write")
            return real(descriptor, data)

        return write

    @contextmanager
    def installed(self) -> Iterator[None]:
        """While inside, the calls of this process pass here; those not made by the proxy pass through."""
        with pytest.MonkeyPatch.context() as patch:
            kind = socket.socket
            patch.setattr(kind, "connect", self._connect(kind.connect))
            patch.setattr(kind, "accept", self._accept(kind.accept))
            for what, names in CALLS.items():
                for name in names:
                    patch.setattr(kind, name, self._of_socket(what, getattr(kind, name)))
            patch.setattr(socket, "socketpair", self._pair(socket.socketpair))
            patch.setattr(os, "pidfd_open", self._watch(os.pidfd_open))
            patch.setattr(os, "open", self._open(os.open))
            patch.setattr(os, "write", self._write(os.write))
            yield
