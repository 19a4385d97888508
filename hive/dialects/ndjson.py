"""One JSON object a line, sans I/O: bytes split anywhere into whole lines."""

from __future__ import annotations

MAX_LINE = 1024 * 1024
"""Bytes of an unfinished line kept; a longer one is given up (it is relayed all the same)."""


class NdjsonReader:
    """Gives the lines completed by `feed`, without their ends; empty ones are passed over.

    >>> reader = NdjsonReader()
    >>> reader.feed(b'{"a":1}\\n{"b"'), reader.feed(b':2}\\n')
    ([b'{"a":1}'], [b'{"b":2}'])
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE:
            self._rest = b""
        return [line for line in lines if line]
