"""The demo backend: a real HTTP/1.1 server with canned text, for a machine that has no inference server.

A connection answers one request at a time, a word every `1 / tokens_per_s` seconds, and stops when its client
leaves. Timers instead of tasks pace it, so a cut answer leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket as sockets
import time
from collections import deque
from contextlib import suppress
from email.utils import formatdate
from functools import partial
from http import HTTPStatus
from pathlib import Path
from stat import S_ISSOCK
from typing import cast

import httptools

from hive.demo.canned import SERVER, CannedReply, Moment, refuse, reply_to
from hive.errors import HiveError, UsageError

log = logging.getLogger("hive.demo")
TOKENS_PER_S = 60.0
BODY_MAX_BYTES = 16 * 1024 * 1024
HEAD_MAX_BYTES = 64 * 1024
PIPELINE_MAX = 16


class Counts:
    """State that all connections share: the pace, the open ones, how many answers were begun."""

    def __init__(self, tokens_per_s: float) -> None:
        self.tokens_per_s = tokens_per_s
        self.open: set[DemoConnection] = set()
        self.begun = 0

    def __repr__(self) -> str:
        return f"<Counts {len(self.open)} open, {self.begun} begun, {self.tokens_per_s:g} tokens/s>"

    def moment(self) -> Moment:
        self.begun += 1
        return Moment(now=time.time(), number=self.begun, tokens_per_s=self.tokens_per_s)


class DemoConnection(asyncio.Protocol):
    """One client: bytes in, requests queued in their order, answers out at the pace of `counts`."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._loop = asyncio.get_running_loop()
        self._asked: deque[tuple[str, CannedReply, bool, bool]] = deque()
        self._parts: deque[tuple[int, bytes]] | None = None  # None: no answer is under way
        self._chunked = self._keep = False
        self._due = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._writable = True
        self._deaf = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._parser = httptools.HttpRequestParser(self)
        self._counts.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - the loop passes it
        self._counts.open.discard(self)
        self._asked.clear()
        if self._timer is not None:
            self._timer.cancel()
        if self._parts:
            log.info("demo_answer_cut parts_unsent=%d", len(self._parts))
        self._parts = None

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._parts is not None and self._timer is None:
            self._send()

    def abort(self) -> None:
        self._transport.abort()

    # reading ---------------------------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._refuse_and_close(400, "this is not the HTTP/1.1 that the demo backend speaks")

    def on_message_begin(self) -> None:
        self._target = b""
        self._head_bytes = 0
        self._body = bytearray()

    def on_url(self, url: bytes) -> None:
        self._target += url
        self._charge_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._charge_head(len(name) + len(value))
        if name.lower() == b"expect" and value.lower() == b"100-continue":
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._body += body
        if len(self._body) > BODY_MAX_BYTES:
            self._refuse_and_close(413, f"the body is larger than {BODY_MAX_BYTES} bytes")

    def on_message_complete(self) -> None:
        if self._deaf:
            return
        method = self._parser.get_method().decode("ascii")
        reply = reply_to(method, self._target.decode("latin-1"), bytes(self._body), self._counts.moment())
        self._enqueue(method, reply, keep=self._parser.should_keep_alive())

    def _charge_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_MAX_BYTES:
            self._refuse_and_close(431, f"the head is larger than {HEAD_MAX_BYTES} bytes")

    def _refuse_and_close(self, status: int, message: str) -> None:
        if not self._deaf:
            self._deaf = True
            self._enqueue("GET", refuse("/api", status, message), keep=False)

    def _enqueue(self, method: str, reply: CannedReply, *, keep: bool) -> None:
        if len(self._asked) >= PIPELINE_MAX:
            self._transport.abort()
            return
        self._asked.append((method, reply, keep, self._parser.get_http_version() != "1.0"))
        if self._parts is None:
            self._begin()

    # answering -------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        method, reply, keep, chunks = self._asked.popleft()
        self._chunked = reply.streamed and chunks
        self._keep = keep and (chunks or not reply.streamed)
        self._parts = deque(reply.parts if method != "HEAD" else [])
        self._due = self._loop.time()
        if not reply.streamed or not self._parts:
            self._wait_then(sum(tokens for tokens, _ in self._parts), self._head(reply))
        else:
            self._transport.write(self._head(reply))
        self._send()

    def _wait_then(self, tokens: int, head: bytes) -> None:
        """A whole answer has its head together with its body, once all its words are spoken."""
        body = b"".join(data for _, data in self._parts or ())
        self._parts = deque([(tokens, head + body)])

    def _head(self, reply: CannedReply) -> bytes:
        fields = [
            f"HTTP/1.1 {reply.status} {HTTPStatus(reply.status).phrase}",
            f"Server: {SERVER}",
            f"Date: {formatdate(usegmt=True)}",
            f"Content-Type: {reply.content_type}",
        ]
        if not reply.streamed:
            fields.append(f"Content-Length: {sum(len(data) for _, data in reply.parts)}")
        elif self._chunked:
            fields.append("Transfer-Encoding: chunked")
        if reply.allow:
            fields.append(f"Allow: {reply.allow}")
        if not self._keep:
            fields.append("Connection: close")
        return "\r\n".join([*fields, "", ""]).encode("latin-1")

    def _send(self) -> None:
        """Sends the parts that are due and sets a timer for the next; a client that does not read is waited for."""
        self._timer = None
        while self._parts and self._writable and not self._transport.is_closing():
            tokens, data = self._parts[0]
            if tokens:
                self._due += tokens / self._counts.tokens_per_s
                self._parts[0] = (0, data)
            if self._due > self._loop.time():
                self._timer = self._loop.call_at(self._due, self._send)
                return
            self._parts.popleft()
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._chunked else data)
        if self._parts is not None and not self._parts:
            self._end()

    def _end(self) -> None:
        if self._chunked:
            self._transport.write(b"0\r\n\r\n")
        self._parts = None
        if not self._keep:
            self._deaf = True
            self._transport.close()
        elif self._asked:
            self._begin()


