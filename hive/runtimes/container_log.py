"""Copies what a container prints into its agent's log, through deaths of this helper and of the engine.

How far the copy is lies in a file beside it: the engine's time of the last piece, and the log's length with it. A
helper that finds the log longer was killed between the two writes: it cuts the log back and asks for those pieces
again, so that nothing is lost or doubled. (What the engine itself dropped meanwhile, because it keeps only so much of
a container's output, is lost.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from hive.errors import HiveError, NotFound
from hive.host.engine import Engine, EngineLogEntry, Frames, as_since, parse_entry
from hive.runtimes.log_process import append, cut_back
from hive.tasks import spawn

log = logging.getLogger("hive.sandbox")

FIRST_WAIT_S = 0.05
LONGEST_WAIT_S = 2.0
"""Between attempts while the engine is away."""
LAST_WORDS_S = 3.0
"""From the end of the container to the end of its log: the engine has it within milliseconds."""


class Position(msgspec.Struct, frozen=True):
    """`at`: the engine's time of the last piece copied, empty before the first; `same`: pieces copied of that very
    moment; `size`: the log's length then, in bytes."""

    at: str = ""
    same: int = 0
    size: int = 0


def fresh(entries: list[EngineLogEntry], at: str, skip: int) -> tuple[list[EngineLogEntry], int]:
    """The entries not copied yet, and the number of entries of the moment `at` that are still to be passed over.

    `since` takes in the last moment again, of which `skip` pieces were copied. What has no time counts as new.

    >>> moment = "2026-11-20T14:25:03.000000002"
    >>> new, left = fresh([EngineLogEntry(moment, text) for text in (b"a", b"b")], moment, skip=1)
    >>> [entry.text for entry in new], left
    ([b'b'], 0)
    """
    new = []
    for entry in entries:
        if entry.at == at and at and skip > 0:
            skip -= 1
        elif not entry.at or entry.at >= at:
            new.append(entry)
    return new, skip


def advanced(position: Position, entries: list[EngineLogEntry], size: int) -> Position:
    """The position of the copy once `entries` are written and the log has `size` bytes.

    >>> advanced(Position(), [EngineLogEntry("2026-01-01T00:00:00.000000001", b"a")] * 2, 2)
    Position(at='2026-01-01T00:00:00.000000001', same=2, size=2)
    """
    at = max([entry.at for entry in entries if entry.at] + [position.at])
    same = sum(entry.at == at for entry in entries) if at else 0
    return Position(at, same + (position.same if at == position.at else 0), size)


class ContainerLog:
    """Follows one container from `begin` until it ended or `close`; `is_over()`: its main process ended."""

    def __init__(
        self,
        engine: Engine,
        container: str,
        *,
        path: Path,
        limit_bytes: int,
        note: Path,
        agent: str,
        is_over: Callable[[], bool],
    ) -> None:
        """`path`: the agent's log, of at most `limit_bytes`; `note`: where it is written down how far the copy is."""
        self._engine = engine
        self._container = container
        self._path = path
        self._limit_bytes = limit_bytes
        self._note = note
        self._agent = agent
        self._is_over = is_over
        self._following: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<ContainerLog {self._container[:12]} to {self._path}>"

    def begin(self) -> None:
        self._following = spawn(self._follow(), name=f"log of {self._agent}")

    async def finish(self) -> None:
        """Waits for the last words of a container that ended."""
        if self._following is not None:
            await asyncio.wait({self._following}, timeout=LAST_WORDS_S)
        self.close()

    def close(self) -> None:
        if self._following is not None:
            self._following.cancel()
            self._following = None

    async def _follow(self) -> None:
        """Stream after stream: one ends with the container, with the engine, or because the disk is full."""
        wait_s, why = FIRST_WAIT_S, ""
        while True:
            over, before = self._is_over(), why
            try:
                await self.copy(follow=not over)
                wait_s, why = FIRST_WAIT_S, ""
            except NotFound:
                return  # removed by hand
            except (HiveError, OSError) as error:
                wait_s, why = min(wait_s * 2, LONGEST_WAIT_S), str(error)
            if over and not why:
                return
            if why and not before:
                log.warning("log_not_followed agent=%s error=%r", self._agent, why)
            if over or not self._is_over():
                await asyncio.sleep(wait_s)

    async def copy(self, *, follow: bool) -> None:
        """All there is that was not copied yet; `follow`: and all that comes, until the engine ends the stream.

        Raises HiveError, and OSError where the disk refuses: then it is asked for again.
        """
        position = self._resumed()
        query = {"stdout": "1", "stderr": "1", "timestamps": "1", "follow": "1" if follow else "0"}
        if position.at:
            query["since"] = as_since(position.at)
        frames, at, skip = Frames(), position.at, position.same
        async with self._engine.stream("GET", f"/containers/{self._container}/logs", query=query) as chunks:
            async for chunk in chunks:
                new, skip = fresh([parse_entry(payload) for payload in frames.feed(chunk)], at, skip)
                if new:
                    # Text, then position, without an await between them.
                    text = b"".join(entry.text for entry in new)
                    position = self._with_room(position, len(text))
                    size = append(self._path, text, self._limit_bytes)
                    position = advanced(position, new, size)
                    write_position(self._note, position)

    def _with_room(self, position: Position, room: int) -> Position:
        """Cuts the log back for so many bytes more; returns the position of the copy after that."""
        cut_back(self._path, self._limit_bytes, room=room)
        with contextlib.suppress(FileNotFoundError):
            if (size := os.stat(self._path).st_size) < position.size:
                position = msgspec.structs.replace(position, size=size)
                write_position(self._note, position)
        return position

    def _resumed(self) -> Position:
        """The position of the copy; bytes of the log beyond it were written without their position, and are cut off."""
        position = read_position(self._note)
        if position is None:
            return Position()
        with contextlib.suppress(FileNotFoundError):
            if os.stat(self._path).st_size > position.size:
                os.truncate(self._path, position.size)
        return position


def read_position(note: Path) -> Position | None:
    """None where there is no note, or none that can be read."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode(note.read_bytes(), type=Position)
    return None


def begin_anew(path: Path, note: Path, limit_bytes: int) -> None:
    """For a new container: what an earlier one printed stays in the log. Raises OSError."""
    write_position(note, Position(size=append(path, b"", limit_bytes)))


def write_position(note: Path, position: Position) -> None:
    """Writes it in place, in one write of a fixed length: a kill leaves the old one or the new one. Raises OSError."""
    fd = os.open(note, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        os.pwrite(fd, msgspec.json.encode(position).ljust(128), 0)
    finally:
        os.close(fd)
