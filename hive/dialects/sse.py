"""Server-sent events, sans I/O: bytes split anywhere into the data of whole events (WHATWG HTML §9.2.6)."""

from __future__ import annotations

import re

MAX_EVENT = 1024 * 1024
"""Bytes of an unfinished event kept; a longer one is given up (it is relayed all the same)."""
_LF, _CR = 10, 13
"""As numbers: to look for one costs a tenth of looking for bytes, for which `in` raises and catches a TypeError first.
For several bytes `find` costs half of `in`."""


class SseReader:
    """Gives the `data` of each event completed by `feed`. Comments and other fields are passed over.

    Line by line: an event in many pieces costs no more than in one.

    >>> reader = SseReader()
    >>> reader.feed(b'data: {"a":'), reader.feed(b'1}\\n\\n: ping\\n\\ndata: [DONE]\\n\\n')
    ([], [b'{"a":1}', b'[DONE]'])
    """

    __slots__ = ("_begun", "_given_up", "_lines", "_lines_bytes", "_open", "_pieces", "_pieces_bytes", "lost")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        """Pieces of the line that has not ended, or a carriage return that a line feed may follow."""
        self._lines: list[bytes] = []
        """The data lines of the event that has not ended."""
        self._open = False
        """True while an event has begun and not ended."""
        self._lines_bytes = self._pieces_bytes = 0
        self._given_up = False
        self._begun = False
        self.lost = False
        """True once an event was given up: the others have a hole between them."""

    @property
    def begun(self) -> bool:
        """Whether anything but comments and empty lines has come, events that `feed` gave aside."""
        return self._begun

    @property
    def at_boundary(self) -> bool:
        """Whether the bytes so far end between two events, so that another may be put there.

        >>> reader = SseReader()
        >>> [(reader.feed(line), reader.at_boundary)[1] for line in (b": ping\\n\\n", b"event: ping\\n", b"\\n")]
        [True, False, True]
        """
        return not self._pieces and not self._open

    def feed(self, data: bytes) -> list[bytes]:
        if data.startswith(b"data: ") and data.endswith(b"\n\n") and not self._pieces and not self._open:
            inner = data[6:-2]
            if _CR not in inner and inner:
                if _LF not in inner:
                    return [inner]
                events = inner.split(b"\n\ndata: ")
                if inner.count(b"\n") == 2 * len(events) - 2 and all(events):
                    return events
        if _LF not in data and _CR not in data and not (self._pieces and self._pieces[-1].endswith(b"\r")):
            self._hold(data)
            return []
        return self._read(b"".join([*self._pieces, data]))

    def end(self) -> list[bytes]:
        """The bytes have ended: a carriage return that was held back was a line end. An event cut short is dropped."""
        return self.feed(b"\n") if self._pieces and self._pieces[-1].endswith(b"\r") else []

    def _read(self, data: bytes) -> list[bytes]:
        self._pieces.clear()
        self._pieces_bytes = 0
        if _CR in data:
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
                self._lines_bytes = 0
                self._given_up = self._open = False
            elif not line.startswith(b":"):
                self._take_field(line)
        self._hold(rest)
        return events

    def _take_field(self, line: bytes) -> None:
        self._begun = self._open = True
        if line.startswith(b"data:") and not self._given_up:
            self._lines.append(line[5:].removeprefix(b" "))
            self._lines_bytes += len(line)
            if self._lines_bytes > MAX_EVENT:
                self._give_up()

    def _hold(self, piece: bytes) -> None:
        """Keeps a piece of a line that has not ended; of a comment, and of what was given up, that it is one."""
        if not piece:
            return
        first = self._pieces[0] if self._pieces else piece
        if not first.startswith((b":", b"\r")):
            self._begun = self._open = True
        self._pieces.append(piece)
        self._pieces_bytes += len(piece)
        if self._lines_bytes + self._pieces_bytes > MAX_EVENT and not first.startswith(b":"):
            self._give_up()
            first = b":"
        if first.startswith(b":"):
            self._pieces = [b":\r" if piece.endswith(b"\r") else b":"]

    def _give_up(self) -> None:
        self._given_up = self.lost = True
        self._lines.clear()
        self._lines_bytes = 0


_EVENT_END = re.compile(rb"\r\n\r\n|\n\n|\r\r")
_NO_USAGE = re.compile(rb',"usage":(?:null|\{(?:"[a-z_]+":0,)*"[a-z_]+":0\})')


class UsageStripper:
    """Relays a stream as it came, but for what Hive's own request for usage added to it (OpenAI's dialect).

    The chunk that carries the usage has no choices and goes; from the others `"usage":null` goes, and a usage of
    nothing but 0, which is what Ollama (0.17.4, 0.32.15) has in every chunk of `/v1/completions`. An event that has
    not ended is held back; one that grows beyond MAX_EVENT passes as it is.

    >>> stripper = UsageStripper()
    >>> stripper.feed(b'data: {"choices":[{}],"usage":null}\\n\\ndata: {"choices":[],"us')
    b'data: {"choices":[{}]}\\n\\n'
    >>> stripper.feed(b'age":{"prompt_tokens":1}}\\n\\ndata: [DONE]\\n\\n'), stripper.end()
    (b'data: [DONE]\\n\\n', b'')
    """

    __slots__ = ("_held", "_passing", "_pieces", "_tail")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        """Pieces of the event that has not ended; joined once, at its end."""
        self._held = 0
        self._tail = b""
        """The last bytes of that event: its end may be split."""
        self._passing = False
        """True while an event that was too long to be held passes as it is."""

    @property
    def at_boundary(self) -> bool:
        """Whether what was given so far ends between two events: always, but inside one that is too long."""
        return not self._passing

    def feed(self, data: bytes) -> bytes:
        if not self._tail and data.endswith(b"\n\n"):
            if data.find(b'"usage"') < 0:
                return data
            if data.find(b"\n\n") == len(data) - 2 and _CR not in data:
                return _without_usage(data)
        end = _EVENT_END.search(self._tail + data)
        if end is None:
            return self._hold(data)
        relayed, begun = [], 0
        if self._passing:
            begun = end.end() - len(self._tail)
            relayed.append(data[:begun])
            self._passing = False
        else:
            data = b"".join([*self._pieces, data])
            self._pieces.clear()
            self._held = 0
        for end in _EVENT_END.finditer(data, begun):
            relayed.append(_without_usage(data[begun : end.end()]))
            begun = end.end()
        self._tail = b""
        relayed.append(self._hold(data[begun:]))
        return b"".join(relayed)

    def _hold(self, piece: bytes) -> bytes:
        """Keeps a piece of an event that has not ended; gives what is not kept."""
        self._tail = (self._tail + piece)[-3:]
        if self._passing:
            return piece
        if piece:
            self._pieces.append(piece)
            self._held += len(piece)
        self._passing = self._held > MAX_EVENT
        return self.end() if self._passing else b""

    def end(self) -> bytes:
        """Held-back bytes of an event that never ended."""
        rest = b"".join(self._pieces)
        self._pieces.clear()
        self._held = 0
        return rest


def _without_usage(event: bytes) -> bytes:
    """One event; empty where it is the usage chunk. Inside a JSON string the quotes would be escaped."""
    if b'"usage":{' in event and (b'"choices":[]' in event or b'"choices": []' in event):
        return b""
    return _NO_USAGE.sub(b"", event)