def listen(
    *, socket: Path | None = None, port: int | None = None, host: str = "127.0.0.1", shared: bool = False
) -> sockets.socket:
    """A listener on a unix socket (mode 0600: only Hive's own user may ask; `shared`: its group, too) or a TCP port
    (0: a free one).

    A socket file nobody listens on any more is replaced. Raises `HiveError` where the address cannot be had.
    """
    if (socket is None) == (port is None):
        raise UsageError("the demo backend needs either a socket or a port")
    family = sockets.AF_INET if socket is None else sockets.AF_UNIX
    listener = sockets.socket(family, sockets.SOCK_STREAM)
    umask = os.umask(0o117 if shared else 0o177)
    try:
        if socket is not None:
            _remove_dead(socket)
            listener.bind(str(socket))
        else:
            listener.setsockopt(sockets.SOL_SOCKET, sockets.SO_REUSEADDR, 1)
            listener.bind((host, port))
        listener.listen(512)
    except OSError as error:
        listener.close()
        where = socket or f"{host}:{port}"
        raise HiveError(f"the demo backend cannot listen on {where}: {error.strerror or error}") from None
    finally:
        os.umask(umask)
    return listener


def _remove_dead(path: Path) -> None:
    with suppress(FileNotFoundError):
        if not S_ISSOCK(path.lstat().st_mode):
            return  # bind says that it is taken
        with sockets.socket(sockets.AF_UNIX) as probe:
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink()


async def serve(
    listener: sockets.socket, *, tokens_per_s: float = TOKENS_PER_S, watch_fd: int | None = None, handle_signals: bool
) -> None:
    """Answers on `listener` until SIGTERM or SIGINT (where `handle_signals`), the end of `watch_fd`, or cancellation.

    Ends at once: open answers are cut, a socket file is removed.
    """
    loop = asyncio.get_running_loop()
    counts = Counts(tokens_per_s)
    done = asyncio.Event()
    address = listener.getsockname()
    make = loop.create_unix_server if isinstance(address, str) else loop.create_server
    server = await make(partial(DemoConnection, counts), sock=listener)
    if handle_signals:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, done.set)
    if watch_fd is not None:
        loop.add_reader(watch_fd, _at_its_end, watch_fd, done)
    log.info("demo_backend_ready address=%s", address if isinstance(address, str) else f"{address[0]}:{address[1]}")
    try:
        await done.wait()
    finally:
        if watch_fd is not None:
            loop.remove_reader(watch_fd)
        server.close()
        _leave(address, counts)


def _leave(address: object, counts: Counts) -> None:
    for connection in set(counts.open):
        connection.abort()
    if isinstance(address, str):
        Path(address).unlink(missing_ok=True)
    log.info("demo_backend_ended requests=%d", counts.begun)


def _at_its_end(watch_fd: int, done: asyncio.Event) -> None:
    """The write end of the pipe is held by the parent: end of file means that it is gone."""
    if not os.read(watch_fd, 64):
        done.set()


def main(
    *,
    socket: Path | None = None,
    port: int | None = None,
    host: str = "127.0.0.1",
    watch_fd: int | None = None,
    tokens_per_s: float = TOKENS_PER_S,
    shared: bool = False,
) -> int:
    """The demo backend as a process of its own; returns its exit code. Raises `HiveError` where it cannot listen."""
    if tokens_per_s <= 0:
        raise UsageError("tokens per second must be above 0")
    listener = listen(socket=socket, port=port, host=host, shared=shared)
    asyncio.run(serve(listener, tokens_per_s=tokens_per_s, watch_fd=watch_fd, handle_signals=True))
    return 0
