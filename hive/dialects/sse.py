"""Server-sent events, sans I/O: bytes split anywhere into the data of whole events (WHATWG HTML §9.2.6)."""

from __future__ import annotations

import re

MAX_EVENT = 1024 * 1024
"""Bytes of an unfinished event kept; a longer one is given up (it is relayed all the same)."""


class SseReader:
    """Gives the `data` of each event completed by `feed`. Comments and other fields are passed over.

    Line by line: an event in many pieces costs no more than in one.

    >>> reader = SseReader()
    >>> reader.feed(b'data: {"a":'), reader.feed(b'1}\\n\\n: ping\\n\\ndata: [DONE]\\n\\n')
    ([], [b'{"a":1}', b'[DONE]'])
    """

    __slots__ = ("_given_up", "_held", "_lines", "_pieces")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        """Of the line that has not ended, or a carriage return whose line feed may be the next byte."""
        self._lines: list[bytes] = []
        """The data lines of the event that has not ended."""
        self._held = 0
        self._given_up = False

    def feed(self, data: bytes) -> list[bytes]:
        fresh = not (self._pieces or self._lines or self._given_up)
        if fresh and data.startswith(b"data: ") and data.find(b"\n\n") == len(data) - 2 and b"\r" not in data:
            single = data[6:-2]
            if b"\n" not in single:
                return [single] if single else []
        if b"\n" not in data and b"\r" not in data and not (self._pieces and self._pieces[-1].endswith(b"\r")):
            self._hold(data)
            return []
        return self._read(b"".join([*self._pieces, data]))

    def end(self) -> list[bytes]:
        """The bytes have ended: a carriage return that was held back was a line end. An event cut short is dropped."""
        return self.feed(b"\n") if self._pieces and self._pieces[-1].endswith(b"\r") else []

    def _read(self, data: bytes) -> list[bytes]:
        self._held -= sum(map(len, self._pieces))
        self._pieces.clear()
        if b"\r" in data:
            held = data.endswith(b"\r")
            data = data[: len(data) - held].replace(b"\r\n", b"\n").replace(b"\r", b"\n") + b"\r" * held
        *lines, rest = data.split(b"\n")
        events = []
        for line in lines:
            if not line:
                payload = b"\n".join(self._lines)
                if payload and not self._given_up:
                    events.append(payload)
                self._lines.clear()
                self._held = 0
                self._given_up = False
            elif line.startswith(b"data:"):
                self._count(len(line))
                if not self._given_up:
                    self._lines.append(line[5:].removeprefix(b" "))
        self._hold(rest)
        return events

    def _hold(self, piece: bytes) -> None:
        if piece:
            self._pieces.append(piece)
            self._count(len(piece))
            if self._given_up:  # what is left of this line is a comment, and so is neither empty nor data
                self._pieces = [b":\r" if piece.endswith(b"\r") else b":"]

    def _count(self, size: int) -> None:
        self._held += size
        if self._held > MAX_EVENT:
            self._given_up = True
            self._lines.clear()


_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_NO_USAGE = b',"usage":null'


class UsageStripper:
    """Relays a stream as it came, but for what Hive's own request for usage added to it (OpenAI's dialect).

    The chunk that carries the usage has no choices and goes; `"usage":null` goes from the others. An event that has
    not ended is held back; one that grows beyond MAX_EVENT passes as it is.

    >>> stripper = UsageStripper()
    >>> stripper.feed(b'data: {"choices":[{}],"usage":null}\\n\\ndata: {"choices":[],"us')
    b'data: {"choices":[{}]}\\n\\n'
    >>> stripper.feed(b'age":{"prompt_tokens":1}}\\n\\ndata: [DONE]\\n\\n'), stripper.end()
    (b'data: [DONE]\\n\\n', b'')
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> bytes:
        if not self._rest and data.endswith(b"\n\n") and b'"usage"' not in data:
            return data
        data = self._rest + data
        relayed, begun = [], 0
        for end in _EVENT_END.finditer(data):
            relayed.append(_without_usage(data[begun : end.end()]))
            begun = end.end()
        self._rest = data[begun:]
        if len(self._rest) > MAX_EVENT:
            relayed.append(self._rest)
            self._rest = b""
        return b"".join(relayed)

    def end(self) -> bytes:
        """What was held back of an event that never ended."""
        rest, self._rest = self._rest, b""
        return rest


def _without_usage(event: bytes) -> bytes:
    """One event; empty where it is the usage chunk. Inside a JSON string the quotes would be escaped."""
    if b'"usage":{' in event and (b'"choices":[]' in event or b'"choices": []' in event):
        return b""
    return event.replace(_NO_USAGE, b"") if _NO_USAGE in event else event
