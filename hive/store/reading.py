"""Looking into a database that a daemon may hold, or none: nothing is written, no writer is kept waiting."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

WAIT_S = 1.0


def has_log(path: Path) -> bool:
    """Whether there is a write-ahead log. One that comes while somebody reads with `opened` was not looked at."""
    return path.with_name(f"{path.name}-wal").exists()


@contextlib.contextmanager
def opened(path: Path, *, is_whole: bool | None = None, wait_s: float = WAIT_S) -> Iterator[sqlite3.Connection]:
    """A connection that only reads. Raises sqlite3.Error, OSError.

    `is_whole`: whether no part of it is in a log; None looks.

    A write-ahead log is gone once its last writer closed cleanly. Only then nothing is missed with `immutable`. Without
    it such a database could not be opened by a user without write access, and would get new files by one with it.
    """
    options = "mode=ro&immutable=1" if (not has_log(path) if is_whole is None else is_whole) else "mode=ro"
    conn = sqlite3.connect(f"file:{quote(os.fspath(path))}?{options}", uri=True, timeout=wait_s)
    try:
        conn.row_factory = sqlite3.Row
        yield conn
    finally:
        conn.close()
