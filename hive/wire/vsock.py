"""AF_VSOCK: listeners, the context ids of callers, and the transport that the event loop lacks.

uvloop 0.23 knows no vsock addresses: `create_server(sock=)` ends in BrokenPipe and `connect_accepted_socket` hangs. It
has `add_reader` and `add_writer` for every descriptor, and on these `SocketTransport` is built.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from hive.errors import DependencyDown
from hive.wire.listeners import BACKLOG, SocketListener

READ_BYTES = 64 * 1024
"""Taken from the socket at once; then the loop's other sockets have their turn."""
HIGH_WATER = 64 * 1024
LOW_WATER = 16 * 1024
"""asyncio's defaults: beyond the one the protocol is to pause, below the other it may go on."""
GATHER = 64
"""Pieces given to one `sendmsg`; the kernel takes 1024 (UIO_MAXIOV)."""

_NO_VSOCK = (errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT, errno.ENODEV, errno.EADDRNOTAVAIL)


def listen_vsock(port: int) -> socket.socket:
    """A socket that listens on `port` of AF_VSOCK for every context of this machine.

    Raises DependencyDown, which says what is missing, where the kernel has no AF_VSOCK or the port cannot be had.
    """
    if not hasattr(socket, "AF_VSOCK"):
        raise DependencyDown("this Python knows no AF_VSOCK", hint="set `vsock = off` in [proxy] of hive.conf")
    sock = None
    try:
        sock = socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        sock.bind((socket.VMADDR_CID_ANY, port))
        sock.listen(BACKLOG)
    except OSError as error:
        if sock is not None:
            sock.close()
        raise _not_had(port, error) from error
    return sock


def _not_had(port: int, error: OSError) -> DependencyDown:
    if error.errno in _NO_VSOCK:
        return DependencyDown(
            "this kernel has no AF_VSOCK (there is no /dev/vsock)",
            hint="load it with `modprobe vhost_vsock`, or set `vsock = off` in [proxy] of hive.conf",
        )
    hint = f"find its holder with `ss --vsock -lp`, or choose another vsock_port than {port} in hive.conf"
    if error.errno == errno.EACCES:
        hint = "ports below 1024 are root's; choose another vsock_port in hive.conf"
    return DependencyDown(f"AF_VSOCK port {port} cannot be taken: {error.strerror}", hint=hint)


def peer_cid(sock: socket.socket) -> int:
    """The context a connection came from: the kernel's word, nothing a guest could choose. 1 and 2 are this machine.

    Raises OSError where the peer is gone already.
    """
    return int(sock.getpeername()[0])


class VsockListener(SocketListener):
    """A `SocketListener` with connections on a `SocketTransport`. If `make` raises OSError, the caller has left."""

    def _take(self, sock: socket.socket) -> None:
        try:
            connection = self._make(sock)
        except OSError:
            connection = None
        if connection is None:
            sock.close()
        else:
            SocketTransport(self._loop, sock, connection)


