"""One `hive up` per state directory, its processes included: the lock is held until the last of them has gone."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from hive.errors import NotPermitted, StoreFull, WrongState

LEAVING_S = 20.0
"""Longest time for the processes of a killed `hive up` to leave."""
LOOK_S = 0.05


def take(path: Path, *, say: Callable[[str], None]) -> int:
    """Locks `path` and writes our pid into it; returns the descriptor, to be inherited by every child.

    The lock belongs to the open file, so children that hold the descriptor keep it when `hive up` is killed, and the
    next one waits until they have let go of sockets, database and ports. Raises WrongState where another runs,
    NotPermitted, StoreFull.
    """
    descriptor = _open(path)
    try:
        _lock(descriptor, path, say)
        _write_pid(descriptor, path)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def holders(path: Path) -> list[int]:
    """Pids of the processes (that we may look into) which have `path` open."""
    wanted = os.stat(path)
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            for descriptor in (entry / "fd").iterdir():
                if os.path.samestat(descriptor.stat(), wanted):
                    found.append(int(entry.name))
                    break
    return sorted(set(found) - {os.getpid()})


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except PermissionError as error:
        raise NotPermitted(f"cannot open {path}: {error.strerror}") from None
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotPermitted(f"{path} is a link; Hive never follows one there", hint="remove it") from None
        raise StoreFull(f"cannot open {path}: {error.strerror}") from None


def _lock(descriptor: int, path: Path, say: Callable[[str], None]) -> None:
    until = time.monotonic() + LEAVING_S
    told = False
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = _owner(descriptor)
            held_by = holders(path)
            if owner in held_by:
                raise WrongState(
                    f"hive up (pid {owner}) already runs on {path.parent}",
                    hint="use that one (`hive status`), end it, or choose another --state-dir",
                ) from None
            if time.monotonic() > until:
                raise WrongState(
                    f"processes of a killed hive up still use {path.parent}: pid {', '.join(map(str, held_by))}",
                    hint="end them, then try again",
                ) from None
            if not told:
                say(f"waiting for the processes of a killed hive up to leave pids={','.join(map(str, held_by))}")
                told = True
            time.sleep(LOOK_S)  # nothing runs yet that could be held up
        else:
            return


def _write_pid(descriptor: int, path: Path) -> None:
    try:
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except OSError as error:
        raise StoreFull(f"cannot write {path}: {error.strerror}") from None


def _owner(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
    return int(text) if text.isdigit() else 0
