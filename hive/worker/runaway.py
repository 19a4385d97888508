"""Detection of a model that has run into a loop while it writes. Pure."""

from __future__ import annotations

from hive.worker.repeated_line import RepeatedLine

WHITE_MAX = 4096
"""Characters of white space in a row: a grammar that permits it lets a model write nothing else, to its last token."""


class WhiteSpaceRun:
    r"""True from the moment `most` characters of white space came in a row.

    >>> found = WhiteSpaceRun(4)
    >>> [found.feed(piece) for piece in ("a  ", "", " b   ", " \n", "c")]
    [False, False, False, True, True]
    """

    def __init__(self, most: int = WHITE_MAX) -> None:
        self._most = most
        self._length = 0
        self._found = False

    def __repr__(self) -> str:
        return f"<WhiteSpaceRun {self._length}>"

    def feed(self, text: str) -> bool:
        """Takes the next piece; whether there was such a run, now or before. A run within one piece is seen where it
        ends the piece, or is all of it: pieces are tokens."""
        if text:
            trailing = len(text) - len(text.rstrip())
            self._length = self._length + trailing if trailing == len(text) else trailing
            self._found = self._found or self._length >= self._most
        return self._found


class Runaway:
    """One text of an answer as it comes, and whether its model goes round in circles."""

    def __init__(self) -> None:
        self._line = RepeatedLine()
        self._white = WhiteSpaceRun()

    def __repr__(self) -> str:
        return f"<Runaway {self._line!r} {self._white!r}>"

    def feed(self, text: str) -> str:
        """Takes the next piece. Returns in words why the model is to be stopped, empty where it may go on.

        >>> Runaway().feed("well"), Runaway().feed(" " * 5000)
        ('', 'the model writes nothing but white space')
        """
        if self._line.feed(text):
            return "the model writes the same line again and again"
        return "the model writes nothing but white space" if self._white.feed(text) else ""
