"""Noticing that the parent is gone, and becoming the one that inherits orphans."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38

_libc = ctypes.CDLL(None, use_errno=True)


def prctl(option: int, value: int) -> None:
    """prctl(2) with one argument. Raises OSError."""
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def die_with_parent(signum: int, *, parent: int | None = None) -> None:
    """From now on the kernel sends this process `signum` when its parent ends.

    `parent`: the pid that must be the parent still, by default the present one; where it ended before the kernel was
    told, the signal is sent here. The kernel forgets the setting when the process changes its uid, so call it after.
    """
    expected = os.getppid() if parent is None else parent
    prctl(PR_SET_PDEATHSIG, signum)
    if os.getppid() != expected:
        os.kill(os.getpid(), signum)


def become_subreaper() -> None:
    """Orphans among this process's descendants become its children, so that it learns how they end."""
    prctl(PR_SET_CHILD_SUBREAPER, 1)


def has_children() -> bool:
    """Whether this process has a child, one that has ended and was not waited for among them.

    Of a sub-reaper: whether anything below it is left. A walk of /proc does not tell: it may miss one.
    """
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def forbid_new_privileges() -> None:
    """Forbids programs started from here to gain rights by a setuid bit: their starter may always signal them."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def watch(fd: int, on_gone: Callable[[], None]) -> None:
    """Calls `on_gone` once, on the running loop, when every writer of the pipe `fd` is gone.

    Beside the parent-death signal, which is lost when the parent's *thread* that forked ends first or a uid changes.
    """
    import asyncio  # 10 MB, which a warden beside each inference server does without

    loop = asyncio.get_running_loop()
    os.set_blocking(fd, False)

    def readable() -> None:
        try:
            data = os.read(fd, 4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            loop.remove_reader(fd)
            on_gone()

    loop.add_reader(fd, readable)
