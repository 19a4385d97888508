"""The Date of an answer (RFC 9110 §6.6.1): formatted once a second, not for each answer."""

from __future__ import annotations

from collections.abc import Callable
from email.utils import formatdate


class Dated:
    """Bytes that a Date is a part of, made once a second for each key. `make(key, date)`.

    >>> Dated(lambda key, date: b"%d %b" % (key, date)).at(200, 784111777.9)
    b'200 date: Sun, 06 Nov 1994 08:49:37 GMT\\r\\n'
    """

    __slots__ = ("_date", "_made", "_make", "_second")

    def __init__(self, make: Callable[[int, bytes], bytes]) -> None:
        self._make = make
        self._second = -1
        self._date = b""
        self._made: dict[int, bytes] = {}

    def at(self, key: int, now: float) -> bytes:
        """`now`: seconds since 1970."""
        second = int(now)
        if second != self._second:
            self._second = second
            self._made.clear()
            self._date = date_field(second)
        made = self._made.get(key)
        if made is None:
            made = self._made[key] = self._make(key, self._date)
        return made


def date_field(second: int) -> bytes:
    """The field with its line end.

    >>> date_field(784111777)
    b'date: Sun, 06 Nov 1994 08:49:37 GMT\\r\\n'
    """
    return b"date: %b\r\n" % formatdate(second, usegmt=True).encode()
