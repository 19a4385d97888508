"""Mounts taken out of another process's view of the files: as descriptors, for a process that puts them elsewhere."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence

from hive.errors import HiveError, NotPermitted

CLONE_FS, CLONE_NEWNS = 0x200, 0x00020000
OPEN_TREE, OPEN_TREE_CLONE = 428, 1
AT_FDCWD = -100

_libc = ctypes.CDLL(None, use_errno=True)


def clone(pidfd: int, paths: Sequence[str]) -> list[int]:
    """A copy of each of these mounts or directories as the process of `pidfd` sees it, attached nowhere.

    The caller closes them. In a thread of its own, which is in that process's view and ends there. It takes root.
    Raises NotPermitted, HiveError.
    """
    found: list[int] = []
    errors: list[OSError] = []

    def run() -> None:
        try:
            _call("unshare", CLONE_FS)
            _call("setns", pidfd, CLONE_NEWNS)
            for path in paths:
                flags = ctypes.c_uint(OPEN_TREE_CLONE | os.O_CLOEXEC)
                found.append(_call("syscall", ctypes.c_long(OPEN_TREE), AT_FDCWD, os.fsencode(path), flags))
        except OSError as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="mount-trees")
    thread.start()
    thread.join()
    if not errors:
        return found
    for descriptor in found:
        os.close(descriptor)
    message = f"its mounts cannot be taken over: {errors[0].strerror}"
    raise (NotPermitted if isinstance(errors[0], PermissionError) else HiveError)(message) from errors[0]


def _call(name: str, *arguments: object) -> int:
    result: int = getattr(_libc, name)(*arguments)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result
