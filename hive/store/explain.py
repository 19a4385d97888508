"""Translation of an `OSError` or `sqlite3.Error` of the state directory for the person: one of Hive's errors."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from hive.errors import ConfigError, DependencyDown, HiveError, NotPermitted, StoreFull

if TYPE_CHECKING:
    import sqlite3

ENOUGH_BYTES = 256 * 1024
"""A new database needs 110 KiB: its tables, the write-ahead log, 32 KiB of shared memory."""
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MISSING = frozenset({errno.ENOENT, errno.ENOTDIR})


def os_error(error: OSError, path: Path) -> HiveError:
    """The error to raise where the file system refused `path`.

    >>> os_error(OSError(errno.ENOSPC, "No space left on device"), Path("/x/hive.db")).message
    'no space left for /x/hive.db'
    """
    if error.errno in _FULL:
        return StoreFull(f"no space left for {path}", hint=f"free some space on the disk of {path.parent}")
    if error.errno in _DENIED:
        return NotPermitted(
            f"{path} cannot be opened for writing: {error.strerror}",
            hint=f"check who owns {path.parent} and whether its file system is mounted read-only",
        )
    if error.errno in _MISSING:
        return ConfigError(f"the directory {path.parent} does not exist", hint="make it, or use another --state-dir")
    return HiveError(f"{path}: {error.strerror or error}")


def sqlite_error(error: sqlite3.Error, path: Path) -> HiveError:
    """The error to raise where SQLite failed. Raises nothing itself, so that it can be used in any `except`."""
    import sqlite3  # 0.7 MB, and the proxy needs `os_error` alone

    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL or (code == sqlite3.SQLITE_IOERR and _little_space(path)):
        return StoreFull(f"the disk of {path} is full", hint=f"free some space on the disk of {path.parent}")
    if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        return NotPermitted(
            f"{path} cannot be written: {error}",
            hint=f"check who owns {path} and {path.parent}, and whether the file system is mounted read-only",
        )
    if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return DependencyDown(
            f"another program keeps {path} locked", hint="close the program that writes to it (sqlite3, a backup)"
        )
    if is_corrupt(error):
        return HiveError(f"{path} is damaged: {error}", hint="restart the daemon: it moves a damaged database aside")
    return HiveError(f"{path}: {error}")


def is_corrupt(error: sqlite3.Error) -> bool:
    """Whether the file is no (whole) database."""
    import sqlite3  # as above

    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


def _little_space(path: Path) -> bool:
    """Whether SQLite's next file might not fit: where its shared memory does not, it says only `disk I/O error`."""
    try:
        found = os.statvfs(path.parent)
    except OSError:
        return False
    return found.f_bavail * found.f_frsize < ENOUGH_BYTES
