"""A program inside an agent and its caller: their bytes both ways, each as fast as the slower one."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from typing import Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from hive.agents.transition_lock import outcome_of
from hive.api.connections import TAKE_OVER, TakeOver
from hive.control.executing import Inside
from hive.errors import HiveError
from hive.host.engine import Frames
from hive.shapes.exec_frames import (
    PIECE_BYTES,
    PROTOCOL,
    SIZE,
    TAKEN,
    WINDOW_BYTES,
    BadFrame,
    Frame,
    FrameKind,
    FrameReader,
    pack,
)
from hive.tasks import spawn

log = logging.getLogger("hive.api")

LEFT_S = 1.0
"""After its end a program's output is read until there has been none for so long, where it does not end."""
READ_S = 60.0
"""A caller has so long to read what was written last."""
HEAD = f"HTTP/1.1 101 Switching Protocols\r\nconnection: Upgrade\r\nupgrade: {PROTOCOL}\r\n\r\n".encode()
END_OF_INPUT = b"\x04"
"""Ends a file on a terminal (Ctrl-D)."""


class Splitter(Protocol):
    """Turns what a descriptor gives into pieces of stdout and stderr."""

    def __call__(self, data: bytes, /) -> list[tuple[FrameKind, bytes]]: ...


class Ends:
    """The caller's side of a program's stdin, stdout and stderr, whatever they are (`Executing.form`)."""

    def __init__(self, form: str, descriptors: list[int], *, is_terminal: bool) -> None:
        self._is_engine = form == "engine"
        self._is_terminal = is_terminal
        self._owned = descriptors
        self.sink = descriptors[0]
        if form == "pipes":
            _, output, errors = descriptors
            self.sources: list[tuple[int, Splitter]] = [
                (output, _all(FrameKind.OUTPUT)),
                (errors, _all(FrameKind.ERRORS)),
            ]
        else:
            framed = self._is_engine and not is_terminal
            self.sources = [(descriptors[0], _Framed() if framed else _all(FrameKind.OUTPUT))]
        for descriptor in descriptors:
            os.set_blocking(descriptor, False)

    def end_input(self) -> bytes:
        """Nothing more comes; what is to be written for that, where a stream cannot be closed by halves."""
        if self._is_terminal:
            return END_OF_INPUT
        if self._is_engine:
            with socket.socket(fileno=os.dup(self.sink)) as sock, contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_WR)
        else:
            os.close(self.sink)
            self._owned.remove(self.sink)
        return b""


def _all(kind: FrameKind) -> Splitter:
    def split(data: bytes, /) -> list[tuple[FrameKind, bytes]]:
        return [(kind, data)]

    return split


class _Framed:
    """The engine's frames."""

    def __init__(self) -> None:
        self._frames = Frames()

    def __call__(self, data: bytes, /) -> list[tuple[FrameKind, bytes]]:
        found = self._frames.feed_both(data)
        return [(FrameKind.ERRORS if stream == 2 else FrameKind.OUTPUT, payload) for stream, payload in found]


