"""Programs of the system, run to their end by those who have nothing else to do meanwhile."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hive.domain import PROGRAM_PATH
from hive.errors import TimedOut
from hive.host.process import exit_code, spawn

PLAIN: Mapping[str, str] = {"PATH": PROGRAM_PATH, "LC_ALL": "C.UTF-8", "SYSTEMD_COLORS": "0", "SYSTEMD_PAGER": ""}
LIMIT_S = 60.0


class Ran(NamedTuple):
    """How it ended, as a shell counts, and what it printed on either output."""

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


def is_there(program: str) -> bool:
    """Whether `run` would find it."""
    return shutil.which(program, path=PLAIN["PATH"]) is not None
