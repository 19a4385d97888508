"""Programs of this host in the place of programs inside agents: the same pipes, no Hive around them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from hive.errors import NotFound
from hive.jobs.access import JobAccess, ProgramInside

AGENT = "scribe"


class LocalPrograms:
    """Runs each in a session of its own, and kills all of that at its end."""

    def __init__(self) -> None:
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self.begun: list[list[str]] = []

    async def begin(self, agent: str, command: Sequence[str]) -> ProgramInside:
        if agent != AGENT:
            raise NotFound(f"there is no agent {agent}")
        self.begun.append(list(command))
        return self._begin(command)

    def _begin(self, command: Sequence[str]) -> ProgramInside:
        pipe = subprocess.PIPE
        process = subprocess.Popen(
            list(command), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True, bufsize=0
        )
        streams = (process.stdin, process.stdout, process.stderr)
        descriptors = [os.dup(stream.fileno()) for stream in streams if stream is not None]
        for stream in streams:
            if stream is not None:
                stream.close()
        run = secrets.token_hex(4)
        self.running[run] = process
        return ProgramInside(run, "pipes", descriptors)

    async def end(self, run: str) -> None:
        process = self.running.pop(run)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.to_thread(process.wait)

    def kill(self) -> None:
        """kill -9 of all that run."""
        for process in self.running.values():
            process.kill()

    def access(self, socket: Path = Path("/nowhere")) -> JobAccess:
        return JobAccess("job1", socket, {}, self)
