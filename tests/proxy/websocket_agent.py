"""A WebSocket as raw bytes: what asks for it, what opens it, and an agent that sends back what it gets."""

from __future__ import annotations

import asyncio

from hive.wire.websocket import Handshake
from tests.proxy.harness import INGRESS_TOKEN

KEY = b"dGhlIHNhbXBsZSBub25jZQ=="
ACCEPT = Handshake(KEY).accept


def ask(rest: bytes = b"/", *, token: bytes = INGRESS_TOKEN, key: bytes = KEY, more: bytes = b"") -> bytes:
    return (
        b"GET /agents/alice%b HTTP/1.1\r\nhost: h\r\nx-hive-token: %b\r\nupgrade: websocket\r\n"
        b"connection: Upgrade\r\nsec-websocket-key: %b\r\nsec-websocket-version: 13\r\n%b\r\n"
    ) % (rest, token, key, more)


def switched(*more: bytes, accept: bytes = ACCEPT, status: bytes = b"HTTP/1.1 101 Switching Protocols") -> bytes:
    lines = [status, b"Upgrade: websocket", b"Connection: Upgrade", b"Sec-WebSocket-Accept: " + accept]
    return b"\r\n".join([*lines, *more, b"", b""])


class Echo:
    """An agent that opens every WebSocket and sends back what it gets, as it came."""

    def __init__(self, opening: bytes = b"") -> None:
        self.opening = opening or switched()
        self.head = b""
        self.got = b""

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.head = await reader.readuntil(b"\r\n\r\n")
        writer.write(self.opening)
        while data := await reader.read(65536):
            self.got += data
            writer.write(data)
            await writer.drain()
