"""The frames of a connection on which a program inside an agent is used: `POST /api/agents/{ref}/exec`, upgraded.

A frame is its kind (one byte), the length of its payload (four bytes, big-endian), its payload. To Hive: `INPUT` (a
piece of stdin; an empty one is its end) and `SIZE` (of the terminal: rows and columns, two bytes each). From Hive:
`OUTPUT` and `ERRORS` (pieces of stdout and stderr), `TAKEN` (so many bytes of stdin were passed on: four bytes), last
`END` (JSON: `exit_code`, or an error with `status`, `code`, `detail`, `hint`).

No more than `WINDOW_BYTES` of stdin may be sent that were not told to be taken: what Hive keeps is bounded, and it
never has to stop reading, by which it would no longer see that its caller is gone. Pure.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

PROTOCOL = "hive-exec"
"""Name of the protocol in the field `Upgrade`."""
WINDOW_BYTES = 256 * 1024
PIECE_BYTES = 64 * 1024
HEAD = struct.Struct(">BI")
SIZE = struct.Struct(">HH")
TAKEN = struct.Struct(">I")


class FrameKind(IntEnum):
    """Kinds of frames."""

    INPUT = 0
    OUTPUT = 1
    ERRORS = 2
    TAKEN = 3
    SIZE = 4
    END = 5


class Frame(NamedTuple):
    kind: FrameKind
    payload: bytes


class BadFrame(ValueError):
    """The other side does not speak this."""


def pack(kind: FrameKind, payload: bytes = b"") -> bytes:
    """
    >>> pack(FrameKind.INPUT, b"hi")
    b'\\x00\\x00\\x00\\x00\\x02hi'
    """
    return HEAD.pack(kind, len(payload)) + payload


class FrameReader:
    """Turns bytes, split anywhere, into frames.

    >>> reader = FrameReader()
    >>> reader.feed(pack(FrameKind.OUTPUT, b"ab")[:6]), reader.feed(b"b")
    ([], [Frame(kind=<FrameKind.OUTPUT: 1>, payload=b'ab')])
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """The frames completed by `data`. Raises BadFrame."""
        self._buffer += data
        found: list[Frame] = []
        at = 0
        while len(self._buffer) - at >= HEAD.size:
            kind, length = HEAD.unpack_from(self._buffer, at)
            if kind not in set(FrameKind) or length > PIECE_BYTES:
                raise BadFrame(f"a frame of kind {kind} with {length} bytes")
            end = at + HEAD.size + length
            if end > len(self._buffer):
                break
            found.append(Frame(FrameKind(kind), bytes(self._buffer[at + HEAD.size : end])))
            at = end
        del self._buffer[:at]
        return found
