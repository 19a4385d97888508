"""A lock with one holder at a time: `flock` on a file that also names its holder."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from hive.errors import WrongState
from hive.store import explain


class Lock:
    """Held from construction until `release` or the end of the process, however it ends.

    `what` names the guarded thing in the message. Raises WrongState naming the holder's pid where another process
    (or another `Lock` of this one) has it, NotPermitted, ConfigError, StoreFull. The file is never removed:
    removing it would let two processes hold locks on two files of the same name.
    """

    def __init__(self, path: Path, *, what: str) -> None:
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise explain.os_error(error, path) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode("ascii", "replace").strip()
            os.close(self._fd)
            raise WrongState(
                f"{what} is in use by process {holder or '(unknown)'} ({path})",
                hint="stop that Hive (an installed one: sudo systemctl stop hive.target), or use another --state-dir",
            ) from None
        # The holder's pid is for people only: a full disk must not keep the lock from being taken.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Gives it back; a second call does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
