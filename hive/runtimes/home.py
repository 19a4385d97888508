"""An agent's files: its home (the agent's own, so nothing in it is trusted) and its log (Hive's)."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from hive.errors import BadRequest, HiveError, NotFound, NotPermitted
from hive.link.specs import SandboxSpec
from hive.settings.table import Paths

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def check_places(agent: str, spec: SandboxSpec, paths: Paths) -> None:
    """Raises BadRequest where the home and the log that are asked for are not where this agent's are."""
    if (Path(spec.home), Path(spec.log)) != (paths.home(agent), paths.log(agent)):
        raise BadRequest(f"home and log of {agent} must be {paths.home(agent)} and {paths.log(agent)}")


def make_home(home: Path, *, uid: int | None, gid: int | None, files: Mapping[str, str]) -> bool:
    """The home directory, 0700, the agent's; `files` (source path → name) copied in where missing or changed.

    An existing home is taken if it is a directory of the agent or of Hive. Whether it is new; a new one is removed
    again where this fails. Raises NotPermitted where it is a link or somebody else's, BadRequest for a name that
    is a path, NotFound for a source that is not there, OSError.
    """
    try:
        home.mkdir(mode=0o700)
        new = True
    except FileExistsError:
        new = False
    try:
        _fill(home, uid, gid, files)
    except (HiveError, OSError):
        if new:
            remove_tree(home)
        raise
    return new


def _fill(home: Path, uid: int | None, gid: int | None, files: Mapping[str, str]) -> None:
    try:
        directory = os.open(home, _DIRECTORY)
    except OSError as error:
        raise NotPermitted(f"{home} is no directory of Hive's own: {error.strerror}") from error
    try:
        owner = os.fstat(directory).st_uid
        if owner not in (os.geteuid(), uid):
            raise NotPermitted(f"{home} belongs to uid {owner}")
        _own(directory, uid, gid)
        os.fchmod(directory, 0o700)
        for source, name in files.items():
            _copy(Path(source), name, directory, uid, gid)
    finally:
        os.close(directory)


def _own(fd: int, uid: int | None, gid: int | None) -> None:
    if uid is not None:
        os.fchown(fd, uid, uid if gid is None else gid)


def _copy(source: Path, name: str, directory: int, uid: int | None, gid: int | None) -> None:
    """Writes beside and renames over: a link or pipe the agent put at `name` is replaced, never followed or opened."""
    if name in ("", ".", "..") or "/" in name or "\0" in name:
        raise BadRequest(f"{name!r} is no file name")
    try:  # a pipe is not waited for
        with os.fdopen(os.open(source, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):
                raise NotFound(f"cannot read {source}: it is no file")
            content = file.read()
    except OSError as error:
        raise NotFound(f"cannot read {source}: {error.strerror}") from error
    if _content(name, directory) == content:
        return
    beside = f".{name}.{os.urandom(8).hex()}"
    fd = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=directory)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(content)
            _own(file.fileno(), uid, gid)
            os.fchmod(file.fileno(), 0o700 if mode & 0o111 else 0o600)
        os.rename(beside, name, src_dir_fd=directory, dst_dir_fd=directory)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(beside, dir_fd=directory)
        raise


def _content(name: str, directory: int) -> bytes | None:
    """The content of the regular file `name`, None where it is none. A pipe is not waited for, a link not followed."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    except OSError:
        return None
    with os.fdopen(fd, "rb") as file:
        return file.read() if stat.S_ISREG(os.fstat(fd).st_mode) else None


def discard(home: Path, log: Path) -> None:
    """Deletes both; what is not there is deleted already."""
    remove_tree(home)
    log.unlink(missing_ok=True)


def remove_tree(top: Path) -> None:
    """Deletes a directory whatever its owner built in it; nothing outside is touched. Missing is fine.

    Links are unlinked, not followed. Directories are emptied by moving theirs up to the top first, so depth costs
    neither recursion nor descriptors. The owner's processes must be gone. Raises OSError, NotPermitted.
    """
    try:
        directory = os.open(top, _DIRECTORY)
    except FileNotFoundError:
        return
    except OSError as error:
        raise NotPermitted(f"{top} is no directory: {error.strerror}") from error
    try:
        os.fchmod(directory, 0o700)
        while names := os.listdir(directory):
            for name in names:
                _remove_entry(name, directory)
    finally:
        os.close(directory)
    os.rmdir(top)


def _is_directory(name: str, directory: int) -> bool:
    return stat.S_ISDIR(os.stat(name, dir_fd=directory, follow_symlinks=False).st_mode)


def _remove_entry(name: str, top: int) -> None:
    """Deletes one entry of the top directory; its subdirectories come up under names that cannot be taken."""
    if not _is_directory(name, top):
        os.unlink(name, dir_fd=top)
        return
    os.chmod(name, 0o700, dir_fd=top)
    inner = os.open(name, _DIRECTORY, dir_fd=top)
    try:
        for child in os.listdir(inner):
            if _is_directory(child, inner):
                os.chmod(child, 0o700, dir_fd=inner)  # a directory that moves must be writable: its `..` changes
                os.rename(child, f".hive-removes-{os.urandom(8).hex()}", src_dir_fd=inner, dst_dir_fd=top)
            else:
                os.unlink(child, dir_fd=inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=top)


def trim_log(path: Path, limit_bytes: int) -> None:
    """Keeps the last half of `limit_bytes`, from a line start, of a log that is longer than `limit_bytes`.

    For logs that others have open; where Hive is the only writer, log_process.py cuts.
    The file stays the same one, its writers append to it all the while: what they write during the copy is copied
    too, up to the last microseconds before the cut. Missing is fine.
    """
    try:
        if os.stat(path).st_size <= limit_bytes:
            return
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        read_to = os.fstat(fd).st_size
        tail = os.pread(fd, limit_bytes // 2, read_to - limit_bytes // 2)
        tail = tail[tail.find(b"\n") + 1 :]
        kept = os.pwrite(fd, tail, 0)
        while kept < limit_bytes * 3 // 4 and (more := os.pread(fd, limit_bytes // 8, read_to)):
            read_to += len(more)
            kept += os.pwrite(fd, more, kept)
        os.ftruncate(fd, kept)
    finally:
        os.close(fd)
