"""One inference server as a process: started behind a warden, its output kept, ended with all that came of it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence

from hive.errors import DependencyDown
from hive.host.cgroup import Leaf
from hive.host.process import (
    CLOCK_TICKS,
    ForkedChild,
    Identity,
    ProcessTable,
    children_of,
    exit_code,
    has_children_listed,
    identify,
    read_stat,
    wait_until_over,
)
from hive.tasks import spawn as spawn_task
from hive.worker.lifeline import Lifeline
from hive.worker.log_ring import LogRing

GRACE_S = 2.0
"""From SIGTERM to SIGKILL: llama-server with a stream under way ends at its next ping, which comes each second."""
STARTED_WITHIN_S = 30.0
"""Longest time until the warden says the server's pid: a Python that starts on a busy machine."""
MARGIN_S = 5.0
"""The warden's own time to kill and to end, after the grace."""
MARK = "HIVE_WORKER"
"""Variable in the environment of a server and all that comes of it: by it orphans of a killed warden are known."""
READ_BYTES = 65536


class ServerProcess:
    """Started once, ended once. Its end is in `ended` and `code`, its last lines in `log`.

    `leaf`: a cgroup of its own, where one can be had; else its warden alone sees to it that nothing is left.
    `on_output` gets its output as it comes. `line`: a warden that waits for its order, else one is started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        grace_s: float = GRACE_S,
        leaf: Leaf | None = None,
        on_output: Callable[[bytes], None] | None = None,
        line: Lifeline | None = None,
    ) -> None:
        self.log = LogRing()
        self.ended = asyncio.Event()
        self.code: int | None = None
        """Exit code as a shell counts, once it has ended."""
        self.pid: int | None = None
        """The server's own, from its start on."""
        self._command = tuple(command)
        self._mark = secrets.token_hex(8)
        self._environment = {**environment, MARK: self._mark}
        self._grace_s = grace_s
        self._leaf = leaf
        self._on_output = on_output
        self._loop = asyncio.get_running_loop()
        self._server: Identity | None = None
        self._line = line
        self._warden: subprocess.Popen[bytes] | ForkedChild | None = None
        self._output: int | None = None
        self._pidfd: int | None = None
        self._ending: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        state = "not started" if self._warden is None else "alive" if self.is_alive() else f"ended {self.code}"
        return f"<ServerProcess {self.pid} {state}>"

    def is_alive(self) -> bool:
        return self._warden is not None and not self.ended.is_set()

    async def start(self) -> None:
        """Returns once the program runs. Raises HiveError where it cannot be started; then nothing is left."""
        if self._leaf is not None:
            await _emptied(self._leaf)  # a supervisor that was killed may have left something in it
        status = self._start_warden()
        try:
            async with asyncio.timeout(STARTED_WITHIN_S):
                word, _, rest = (await _line(status)).partition(" ")
        except TimeoutError:
            await self.end()
            raise DependencyDown(f"{self._command[0]} did not start within {STARTED_WITHIN_S:g} s") from None
        except BaseException:
            self.leave()
            raise
        if word != "pid":
            await self.end()
            raise DependencyDown(rest or f"the warden of {self._command[0]} ended: {' '.join(self.log.last(1))}")
        self.pid = int(rest)
        self._server = identify(self.pid)

    def _start_warden(self) -> int:
        """Returns the descriptor from which its status line is read."""
        if self._leaf is not None:
            self._leaf.make()
        if self._line is None:
            self._line = Lifeline.spawned(self._command, self._environment, grace_s=self._grace_s, leaf=self._leaf)
        else:
            self._line.order(self._command, self._environment)
        self._warden, self._output = self._line.process, self._line.output
        self._pidfd = os.pidfd_open(self._warden.pid)
        os.set_blocking(self._output, False)
        self._loop.add_reader(self._output, self._read)
        self._loop.add_reader(self._pidfd, self._on_end)
        return self._line.status

    async def has_ended(self, *, within_s: float) -> bool:
        """Whether it has ended, waiting for that at most so long."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self.ended.wait()
        return self.ended.is_set()

    def leave(self) -> None:
        """Tells the warden to end it all, and does not wait."""
        if self._line is not None:
            self._line.leave()

    async def end(self) -> None:
        """Returns once neither it nor anything that came of it is there. May be called again, and at any time."""
        self.leave()
        if self._warden is None:
            return
        if self._ending is None:
            self._ending = spawn_task(self._end(), name="end-server")
        await asyncio.shield(self._ending)

    async def _end(self) -> None:
        assert self._warden is not None
        if not await self.has_ended(within_s=self._grace_s + MARGIN_S):  # it was stopped, or hangs
            self._kill_below(self._warden.pid)
            self._warden.kill()
            await self.ended.wait()
        self._kill_orphans()
        if self._leaf is not None:
            await _emptied(self._leaf)

    @staticmethod
    def _kill_below(pid: int) -> None:
        below = ProcessTable().with_descendants({pid}) - {pid}
        for process in filter(None, map(identify, below)):
            process.send(signal.SIGKILL)

    def _kill_orphans(self) -> None:
        """Kills what was left to be inherited by others where the warden was killed; each may just have forked.

        It is known by the server's session, and by MARK, which is not to be read where a process wrote itself another
        title (vLLM's do). What left the session *and* wrote itself a title is found by a cgroup alone.
        """
        assert self._warden is not None
        if (self._warden.returncode or 0) >= 0:
            return  # it ended by itself, and left nothing
        while left := self._orphans():
            if not [process for process in left if process.send(signal.SIGKILL)]:
                return

    def _orphans(self) -> list[Identity]:
        table = ProcessTable()
        found = {stat.pid for stat in table.with_environment(f"{MARK}={self._mark}")}
        leader = table.processes.get(self.pid or 0)
        if self._server is not None and (leader is None or leader.start_ticks == self._server.start_ticks):
            found.update(table.sessions.get(self._server.pid, ()))
        stats = [table.processes[pid] for pid in table.with_descendants(found) if pid in table.processes]
        return [Identity.of(stat) for stat in stats if stat.alive]

    def cpu_s(self) -> float:
        """CPU time that the server and its living descendants have used so far."""
        if self._leaf is not None:
            return self._leaf.cpu_us() / 1e6
        if self._warden is None or (warden := read_stat(self._warden.pid)) is None:
            return 0.0
        ticks, pids = warden.waited_cpu_ticks, self._below(warden.pid)
        for pid in pids:
            if (stat := read_stat(pid)) is not None:
                ticks += stat.cpu_ticks + stat.waited_cpu_ticks
        return ticks / CLOCK_TICKS

    @staticmethod
    def _below(pid: int) -> list[int]:
        if not has_children_listed():
            return list(ProcessTable().with_descendants({pid}) - {pid})
        found = fresh = children_of(pid)
        while fresh:
            fresh = [child for parent in fresh for child in children_of(parent)]
            found = found + fresh
        return found

    # What the loop calls ------------------------------------------------------------------------------------------

    def _read(self) -> None:
        """Takes all there is, so that no server ever waits for somebody to look at its output."""
        assert self._output is not None
        try:
            data = os.read(self._output, READ_BYTES)
        except BlockingIOError:
            return
        if data:
            self.log.feed(data)
            if self._on_output is not None:
                self._on_output(data)
            return
        self._close_output()

    def _close_output(self) -> None:
        if self._output is not None:
            self._loop.remove_reader(self._output)
            os.close(self._output)
            self._output = None
            self.log.end()

    def _on_end(self) -> None:
        assert self._warden is not None
        assert self._pidfd is not None
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        self._pidfd = None
        self.leave()
        self.code = exit_code(self._warden.wait())
        for _ in range(64):  # its last words; what outlived a killed warden may go on writing
            if self._output is None:
                break
            self._read()
        self._close_output()
        self.ended.set()


async def _emptied(leaf: Leaf) -> None:
    """Kills what is in it, and removes it; what hangs in the kernel keeps it there."""
    if leaf.path.exists():
        leaf.kill()
        await wait_until_over(lambda: not leaf.pids(), MARGIN_S)
        await leaf.let_go()


async def _line(fd: int) -> str:
    """The first line that comes on a pipe, without its end; empty where that comes before. Closes it."""
    os.set_blocking(fd, False)
    loop, found = asyncio.get_running_loop(), bytearray()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        while b"\n" not in found:
            await readable.wait()
            readable.clear()
            with contextlib.suppress(BlockingIOError):
                if not (data := os.read(fd, 4096)):
                    break
                found += data
        return found.decode(errors="replace").partition("\n")[0]
    finally:
        loop.remove_reader(fd)
        os.close(fd)
