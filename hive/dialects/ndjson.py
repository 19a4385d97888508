"""One JSON object a line, sans I/O: bytes split anywhere into whole lines."""

from __future__ import annotations

MAX_LINE = 1024 * 1024
"""Bytes of an unfinished line kept; a longer one is given up (it is relayed all the same)."""


def one_line(line: bytes) -> bytes:
    """JSON text as one line for any reader: with escapes of U+0085, U+2028 and U+2029, which JSON leaves as they are.

    httpx splits lines there, and with it the `ollama` package (0.6).

    >>> one_line('{"text":"a\\x85b\\u2028"}'.encode())
    b'{"text":"a\\\\u0085b\\\\u2028"}'
    """
    if line.find(b"\xc2\x85") < 0 and line.find(b"\xe2\x80") < 0:
        return line
    line = line.replace(b"\xc2\x85", b"\\u0085")
    return line.replace(b"\xe2\x80\xa8", b"\\u2028").replace(b"\xe2\x80\xa9", b"\\u2029")


class NdjsonReader:
    """Gives the lines completed by `feed`, without their ends; empty ones are passed over.

    The pieces of an unfinished line are joined once, at its end: a line in many pieces costs no more than in one.

    >>> reader = NdjsonReader()
    >>> reader.feed(b'{"a":1}\\n{"b"'), reader.feed(b':2}\\n')
    ([b'{"a":1}'], [b'{"b":2}'])
    """

    __slots__ = ("_held", "_pieces", "_skipping")

    def __init__(self) -> None:
        self._pieces: list[bytes] = []
        self._held = 0
        self._skipping = False

    @property
    def at_boundary(self) -> bool:
        """Whether the bytes so far end with a line, so that another may be put there."""
        return not self._pieces and not self._skipping

    @property
    def rest(self) -> bytes:
        """The line that has not ended."""
        return b"".join(self._pieces)

    def feed(self, data: bytes) -> list[bytes]:
        first, *lines = data.split(b"\n")
        if not lines:
            self._hold(first)
            return []
        if self._pieces or self._skipping:
            first = b"" if self._skipping else b"".join([*self._pieces, first])
            self._pieces.clear()
            self._held = 0
            self._skipping = False
        rest = lines.pop()
        self._hold(rest)
        return [line for line in (first, *lines) if line]

    def _hold(self, piece: bytes) -> None:
        if not piece or self._skipping:
            return
        self._pieces.append(piece)
        self._held += len(piece)
        if self._held > MAX_LINE:  # given up to its end: the rest of it is no line of its own
            self._pieces.clear()
            self._held = 0
            self._skipping = True
