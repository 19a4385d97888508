"""The program that reads large bodies: `python -m hive.proxy.body_worker FD`, with a socket of the proxy as FD.

    proxy → worker   lengths of the three (HEAD), the rules, what is wanted, the body
    worker → proxy   one byte when it is ready; then for each body the lengths of the two (REPLY), the answer, the
                     body built anew

It ends when the proxy closes the socket or ends in any way. It imports as little as it can: the bodies it reads are
untrusted, and a bug in a decoder should find nothing here.
"""

from __future__ import annotations

import signal
import socket
import struct
import sys

import msgspec

from hive.errors import BadRequest, HiveError
from hive.proxy import body
from hive.proxy.body import Asked, Want
from hive.settings.field_rules import FieldRules

HEAD = struct.Struct("!IIQ")
"""Bytes of the rules, of the requirements (`Want`), of the body."""
REPLY = struct.Struct("!IQ")
"""Bytes of the answer, of the body built anew."""
READY = b"\x01"
BUFFER_BYTES = 1024 * 1024
"""Asked of the kernel for either side (it gives 416 KiB where `wmem_max` is the default): fewer wake-ups a body."""


class BodyResult(msgspec.Struct, frozen=True):
    """The result of reading a body: `asked` without its text, or the refusal as `code` and `message` of an error."""

    asked: Asked | None = None
    code: str = ""
    message: str = ""


def read(rules: bytes, want: bytes, text: bytes) -> tuple[BodyResult, list[bytes]]:
    """One body → the answer and what goes upstream."""
    try:
        asked = body.read(text, msgspec.msgpack.decode(rules, type=FieldRules), msgspec.msgpack.decode(want, type=Want))
    except HiveError as error:
        return BodyResult(code=error.code, message=error.message), []
    except Exception as error:  # a fault of ours costs this body, not the worker
        return BodyResult(code=BadRequest.code, message=f"this body could not be read: {type(error).__name__}"), []
    return BodyResult(asked=msgspec.structs.replace(asked, upstream=[])), asked.upstream


def serve(sock: socket.socket) -> None:
    """Reads bodies until the proxy is gone."""
    sock.sendall(READY)
    while _serve_one(sock):
        pass


def _serve_one(sock: socket.socket) -> bool:
    """One body; False where the proxy is gone. Nothing of it is kept while the next is waited for."""
    head = _receive(sock, HEAD.size)
    if head is None:
        return False
    parts = [_receive(sock, length) for length in HEAD.unpack(head)]
    if None in parts:
        return False
    answer, pieces = read(*(part or b"" for part in parts))
    encoded = msgspec.msgpack.encode(answer)
    sock.sendall(REPLY.pack(len(encoded), sum(map(len, pieces))) + encoded)
    for piece in pieces:
        sock.sendall(piece)
    return True


def _receive(sock: socket.socket, length: int) -> bytes | None:
    """Exactly so many bytes, None where the proxy is gone."""
    data = bytearray(length)
    view = memoryview(data)
    while view:
        got = sock.recv_into(view)
        if not got:
            return None
        view = view[got:]
    return bytes(data)


def main(fd: int) -> None:
    """Signals that end the proxy are left to it: it finishes its requests first, and needs this for them."""
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    with socket.socket(fileno=fd) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        try:
            serve(sock)
        except ConnectionError:
            return  # the proxy ended while it was told something


if __name__ == "__main__":
    main(int(sys.argv[1]))
