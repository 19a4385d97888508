"""The host's end of Firecracker's vsock: a real unix socket that takes `CONNECT <port>` and joins it to a guest's port.

As docs/vsock.md of Firecracker has it: `OK <assigned port>` where somebody listens in the guest, a plain close where
nobody does, and nothing at all while the VMM is paused (its kernel accepts all the same).
"""

from __future__ import annotations

import asyncio
from pathlib import Path


class Muxer:
    """`guest`: the TCP ports of 127.0.0.1 that stand for the guest's, by the guest's. `said`: its lines so far."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.guest: dict[int, int] = {}
        self.words: bytes | None = None
        """Said instead of all that, then nothing."""
        self.dribbles = False
        """Says them byte by byte."""
        self.running = asyncio.Event()
        self.running.set()
        self.said: list[bytes] = []
        self.open = 0
        self._server: asyncio.Server | None = None

    def address(self, port: int) -> str:
        return f"vsock:{self.path}:{port}"

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
        await asyncio.sleep(0.01)  # what was closed has its end

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        line = await reader.readuntil(b"\n")
        self.said.append(line)
        if not self.running.is_set():
            gone = asyncio.ensure_future(reader.read())
            back = asyncio.ensure_future(self.running.wait())
            done, waiting = await asyncio.wait([gone, back], return_when=asyncio.FIRST_COMPLETED)
            for task in waiting:
                task.cancel()
            if gone in done:
                return
        if self.words is not None:
            for piece in map(bytes, zip(self.words, strict=True)) if self.dribbles else (self.words,):
                writer.write(piece)
                await asyncio.sleep(0.001)
            await reader.read()
            return
        port = self.guest.get(int(line.removeprefix(b"CONNECT ")))
        if port is None:
            return
        guest_reader, guest_writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"OK 1073741824\n")
        await asyncio.gather(_pump(reader, guest_writer), _pump(guest_reader, writer))


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass
    finally:
        writer.close()
