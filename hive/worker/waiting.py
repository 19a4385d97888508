"""The wait of a prepared supervisor: it has begun, and nothing of the GPU is its own until there is a grant.

The helper keeps a file, the mark, for as long as it wants one to wait, and writes the grant once the daemon has decided
for the load. Whatever of the two sides is killed, a supervisor without a grant ends by itself.
"""

from __future__ import annotations

import os
import select
import time
from collections.abc import Sequence
from pathlib import Path

from hive.errors import DependencyDown
from hive.host.directory_watch import DirectoryWatch

PREPARED_S = 300.0
"""Longest wait since the mark was touched last."""
INIT = 1


def is_awaited(grant: Path, mark: Path) -> bool:
    """Whether the grant is to come: else whoever reads it says what is wrong."""
    return not grant.exists() and mark.exists()


def wait_for_grant(grant: Path, mark: Path, *, warden: int, limit_s: float = PREPARED_S) -> bool:
    """Whether there is a grant, after a wait that ends with this process's parent and with its warden too.

    Raises DependencyDown.
    """
    with_them = [os.pidfd_open(warden)]
    if (parent := parent_gone()) is not None:
        with_them.append(parent)
    try:
        return until_granted(grant, mark, with_them=with_them, limit_s=limit_s)
    except OSError as error:
        raise DependencyDown(f"cannot wait for {grant}: {error.strerror}") from None
    finally:
        for fd in with_them:
            os.close(fd)


def until_granted(grant: Path, mark: Path, *, with_them: Sequence[int], limit_s: float = PREPARED_S) -> bool:
    """Waits for the grant as long as there is a mark; whether it has come: False once nobody wants it to wait.

    `with_them`: descriptors that become readable once the wait makes no sense (pidfds of the helper and the warden).
    Raises OSError.
    """
    watch = DirectoryWatch(mark.parent)
    poll = select.poll()
    for fd in (watch.fd, *with_them):
        poll.register(fd, select.POLLIN)
    touched, until = _touched(mark), time.monotonic() + limit_s
    try:
        while not grant.exists():
            now, last, touched = time.monotonic(), touched, _touched(mark)
            if touched is not None and touched != last:
                until = now + limit_s
            if touched is None or now >= until:
                return grant.exists()
            ready = [fd for fd, _ in poll.poll((until - now) * 1000)]
            if any(fd != watch.fd for fd in ready):
                return grant.exists()
            watch.forget()
        return True
    finally:
        watch.close()


def _touched(mark: Path) -> int | None:
    """A number that is another one after each touch; None where it is gone."""
    try:
        return mark.stat().st_mtime_ns
    except OSError:
        return None


def parent_gone() -> int | None:
    """A descriptor that is readable once the parent has ended; None below init, which starts units and outlives them.

    The caller closes it.
    """
    parent = os.getppid()
    if parent == INIT:
        return None
    try:
        return os.pidfd_open(parent)
    except ProcessLookupError:  # it has ended: this process is init's child by now, or another one's soon
        return None
