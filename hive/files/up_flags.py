"""The flags that a `hive up` was started with, so that whoever finds it ended is told the same command."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

NAME = "up.flags"
"""In the state directory."""
LONGEST_BYTES = 4096


def keep(path: Path, flags: str) -> None:
    """Writes them, each with a space before it, whole or not at all. A full disk only costs the memory of them."""
    temporary = path.with_suffix(".new")
    with contextlib.suppress(OSError):
        temporary.write_text(flags)
        os.replace(temporary, path)


def kept(path: Path, uid: int) -> str:
    """Empty where nobody has kept any, or this user may not read them.

    Only a file of `uid`, who is told a command made of it: another user could have written anything there.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        found = os.fstat(fd)
        is_fit = found.st_uid == uid and found.st_size <= LONGEST_BYTES
        return os.read(fd, LONGEST_BYTES).decode(errors="replace") if is_fit else ""
    except OSError:
        return ""
    finally:
        os.close(fd)
