"""A relay before a llama-server that holds an order about a slot up: `slot_relay.py PORT SERVER_PORT FOLDER`.

`FOLDER/hold` names where: `before save`, `after save`, `before restore`, `after restore`; after means that the server
has done it, and nobody knows yet. It is held until that file is gone. `FOLDER/events` has a line for each place passed,
and `held` as soon as one is held up. An order whose sender has left meanwhile is carried out all the same.
"""

from __future__ import annotations

import asyncio
import re
import sys
from contextlib import suppress
from pathlib import Path

ORDER = re.compile(rb"POST /slots/\d+\?action=(save|restore)\b")
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class SlotRelay:
    """One relay."""

    def __init__(self, server_port: int, folder: Path) -> None:
        self._server_port = server_port
        self._hold = folder / "hold"
        self._events = folder / "events"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            first = await reader.read(65536)
            order = ORDER.match(first)
            if order is not None:
                await self._ordered(order[1].decode(), await whole(reader, first), writer)
            elif first:
                to, there = await self._connect()
                there.write(first)
                await asyncio.gather(pump(reader, there), pump(to, writer))
        writer.close()

    async def _ordered(self, verb: str, order: bytes, writer: asyncio.StreamWriter) -> None:
        await self._passes(f"before {verb}")
        to, there = await self._connect()
        there.write(order)
        answer = await whole(to, b"")
        there.close()
        await self._passes(f"after {verb}")
        writer.write(answer)
        await writer.drain()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self._server_port)

    async def _passes(self, place: str) -> None:
        self._say(place)
        if self._is_held(place):
            self._say("held")
        while self._is_held(place):  # noqa: ASYNC110 - a test says it by a file
            await asyncio.sleep(0.01)

    def _is_held(self, place: str) -> bool:
        return self._hold.exists() and self._hold.read_text() == place

    def _say(self, event: str) -> None:
        with self._events.open("a") as events:
            events.write(event + "\n")


async def whole(reader: asyncio.StreamReader, data: bytes) -> bytes:
    """One message with a length, head and body."""
    while (head := data.find(b"\r\n\r\n")) < 0:
        data += await reader.readexactly(1)
    length = LENGTH.search(data[:head])
    left = (int(length[1]) if length else 0) - (len(data) - head - 4)
    return data + (await reader.readexactly(left) if left > 0 else b"")


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(65536):
            writer.write(piece)
            await writer.drain()
    writer.close()


async def main(port: str, server_port: str, folder: str) -> None:
    relay = SlotRelay(int(server_port), Path(folder))
    async with await asyncio.start_server(relay.serve, "127.0.0.1", int(port)) as server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
