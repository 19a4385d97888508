"""Detection of a model that writes the same line again and again. Pure."""

from __future__ import annotations

CHARACTERS_MIN = 16
"""Shorter lines repeat in tables, code and lists."""
TIMES = 8
_KEPT = 4096


class RepeatedLine:
    r"""True from the moment a line of at least `characters` came `times` times in a row.

    A text that never ends its lines costs nothing: of a longer line the first 4,096 characters are compared.

    >>> found = RepeatedLine(characters=4, times=3)
    >>> [found.feed(piece) for piece in ("again\nag", "ain\n", "again\n")]
    [False, False, True]
    >>> found = RepeatedLine(characters=4, times=3)
    >>> found.feed("again\nagain\nother\nagain\n}\n}\n}\n")
    False
    """

    def __init__(self, *, characters: int = CHARACTERS_MIN, times: int = TIMES) -> None:
        self._characters = characters
        self._times = times
        self._line = ""
        self._last = ""
        self._count = 0
        self._found = False

    def __repr__(self) -> str:
        return f"<RepeatedLine {self._count} times>"

    def feed(self, text: str) -> bool:
        """Takes the next piece; whether the text has run into a loop, now or before."""
        *ended, begun = text.split("\n")
        for piece in ended:
            self._take(piece)
            self._end_line()
        self._take(begun)
        return self._found

    def _take(self, piece: str) -> None:
        self._line += piece[: max(0, _KEPT - len(self._line))]

    def _end_line(self) -> None:
        line, self._line = self._line.rstrip(), ""
        self._count = self._count + 1 if line == self._last else 1
        self._last = line
        if len(line) >= self._characters and self._count >= self._times:
            self._found = True
