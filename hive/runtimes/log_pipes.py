"""Agents' output on its way into their logs: a named pipe for each, and the process that reads them all.

An agent has the writing end and nothing of the log: it can neither shorten it nor read what others have not read yet.
The reader (log_process.py) outlives this helper; this helper keeps every pipe open too, so that whichever of the two is
killed no agent is without a reader (SIGPIPE). A new helper takes the pipes up by their names, and starts a reader of
its own in the place of an earlier one: of this version, with these settings.

Only where both are killed in the same moment an agent that prints before the next helper is there gets SIGPIPE, and
where the helper is killed within the milliseconds before the reader has opened a new agent's pipe.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import fcntl
import logging
import os
import signal
import stat
import struct
import sys
import termios
import time
from pathlib import Path

from hive.errors import HiveError
from hive.host.process import identify, spawn
from hive.runtimes import log_process
from hive.runtimes.log_process import LOCK, NEW, OVER, open_log

log = logging.getLogger("hive.sandbox")

LAST_WORDS_S = 3.0
"""From the end of an agent to its last line in the log, once there is a process that reads the pipes."""
READER_STARTS_S = 30.0
"""Until a reader that was just started reads; seen on a busy machine: more than 3 s."""
LOOK_S = 0.002
READS_S = 0.05
"""Between looks whether the reader has the pipes, until it has."""
AGAIN_S = 0.5
"""From the end of a reader that did not live long, or could not be started, to the next one."""
_FLOCK = "hhqqi4x"
"""`struct flock` of Linux where a pointer has 64 bits: type, whence, start, length, pid."""


class AgentOutput:
    """The pipe of one started agent, open here for both ways: as long as it is, no end of it is missing."""

    def __init__(self, pipes: LogPipes, agent: str, fd: int) -> None:
        self._pipes = pipes
        self._agent = agent
        self._fd = fd

    def __repr__(self) -> str:
        return f"<AgentOutput {self._agent} {self.left_bytes() if self._fd >= 0 else 'closed'}>"

    def writing_end(self) -> int:
        """The end the agent gets as stdout; the caller closes it. A write waits where it is full. Raises OSError."""
        return os.open(self._pipes.path(self._agent), os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def left_bytes(self) -> int:
        """Number of bytes that are not in the log yet."""
        left = array.array("i", [0])
        fcntl.ioctl(self._fd, termios.FIONREAD, left)
        return left[0]

    def say(self, line: str) -> None:
        """A line of Hive's own among the agent's; dropped where the pipe is full."""
        with contextlib.suppress(OSError):
            os.write(self._fd, line.encode())

    async def finish(self) -> None:
        """Waits, after the agent's end, until its last words are in the log, and removes the pipe."""
        begun, wait_s = time.monotonic(), LOOK_S
        until = begun + LAST_WORDS_S
        while self._fd >= 0 and self.left_bytes() and time.monotonic() < until:
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 1.5, READS_S)
            if not self._pipes.are_read:
                until = min(begun + READER_STARTS_S, time.monotonic() + LAST_WORDS_S)
        self.remove()

    def remove(self) -> None:
        """Closes it for good: a process that was given the agent's end has no reader any more."""
        if self._fd >= 0:
            self._pipes.remove(self._agent)
            self.close()

    def close(self) -> None:
        """The helper leaves: an agent that runs prints on, and the reader reads."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            self._pipes.closed(self)


class LogPipes:
    """All agents' pipes of one helper, and their reader, which is there while an agent is."""

    def __init__(self, directory: Path, logs: Path, *, limit_bytes: int) -> None:
        """`directory`: Hive's alone; `logs`: where the logs are; `limit_bytes`: of one."""
        self._directory = directory
        self._logs = logs
        self._limit_bytes = limit_bytes
        self._open: set[AgentOutput] = set()
        self._reader: _Reader | None = None

    def __repr__(self) -> str:
        return f"<LogPipes {len(self._open)} read by {self._reader!r}>"

    @property
    def are_read(self) -> bool:
        """Whether the reader has them all open; it was just started otherwise."""
        return self._reader is not None and self._reader.reads

    def path(self, agent: str) -> Path:
        return self._directory / agent

    def has(self, agent: str) -> bool:
        """Whether it prints into a pipe; before there were any an agent had its log itself."""
        try:
            return stat.S_ISFIFO(os.lstat(self.path(agent)).st_mode)
        except OSError:
            return False

    def make(self, agent: str) -> AgentOutput:
        """A new pipe, for an agent that is about to be started. Raises OSError.

        Others may write to it, because the agent's user opens /dev/stderr: only a process that has the pipe open gets
        as far as that, for the directory is Hive's alone. Nobody else may read it.
        """
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(open_log(self._logs / f"{agent}.log"))  # a disk that refuses says so now
        path = self.path(agent)
        path.unlink(missing_ok=True)
        os.mkfifo(path, 0o600)
        path.chmod(0o602)
        output = self._keep(agent)
        self._tell(NEW, agent)
        return output

    def adopt(self, agent: str) -> AgentOutput | None:
        """The pipe of an agent that an earlier helper started; None where it has none. Raises OSError."""
        if not self.has(agent):
            return None
        output = self._keep(agent)
        self._tell(NEW, agent)
        return output

    def _keep(self, agent: str) -> AgentOutput:
        fd = os.open(self.path(agent), os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        output = AgentOutput(self, agent, fd)
        self._open.add(output)
        return output

    async def sweep(self, agent: str) -> None:
        """Finishes the output of an agent that ended while no helper was there. Raises OSError."""
        if (output := self.adopt(agent)) is not None:
            await output.finish()

    def remove(self, agent: str) -> None:
        """Removes the pipe of an agent that ended; without a pipe nothing happens."""
        with contextlib.suppress(OSError):
            self.path(agent).unlink()
        if self._reader is not None:
            self._reader.tell(OVER, agent)

    def closed(self, output: AgentOutput) -> None:
        """The reader is let go with the last one: it ends when no writer is left."""
        self._open.discard(output)
        if not self._open and self._reader is not None:
            self._reader.let_go()
            self._reader = None

    def _tell(self, word: str, agent: str) -> None:
        if self._reader is None:
            self._reader = _Reader(self._directory, self._logs, self._limit_bytes)
        else:
            self._reader.tell(word, agent)


class _Reader:
    """The reader of this helper, started again where it ends, until it is let go."""

    def __init__(self, directory: Path, logs: Path, limit_bytes: int) -> None:
        self._directory = directory
        self._command = [sys.executable, "-I", "-S", "-B", log_process.__file__]
        self._command += [str(directory), str(logs), str(limit_bytes)]
        self._loop = asyncio.get_running_loop()
        self._pid = 0
        self.reads = False
        """Set once the reader has every pipe open."""
        self._ended_fd = self._control = -1
        self._started_at = 0.0
        self._later: asyncio.TimerHandle | None = None
        self._held: list[int] = []
        """Every pipe, from before an earlier helper's reader is killed until this one has them all open: agents that
        this helper has not come to yet would be without a reader."""
        self._start()

    def __repr__(self) -> str:
        return f"pid {self._pid}" if self._pid else "nobody"

    def tell(self, word: str, agent: str) -> None:
        """A reader that does not hear is replaced: the next one looks for itself what there is."""
        if self._control < 0:
            return
        try:
            os.write(self._control, f"{word}{agent}\n".encode())
        except OSError as error:
            log.warning("log_reader_does_not_hear pid=%d error=%s", self._pid, error)
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._ended_fd, signal.SIGKILL)

    def let_go(self) -> None:
        """It goes on while agents do, and ends after them."""
        if not self._held:
            self._not_later()
        if self._control >= 0:
            os.close(self._control)
            self._control = -1

    def _start(self) -> None:
        """Starts a reader in the place of an earlier one. All that the earlier one took from a pipe is in the log."""
        self._later = None
        self._hold_all()
        _kill_reader(self._directory)
        control, self._control = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(self._control, False)
        nowhere = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
        try:
            child = spawn([*self._command, str(control)], env={}, stdout_fd=nowhere, keep_fds=(control,))
        except HiveError as error:
            log.error("log_reader_not_started error=%s", error)
            os.close(self._control)
            self._control = -1
            self._later = self._loop.call_later(AGAIN_S, self._start)
            return
        finally:
            os.close(control)
            os.close(nowhere)
        child.returncode = 0  # it may outlive this helper, and is waited for below
        self._pid, self._started_at = child.pid, time.monotonic()
        self._ended_fd = os.pidfd_open(child.pid)
        self._loop.add_reader(self._ended_fd, self._ended)
        self._later = self._loop.call_later(READS_S, self._check)

    def _check(self) -> None:
        """Until it reads: one of an earlier helper may have been started so late that it came first."""
        self._later = None
        if reading(self._directory, byte=1) == self._pid:
            self.reads = True
            self._hold_none()
            return
        if reading(self._directory) != self._pid:
            _kill_reader(self._directory)
        self._later = self._loop.call_later(READS_S, self._check)

    def _hold_all(self) -> None:
        self._hold_none()
        for path in self._directory.iterdir():
            with contextlib.suppress(OSError):
                if stat.S_ISFIFO(os.lstat(path).st_mode):
                    self._held.append(os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC))

    def _hold_none(self) -> None:
        while self._held:
            os.close(self._held.pop())

    def _not_later(self) -> None:
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _ended(self) -> None:
        self._loop.remove_reader(self._ended_fd)
        os.close(self._ended_fd)
        code = _wait_for(self._pid)
        self._ended_fd, ended, self._pid = -1, self._pid, 0
        self.reads = False
        if self._control < 0:
            self._not_later()
            self._hold_none()
            return
        os.close(self._control)
        self._control = -1
        self._not_later()
        log.error("log_reader_ended pid=%d exit_code=%s", ended, code)
        if time.monotonic() - self._started_at > AGAIN_S:
            self._start()
        else:
            self._later = self._loop.call_later(AGAIN_S, self._start)


def reading(directory: Path, *, byte: int = 0) -> int:
    """The pid of the process that reads the pipes in this directory and so holds its lock; 0 where there is none.

    `byte` 1: only once it has all of them open.
    """
    try:
        fd = os.open(directory / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        found = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, struct.pack(_FLOCK, fcntl.F_WRLCK, 0, byte, 1, 0)))
    finally:
        os.close(fd)
    return 0 if found[0] == fcntl.F_UNLCK else int(found[4])


def _kill_reader(directory: Path) -> None:
    """Exactly the one that reads there, if any. Nothing is lost by it, see log_process.py."""
    who = identify(reading(directory))
    if who is not None and reading(directory) == who.pid:
        who.send(signal.SIGKILL)


def _wait_for(pid: int) -> int | None:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:  # somebody else takes the end of every child
        return None