class ExecStream:
    """Carries the bytes of one program on a connection of its own. `run` returns when either side has ended."""

    def __init__(self, inside: Inside) -> None:
        self._inside = inside
        order, execution = inside.order, inside.execution
        self._ends = Ends(execution.form, execution.descriptors, is_terminal=order.terminal is not None)
        self._reader = FrameReader()
        self._gone = asyncio.Event()
        self._input: deque[bytes] = deque()
        self._input_bytes = 0
        self._more_input = asyncio.Event()
        self._input_ended = not order.has_input
        self._size: tuple[int, int] | None = None
        self._is_resizing = False
        self._is_over = False
        self._reading: set[asyncio.Event] = set()
        self._wire: TakeOver | None = None
        if not order.has_input:
            self._input.append(b"")
            self._more_input.set()

    # what the connection tells ----------------------------------------------------------------------------------------

    def received(self, data: bytes) -> None:
        """Bytes of its caller."""
        try:
            for frame in self._reader.feed(data):
                self._take(frame)
        except BadFrame as error:
            log.info("exec_broken_off error=%s", error)
            self.lost()
            if self._wire is not None:
                self._wire.transport.abort()

    def lost(self) -> None:
        """Its caller is gone."""
        self._gone.set()

    def _take(self, frame: Frame) -> None:
        match frame.kind:
            case FrameKind.INPUT:
                self._input_bytes += len(frame.payload)
                if self._input_ended or self._input_bytes > WINDOW_BYTES:
                    raise BadFrame(f"input after its end, or more than {WINDOW_BYTES} bytes that were not taken yet")
                self._input_ended = not frame.payload
                self._input.append(frame.payload)
                self._more_input.set()
            case FrameKind.SIZE if len(frame.payload) == SIZE.size:
                self._size = SIZE.unpack(frame.payload)
                if not self._is_resizing:
                    self._is_resizing = True
                    spawn(self._resize(), name="resize a terminal")
            case _:
                raise BadFrame(f"a frame of kind {frame.kind} from a caller")

    async def _resize(self) -> None:
        """Tells the last size there was, however many came meanwhile."""
        while (size := self._size) is not None:
            self._size = None
            await self._inside.resize(*size)
        self._is_resizing = False

    # the two of them --------------------------------------------------------------------------------------------------

    async def run(self, take_over: Callable[[ExecStream], TakeOver]) -> None:
        """Until the program has ended and all it wrote is told, or its caller is gone."""
        self._wire = wire = take_over(self)
        wire.transport.write(HEAD)
        if wire.transport.is_closing():
            return
        feeding = spawn(self._feed(), name="exec input")
        telling = spawn(self._tell(), name="exec output")
        leaving = spawn(self._gone.wait(), name="exec caller")
        try:
            await asyncio.wait({telling, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ending = [task for task in (feeding, telling, leaving) if not task.done()]
            for task in ending:
                task.cancel()
            if ending:
                await asyncio.wait(ending)  # no descriptor is read or written once it is closed
            wire.transport.close()
            # where its caller reads nothing of what is left
            asyncio.get_running_loop().call_later(READ_S, wire.transport.abort)

    async def _tell(self) -> None:
        """Its output, then how it ended."""
        sources = [spawn(self._source(*source), name="exec source") for source in self._ends.sources]
        try:
            ended = await outcome_of(_result(self._inside.execution.ended))
            self._is_over = True
            for reading in self._reading:
                reading.set()
            await asyncio.gather(*sources)
        finally:
            for task in sources:
                task.cancel()
            await asyncio.wait(sources)
        how = self._inside.how
        if isinstance(ended, HiveError):
            told = {"status": ended.status, "code": ended.code, "detail": ended.message, "hint": ended.hint}
            how.why = ended.message
        else:
            told = {"exit_code": ended}
            how.why = ""
        await self._write(pack(FrameKind.END, json.dumps(told).encode()))

    async def _source(self, descriptor: int, split: Splitter) -> None:
        while data := await self._read(descriptor):
            for kind, piece in split(data):
                for at in range(0, len(piece), PIECE_BYTES):
                    await self._write(pack(kind, piece[at : at + PIECE_BYTES]))

    async def _read(self, descriptor: int) -> bytes:
        """Returns what is there; nothing at its end, or where the program is over and another process holds it open."""
        while True:
            try:
                return os.read(descriptor, PIECE_BYTES)
            except BlockingIOError:
                pass
            except OSError:
                return b""  # EIO: no process has the terminal any more
            try:
                await self._readable(descriptor, within_s=LEFT_S if self._is_over else None)
            except TimeoutError:
                return b""

    async def _readable(self, descriptor: int, *, within_s: float | None) -> None:
        """Returns once there is something to read, or the program is over. Raises TimeoutError."""
        loop, ready = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(descriptor, ready.set)
        self._reading.add(ready)
        try:
            async with asyncio.timeout(within_s):
                await ready.wait()
        finally:
            self._reading.discard(ready)
            loop.remove_reader(descriptor)

    async def _write(self, data: bytes) -> None:
        assert self._wire is not None
        await self._wire.drain()
        self._wire.transport.write(data)

    async def _feed(self) -> None:
        """Its input; where it does not want any, that is taken and forgotten."""
        is_open = True
        while True:
            await self._more_input.wait()
            self._more_input.clear()
            while self._input:
                piece = self._input.popleft()
                if is_open and not piece:
                    piece, is_open = self._ends.end_input(), self._inside.order.terminal is not None
                    await self._pass_on(piece)
                    continue
                if is_open:
                    is_open = await self._pass_on(piece)
                self._input_bytes -= len(piece)
                await self._write(pack(FrameKind.TAKEN, TAKEN.pack(len(piece))))

    async def _pass_on(self, data: bytes) -> bool:
        """Writes it to the program; False where that takes no more."""
        loop, at = asyncio.get_running_loop(), 0
        while at < len(data):
            try:
                at += os.write(self._ends.sink, data[at:])
            except BlockingIOError:
                ready = asyncio.Event()
                loop.add_writer(self._ends.sink, ready.set)
                try:
                    await ready.wait()
                finally:
                    loop.remove_writer(self._ends.sink)
            except OSError:
                return False
        return True


async def _result(ended: asyncio.Future[int | None]) -> int | None:
    return await asyncio.shield(ended)


class Upgraded(Response):
    """The answer after which the connection is the program's and its caller's."""

    def __init__(self, inside: Inside) -> None:
        super().__init__(status_code=101)
        self._inside = inside

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        async with self._inside:
            await ExecStream(self._inside).run(scope["state"][TAKE_OVER])
