"""The program that writes what agents print into their logs: one process for all agents of a helper.

`log_process.py PIPES LOGS LIMIT CONTROL`: for each named pipe `PIPES/<id>` it moves what comes into `LOGS/<id>.log`.
It runs in a session of its own and outlives the helper; where it is killed the helper, which keeps every pipe open too,
starts the next one, and agents wait meanwhile at a full pipe. Bytes go by splice(2), which takes them out of the pipe
once they are in the file: a kill at any moment loses none and doubles none.

A log never has more than LIMIT bytes; one that is full keeps its last half, written beside it and renamed over it.
An agent that has nothing to say costs two descriptors here and no CPU time.

Standard library only, and no other module of Hive: it is run by its path, with as little in memory as Python allows.
The helper takes what it needs of files from here.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import resource
import select
import stat
import sys
import time
from collections.abc import Callable

PIECE_BYTES = 64 * 1024
"""Moved at once, then others have their turn: a pipe as the kernel makes it."""
CALM_S = 0.005
"""Between rounds in which little was said: a thousand agents that print a line now and then are one round."""
CALM_BYTES = 16 * 1024
LAST_BYTES = 1024 * 1024
"""Most bytes moved of an agent that ended, if a process has its pipe still: a user's pipe holds no more (pipe(7))."""
LOCK = ".lock"
"""Locked (fcntl) by the process that reads: the next one waits for its first byte, and a helper learns its pid. The
second byte it locks once it has every pipe open."""
NEW, OVER = "+", "-"
"""The helper's words about an agent, in a line with its id: there is a new pipe; it ended."""
_READ = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC


def open_log(path: str | os.PathLike[str], *, more: int = 0, make: bool = True) -> int:
    """The log for writing and reading. Its owner is Hive; no agent has it. `more`: flags of open(2).

    `make`: it is made where it is missing.

    0600, or readable for the group of a directory that is (the daemon's, where Hive is installed). Raises OSError.
    """
    more |= os.O_CREAT if make else 0
    fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | more, 0o600)
    try:
        _give(fd, os.path.dirname(path))
    except OSError:
        os.close(fd)
        raise
    return fd


def _give(fd: int, directory: str) -> None:
    above, own = os.stat(directory), os.fstat(fd)
    right = (own.st_gid, stat.S_IMODE(own.st_mode)) == (above.st_gid, 0o640)
    if above.st_mode & stat.S_IXGRP and own.st_uid == os.geteuid() and not right:
        os.fchown(fd, -1, above.st_gid)
        os.fchmod(fd, 0o640)


