"""Reading a file whose place others may write to: no link is followed, and nothing that is no file hangs the reader."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def read(path: Path, limit_bytes: int) -> bytes:
    """At most so much of its beginning. Raises OSError, FileNotFoundError among them."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(f"{path} is no file")
        with open(fd, "rb", closefd=False) as file:
            return file.read(limit_bytes)
    finally:
        os.close(fd)
