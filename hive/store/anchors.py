"""The file beside the database to which the heads of the audit table's chain are appended, one a line.

Among them is what was before the first row, each time the oldest were pruned: so no one can remove rows and say that
they were pruned. Heads of rows that are gone are of no more use and go with them (`keep_from`).
"""

from __future__ import annotations

import contextlib
import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from hive.store import plain_file
from hive.store.chain import START, Head

_LINE = re.compile(rb"([0-9]{1,18}) ([0-9a-f]{64}) \S+( pruned)?")
FILE_MAX_BYTES = 1 << 30


class Anchors(NamedTuple):
    """The heads that were read. `beginnings`: those of the heads behind which a chain may begin. `unreadable`: lines
    that are none, like one that a power cut tore. `is_there`: the file.
    """

    heads: list[Head]
    beginnings: frozenset[Head]
    unreadable: int
    is_there: bool = True

    def vouch_for(self, begun_after: Head) -> bool:
        """Whether a chain may begin behind this row as far as they tell; they tell nothing where there are none.

        >>> noted = Anchors([Head(7, "a"), Head(9, "b")], frozenset([Head(7, "a")]), 0)
        >>> [noted.vouch_for(head) for head in (START, Head(7, "a"), Head(9, "b"), Head(9, "c"))]
        [True, True, False, False]
        """
        return begun_after == START or not self.heads or begun_after in self.beginnings


def anchors_of(database: Path) -> Path:
    """The path of the heads. With `chattr +a` the file is only ever appended to, and grows without end."""
    return database.with_name("audit.heads")


def append(path: Path, head: Head, *, now: float, is_beginning: bool = False) -> None:
    """One line, on the disk when this returns: `1200 <64 hex digits> 2026-11-20T18:00:00Z`. Raises OSError.

    `is_beginning`: that row and those before it are pruned; then `pruned` stands at the end.
    """
    moment = f"{datetime.fromtimestamp(now, UTC):%Y-%m-%dT%H:%M:%SZ}"
    line = f"{head.id} {head.hash} {moment}{' pruned' if is_beginning else ''}\n".encode()
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
        lines = _lines(path)
    except FileNotFoundError:
        return Anchors([], frozenset(), 0, is_there=False)
    heads = [head for line in lines if (head := _head_in(line)) is not None]
    beginnings = [head for line in lines if line.endswith(b" pruned") and (head := _head_in(line)) is not None]
    return Anchors(heads, frozenset(beginnings), len(lines) - len(heads))


def keep_from(path: Path, first: int) -> int:
    """Takes away the heads of rows before `first`; returns their number. No writer may append meanwhile.

    The file is there whole at every moment. A line that cannot be read stays: it may be an operator's. Raises OSError,
    also where the file may only be appended to.
    """
    try:
        lines = _lines(path)
    except FileNotFoundError:
        return 0
    kept = [line for line in lines if (head := _head_in(line)) is None or head.id >= first]
    if len(kept) < len(lines):
        _replace(path, b"".join(line + b"\n" for line in kept))
    return len(lines) - len(kept)


def _lines(path: Path) -> list[bytes]:
    return [line for line in plain_file.read(path, FILE_MAX_BYTES).split(b"\n") if line]


def _head_in(line: bytes) -> Head | None:
    match = _LINE.fullmatch(line)
    return None if match is None else Head(int(match[1]), match[2].decode())


def _replace(path: Path, content: bytes) -> None:
    beside = path.with_name(f".{path.name}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(beside)
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
    try:
        os.rename(beside, path)
    except OSError:
        os.unlink(beside)
        raise
    plain_file.sync(path.parent)
