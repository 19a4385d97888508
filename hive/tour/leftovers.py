"""The directory of one tour, and those that killed tours left: locked while a tour lives, removed by the next one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from hive.errors import DependencyDown, StoreFull

PREFIX = "hive-demo-"
OTHER_PLACES = (Path("/var/tmp"), Path("/tmp"))


class TourDirectory:
    """A directory that is locked: by the tour it belongs to, or by the one that removes it."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock = lock

    def __repr__(self) -> str:
        return f"<TourDirectory {self.path}>"

    def remove(self) -> None:
        """Removes it with all that is in it. Raises StoreFull where something stays."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()
        if self.path.exists():
            raise StoreFull(f"{self.path} cannot be removed", hint=f"as root: rm -r {self.path}")

    def close(self) -> None:
        """Lets go of it as it is."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def place(uid: int) -> Path:
    """The temporary directory. As root agents are users of their own, who have to get there. Raises DependencyDown."""
    first = Path(tempfile.gettempdir()).resolve()
    for candidate in (first, *OTHER_PLACES):
        if uid != 0 or is_passable(candidate):
            return candidate
    raise DependencyDown(
        f"agents run as users of their own and cannot reach {first}", hint="set TMPDIR to a directory all may pass"
    )


def is_passable(directory: Path) -> bool:
    """Whether every user may go through it and what is above it."""
    try:
        return all(each.stat().st_mode & stat.S_IXOTH for each in (directory, *directory.parents))
    except OSError:
        return False


def make(base: Path, uid: int) -> TourDirectory:
    """A new one, of this user. Raises StoreFull."""
    while True:
        try:
            path = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{uid}-", dir=base))
        except OSError as error:
            raise StoreFull(f"cannot make a directory in {base}: {error.strerror}", hint="set TMPDIR") from None
        # Before it is locked, another tour may take it for one that was left: then it is gone, and this makes the next.
        if (lock := _locked(path, wait=True)) is not None:
            path.chmod(0o711 if uid == 0 else 0o700)
            return TourDirectory(path, lock)


def left(base: Path, uid: int) -> Iterator[TourDirectory]:
    """Those of this user's tours that live no more, each locked."""
    for path in _own(base, uid):
        if (lock := _locked(path, wait=False)) is not None:
            yield TourDirectory(path, lock)


def _own(base: Path, uid: int) -> Sequence[Path]:
    """Directories with such a name, of this user: in a shared place others may make what looks like one."""
    found = []
    for path in sorted(base.glob(f"{PREFIX}{uid}-*")):
        with contextlib.suppress(OSError):
            seen = path.lstat()
            if stat.S_ISDIR(seen.st_mode) and seen.st_uid == uid:
                found.append(path)
    return found


def _locked(path: Path, *, wait: bool) -> int | None:
    """A descriptor that holds the lock of this directory; None where another has it, or it is gone."""
    try:
        lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        if os.path.samestat(os.fstat(lock), os.lstat(path)):
            return lock
    except OSError:
        pass
    os.close(lock)
    return None
