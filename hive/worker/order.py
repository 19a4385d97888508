"""The order of a warden as bytes: the words of a command and its environment, in any encoding. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence


def encode_order(command: Sequence[str], environment: Mapping[str, str]) -> bytes:
    r"""A head with the number of words and of bytes that follow; each word, each `NAME=value`, ended by NUL.

    >>> encode_order(["ls", ""], {"A": "1"})
    b'2 8\nls\x00\x00A=1\x00'
    """
    items = [*command, *(f"{name}={value}" for name, value in environment.items())]
    body = b"".join(os.fsencode(item) + b"\0" for item in items)
    return b"%d %d\n" % (len(command), len(body)) + body


def decode_order(data: bytes) -> tuple[list[str], dict[str, str]] | None:
    r"""The order, None while a part of it is missing.

    >>> decode_order(encode_order(["ls", ""], {"A": "1=2", "B": ""}))
    (['ls', ''], {'A': '1=2', 'B': ''})
    >>> decode_order(b"2 8"), decode_order(b"2 8\nls\0")
    (None, None)
    """
    head, end, body = data.partition(b"\n")
    if not end:
        return None
    words, size = map(int, head.split())
    if len(body) < size:
        return None
    items = [os.fsdecode(item) for item in body[:size].split(b"\0")[:-1]]
    return items[:words], dict(item.split("=", 1) for item in items[words:])
