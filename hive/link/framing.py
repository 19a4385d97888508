"""One frame: 4 bytes big-endian length, then MessagePack `[seq, reply_to, descriptors, message]`.

`seq` is 0 for a message that wants no answer, `reply_to` is 0 for one that is none.
"""

from __future__ import annotations

import msgspec

from hive.link.messages import AnyMessage

MAX_FRAME = 64 * 1024 * 1024
"""Bytes. The largest table (10,000 agents) is 4 MiB; a peer that announces more is broken."""


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    seq: int
    reply_to: int
    descriptors: int
    message: AnyMessage


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Envelope).decode


class FrameError(ValueError):
    """The peer does not speak this protocol, or would take what it is sent for none of it."""


def pack(envelope: Envelope) -> bytes:
    """The bytes of one frame. Raises FrameError where the peer would take it for broken."""
    body = _encode(envelope)
    if len(body) > MAX_FRAME:
        raise FrameError(f"{type(envelope.message).__name__} of {len(body)} bytes")
    return len(body).to_bytes(4, "big") + body


class Unpacker:
    """Turns bytes, split anywhere, into envelopes.

    >>> from hive.link.messages import Quiet
    >>> frame = pack(Envelope(0, 0, 0, Quiet(agent="a1")))
    >>> unpacker = Unpacker()
    >>> unpacker.feed(frame[:7]), unpacker.feed(frame[7:])[0].message.agent
    ([], 'a1')
    """

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Envelope]:
        """The envelopes completed by `data`. Raises FrameError."""
        buffer = self._buffer
        buffer += data
        envelopes: list[Envelope] = []
        start = 0
        while len(buffer) - start >= 4:
            size = int.from_bytes(buffer[start : start + 4], "big")
            if size > MAX_FRAME:
                raise FrameError(f"a frame of {size} bytes")
            if len(buffer) - start - 4 < size:
                break
            try:
                envelopes.append(_decode(bytes(buffer[start + 4 : start + 4 + size])))
            except msgspec.MsgspecError as error:
                raise FrameError(str(error)) from error
            start += 4 + size
        del buffer[:start]
        return envelopes
