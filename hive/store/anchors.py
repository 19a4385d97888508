"""The file beside the database to which the heads of the audit table's chain are appended, one a line."""

from __future__ import annotations

import os
import re
import stat
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from hive.store.chain import Head

_LINE = re.compile(rb"([0-9]{1,18}) ([0-9a-f]{64}) \S+")
FILE_MAX_BYTES = 1 << 30


class Anchors(NamedTuple):
    """What was read. `unreadable`: lines that are none, like one that a power cut tore."""

    heads: list[Head]
    unreadable: int


def anchors_of(database: Path) -> Path:
    """Where they are. The file is only ever appended to, so `chattr +a` may keep it from all else."""
    return database.with_name("audit.heads")


def append(path: Path, head: Head, *, now: float) -> None:
    """One line, on the disk when this returns: `1200 <64 hex digits> 2026-11-20T18:00:00Z`. Raises OSError."""
    line = f"{head.id} {head.hash} {datetime.fromtimestamp(now, UTC):%Y-%m-%dT%H:%M:%SZ}\n".encode()
    fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        size = os.fstat(fd).st_size
        torn = size > 0 and os.pread(fd, 1, size - 1) != b"\n"
        os.write(fd, b"\n" + line if torn else line)
        os.fdatasync(fd)
    finally:
        os.close(fd)


def read(path: Path) -> Anchors:
    """All of them, in the order they were noted; none where there is no file. Raises OSError."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return Anchors([], 0)
    with open(fd, "rb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is no file")
        lines = [line for line in file.read(FILE_MAX_BYTES).split(b"\n") if line]
    found = [_LINE.fullmatch(line) for line in lines]
    heads = [Head(int(match[1]), match[2].decode()) for match in found if match is not None]
    return Anchors(heads, len(found) - len(heads))
