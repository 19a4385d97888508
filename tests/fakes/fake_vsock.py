"""The vsock device of a fake Firecracker: AF_UNIX on the host's side, the guest's channel on the other.

Each behaviour with where it is written (src/vmm/src/devices/virtio/vsock/ in firecracker 1.17.0-dev, 81b38b9):
- binds `uds_path` itself and fails where the file exists; leaves it behind when it ends (unix/muxer.rs `new`)
- a guest's call to CID 2 is connected to `<uds_path>_<port>`, without a word before the bytes; nobody there is a
  reset; other CIDs are dropped in silence (muxer.rs `handle_peer_request_pkt`, `send_pkt`)
- that connect blocks the thread the machine and its API run on: a full backlog hangs both (PR 5995; seen up to 1.16.1,
  and still so in main of August 2026)
- a host's call says `CONNECT <port>\\n`, in one piece of 10 to 32 bytes, the word in any case, and gets
  `OK <assigned>\\n` once the guest took it; assigned ports count from 1073741824 (muxer.rs `read_local_stream_port`,
  `allocate_local_port`)
- nobody listening in the guest: hung up without a word. A guest that says nothing: after 2 s (csm/mod.rs
  `CONN_REQUEST_TIMEOUT_MS`)
- an end of the host's side, also of one direction only (SHUT_WR), ends both in the guest (csm/connection.rs `recv_pkt`)
- 1023 connections; 64 KiB from guest to host are buffered, then the guest waits (unix/mod.rs `MAX_CONNECTIONS`,
  csm/mod.rs `CONN_TX_BUF_SIZE`)
- 1.16.0 and 1.16.1: after the first resume nothing reaches the guest any more, no answer to a connect either (PR 6100)
- after a snapshot the guest's ends of all connections are reset at the resume, and the host's stay open and silent
  (seen, 1.15.1); who listens goes on (docs/snapshotting/snapshot-support.md)
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import selectors
import socket
import time

from fake_guest import HOST_CID, TAKEN

MAX_CONNECTIONS = 1023
REQUEST_TIMEOUT_S = 2.0
BUFFER_BYTES = 64 * 1024
FIRST_PORT = 1 << 30


class Connection:
    """Bytes both ways between a socket on the host and one of the guest."""

    def __init__(self, muxer: Muxer, host: socket.socket, guest: socket.socket, *, answer: bytes = b"") -> None:
        """`answer`: what the host is told once the guest took it; without one it is established already."""
        self.muxer = muxer
        self.ends = {"host": host, "guest": guest}
        self.buffers = {"host": bytearray(), "guest": bytearray()}
        self.answer = answer
        self.until = time.monotonic() + REQUEST_TIMEOUT_S if answer else None
        self.ended: set[str] = set()
        self.closed = False
        self.handlers = {name: functools.partial(self.on_event, name) for name in self.ends}
        for sock in self.ends.values():
            sock.setblocking(False)
        self.update()

    def on_event(self, name: str, mask: int) -> None:
        other = "guest" if name == "host" else "host"
        if self.closed:
            return
        try:
            if mask & selectors.EVENT_READ and other not in self.ended:
                self.read(name, other)
            if mask & selectors.EVENT_WRITE and self.buffers[name]:
                del self.buffers[name][: self.ends[name].send(self.buffers[name])]
        except BlockingIOError:
            pass
        except OSError:
            self.close()
        self.update()

    def read(self, name: str, other: str) -> None:
        data = self.ends[name].recv(min(BUFFER_BYTES - len(self.buffers[other]), 65536) or 1)
        if name == "guest" and self.until is not None:
            if data != TAKEN:
                self.close()
                return
            self.until = None
            data = self.answer
        if data:
            self.buffers[other] += data
        elif name == "host":
            self.ended |= {"guest", "host"}
        else:
            self.ended.add("host")

    def update(self) -> None:
        """Sets what to wait for next: a full buffer is not read into, an end is passed on after the last byte."""
        if self.closed:
            return
        for name, sock in self.ends.items():
            other = "guest" if name == "host" else "host"
            if name in self.ended and not self.buffers[name]:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_WR)
            mask = 0
            deaf = self.muxer.is_deaf and other == "guest"
            waits = self.until is not None and name == "host"
            if other not in self.ended and len(self.buffers[other]) < BUFFER_BYTES and not deaf and not waits:
                mask |= selectors.EVENT_READ
            if self.buffers[name]:
                mask |= selectors.EVENT_WRITE
            self.watch(name, mask)
        if self.ended == {"host", "guest"} and not any(self.buffers.values()):
            self.close()

    def watch(self, name: str, mask: int) -> None:
        selector, sock = self.muxer.selector, self.ends[name]
        known = sock in selector.get_map()
        if mask and known:
            selector.modify(sock, mask, self.handlers[name])
        elif mask:
            selector.register(sock, mask, self.handlers[name])
        elif known:
            selector.unregister(sock)

    def close(self) -> None:
        self.forget("host", "guest")

    def forget(self, *ends: str) -> None:
        """Closes these ends; one that stays open is silent from now on."""
        if self.closed:
            return
        self.closed = True
        for name, sock in self.ends.items():
            with contextlib.suppress(KeyError):
                self.muxer.selector.unregister(sock)
            if name in ends:
                sock.close()
            else:
                self.muxer.lost.append(sock)
        self.muxer.connections.discard(self)


class Muxer:
    """The device. It binds at once and works from `activate` on, whenever its selector is asked."""

    def __init__(self, uds_path: str) -> None:
        """Raises OSError where it cannot bind."""
        self.uds_path = uds_path
        self.is_deaf = False
        self.connections: set[Connection] = set()
        self.pending: set[socket.socket] = set()
        self.lost: list[socket.socket] = []
        """Ends of connections nobody hears of: kept, so that the other end sees nothing either."""
        self.last_port = FIRST_PORT - 1
        self.selector: selectors.BaseSelector
        self.guest: socket.socket
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(uds_path)
        self.listener.listen(128)
        self.listener.setblocking(False)

    def activate(self, selector: selectors.BaseSelector, guest: socket.socket) -> None:
        self.selector, self.guest = selector, guest
        guest.setblocking(False)
        selector.register(self.listener, selectors.EVENT_READ, self.on_call)
        selector.register(guest, selectors.EVENT_READ, self.on_guest)

    def next_s(self) -> float | None:
        """Until the next connection request is too old."""
        due = [connection.until for connection in self.connections if connection.until is not None]
        return max(min(due) - time.monotonic(), 0) if due else None

    def expire(self) -> None:
        now = time.monotonic()
        for connection in [one for one in self.connections if one.until is not None and one.until <= now]:
            connection.close()

    def reset(self) -> None:
        for connection in list(self.connections):
            connection.forget("guest")
        for sock in self.pending:
            self.selector.unregister(sock)
            sock.close()
        self.pending.clear()

    def become_deaf(self) -> None:
        """Nothing goes to the guest any more."""
        self.is_deaf = True
        for connection in self.connections:
            connection.update()

    # --- calls of the host -----------------------------------------------------------------------------------------

    def on_call(self, mask: int) -> None:
        host, _ = self.listener.accept()
        if len(self.connections) >= MAX_CONNECTIONS:
            host.close()
            return
        host.setblocking(False)
        self.pending.add(host)
        self.selector.register(host, selectors.EVENT_READ, lambda mask: self.on_connect(host))

    def on_connect(self, host: socket.socket) -> None:
        self.selector.unregister(host)
        self.pending.discard(host)
        port = _read_port(host)
        if port is None:
            host.close()
            return
        self.last_port += 1
        ours, theirs = socket.socketpair()
        if not self.is_deaf:
            message = json.dumps({"op": "request", "port": port}).encode()
            socket.send_fds(self.guest, [message], [theirs.fileno()])
            theirs.close()
        else:
            self.lost.append(theirs)
        self.connections.add(Connection(self, host, ours, answer=f"OK {self.last_port}\n".encode()))

    # --- calls of the guest ----------------------------------------------------------------------------------------

    def on_guest(self, mask: int) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self.guest, 4096, 1)
        except OSError:
            message = b""
        if not message:
            self.selector.unregister(self.guest)
            return
        said, sock = json.loads(message), socket.socket(fileno=descriptors[0])
        if said["cid"] != HOST_CID:
            self.lost.append(sock)
            return
        host = socket.socket(socket.AF_UNIX)
        try:
            if len(self.connections) >= MAX_CONNECTIONS:
                raise OSError(errno.EMFILE, "limit reached")
            host.connect(f"{self.uds_path}_{said['port']}")
            if not self.is_deaf:
                sock.sendall(TAKEN)
        except OSError:
            sock.close()
            host.close()
        else:
            self.connections.add(Connection(self, host, sock))


def _read_port(host: socket.socket) -> int | None:
    """Bytes there at the first event are all that is looked at, as `read_exact` on a non-blocking socket does."""
    try:
        line = host.recv(10)
        while len(line) >= 10 and not line.endswith(b"\n") and len(line) < 32:
            more = host.recv(1)
            if not more:
                return None
            line += more
    except OSError:
        return None
    words = line.decode(errors="replace").split()
    if len(line) < 10 or len(words) < 2 or words[0].lower() != "connect" or not words[1].isdecimal():
        return None
    return int(words[1])


def bind_error(error: OSError) -> str:
    """As Rust shows it."""
    return f"{os.strerror(error.errno or 0)} (os error {error.errno})"
