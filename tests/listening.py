"""A server of a test, on a socket file or a port of loopback, that leaves no connection behind."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""A conversation with one client; its connection is closed after it."""
LEFT = (asyncio.IncompleteReadError, ConnectionError)
"""The client closed the connection."""


@contextlib.asynccontextmanager
async def listening(talk: Talk, path: Path | str | None = None) -> AsyncIterator[str]:
    """Yields the address; without `path` it is on loopback.

    At the end every connection is over: asyncio's server in 3.11 waits for none, and what collects one that was left
    open warns in the middle of a later test.
    """
    open: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def talk_and_close(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        open[task] = writer
        task.add_done_callback(open.pop)
        try:
            with contextlib.suppress(*LEFT):
                await talk(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    if path is None:
        server = await asyncio.start_server(talk_and_close, "127.0.0.1", 0)
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    else:
        server = await asyncio.start_unix_server(talk_and_close, path)
        address = str(path)
    try:
        yield address
    finally:
        server.close()
        for _ in range(5):  # a connection accepted just now begins
            await asyncio.sleep(0)
        left = list(open)
        for task, writer in open.items():
            writer.transport.abort()
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