class SocketTransport(asyncio.Transport):
    """asyncio's stream transport over `add_reader` and `add_writer`, for any stream socket on any loop.

    Owns `sock` (non-blocking, connected) from here on. `connection_made` is called before the constructor returns,
    `connection_lost` exactly once, from the loop, never from inside a call of the protocol's. `close` sends what was
    written and drops what comes; `abort` drops both. Writing to a closed one does nothing.
    """

    __slots__ = (
        "__weakref__",
        *("_closing", "_descriptor", "_ended", "_full", "_loop", "_protocol", "_reading", "_saw_eof", "_sock"),
        *("_unsent", "_unsent_bytes", "_wrote_eof"),
    )

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, protocol: asyncio.Protocol) -> None:
        super().__init__()
        sock.setblocking(False)
        self._loop = loop
        self._sock = sock
        self._descriptor = sock.fileno()
        self._protocol: asyncio.Protocol | None = protocol
        self._unsent: deque[bytes | memoryview] = deque()
        self._unsent_bytes = 0
        self._reading = self._saw_eof = self._full = self._wrote_eof = self._closing = self._ended = False
        if self._calls(protocol.connection_made, self) and not self._closing:
            self.resume_reading()

    def __repr__(self) -> str:
        state = "ended" if self._ended else "closing" if self._closing else "open"
        return f"<SocketTransport {state}, {self._unsent_bytes} B unsent>"

    # asyncio.BaseTransport ----------------------------------------------------------------------------------------

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        """`socket`, and while it is open `peername` and `sockname`."""
        if name == "socket":
            return self._sock
        if name not in ("peername", "sockname"):
            return default
        try:
            return self._sock.getpeername() if name == "peername" else self._sock.getsockname()
        except OSError:
            return default

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if self._closing:
            return
        self._closing = True
        self._stop_reading()
        if not self._unsent:
            self._end(None)

    # asyncio.ReadTransport ----------------------------------------------------------------------------------------

    def pause_reading(self) -> None:
        """Stops reading: until `resume_reading` neither bytes nor the peer's end are told."""
        self._stop_reading()

    def resume_reading(self) -> None:
        if not (self._closing or self._saw_eof or self._reading):
            self._reading = True
            self._loop.add_reader(self._descriptor, self._on_readable)

    def _stop_reading(self) -> None:
        if self._reading:
            self._reading = False
            self._loop.remove_reader(self._descriptor)

    def _on_readable(self) -> None:
        protocol = self._protocol
        if not self._reading or protocol is None:
            return  # this round of the loop saw it readable before it was paused or closed
        try:
            data = self._sock.recv(READ_BYTES)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        if not data:
            self._on_eof(protocol)
        elif self._calls(protocol.data_received, data) and self._reading:
            self._end_if_reset()

    def _end_if_reset(self) -> None:
        """An error behind the bytes just read. libuv 1.52 stops watching a socket at its first error (uv__poll_io), so
        this call may have been the last that uvloop makes."""
        number = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if number:
            self._end(OSError(number, os.strerror(number)))

    def _on_eof(self, protocol: asyncio.Protocol) -> None:
        """Handles the end of the incoming bytes. The socket stays readable for ever, so reading stops here for every
        protocol."""
        self._saw_eof = True
        self._stop_reading()
        try:
            stays = protocol.eof_received()
        except Exception as error:
            self._blame(error, "eof_received")
            return
        if not stays:
            self.close()

    # asyncio.WriteTransport ---------------------------------------------------------------------------------------

    def get_write_buffer_size(self) -> int:
        return self._unsent_bytes

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Sends what the socket takes now and the rest as it takes more."""
        if self._wrote_eof:
            raise RuntimeError("Cannot call write() after write_eof()")
        if self._closing or not data:
            return
        sent = 0
        if not self._unsent:
            try:
                sent = self._sock.send(data)
            except (BlockingIOError, InterruptedError):
                pass
            except OSError as error:
                self._end(error)
                return
            if sent == len(data):
                return
            self._loop.add_writer(self._descriptor, self._on_writable)
        rest = memoryview(data if isinstance(data, bytes) else bytes(data))[sent:]
        self._unsent.append(rest)
        self._unsent_bytes += len(rest)
        if not self._full and self._unsent_bytes > HIGH_WATER and self._protocol is not None:
            self._full = True
            self._calls(self._protocol.pause_writing)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        """Tells the peer, after all that was written, that no more will come; reading goes on."""
        if self._closing or self._wrote_eof:
            return
        self._wrote_eof = True
        if not self._unsent:
            self._shut()

    def abort(self) -> None:
        self._end(None)

    def _on_writable(self) -> None:
        if self._ended:
            return
        try:
            sent = self._sock.sendmsg(list(itertools.islice(self._unsent, GATHER)))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as error:
            self._end(error)
            return
        self._forget(sent)
        if self._full and self._unsent_bytes <= LOW_WATER and self._protocol is not None:
            self._full = False
            self._calls(self._protocol.resume_writing)  # which may write, close or abort
        if self._unsent or self._ended:
            return
        self._loop.remove_writer(self._descriptor)
        if self._closing:
            self._end(None)
        elif self._wrote_eof:
            self._shut()

    def _forget(self, sent: int) -> None:
        """Removes sent bytes from those to be sent."""
        self._unsent_bytes -= sent
        while sent:
            first = self._unsent.popleft()
            if sent < len(first):
                self._unsent.appendleft(memoryview(first)[sent:])
                return
            sent -= len(first)

    def _shut(self) -> None:
        try:
            self._sock.shutdown(socket.SHUT_WR)
        except OSError as error:  # the peer was faster
            self._end(error)

    # the end ------------------------------------------------------------------------------------------------------

    def _end(self, error: OSError | None) -> None:
        """Stops reading and sending; the protocol is told in the loop's next round."""
        if self._ended:
            return
        self._ended = self._closing = True
        self._stop_reading()
        self._loop.remove_writer(self._descriptor)
        self._unsent.clear()
        self._unsent_bytes = 0
        self._loop.call_soon(self._lose, error)

    def _lose(self, error: OSError | None) -> None:
        protocol, self._protocol = self._protocol, None
        if protocol is not None:
            self._calls(protocol.connection_lost, error)
        self._sock.close()

    def _calls(self, callback: Callable[..., object], *arguments: object) -> bool:
        """Whether the protocol's callback returned. One that raises ends the connection."""
        try:
            callback(*arguments)
        except Exception as error:
            self._blame(error, getattr(callback, "__name__", repr(callback)))
            return False
        return True

    def _blame(self, error: Exception, what: str) -> None:
        context = {"message": f"protocol.{what}() failed", "exception": error, "transport": self}
        self._loop.call_exception_handler(context)
        self._end(None)
