"""Last lines of a server's output: bounded in number and in length. Pure."""

from __future__ import annotations

from collections import deque

from hive.line_splitter import LineSplitter

LINES_MAX = 2000
LINE_MAX_BYTES = 1000


class LogRing:
    r"""The last `lines_max` lines of bytes that come in any pieces; of a long line its beginning.

    >>> ring = LogRing(lines_max=2)
    >>> for piece in (b"one\ntwo\nth", b"ree\nfo"):
    ...     ring.feed(piece)
    >>> ring.last(), ring.last(1)
    (['two', 'three'], ['three'])
    >>> ring.end(); ring.last(1)
    ['fo']
    """

    def __init__(self, lines_max: int = LINES_MAX) -> None:
        self._lines: deque[str] = deque(maxlen=lines_max)
        self._splitter = LineSplitter(LINE_MAX_BYTES)

    def __repr__(self) -> str:
        return f"<LogRing {len(self._lines)} lines>"

    def feed(self, data: bytes) -> None:
        self._lines += self._splitter.feed(data)

    def end(self) -> None:
        """A line begun and not ended is one now."""
        self._lines += self._splitter.rest()

    def last(self, count: int = LINES_MAX) -> list[str]:
        """The last `count` of them, oldest first."""
        return list(self._lines)[-count:] if count > 0 else []
