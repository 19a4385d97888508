"""Files beside the database: read where others may write, no link followed, no hang; names brought to the disk."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read(path: Path, limit_bytes: int) -> bytes:
    """
    At most so much of its beginning. Takes the memory that the file needs, not that of the limit: a box with little
    must read its own files again. Raises OSError, FileNotFoundError among them.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(f"{path} is no file")
        # read(n) reserves n bytes before it reads, also of a file of ten.
        with open(fd, "rb", closefd=False) as file:
            return file.read(min(limit_bytes, found.st_size))
    finally:
        os.close(fd)


def sync(directory: Path) -> None:
    """Brings the names in a directory to the disk: a rename is there after a power cut. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
