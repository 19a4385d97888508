"""HTTP/1.1 server of a runner, on a unix socket: threads for connections, one call at work at a time.

Hive's proxy is its only client, and has checked who asks and what. So it knows what that proxy sends and little else:
bodies with a length, JSON or a form. A client that has closed its half of the connection wants no answer any more: a
handler asks `is_gone()` between two steps of its work, and the connection is closed when it has ended. Standard library
only.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hive.runner.faults import OUT_OF_MEMORY, CallerGone, EngineFault, is_out_of_memory
from hive.runner.form import SentForm, read_form

MOST_HEAD_BYTES = 64 << 10
MOST_JSON_BYTES = 16 << 20
MOST_FORM_BYTES = 2 << 30
"""The proxy's own limit is far lower; this one keeps a disk from being filled by its error."""
MOST_DROPPED_BYTES = 64 << 20
"""Of a body that is refused."""
CONNECTIONS = 32
"""At once, each with a thread that is there from the start: without memory none could be started, and whoever did would
wait for ever (CPython 3.11; seen). The next ones wait in the kernel; the proxy has one request at work here."""
SPARE_BYTES = 4 << 20
"""Given back where the memory is at its end, so that this can be answered."""
READ_S = 60.0
"""Longest silence within a request."""
IDLE_S = 3600.0
"""Longest silence between two of them."""
LOOK_S = 0.1
"""Time between two looks at the client of a call that waits."""
REASONS = {200: "OK", 400: "Bad Request", 404: "Not Found", 405: "Method Not Allowed", 411: "Length Required"}

Handler = Callable[["EngineCall"], None]


class CallRoute(NamedTuple):
    """Answer of a path. `takes_turn`: its work waits until no other is done."""

    handler: Handler
    takes_turn: bool = True


class CallLine:
    """The calls that wait for their turn, in order: `places` at work at a time."""

    def __init__(self, places: int = 1) -> None:
        self._changed = threading.Condition()
        self._tickets: list[object] = []
        self.places = places

    def __repr__(self) -> str:
        return f"<CallLine {self.waiting} waiting, {min(len(self._tickets), self.places)}/{self.places} at work>"

    @property
    def waiting(self) -> int:
        return max(0, len(self._tickets) - self.places)

    @property
    def busy(self) -> int:
        return min(len(self._tickets), self.places)

    @contextlib.contextmanager
    def turn(self, call: EngineCall) -> Iterator[None]:
        """Waits for the call's turn. Raises CallerGone where its client leaves before."""
        ticket = object()
        with self._changed:
            self._tickets.append(ticket)
        try:
            with self._changed:
                while ticket not in self._tickets[: self.places]:
                    self._changed.wait(LOOK_S)
                    call.check_caller()
            yield
        finally:
            with self._changed:
                self._tickets.remove(ticket)
                self._changed.notify_all()


class _Reader:
    """Bytes of a connection, with a buffer. `end_body_after` bounds what `line` and `some` give of it."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._kept, self._left = connection, bytearray(), 0

    def head(self) -> bytes | None:
        """A request's head with its empty line; None where the connection ends instead. Raises EngineFault: 431."""
        self._connection.settimeout(IDLE_S)
        while (end := self._kept.find(b"\r\n\r\n")) < 0:
            if len(self._kept) > MOST_HEAD_BYTES:
                raise EngineFault(431, f"the head has more than {MOST_HEAD_BYTES} bytes", "head_too_large")
            if not (came := self._connection.recv(65536)):
                return None
            self._connection.settimeout(READ_S)
            self._kept += came
        return self._taken(end + 4)

    def end_body_after(self, size: int) -> None:
        self._left = size
        self._connection.settimeout(READ_S)

    @property
    def left(self) -> int:
        """Bytes of the body that nobody has read."""
        return self._left

    def line(self, most: int) -> bytes:
        while (end := self._kept.find(b"\n", 0, most)) < 0 and len(self._kept) < min(most, self._left):
            self._more()
        most = min(most, self._left) if end < 0 else min(end + 1, most, self._left)
        self._left -= most
        return self._taken(most)

    def some(self, most: int) -> bytes:
        if self._left and not self._kept:
            self._more()
        most = min(most, self._left, len(self._kept))
        self._left -= most
        return self._taken(most)

    def drop_body(self) -> None:
        """Reads what nobody has read of the body, within bounds."""
        dropped = 0
        while dropped < MOST_DROPPED_BYTES and (piece := self.some(256 << 10)):
            dropped += len(piece)

    def _more(self) -> None:
        if not (came := self._connection.recv(min(256 << 10, max(1, self._left)))):
            raise CallerGone
        self._kept += came

    def _taken(self, size: int) -> bytes:
        taken = bytes(self._kept[:size])
        del self._kept[:size]
        return taken


