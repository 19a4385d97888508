"""Files of pictures, as far as their heads tell: what they are, how large, and PNG without its texts. Pure.

ComfyUI writes the whole graph into each PNG. That is the operator's, and an agent gets pixels only.
"""

from __future__ import annotations

import struct

PNG = b"\x89PNG\r\n\x1a\n"
_TOLD = frozenset({b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"tIME"})
_JPEG_SIZES = frozenset({*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0)})


def without_texts(data: bytes) -> bytes:
    """A PNG without what is told in it beside the picture; anything else as it is.

    >>> chunk = lambda kind, body: struct.pack(">I", len(body)) + kind + body + b"crc0"
    >>> told = PNG + chunk(b"IHDR", b"x") + chunk(b"tEXt", b"prompt") + chunk(b"IEND", b"")
    >>> without_texts(told) == PNG + chunk(b"IHDR", b"x") + chunk(b"IEND", b"")
    True
    """
    if not data.startswith(PNG):
        return data
    kept, at = [PNG], len(PNG)
    while at + 12 <= len(data):
        end = at + 12 + int.from_bytes(data[at : at + 4], "big")
        if data[at + 4 : at + 8] not in _TOLD:
            kept.append(data[at:end])
        at = end
    return b"".join(kept)


def size_of(data: bytes) -> tuple[int, int] | None:
    """Width and height of a PNG, JPEG or WebP; None for what is none of these.

    >>> size_of(PNG + b"\\0\\0\\0\\rIHDR" + struct.pack(">II", 64, 32)), size_of(b"<html>")
    ((64, 32), None)
    """
    if data.startswith(PNG) and len(data) >= 24:
        width, height = struct.unpack(">II", data[16:24])
        return width, height
    if data[:2] == b"\xff\xd8":
        return _jpeg_size(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP" and len(data) >= 30:
        return _webp_size(data)
    return None


def _jpeg_size(data: bytes) -> tuple[int, int] | None:
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        if data[at + 1] in _JPEG_SIZES:
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return width, height
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None


def _webp_size(data: bytes) -> tuple[int, int] | None:
    kind = data[12:16]
    if kind == b"VP8 ":
        width, height = struct.unpack("<HH", data[26:30])
        return width & 0x3FFF, height & 0x3FFF
    if kind == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8X":
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    return None
