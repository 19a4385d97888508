"""Files that are there whole or not at all, whatever ends the process that writes them.

A file is written beside its place, under a name made from its own (`beside`), synced and renamed. A process killed in
between leaves the old file, and a leftover that the next write, or `remove`, takes away.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hive.errors import AS_ROOT, HiveError, NotPermitted, StoreFull, WrongState

Owner = tuple[int, int]
"""uid and gid."""
KEEP: Owner = (-1, -1)


def beside(path: Path) -> Path:
    """The path at which `path` is written before it is renamed."""
    return path.with_name(f".{path.name}.hive-new")


def write_whole(path: Path, content: bytes, *, mode: int, owner: Owner = KEEP) -> None:
    """Puts `content` at `path`, in place of what is there. It is on the disk when this returns.

    Raises NotPermitted, StoreFull.
    """
    with translated(path):
        _write_beside(path, content, mode, owner)
        os.rename(beside(path), path)
        sync(path.parent)


def free_bytes(directory: Path) -> int | None:
    """Left on its disk for this user; None where nobody knows."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize


def size_bytes(directory: Path) -> int | None:
    """Of its disk; None where nobody knows."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def create_whole(path: Path, content: bytes, *, mode: int, owner: Owner = KEEP) -> bool:
    """`write_whole` where nothing is there; False, and nothing done, where something is (a link, too).

    Raises NotPermitted, StoreFull.
    """
    with translated(path):
        if os.path.lexists(path):
            return False
        _write_beside(path, content, mode, owner)
        try:
            os.link(beside(path), path)
        except FileExistsError:
            return False
        finally:
            os.unlink(beside(path))
        sync(path.parent)
    return True


def link_whole(path: Path, target: str) -> None:
    """Makes `path` a symbolic link to `target`, in place of what is there. Raises NotPermitted, StoreFull."""
    with translated(path):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside(path))
        os.symlink(target, beside(path))
        os.rename(beside(path), path)
        sync(path.parent)


def remove(path: Path) -> None:
    """Removes a file or link and what an interrupted write of it left; nothing is done where neither is there.

    Raises NotPermitted, StoreFull.
    """
    with translated(path):
        for leftover in (beside(path), path):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                os.unlink(leftover)


def remove_tree(path: Path) -> None:
    """Removes a directory with all that is in it, or a file, or a link; nothing is done where there is none.

    Raises NotPermitted, StoreFull.
    """
    with translated(path):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def remove_tree_below_mounts(path: Path) -> list[Path]:
    """`remove_tree`, which goes on at a mount point: that stays, emptied, with the directories it is in. The mount
    points that stayed.

    Raises NotPermitted, StoreFull.
    """
    mounts = list[Path]()
    with translated(path):
        if not path.is_dir() or path.is_symlink():
            path.unlink(missing_ok=True)
            return []
        for top, directories, files, fd in os.fwalk(path, topdown=False, onerror=_raise):
            for name in files:
                os.unlink(name, dir_fd=fd)
            for name in directories:
                _remove_directory(Path(top, name), mounts, name, fd)
        _remove_directory(path, mounts, path, None)
    return mounts


def _raise(error: OSError) -> None:
    raise error


def _remove_directory(path: Path, mounts: list[Path], name: str | Path, dir_fd: int | None) -> None:
    """One that is empty but for mount points; a link to one, too. Notes a mount point in `mounts`."""
    try:
        os.rmdir(name, dir_fd=dir_fd)
    except NotADirectoryError:
        os.unlink(name, dir_fd=dir_fd)
    except OSError as error:
        if error.errno == errno.EBUSY:
            mounts.append(path)
        elif error.errno != errno.ENOTEMPTY or not any(one.is_relative_to(path) for one in mounts):
            raise


def sync(directory: Path) -> None:
    """Makes all that was made, renamed and removed in it survive a power cut. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def give_tree(directory: Path, owner: Owner, *, only: Callable[[os.stat_result], bool]) -> None:
    """Gives to `owner` everything in `directory`, not itself, for which `only` is true.

    Links are not followed, and a file that has a second name is left alone: that may be anywhere. Raises NotPermitted,
    StoreFull.
    """
    with translated(directory):
        for _, directories, files, fd in os.fwalk(directory, follow_symlinks=False):
            for name in (*directories, *files):
                found = os.stat(name, dir_fd=fd, follow_symlinks=False)
                if only(found) and (found.st_nlink == 1 or stat.S_ISDIR(found.st_mode)):
                    os.chown(name, *owner, dir_fd=fd, follow_symlinks=False)


def _write_beside(path: Path, content: bytes, mode: int, owner: Owner) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(beside(path))
    fd = os.open(beside(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        rest = memoryview(content)
        while rest:
            rest = rest[os.write(fd, rest) :]
        if owner != KEEP:
            os.fchown(fd, *owner)
        os.fchmod(fd, mode)  # last: nobody reads a secret that is not his yet
        os.fsync(fd)
    finally:
        os.close(fd)


@contextmanager
def translated(path: Path, *, act: str = "change") -> Iterator[None]:
    """Translates the system's refusals about `path` to Hive's errors: NotPermitted, StoreFull, WrongState, HiveError.

    `act`: what was tried, as the message says it.
    """
    try:
        yield
    except PermissionError as error:
        found = path if error.filename in (None, str(beside(path))) else error.filename
        raise NotPermitted(f"cannot {act} {found}: {error.strerror}", hint=AS_ROOT) from error
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        raise WrongState(f"cannot {act} {path}: {error.strerror}") from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO):
            raise StoreFull(f"cannot write {path}: {error.strerror}") from error
        raise HiveError(f"cannot {act} {path}: {error.strerror}") from error


def storage_error(error: OSError) -> HiveError:
    """The Hive error for an operating system error of a disk."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return StoreFull(f"the disk is full: {error.filename or 'the state directory'}")
    return HiveError(str(error))