class EngineCall:
    """One request with its answer. A handler gives one whole answer, or events and their end.

    `cost`: what the answer took, as the header `x-hive-cost` has it (`audio_s=6.020`, `images=2; pixel_steps=1048576`);
    set before the answer begins.
    """

    def __init__(
        self, connection: socket.socket, method: str, target: str, headers: Mapping[str, str], reader: _Reader
    ) -> None:
        self.method, self.headers = method, headers
        self.path, _, self.query = target.partition("?")
        self.cost = ""
        self.has_begun = self.is_over = False
        self._connection, self._reader = connection, reader
        self._body: bytes | None = None
        self._form: SentForm | None = None

    def __repr__(self) -> str:
        return f"<EngineCall {self.method} {self.path}{' begun' if self.has_begun else ''}>"

    @property
    def id(self) -> str:
        """The id by which Hive knows the request; empty where it told none."""
        return self.headers.get("x-request-id", "")

    # --- what was sent

    def read_body(self, spool: str | None) -> None:
        """Reads the body: a form's file to an unlinked one in `spool`. Raises EngineFault for what is too large."""
        kind, size = self.headers.get("content-type", ""), self._reader.left
        is_form = kind.lower().startswith("multipart/")
        if size > (most := MOST_FORM_BYTES if is_form else MOST_JSON_BYTES):
            raise EngineFault(413, f"the body has {size} bytes, and may have {most}", "too_large")
        if is_form:
            self._form = read_form(self._reader, kind, spool)
            return
        pieces = list[bytes]()
        while piece := self._reader.some(size):
            pieces.append(piece)
        self._body = b"".join(pieces)

    def json(self) -> dict[str, Any]:
        """The body, which is a JSON object. Raises EngineFault: 400."""
        try:
            found = json.loads(self._body or b"")
        except (ValueError, RecursionError) as error:
            raise EngineFault(400, f"the body is not JSON: {str(error)[:200]}", "bad_request") from None
        if not isinstance(found, dict):
            raise EngineFault(400, "the body is no JSON object", "bad_request")
        return found

    def form(self) -> SentForm:
        """The body, which is a form. Raises EngineFault: 415."""
        if self._form is None:
            raise EngineFault(415, f"{self.path} takes multipart/form-data", "unsupported_media_type")
        return self._form

    # --- the client

    def is_gone(self) -> bool:
        """Whether the client has closed its connection, or its half of it."""
        look = select.poll()
        look.register(self._connection, select.POLLIN)
        if not look.poll(0):  # asked first: a read from a socket with a timeout waits for it, whatever its flags say
            return False
        try:
            return self._connection.recv(1, socket.MSG_PEEK) == b""
        except OSError:
            return True

    def check_caller(self) -> None:
        """Raises CallerGone if the client is gone."""
        if self.is_gone():
            raise CallerGone

    # --- the answer

    def answer(
        self,
        body: bytes,
        content_type: str = "application/json",
        *,
        status: int = 200,
        headers: Sequence[tuple[str, str]] = (),
    ) -> None:
        """Answers with these bytes."""
        more = (("content-type", content_type), ("content-length", str(len(body))), *headers)
        self._begin(status, more, body)
        self.is_over = True

    def answer_json(self, shape: object, *, status: int = 200) -> None:
        """Answers with this, as JSON."""
        self.answer(json.dumps(shape, ensure_ascii=False).encode("utf-8", "surrogatepass"), status=status)

    def event(self, data: object, name: str = "") -> None:
        """Sends an event of a stream, and the answer's head before the first. `data`: a text, or what becomes JSON."""
        text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
        event = (f"event: {name}\n" if name else "") + "".join(f"data: {line}\n" for line in text.split("\n")) + "\n"
        if not self.has_begun:
            kind = ("content-type", "text/event-stream; charset=utf-8")
            self._begin(200, (kind, ("cache-control", "no-cache"), ("transfer-encoding", "chunked")))
        raw = event.encode("utf-8", "replace")
        self._send(b"%x\r\n%b\r\n" % (len(raw), raw))

    def end_events(self) -> None:
        """Ends a stream of events."""
        self._send(b"0\r\n\r\n")
        self.is_over = True

    def fail(self, fault: EngineFault) -> None:
        """Answers with an error; where the answer has begun, with an event of it, and no end."""
        if self.has_begun:
            self.event(fault.shape(), "error")
        else:
            self.cost = fault.cost
            self.answer_json(fault.shape(), status=fault.status)

    def close(self) -> None:
        """Lets a form's file go."""
        if self._form is not None:
            self._form.close()

    def _begin(self, status: int, headers: Sequence[tuple[str, str]], body: bytes = b"") -> None:
        if self.has_begun:
            raise RuntimeError("the answer has begun already")
        self.has_begun = True
        more = (*headers, ("x-hive-cost", self.cost)) if self.cost else headers
        lines = [f"HTTP/1.1 {status} {REASONS.get(status, 'Status')}", *(f"{name}: {value}" for name, value in more)]
        self._send(("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace") + body)

    def _send(self, raw: bytes) -> None:
        try:
            self._connection.sendall(raw)
        except OSError:
            raise CallerGone from None


