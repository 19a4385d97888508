"""Sockets inside a jail: a tree in which an untrusted user may write, rename and plant links at any moment.

Firecracker, jailed, connects for its guest to `<uds_path>_<port>` as it sees it; on the host that lies at
`<chroot_base>/firecracker/<id>/root/…`. `<id>` is root's, what is in `root` is the jail's user's.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from hive.errors import BadRequest

BACKLOG = 1024
"""Firecracker connects on the thread that runs the machine and its API: a full backlog hangs both. So does every
version up to 1.17 (main of August 2026)."""
_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def bind_in(jail: Path, path: Path, *, owner: tuple[int, int] | None = None) -> socket.socket:
    """A listening socket at `path`, 0600 and `owner`'s (uid, gid); what had that name before is replaced.

    `jail` is a directory above `path` that belongs to this process's user and that nobody else may write. In it the
    socket is made and given away, and only then moved to its place: among the jail's own files its user could put
    another in the socket's place between two steps, and have that one given to him. Below `jail` each directory is
    opened from the one before it, and no link is followed. `path` may be of any length.

    Raises BadRequest where a directory on the way is a link or none, or where `jail` is not as it has to be; OSError.
    """
    directories, name = _parts(jail, path)
    made = f".{os.getpid()}"
    with _opened(jail) as top, _below(top, directories, path) as directory:
        _check_own(jail, os.fstat(top))
        with contextlib.suppress(FileNotFoundError):
            os.unlink(made, dir_fd=top)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            sock.bind(f"/proc/self/fd/{top}/{made}")  # short, wherever the jail lies
            os.chmod(made, 0o600, dir_fd=top)
            if owner is not None:
                os.chown(made, *owner, dir_fd=top)
            sock.listen(BACKLOG)
            os.rename(made, name, src_dir_fd=top, dst_dir_fd=directory)
        except OSError as error:
            sock.close()
            with contextlib.suppress(FileNotFoundError):
                os.unlink(made, dir_fd=top)
            if error.errno in (errno.EXDEV, errno.EISDIR):
                why = "is on another file system than its jail" if error.errno == errno.EXDEV else "is a directory"
                raise BadRequest(f"{path} {why}") from error
            raise
    return sock


def unlink_in(jail: Path, path: Path) -> None:
    """Removes the socket at `path`, with no more trust than it was made; what is no socket stays.

    Raises BadRequest where a directory on the way is a link or none; OSError.
    """
    directories, name = _parts(jail, path)
    with _opened(jail) as top, _below(top, directories, path) as directory:
        if stat.S_ISSOCK(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode):
            os.unlink(name, dir_fd=directory)


@contextlib.contextmanager
def found_in(jail: Path, path: Path) -> Iterator[str]:
    """A name to connect to the socket at `path` by: as long as this lasts it leads to that one and nowhere else,
    whatever is put in its place, and a link there is not followed.

    Raises BadRequest where a directory on the way is a link or none, or `path` is no socket; OSError.
    """
    directories, name = _parts(jail, path)
    with _opened(jail) as top, _below(top, directories, path) as directory:
        found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        try:
            if not stat.S_ISSOCK(os.fstat(found).st_mode):
                raise BadRequest(f"{path} is no socket")
            yield f"/proc/self/fd/{found}"
        finally:
            os.close(found)


def _parts(jail: Path, path: Path) -> tuple[tuple[str, ...], str]:
    """The directories from `jail` to `path`, and the last name."""
    if not path.is_relative_to(jail) or path == jail or ".." in path.parts:
        raise BadRequest(f"{path} is not inside {jail}")
    *directories, name = path.relative_to(jail).parts
    return tuple(directories), name


def _check_own(jail: Path, found: os.stat_result) -> None:
    if found.st_uid != os.geteuid() or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise BadRequest(f"{jail} can be written by others than its owner, or is another's")


@contextlib.contextmanager
def _opened(jail: Path) -> Iterator[int]:
    try:
        descriptor = os.open(jail, _DIRECTORY)
    except NotADirectoryError:
        raise BadRequest(f"{jail} is a link or no directory") from None
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _below(top: int, directories: tuple[str, ...], path: Path) -> Iterator[int]:
    """The last of `directories`, each opened in the one before; `top` itself where there are none."""
    descriptor = os.dup(top)
    try:
        for directory in directories:
            try:
                inner = os.open(directory, _DIRECTORY, dir_fd=descriptor)
            except NotADirectoryError:
                raise BadRequest(f"{path}: {directory!r} is a link or no directory") from None
            os.close(descriptor)
            descriptor = inner
        yield descriptor
    finally:
        os.close(descriptor)
