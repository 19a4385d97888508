"""The supervisor's end of a warden: its process, the lifeline that keeps it alive, its order, its status, its output.

The order – a command and its environment – may be told at the start, or later through the lifeline: then the warden is
there before it is known what it will start.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence

from hive.errors import DependencyDown, HiveError
from hive.host.cgroup import Leaf
from hive.host.process import ForkedChild, fork, spawn
from hive.worker import warden
from hive.worker.order import encode_order

PIPE_BYTES = 65536
"""Room of a pipe, unless it is given more."""


class Lifeline:
    """One warden. `status` and `output` are readable ends of pipes; whoever takes one from here closes it."""

    def __init__(self, process: subprocess.Popen[bytes] | ForkedChild, lifeline: int, status: int, output: int) -> None:
        self.process = process
        self.status = status
        self.output = output
        self._lifeline: int | None = lifeline

    def __repr__(self) -> str:
        return f"<Lifeline of {self.process.pid}{'' if self._lifeline is not None else ', left'}>"

    @classmethod
    def spawned(
        cls, command: Sequence[str], environment: Mapping[str, str], *, grace_s: float, leaf: Leaf | None = None
    ) -> Lifeline:
        """A warden that starts `command` at once. Raises HiveError; then nothing is left."""
        theirs, lifeline = os.pipe()
        status, status_theirs = os.pipe()
        output, output_theirs = os.pipe()
        words = (str(theirs), str(status_theirs), str(grace_s), *command)
        try:
            process = spawn(
                [sys.executable, "-I", "-m", "hive.worker.warden", *words],
                env=environment,
                stdout_fd=output_theirs,
                keep_fds=(theirs, status_theirs),
                cgroup_dir=None if leaf is None else leaf.path,
            )
        except HiveError:
            for fd in (lifeline, status, output):
                os.close(fd)
            raise
        finally:
            for fd in (theirs, status_theirs, output_theirs):
                os.close(fd)
        return cls(process, lifeline, status, output)

    @classmethod
    def forked(cls, *, grace_s: float) -> Lifeline:
        """A warden that waits for its order, out of this process: see `hive.host.process.fork`. Raises OSError."""
        theirs, lifeline = os.pipe()
        status, status_theirs = os.pipe()
        output, output_theirs = os.pipe()
        child = fork(
            lambda: warden.wait_for_order(theirs, status_theirs, grace_s),
            stdout_fd=output_theirs,
            keep_fds=(theirs, status_theirs),
        )
        for fd in (theirs, status_theirs, output_theirs):
            os.close(fd)
        return cls(child, lifeline, status, output)

    def order(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Tells a warden that waits what to start. One that has ended says so by its status. Raises DependencyDown."""
        assert self._lifeline is not None
        data = encode_order(command, environment)
        try:
            if len(data) > PIPE_BYTES:  # whole, or a warden that does not read would hold up this process
                fcntl.fcntl(self._lifeline, fcntl.F_SETPIPE_SZ, len(data))
            os.write(self._lifeline, data)
        except BrokenPipeError:
            return
        except OSError as error:
            raise DependencyDown(f"{command[0]}: its command and environment are too long: {error.strerror}") from error

    def leave(self) -> None:
        """Tells the warden to end all there is, and does not wait."""
        if self._lifeline is not None:
            os.close(self._lifeline)
            self._lifeline = None