class RunnerServer:
    """Answers the routes of one engine at a unix socket. `spool`: directory of the files of forms, unlinked at once."""

    def __init__(self, path: Path, routes: Mapping[tuple[str, str], CallRoute], *, spool: str | None = None) -> None:
        self._path, self._routes, self._spool = path, routes, spool
        self.line = CallLine()
        self._is_closed = False
        self._spare = bytearray(SPARE_BYTES)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)

    def __repr__(self) -> str:
        return f"<RunnerServer {self._path} {self.line}>"

    def listen(self) -> None:
        """Binds the socket, in place of one that a dead process left, and answers from now on in threads of its own."""
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()
        self._listener.bind(str(self._path))
        self._listener.listen(128)
        for _ in range(CONNECTIONS):
            threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """Accepts no more, and removes the socket. Calls at work go on."""
        self._is_closed = True
        self._path.unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes who accepts
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError as error:
                if self._is_closed:
                    return
                said(f"accept failed: {error}")
                time.sleep(1)
                continue
            self._serve(connection)

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection:
                reader = _Reader(connection)
                while self._one(connection, reader):
                    pass
        except (OSError, CallerGone):
            pass  # the client is gone, or was silent for too long
        except MemoryError:
            end(OUT_OF_MEMORY)

    def _one(self, connection: socket.socket, reader: _Reader) -> bool:
        """Answers one request; whether another may follow on this connection."""
        call = EngineCall(connection, "", "", {}, reader)
        try:
            head = reader.head()
            if head is None:
                return False
            method, target, headers = parsed_head(head)
            call = EngineCall(connection, method, target, headers, reader)
            reader.end_body_after(body_length(headers))
            if headers.get("expect", "").lower() == "100-continue":
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            self._work(call)
        except EngineFault as fault:
            reader.drop_body()  # a client that still sends would not read the answer
            call.fail(fault)
        except CallerGone:
            return False
        except Exception as error:
            self._failed(call, error)
        finally:
            call.close()
        return call.is_over and not reader.left and call.headers.get("connection", "").lower() != "close"

    def _work(self, call: EngineCall) -> None:
        route = self._routes.get((call.method, call.path))
        if route is None:
            if any(path == call.path for _, path in self._routes):
                raise EngineFault(405, f"{call.path} is not for {call.method[:20]}", "method_not_allowed")
            raise EngineFault(404, f"there is nothing at {call.path[:200]}", "not_found")
        call.read_body(self._spool)
        if not route.takes_turn:
            return route.handler(call)
        with self.line.turn(call):
            return route.handler(call)

    def _failed(self, call: EngineCall, error: Exception) -> None:
        """Answers for an engine that failed. One without memory cannot be trusted to have given back what it took, so
        that its process ends."""
        is_full = is_out_of_memory(error)
        if is_full:
            self._spare.clear()
        said(f"{call.path} failed: {type(error).__name__}: {str(error)[:500]}")
        why = "the engine has no memory left for this" if is_full else f"the engine failed: {type(error).__name__}"
        code = "out_of_memory" if is_full else "engine_failed"
        with contextlib.suppress(CallerGone):
            call.fail(EngineFault(503 if is_full else 500, why, code))
        if is_full:
            end(OUT_OF_MEMORY)


def parsed_head(head: bytes) -> tuple[str, str, dict[str, str]]:
    """Method, target and header fields (lower case) of a head. Raises EngineFault: 400.

    >>> parsed_head(b"GET /health HTTP/1.1\\r\\nHost: h\\r\\n\\r\\n")
    ('GET', '/health', {'host': 'h'})
    """
    first, *lines = head.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
    words = first.split(" ")
    if len(words) != 3 or not words[2].startswith("HTTP/1."):
        raise EngineFault(400, "this is no HTTP/1.1 request", "bad_request")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        key = name.lower()
        if not colon or not name or name != name.strip() or (key in headers and key == "content-length"):
            raise EngineFault(400, "a header field is not well formed", "bad_request")
        headers[key] = value.strip()
    return words[0], words[1], headers


def body_length(headers: Mapping[str, str]) -> int:
    """Length of a request's body. Raises EngineFault: 400, 411.

    >>> body_length({}), body_length({"content-length": "12"})
    (0, 12)
    """
    if "transfer-encoding" in headers:
        raise EngineFault(411, "the body has to have a Content-Length", "length_required")
    told = headers.get("content-length", "0")
    if not (told.isascii() and told.isdigit() and len(told) < 16):
        raise EngineFault(400, "Content-Length is no number", "bad_request")
    return int(told)


def said(line: str) -> None:
    """Writes a line to the log, which is the standard error stream."""
    print(line.replace("\n", " "), file=sys.stderr, flush=True)  # noqa: T201 - a program of its own


def end(code: int) -> None:
    """Ends the process at once, whatever its threads do."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
