"""The stdin, stdout and stderr of a program inside an agent, on the descriptors that came for it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable

from hive.host.engine import Frames
from hive.jobs.access import ProgramInside
from hive.tasks import spawn

READ_BYTES = 65536
ERRORS_KEPT = 2000
"""Bytes of what it wrote to stderr last; told where it fails."""


class InsideStreams:
    """Made on a running loop; closed once, by `close`. One task reads and one writes."""

    def __init__(self, program: ProgramInside) -> None:
        self._owned = list(program.descriptors)
        self._sink = self._owned[0]
        self._errors = b""
        self._frames = Frames() if program.form == "engine" else None
        self._output = self._owned[0] if program.form == "engine" else self._owned[1]
        self._pieces: deque[bytes] = deque()
        for descriptor in self._owned:
            os.set_blocking(descriptor, False)
        self._draining = spawn(self._drain(self._owned[2]), name="stderr inside") if program.form == "pipes" else None

    def __repr__(self) -> str:
        return f"<InsideStreams {self._owned or 'closed'}>"

    @property
    def last_words(self) -> str:
        """The last line of its stderr that says anything."""
        lines = self._errors.decode(errors="replace").split("\n")
        return next((line.strip()[-300:] for line in reversed(lines) if line.strip()), "")

    async def output(self) -> AsyncIterator[bytes]:
        """Its stdout, until the end. Raises HiveError where an engine sends something else."""
        while data := await self._read(self._output):
            if self._frames is None:
                yield data
                continue
            for stream, payload in self._frames.feed_both(data):
                if stream == 2:
                    self._keep(payload)
                else:
                    yield payload

    async def write(self, data: bytes) -> bool:
        """Passes it to its stdin; False where that takes no more."""
        loop, at = asyncio.get_running_loop(), 0
        while at < len(data) and self._owned:
            try:
                at += os.write(self._sink, data[at:])
            except BlockingIOError:
                await _until(loop.add_writer, loop.remove_writer, self._sink)
            except OSError:
                return False
        return at == len(data)

    def end_input(self) -> None:
        """Nothing more comes on its stdin. Nobody writes any more."""
        if not self._owned:
            return
        if self._frames is not None:
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._sink)) as sock:
                sock.shutdown(socket.SHUT_WR)
        elif self._sink in self._owned:
            self._owned.remove(self._sink)
            os.close(self._sink)

    async def close(self) -> None:
        """Gives the descriptors back: its stdin ends with that. Nothing reads or writes any more."""
        if self._draining is not None and not self._draining.done():
            self._draining.cancel()
            await asyncio.wait([self._draining])
        owned, self._owned = self._owned, []
        for descriptor in owned:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    async def _drain(self, descriptor: int) -> None:
        while data := await self._read(descriptor):
            self._keep(data)

    def _keep(self, data: bytes) -> None:
        self._errors = (self._errors + data)[-ERRORS_KEPT:]

    async def _read(self, descriptor: int) -> bytes:
        """Reads what is there; nothing at its end. One that always has something lets others run in between."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(0)
        while self._owned:
            try:
                return os.read(descriptor, READ_BYTES)
            except BlockingIOError:
                await _until(loop.add_reader, loop.remove_reader, descriptor)
            except OSError:
                return b""
        return b""


async def _until(add: Callable[[int, Callable[[], None]], None], remove: Callable[[int], object], where: int) -> None:
    ready = asyncio.Event()
    add(where, ready.set)
    try:
        await ready.wait()
    finally:
        remove(where)
