"""The end of a growing log file, and what was added to it.

A log is never followed as a link: its agent may have had a hand in what lies there.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

BLOCK_BYTES = 64 * 1024


class TailMark(NamedTuple):
    """The position to which a file was read, and the file."""

    inode: int
    position: int


NOWHERE = TailMark(0, 0)


def last_lines(path: Path, count: int) -> tuple[bytes, TailMark]:
    """The last `count` lines of the file, and its end. A file that is not there is empty. Raises OSError."""
    with contextlib.suppress(FileNotFoundError), _opened(path) as file:
        end = start = file.seek(0, os.SEEK_END)
        blocks: list[bytes] = []
        newlines = 0
        while start > 0 and newlines <= count:
            step = min(BLOCK_BYTES, start)
            start -= step
            file.seek(start)
            blocks.append(file.read(step))
            newlines += blocks[-1].count(b"\n")
        lines = b"".join(reversed(blocks)).splitlines(keepends=True)
        return b"".join(lines[-count:] if count else []), TailMark(_inode(file), end)
    return b"", NOWHERE


def added_since(path: Path, mark: TailMark) -> tuple[bytes, TailMark]:
    """At most one block from `mark` on, and the mark behind it. Raises OSError.

    A file that became shorter or was replaced is read from its start.
    """
    with contextlib.suppress(FileNotFoundError), _opened(path) as file:
        inode = _inode(file)
        known = inode == mark.inode and file.seek(0, os.SEEK_END) >= mark.position
        start = file.seek(mark.position if known else 0)
        data = file.read(BLOCK_BYTES)
        return data, TailMark(inode, start + len(data))
    return b"", mark


def _opened(path: Path) -> BinaryIO:
    return open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), "rb")


def _inode(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino
