"""Workers on scripted servers, for tests: real processes, counted by their pids."""

# ruff: noqa: ASYNC110 - other processes send no asyncio events

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from hive.backends.command_line import Launch
from hive.host.process import read_stat
from hive.worker.bios import BiosForm
from hive.worker.profile import TimeoutProfile
from hive.worker.records import RequestResult, WorkerState, WorkerStatus
from hive.worker.worker import LlamaWorker

SERVER = Path(__file__).parents[1] / "fakes" / "scripted_server.py"
PATIENT = TimeoutProfile(backoff_first_s=0.05, backoff_longest_s=0.05, crash_limit=100)
"""Nothing but a dead server ends a request before its test gives up."""


class OfItsOwnKind(BaseException):
    """None of Exception, as those of pytest and trio are."""


class Folder:
    """Socket and pids of one scripted server."""

    def __init__(self, path: Path) -> None:
        self.socket = path / "llama.sock"
        self.pids_file = path / "pids"

    def launch(self, *flags: str) -> Launch:
        words = ("--socket", str(self.socket), "--pids", str(self.pids_file), *flags)
        return Launch((sys.executable, "-I", "-S", str(SERVER), *words), {"PATH": "/usr/bin:/bin"}, (), self.socket)

    def pids(self) -> list[int]:
        """All that ever ran."""
        return [int(line) for line in self.pids_file.read_text().split()] if self.pids_file.exists() else []

    def alive(self) -> list[int]:
        stats = [read_stat(pid) for pid in self.pids()]
        return [stat.pid for stat in stats if stat is not None and stat.alive]


@asynccontextmanager
async def worker(
    folder: Path, *flags: str, profile: TimeoutProfile = PATIENT, slots: int = 2, **more: Any
) -> AsyncIterator[LlamaWorker]:
    """A worker that is ready; in the end nothing of it is left."""
    place = Folder(folder)
    found = LlamaWorker(place.launch(*flags), slots=slots, profile=profile, **({"bios": BiosForm.OFF} | more))
    try:
        await found.start()
        yield found
    finally:
        await found.stop()
    assert not place.alive()
    assert not place.socket.exists()


async def ask(found: LlamaWorker, script: str, **params: Any) -> int:
    asked = await found.submit("test", "", script, params=params)
    assert asked.request_id is not None, asked
    return asked.request_id


async def outcome(found: LlamaWorker, request_id: int) -> RequestResult:
    """Of a request, once it has ended."""
    while not isinstance(result := await found.get_result(request_id), RequestResult):
        await asyncio.sleep(0.005)
    return result


async def status_when(found: LlamaWorker, is_so: Callable[[WorkerStatus], bool]) -> WorkerStatus:
    while not is_so(status := await found.get_worker_status()):
        await asyncio.sleep(0.005)
    return status


async def ready_again(found: LlamaWorker, *, restarts: int = 1) -> WorkerStatus:
    return await status_when(found, lambda now: now.state is WorkerState.READY and now.restart_count >= restarts)


async def has_data(found: LlamaWorker, request_id: int, *, length: int = 1) -> None:
    """Returns once so many characters of the answer have come."""
    while (await found.get_status(request_id)).output_length < length:
        await asyncio.sleep(0.005)
