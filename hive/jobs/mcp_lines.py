"""The lines of an MCP server's stdout, sifted before anything is made of them: bounded in length and in number. Pure.

A server is a program of somebody's. It may write without end, write what is no message, or answer what nobody asked.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

MESSAGE_MAX_BYTES = 4 * 1024 * 1024
"""One message. A result is cut to a hundredth of that, but has to be there as a whole to be read."""
ENDLESS_BYTES = 64 * 1024 * 1024
"""A line that is longer than this is given up, and its server with it."""
UNASKED_MAX = 10_000
"""Lines since the last question that answer none: log lines, notifications, noise."""
EDGE_BYTES = 512
TOO_LONG = f"the result is longer than {MESSAGE_MAX_BYTES} bytes, and nothing of it was kept"
UNREADABLE = "what came as its result is no message of MCP"
_ID = re.compile(rb'"id"\s*:\s*(?:([0-9]{1,18})|"([^"\\]{1,64})")')

MessageId = int | str


class Flooded(Exception):
    """The server writes more than anybody reads; the text says what."""


class Sifted(NamedTuple):
    """`message`: a line to be read. `id`: of the question that it answers; None for a question of the server's own.
    `fault`: why the answer is none; there is no message then."""

    message: bytes
    id: MessageId | None
    fault: str = ""


class _Head(msgspec.Struct):
    """The members that tell a message's kind."""

    id: int | str | None = None
    method: str | None = None


_head = msgspec.json.Decoder(_Head).decode


class MessageSieve:
    r"""Turns bytes, split anywhere, into the messages that matter: answers to what was `asked`, and questions.

    Notifications are dropped: Hive shows none, and the tools of a job do not change. So is what is no message.

    >>> sieve = MessageSieve()
    >>> sieve.asked(1)
    >>> sieve.feed(b'starting up...\n{"method": "notifications/message"}\n{"id": 1, "res')
    []
    >>> sieve.feed(b'ult": {}}\n{"id": 1, "result": {}}\n')
    [Sifted(message=b'{"id": 1, "result": {}}', id=1, fault='')]
    """

    def __init__(self, limit: int = MESSAGE_MAX_BYTES) -> None:
        self._limit = limit
        self._line = bytearray()
        self._left_out = 0
        """Bytes of the line that are not kept."""
        self._tail = b""
        self._waiting: dict[MessageId, None] = {}
        self._unasked = 0

    def __repr__(self) -> str:
        return f"<MessageSieve {self.held} B, {len(self._waiting)} waiting>"

    @property
    def held(self) -> int:
        """Bytes that are kept."""
        return len(self._line)

    def asked(self, id: MessageId) -> None:
        """A question is on its way."""
        self._waiting[id] = None
        self._unasked = 0

    def give_up(self) -> None:
        """The line that is coming in is not kept, for want of room."""
        self._leave_out(b"")

    def feed(self, data: bytes) -> list[Sifted]:
        """Raises Flooded."""
        found: list[Sifted] = []
        *whole, partial = data.split(b"\n")
        for piece in whole:
            self._take(piece)
            if (sifted := self._ended()) is not None:
                found.append(sifted)
        self._take(partial)
        return found

    def _take(self, piece: bytes) -> None:
        if self._left_out or len(self._line) + len(piece) > self._limit:
            self._leave_out(piece)
        else:
            self._line += piece

    def _leave_out(self, piece: bytes) -> None:
        """Keeps the two ends of the line alone."""
        room = max(0, EDGE_BYTES - len(self._line))
        left = bytes(self._line[EDGE_BYTES:]) + piece[room:]
        self._line += piece[:room]
        del self._line[EDGE_BYTES:]
        self._left_out += len(left)
        self._tail = (self._tail + left[-EDGE_BYTES:])[-EDGE_BYTES:]
        if self._left_out > ENDLESS_BYTES:
            raise Flooded(f"it wrote {ENDLESS_BYTES} bytes without an end of the line")

    def _ended(self) -> Sifted | None:
        line, tail, is_overlong = bytes(self._line), self._tail, self._left_out > 0
        self._line.clear()
        self._tail, self._left_out = b"", 0
        if is_overlong:
            return self._faulty(TOO_LONG, line, tail)
        try:
            head = _head(line)
        except (msgspec.MsgspecError, RecursionError):
            return self._faulty(UNREADABLE, line[:EDGE_BYTES], line[-EDGE_BYTES:])
        if head.id is not None and head.method is None and head.id in self._waiting:
            del self._waiting[head.id]
            return Sifted(line, head.id)
        self._drop()  # a question of the server's is answered, and counted all the same
        return Sifted(line, None) if head.id is not None and head.method is not None else None

    def _faulty(self, fault: str, *edges: bytes) -> Sifted | None:
        if (id := self._id_in(*edges)) is None:
            self._drop()
            return None
        del self._waiting[id]
        return Sifted(b"", id, fault)

    def _drop(self) -> None:
        self._unasked += 1
        if self._unasked > UNASKED_MAX:
            raise Flooded(f"it wrote {UNASKED_MAX} lines that nobody asked for")

    def _id_in(self, *edges: bytes) -> MessageId | None:
        """Id of the question that a line answers which is not read: some servers write it first, some last."""
        for edge in edges:
            for number, text in _ID.findall(edge):
                id = int(number) if number else text.decode(errors="replace")
                if id in self._waiting:
                    return id
        return None
