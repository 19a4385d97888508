"""Programs of the system, run to their end by callers that may block, or read as they go."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hive.domain import PROGRAM_PATH
from hive.errors import TimedOut
from hive.host.process import exit_code, spawn

PLAIN: Mapping[str, str] = {"PATH": PROGRAM_PATH, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
LIMIT_S = 60.0


class Ran(NamedTuple):
    """The end of a program: its code, as a shell counts, and what it printed on either output."""

    code: int
    text: str

    @property
    def last_line(self) -> str:
        lines = self.text.strip().splitlines()
        return lines[-1] if lines else "it said nothing"


def run(command: Sequence[str], *, env: Mapping[str, str] = PLAIN, limit_s: float = LIMIT_S) -> Ran:
    """Runs it in / with exactly `env`, stdin at its end, and waits. Blocks: not for an event loop.

    Raises NotFound (no such program), NotPermitted, TimedOut (it is killed then).
    """
    output = os.memfd_create(os.path.basename(command[0]), os.MFD_CLOEXEC)
    try:
        child = spawn(command, env=env, cwd="/", stdout_fd=output)
        try:
            child.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise TimedOut(f"{command[0]} did not come to an end within {limit_s:g} s") from None
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
        text = os.pread(output, os.fstat(output).st_size, 0).decode(errors="replace")
    finally:
        os.close(output)
    return Ran(exit_code(child.returncode), text)


def begin(command: Sequence[str]) -> tuple[subprocess.Popen[bytes], int]:
    """Starts it with PLAIN as its environment; returns it and the descriptor to read what it prints from.

    It is killed when this process ends. The caller closes the descriptor, ends it and reaps it. Raises NotFound,
    NotPermitted.
    """
    read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
    try:
        return spawn(command, env=PLAIN, stdout_fd=write_fd, pdeathsig=signal.SIGKILL), read_fd
    except BaseException:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)


def is_there(program: str) -> bool:
    """Whether `run` would find it."""
    return shutil.which(program, path=PLAIN["PATH"]) is not None
