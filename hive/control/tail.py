"""The output of an agent, as an answer of the API: the end of it, and what is added while a reader follows.

Its output is in a file of Hive's, or, where agents are units of systemd, in the journal: there over all its starts,
with what systemd said of each.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import NamedTuple

from hive.host import systemd
from hive.host.journal import follow_journal
from hive.host.tail import added_since, last_lines

POLL_S = 0.2
"""Between looks at a followed file; a person does not see less."""


class Output(NamedTuple):
    """The place of an agent's output. `unit`: in the journal, of this unit; empty where it is in the file `path`.
    `only_its_own`: without what systemd says of the unit."""

    path: Path
    unit: str = ""
    only_its_own: bool = False


async def tail(output: Output, count: int) -> bytes:
    """The last `count` lines. Raises OSError, and for the journal NotPermitted, DependencyDown, TimedOut."""
    if output.unit:
        return (await systemd.read_journal(output.unit, lines=count, only_its_own=output.only_its_own)).encode()
    text, _ = await asyncio.to_thread(last_lines, output.path, count)
    return text


async def follow(output: Output, count: int, stopping: asyncio.Event) -> AsyncIterator[bytes]:
    """The last `count` lines, then what is added, until `stopping` is set. `tail` tells beforehand what is wrong."""
    pieces = (
        follow_journal(output.unit, lines=count, only_its_own=output.only_its_own, stopping=stopping)
        if output.unit
        else _follow_file(output.path, count, stopping)
    )
    # A reader that leaves ends this generator, which does not end the one it reads from by itself.
    async with contextlib.aclosing(pieces):
        async for piece in pieces:
            yield piece


async def _follow_file(path: Path, count: int, stopping: asyncio.Event) -> AsyncGenerator[bytes]:
    text, mark = await asyncio.to_thread(last_lines, path, count)
    if text:
        yield text
    while not stopping.is_set():
        added, mark = await asyncio.to_thread(added_since, path, mark)
        if added:
            yield added
        else:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await stopping.wait()
