"""The program that reads large bodies: `python -m hive.bodies.body_worker FD`, with a socket of the proxy as FD.

    worker → proxy   one byte when it is ready; then for each body:
    proxy → worker   lengths of the three (HEAD), the rules, the opening, the body
    worker → proxy   length of the answer, 0 (REPLY), the answer: the model that is named, or a refusal, which ends it
    proxy → worker   length (CHOICE) of the choice of a server, 0 where the body is not to be read on; the choice
    worker → proxy   the lengths of the two (REPLY), the answer, the body built anew

It ends when the proxy closes the socket or ends in any way. It imports as little as it can: the bodies it reads are
untrusted, and a bug in a decoder should find nothing here.
"""

from __future__ import annotations

import signal
import socket
import struct
import sys

import msgspec

from hive.bodies.body import Asked, BodyChoice, NamedBody, OpenedBody, Opening, complete, open_body
from hive.bodies.needs import needs_of
from hive.errors import BadRequest, HiveError
from hive.settings.field_rules import FieldRules

HEAD = struct.Struct("!IIQ")
"""Bytes of the rules, of the `Opening`, of the body."""
CHOICE = struct.Struct("!I")
"""Bytes of the `BodyChoice`."""
REPLY = struct.Struct("!IQ")
"""Bytes of the answer, of the body built anew."""
READY = b"\x01"
BUFFER_BYTES = 1024 * 1024
"""Asked of the kernel for either side (it gives 416 KiB where `wmem_max` is the default): fewer wake-ups a body."""


class BodyResult(msgspec.Struct, frozen=True):
    """The result of a step: `named` of the first, `asked` of the second, without its text; or the refusal as `code` and
    `message` of an error."""

    named: NamedBody | None = None
    asked: Asked | None = None
    code: str = ""
    message: str = ""


def opened(rules: bytes, opening: bytes, text: bytes) -> OpenedBody | BodyResult:
    """The first step of one body, or the refusal."""
    try:
        body = open_body(
            text, msgspec.msgpack.decode(rules, type=FieldRules), msgspec.msgpack.decode(opening, type=Opening)
        )
        named = msgspec.structs.replace(body.named, needs=needs_of(text))
        return msgspec.structs.replace(body, named=named)
    except Exception as error:
        return _refusal(error)


def completed(body: OpenedBody, choice: bytes) -> tuple[BodyResult, list[bytes]]:
    """The second step: the answer and what goes upstream."""
    try:
        chosen = msgspec.msgpack.decode(choice, type=BodyChoice)
        asked = complete(body, chosen.want, chosen.served)
    except Exception as error:
        return _refusal(error), []
    return BodyResult(asked=msgspec.structs.replace(asked, upstream=[])), asked.upstream


def _refusal(error: Exception) -> BodyResult:
    if isinstance(error, HiveError):
        return BodyResult(code=error.code, message=error.message)
    # a fault of ours costs this body, not the worker
    return BodyResult(code=BadRequest.code, message=f"this body could not be read: {type(error).__name__}")


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
    rules, opening, text = (_receive(sock, length) for length in HEAD.unpack(head))
    if rules is None or opening is None or text is None:
        return False
    body = opened(rules, opening, text)
    del text
    if isinstance(body, BodyResult):
        _answer(sock, body, [])
        return True
    _answer(sock, BodyResult(named=body.named), [])
    head = _receive(sock, CHOICE.size)
    choice = None if head is None else _receive(sock, CHOICE.unpack(head)[0])
    if choice:
        _answer(sock, *completed(body, choice))
    return choice is not None


def _answer(sock: socket.socket, result: BodyResult, pieces: list[bytes]) -> None:
    encoded = msgspec.msgpack.encode(result)
    sock.sendall(REPLY.pack(len(encoded), sum(map(len, pieces))) + encoded)
    for piece in pieces:
        sock.sendall(piece)


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
