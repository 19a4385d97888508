"""The Date of an answer (RFC 9110 §6.6.1): formatted once a second, not for each answer."""

from __future__ import annotations

import time
from email.utils import formatdate


class DateField:
    """The field of the second that was asked for last, with its line end.

    >>> DateField().at(784111777.9)
    b'date: Sun, 06 Nov 1994 08:49:37 GMT\\r\\n'
    """

    __slots__ = ("_field", "_second")

    def __init__(self) -> None:
        self._second = -1
        self._field = b""

    def at(self, now: float) -> bytes:
        """`now`: seconds since 1970."""
        second = int(now)
        if second != self._second:
            self._second = second
            self._field = b"date: %b\r\n" % formatdate(second, usegmt=True).encode()
        return self._field


_date = DateField()


def date_field() -> bytes:
    """The Date field of this moment, with its line end."""
    return _date.at(time.time())
