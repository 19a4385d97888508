"""The journal as a stream: what units write from now on, for as long as it is read."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncGenerator, Sequence

from hive.host import program
from hive.host.systemd import journal_command

POLL_S = 0.2
"""Between looks at whether to stop, while nothing comes."""
PIECE_BYTES = 64 * 1024


def follow_journal(
    unit: str, *, lines: int, stopping: asyncio.Event, only_its_own: bool = False
) -> AsyncGenerator[bytes]:
    """The last `lines` of what `unit` wrote, over all its starts, then what it writes. See `follow_output`.

    `only_its_own`: without what systemd says of it.
    """
    command = journal_command(unit, lines=lines, follow=True, only_its_own=only_its_own)
    return follow_output(command, stopping=stopping)


async def follow_output(command: Sequence[str], *, stopping: asyncio.Event) -> AsyncGenerator[bytes]:
    """Follows the output of a program, as it comes, until it ends, `stopping` is set, or the generator is closed.

    Then the program is killed, as it is when this process ends. It is read no faster than its pieces are taken.
    Raises NotFound where there is no such program.
    """
    child, read_fd = program.begin(command)
    os.set_blocking(read_fd, False)
    try:
        while piece := await _next(read_fd, stopping):
            yield piece
    finally:
        os.close(read_fd)
        child.kill()
        child.wait()


async def _next(fd: int, stopping: asyncio.Event) -> bytes:
    """The next piece; empty at its end, or once `stopping` is set."""
    loop, arrived = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, arrived.set)
    try:
        while not stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await arrived.wait()
                return os.read(fd, PIECE_BYTES)
    finally:
        loop.remove_reader(fd)
    return b""