def cut_back(path: str | os.PathLike[str], limit_bytes: int, *, room: int = 1) -> None:
    """Keeps the last half of `limit_bytes`, from a line start, of a log that has no room for so many bytes more.

    Written beside it and renamed over it: a process killed in between leaves the one or the other. Only one process may
    write to the log. Missing is fine. Raises OSError.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        size = os.fstat(fd).st_size
        if size + room <= limit_bytes or size <= limit_bytes // 2:
            return
        kept = os.pread(fd, limit_bytes // 2, size - limit_bytes // 2)
        kept = kept[kept.find(b"\n") + 1 :]
        try:
            _replace(path, kept)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            os.pwrite(fd, kept, 0)  # a full disk has no room for a second one
            os.ftruncate(fd, len(kept))
    finally:
        os.close(fd)


def _replace(path: str | os.PathLike[str], content: bytes) -> None:
    beside = os.path.join(os.path.dirname(path), f".{os.path.basename(path)}.new")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(beside)
    try:
        with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600), "wb") as file:
            _give(file.fileno(), os.path.dirname(path))
            file.write(content)
        os.rename(beside, path)
    except OSError:
        with contextlib.suppress(OSError):
            os.unlink(beside)
        raise


def append(path: str | os.PathLike[str], text: bytes, limit_bytes: int) -> int:
    """Writes all of it at the end of the log, which is cut back as often as it is full; its length then.

    Raises OSError where the disk refuses: then a part of it may be there.
    """
    while True:
        cut_back(path, limit_bytes)
        fd = open_log(path, more=os.O_APPEND)
        try:
            size = os.fstat(fd).st_size
            text = text[os.write(fd, text[: max(limit_bytes - size, 1)]) :]
            if not text:
                return os.fstat(fd).st_size
        finally:
            os.close(fd)


def move(
    pipe: int, path: str, limit_bytes: int, most: int = PIECE_BYTES, *, is_kept: Callable[[], bool] = lambda: True
) -> int | None:
    """Moves up to `most` bytes of the pipe to the end of the log, which is cut back where it is full.

    `is_kept`: whether the log is made where it is missing, or was deleted while this wrote to it. Answers how many
    bytes; None where the pipe is empty, 0 where nobody can write to it any more besides. Raises OSError where the log
    does not take them: they are in the pipe still, unless it was deleted meanwhile.
    """
    make = is_kept()
    fd = open_log(path, make=make)
    try:
        size = os.fstat(fd).st_size
        if size >= limit_bytes:
            os.close(fd)
            fd = -1
            cut_back(path, limit_bytes)
            fd = open_log(path, make=make)
            size = os.fstat(fd).st_size
        room = max(min(most, limit_bytes - size), 1)
        moved = _moved(pipe, fd, size, room)
        if moved and os.fstat(fd).st_nlink == 0 and is_kept():
            append(path, os.pread(fd, moved, size), limit_bytes)
        return moved
    finally:
        if fd >= 0:
            os.close(fd)


def _moved(pipe: int, fd: int, offset: int, most: int) -> int | None:
    try:
        return os.splice(pipe, fd, most, offset_dst=offset, flags=os.SPLICE_F_NONBLOCK)
    except BlockingIOError:
        return None
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    said = _read(pipe, most)  # a file system without splice(2)
    return os.pwrite(fd, said, offset) if said else None


def _read(pipe: int, most: int) -> bytes | None:
    """None where it is empty, no bytes where nobody can write to it besides."""
    try:
        return os.read(pipe, most)
    except BlockingIOError:
        return None


class AgentPipe:
    """The pipe of one agent, and how much of it found no room."""

    def __init__(self, fd: int, inode: int, path: str, log: str) -> None:
        self.fd = fd
        """-1 once it has no writer any more."""
        self.inode = inode
        self.path = path
        self.log = log
        self.lost_bytes = 0
        self.why_lost = ""

    def __repr__(self) -> str:
        return f"<AgentPipe {self.log} fd {self.fd}>"

    def take(self, limit_bytes: int) -> int | None:
        """Moves a piece into the log; answers as `move`.

        What a log does not take (a full disk) is dropped, and told in the log later: an agent that waited for room on
        a disk would be one that hangs. A log that is missing is made again while the pipe has its name. An agent that
        ended has lost it: then the log was removed with the agent.
        """
        try:
            if self.lost_bytes:
                self._tell(limit_bytes, make=self._is_kept())
            return move(self.fd, self.log, limit_bytes, is_kept=self._is_kept)
        except OSError as error:
            said = _read(self.fd, PIECE_BYTES)
            self.lost_bytes += len(said or b"")
            self.why_lost = os.strerror(error.errno or 0)
            return None if said is None else len(said)

    def _is_kept(self) -> bool:
        return os.path.exists(self.path)

    def _tell(self, limit_bytes: int, *, make: bool) -> None:
        cut_back(self.log, limit_bytes)
        line = f"hive: {self.lost_bytes} bytes of its output are not here: {self.why_lost}\n".encode()
        fd = open_log(self.log, make=make)
        try:
            size = os.fstat(fd).st_size
            if os.pwrite(fd, line, size) < len(line):
                os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        finally:
            os.close(fd)
        self.lost_bytes = 0


class OutputReader:
    """Everything of one such process; `run` lasts until the helper is gone and no writer is left."""

    def __init__(self, pipes: str, logs: str, limit_bytes: int, control: int) -> None:
        self._pipes = pipes
        self._logs = logs
        self._limit_bytes = limit_bytes
        self._control = control
        self._said = b""
        self._sources: dict[str, AgentPipe] = {}
        self._by_fd: dict[int, AgentPipe] = {}
        self._poll = select.epoll()

    def __repr__(self) -> str:
        return f"<OutputReader {len(self._by_fd)} of {len(self._sources)} pipes>"

    def run(self, lock: int) -> None:
        for name in os.listdir(self._pipes):
            if not name.startswith("."):
                self._open(name)
        fcntl.lockf(lock, fcntl.LOCK_EX, 1, 1)
        os.set_blocking(self._control, False)
        self._poll.register(self._control, select.EPOLLIN)
        while self._control >= 0 or self._by_fd:
            moved = sum(self._look(fd, event) for fd, event in self._poll.poll())
            if moved < CALM_BYTES:
                time.sleep(CALM_S)

    def _look(self, fd: int, event: int) -> int:
        """Bytes moved."""
        if fd == self._control:
            self._hear()
            return PIECE_BYTES
        source = self._by_fd.get(fd)
        if source is None:  # it ended in this very round
            return 0
        if event & select.EPOLLIN:
            return source.take(self._limit_bytes) or 0
        self._close(source)
        return 0

    def _hear(self) -> None:
        """Reads the helper's words. At the end of the helper its agents go on, and so does this process."""
        said = _read(self._control, PIECE_BYTES)
        if said is None:
            return
        if not said:
            self._poll.unregister(self._control)
            os.close(self._control)
            self._control = -1
            return
        *lines, self._said = (self._said + said).split(b"\n")
        for line in lines:
            word, name = line[:1].decode(), line[1:].decode()
            if word == NEW:
                self._open(name)
            elif word == OVER and name in self._sources:
                self._end(self._sources.pop(name))

    def _open(self, name: str) -> None:
        """The pipe as it is now. The one of an earlier start is emptied first: one agent has one order of lines."""
        before = self._sources.get(name)
        path = os.path.join(self._pipes, name)
        try:
            fd = os.open(path, _READ)
        except OSError:
            return  # it ended meanwhile
        found = os.fstat(fd)
        if not stat.S_ISFIFO(found.st_mode) or (before is not None and before.inode == found.st_ino):
            os.close(fd)
            return
        if before is not None:
            self._end(before)
        source = AgentPipe(fd, found.st_ino, path, os.path.join(self._logs, f"{name}.log"))
        if source.take(self._limit_bytes) == 0:  # left behind; the kernel would never tell that no writer is left
            os.close(fd)
            return
        self._sources[name] = self._by_fd[fd] = source
        self._poll.register(fd, select.EPOLLIN)

    def _end(self, source: AgentPipe) -> None:
        """Moves what is left, however many others were given the pipe and write to it still."""
        left = LAST_BYTES
        while source.fd >= 0 and left > 0 and (moved := source.take(self._limit_bytes)):
            left -= moved
        self._close(source)

    def _close(self, source: AgentPipe) -> None:
        if source.fd >= 0:
            self._poll.unregister(source.fd)
            del self._by_fd[source.fd]
            os.close(source.fd)
            source.fd = -1


def main(pipes: str, logs: str, limit_bytes: str, control: str) -> None:
    """Waits until no other one reads these pipes, then reads them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    os.umask(0o077)
    lock = os.open(os.path.join(pipes, LOCK), os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.lockf(lock, fcntl.LOCK_EX, 1, 0)
    OutputReader(pipes, logs, int(limit_bytes), int(control)).run(lock)


if __name__ == "__main__":
    main(*sys.argv[1:])
