"""Changes of the names in a directory, or of what a file says, told by the kernel (inotify(7))."""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

IN_MODIFY, IN_MOVED_FROM, IN_MOVED_TO, IN_CREATE, IN_DELETE = 0x2, 0x40, 0x80, 0x100, 0x200
_libc = ctypes.CDLL(None, use_errno=True)


class DirectoryWatch:
    """Its descriptor `fd` is readable once a name has come, gone, or become another file since the last `forget`."""

    def __init__(self, directory: Path, events: int = IN_MOVED_FROM | IN_MOVED_TO | IN_CREATE | IN_DELETE) -> None:
        """Raises OSError."""
        self.fd = _checked(_libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC))
        try:
            _checked(_libc.inotify_add_watch(self.fd, os.fsencode(directory), ctypes.c_uint32(events)))
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


class FileWatch(DirectoryWatch):
    """The same of what a file says: `fd` is readable once that has changed, or the file is gone. The kernel tells so of
    `cgroup.events` too."""

    def __init__(self, file: Path) -> None:
        """Raises OSError."""
        super().__init__(file, IN_MODIFY)


def _checked(result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
