"""The one thing asked of systemd that its programs cannot say: a scope of processes that run already.

`systemd-run --scope` makes one of itself only. So this is a D-Bus client of one method, on the private socket that
systemctl uses too: no library is needed, and no bus has to run. Written for and tested with systemd 252.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Sequence
from pathlib import Path

from hive.errors import DependencyDown, HiveError, TimedOut
from hive.host.systemd import error_of

PRIVATE = Path("/run/systemd/private")
CALL_S = 10.0
ANSWER_MAX_BYTES = 1 << 20
Value = str | bool | int | list[int]
Properties = Sequence[tuple[str, str, Value]]
"""(name, D-Bus type, value); types: s, b, t (64 bits) and au (numbers of 32 bits)."""
_METHOD_CALL, _RETURN, _ERROR = 1, 2, 3
_PATH, _INTERFACE, _MEMBER, _REPLY_SERIAL, _DESTINATION, _SIGNATURE = 1, 2, 3, 5, 6, 8
_SERIAL = 1


class _Writer:
    """Values as D-Bus writes them, little-endian, each at its alignment (D-Bus specification, "Marshaling")."""

    def __init__(self) -> None:
        self.data = bytearray()

    def align(self, size: int) -> None:
        self.data += b"\0" * (-len(self.data) % size)

    def u32(self, value: int) -> None:
        self.align(4)
        self.data += struct.pack("<I", value)

    def string(self, text: str) -> None:
        raw = text.encode()
        self.u32(len(raw))
        self.data += raw + b"\0"

    def signature(self, text: str) -> None:
        self.data += bytes([len(text)]) + text.encode() + b"\0"

    def array(self, alignment: int, write: Callable[[], None]) -> None:
        self.u32(0)
        at = len(self.data)
        self.align(alignment)
        began = len(self.data)
        write()
        struct.pack_into("<I", self.data, at - 4, len(self.data) - began)

    def _numbers(self, values: list[int]) -> None:
        for one in values:
            self.u32(one)

    def variant(self, kind: str, value: Value) -> None:
        self.signature(kind)
        if isinstance(value, list):
            self.array(4, lambda: self._numbers(value))
        elif isinstance(value, str):
            self.string(value)
        elif kind == "t":
            self.align(8)
            self.data += struct.pack("<Q", value)
        else:
            self.u32(int(value))


def start_scope_call(unit: str, properties: Properties) -> bytes:
    """The message that asks for the scope.

    >>> call = start_scope_call("a.scope", [("PIDs", "au", [7])])
    >>> call[:4], len(call) % 4, call.count(b"StartTransientUnit"), call.count(b"ssa(sv)a(sa(sv))")
    (b'l\\x01\\x00\\x01', 0, 1, 1)
    """
    body = _Writer()
    body.string(unit)
    body.string("fail")  # one that is there already is not replaced

    def pairs() -> None:
        for name, kind, value in properties:
            body.align(8)
            body.string(name)
            body.variant(kind, value)

    body.array(8, pairs)
    body.array(8, lambda: None)
    head = _Writer()
    head.data += struct.pack("<cBBBII", b"l", _METHOD_CALL, 0, 1, len(body.data), _SERIAL)

    def fields() -> None:
        for code, kind, text in (
            (_PATH, "o", "/org/freedesktop/systemd1"),
            (_DESTINATION, "s", "org.freedesktop.systemd1"),
            (_INTERFACE, "s", "org.freedesktop.systemd1.Manager"),
            (_MEMBER, "s", "StartTransientUnit"),
            (_SIGNATURE, "g", "ssa(sv)a(sa(sv))"),
        ):
            head.align(8)
            head.data.append(code)
            head.signature(kind)
            (head.signature if kind == "g" else head.string)(text)

    head.array(8, fields)
    head.align(8)
    return bytes(head.data + body.data)


def start_scope(unit: str, properties: Properties) -> None:
    """Makes and starts a transient scope; systemd has queued it when this returns, and moves the processes at once.

    Blocks: for a thread. Raises WrongState where there is such a unit, NotPermitted, DependencyDown, TimedOut,
    HiveError.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC) as sock:
            sock.settimeout(CALL_S)
            sock.connect(os.fspath(PRIVATE))
            _say_who(sock)
            sock.sendall(start_scope_call(unit, properties))
            _take_answer(sock)
    except TimeoutError:
        raise TimedOut(f"systemd did not answer within {CALL_S:g} s") from None
    except OSError as error:
        raise DependencyDown(f"systemd does not answer at {PRIVATE}: {error.strerror}") from error


def _say_who(sock: socket.socket) -> None:
    """The kernel tells systemd who this is; the protocol wants it said all the same."""
    sock.sendall(b"\0AUTH EXTERNAL " + str(os.geteuid()).encode().hex().encode() + b"\r\n")
    answer = b""
    while not answer.endswith(b"\r\n"):
        if not (piece := sock.recv(1)) or len(answer) > 512:
            raise DependencyDown("systemd takes nobody at its private socket")
        answer += piece
    if not answer.startswith(b"OK "):
        raise DependencyDown(f"systemd refuses this user: {answer.decode(errors='replace').strip()[:100]}")
    sock.sendall(b"BEGIN\r\n")


def _take_answer(sock: socket.socket) -> None:
    """Reads until the answer to the call: signals of other units come on the same connection. Raises HiveError."""
    while True:
        fixed = _exactly(sock, 16)
        order = "<" if fixed[:1] == b"l" else ">"
        kind, body_bytes = fixed[1], struct.unpack_from(f"{order}I", fixed, 4)[0]
        fields_bytes = struct.unpack_from(f"{order}I", fixed, 12)[0]
        if body_bytes + fields_bytes > ANSWER_MAX_BYTES:
            raise DependencyDown("systemd's answer is no D-Bus message")
        head = _exactly(sock, fields_bytes + -fields_bytes % 8)[:fields_bytes]
        body = _exactly(sock, body_bytes)
        if kind in (_RETURN, _ERROR) and _is_answer(head, order):
            if kind == _ERROR:
                raise _error_in(body, order)
            return


def _is_answer(fields: bytes, order: str) -> bool:
    """Whether these header fields name the one call that was made."""
    marked = bytes([_REPLY_SERIAL, 1]) + b"u\0"
    at = fields.find(marked)
    return at >= 0 and at % 8 == 0 and struct.unpack_from(f"{order}I", fields, at + 4)[0] == _SERIAL


def _error_in(body: bytes, order: str) -> HiveError:
    length = struct.unpack_from(f"{order}I", body)[0] if len(body) >= 4 else 0
    return error_of(["systemd"], body[4 : 4 + length].decode(errors="replace"))


def _exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (piece := sock.recv(size - len(data))):
            raise DependencyDown("systemd hung up")
        data += piece
    return data
