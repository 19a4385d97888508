"""Changes of the names in a directory, told by the kernel (inotify(7))."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 0x40, 0x80, 0x100, 0x200
_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryWatch:
    """Its descriptor `fd` is readable once a name has come, gone, or become another file since the last `forget`."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError."""
        self.fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            names = IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE
            _checked(_libc.inotify_add_watch(self.fd, os.fsencode(directory), ctypes.c_uint32(names)))
        except OSError:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<DirectoryWatch {self.fd}>"

    def forget(self) -> None:
        """Takes what was told until now: the caller looks at the directory itself."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self.fd, 65536):
                pass

    def close(self) -> None:
        os.close(self.fd)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
