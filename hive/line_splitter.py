"""Output of a process as lines: bytes split anywhere, lines of any length. Pure."""

from __future__ import annotations

LIMIT_BYTES = 8000


class LineSplitter:
    r"""Turns bytes, split anywhere, into lines of at most `limit` bytes; the rest of a longer one is left out.

    >>> splitter = LineSplitter()
    >>> splitter.feed(b"one\ntw"), splitter.feed(b"o\n"), splitter.feed(b"end"), splitter.rest()
    (['one'], ['two'], [], ['end'])
    """

    def __init__(self, limit: int = LIMIT_BYTES) -> None:
        self._limit = limit
        self._partial = bytearray()
        self._overlong = 0

    def feed(self, data: bytes) -> list[str]:
        """The lines completed by `data`."""
        *whole, partial = data.split(b"\n")
        lines = []
        for piece in whole:
            self._take(piece)
            lines += self.rest() or [""]
        self._take(partial)
        return lines

    def rest(self) -> list[str]:
        """The line begun and not ended, if any; it is over now."""
        if not self._partial:
            return []
        line = self._partial.decode(errors="backslashreplace").rstrip("\r")
        if self._overlong:
            line += f" … {self._overlong} bytes more"
        self._partial.clear()
        self._overlong = 0
        return [line]

    def _take(self, piece: bytes) -> None:
        room = self._limit - len(self._partial)
        self._partial += piece[:room]
        self._overlong += max(0, len(piece) - room)
