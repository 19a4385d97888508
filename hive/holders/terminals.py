"""The terminal that a process has, told a line: found by what /proc says, so that nobody has to pass a descriptor."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from hive.host.process import Identity

TERMINALS = Path("/dev/pts")
PTS_MAJOR = 136
TTY_FIELD = 4
"""Of /proc/<pid>/stat after the name: the device number of the terminal, 0 for none."""


def pts_number(device: int) -> int | None:
    """The N of /dev/pts/N with this device number, as /proc writes it; None for what is no such terminal.

    >>> pts_number(0x8805), pts_number(0x8800 | 1 << 20 | 2), pts_number(0), pts_number(0x0401)
    (5, 258, None, None)
    """
    if (device >> 8) & 0xFFF != PTS_MAJOR:
        return None
    return (device & 0xFF) | ((device >> 12) & ~0xFF)


def open_terminal(main: Identity, uid: int) -> int | None:
    """The terminal of exactly this process, if it is this user's, open for writing without any wait; None for none."""
    number = None
    with contextlib.suppress(OSError, ValueError):
        content = Path(f"/proc/{main.pid}/stat").read_bytes()
        number = pts_number(int(content[content.rindex(b")") + 2 :].split()[TTY_FIELD]))
    if number is None or main.stat() is None:
        return None
    with contextlib.suppress(OSError):
        flags = os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(TERMINALS / str(number), flags)
        found = os.fstat(fd)
        if stat.S_ISCHR(found.st_mode) and found.st_uid == uid and found.st_rdev == os.makedev(PTS_MAJOR, number):
            return fd
        os.close(fd)
    return None


def tell_terminal(main: Identity, uid: int, text: str) -> None:
    """Writes a line to the terminal of this process of this user, and never waits. Does nothing where there is none, or
    it takes nothing now."""
    fd = open_terminal(main, uid)
    if fd is None:
        return
    with contextlib.suppress(OSError):
        os.write(fd, f"\r\n{text}\r\n".encode(errors="replace"))
    os.close(fd)
