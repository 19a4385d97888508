"""One supervised process: started, its output shown line by line, started again when it ends, ended on request."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence

from hive.errors import HiveError
from hive.host.process import spawn
from hive.line_splitter import LineSplitter
from hive.log_lines import without_priority
from hive.up.backoff import next_delay_s
from hive.up.reaper import Reaper

log = logging.getLogger("hive.up")
Say = Callable[[str, str], None]

LAST_LINES = 12
LOOK_S = 0.1
HURRY_S = 1.0


class ChildFailed(HiveError):
    """A process of Hive did not come up."""

    code = "child_failed"


class Child:
    """Keeps one process running until `stop`.

    `argv()` is asked before every start, so that it may change (ports are known only after the first). `inherit`
    are descriptors the process keeps open: the lock that says this Hive is in use, and the pipe that ends with `hive
    up`. `say(name, line)` gets what it writes to stdout and stderr.
    """

    def __init__(
        self, name: str, argv: Callable[[], Sequence[str]], *, reaper: Reaper, say: Say, inherit: Sequence[int] = ()
    ) -> None:
        self.name = name
        self.pid: int | None = None
        self.failure: ChildFailed | None = None
        """The reason it could not come up, as long as `came_up` was not called."""
        self._argv = argv
        self._reaper = reaper
        self._say = say
        self._inherit = tuple(inherit)
        self._steady = False
        self._leaving = False
        self._delay_s: float | None = None
        self._started_at = 0.0
        self._last: deque[str] = deque(maxlen=LAST_LINES)
        self._loop = asyncio.get_running_loop()
        self._ended = asyncio.Event()
        self._ended.set()
        self._again: asyncio.TimerHandle | None = None
        self._output: _Output | None = None

    def __repr__(self) -> str:
        return f"<Child {self.name} {'ended' if self.pid is None else self.pid}{' leaving' * self._leaving}>"

    def start(self) -> None:
        """Starts it. It hears no Ctrl-C of our terminal (own session) and ends with us (SIGTERM by the kernel).

        Raises HiveError where there is no such program.
        """
        if self._leaving:
            return
        reading, writing = os.pipe()
        os.set_blocking(reading, False)
        try:
            process = spawn(
                self._argv(), env=os.environ, stdout_fd=writing, pdeathsig=signal.SIGTERM, keep_fds=self._inherit
            )
        except HiveError:
            os.close(reading)
            raise
        finally:
            os.close(writing)

        def on_end(code: int) -> None:
            process.returncode = code  # the reaper has waited for it: Popen must not do so again
            self._on_end(code)

        self.pid = process.pid
        self._started_at = self._loop.time()
        self._ended.clear()
        self._reaper.expect(process.pid, on_end)
        self._output = _Output(reading, self._line)

    def came_up(self) -> None:
        """It answered once: from now on an end is reported and repaired, no longer a failure to come up."""
        self._steady = True

    async def stop(self, *, grace_s: float, hurry: Callable[[], bool] = lambda: False) -> None:
        """SIGTERM, after `grace_s` (or HURRY_S once there is a hurry) SIGKILL; returns once it has ended for good."""
        self.leave(signal.SIGTERM)
        kill_at = self._loop.time() + grace_s
        while not await self.has_ended(within_s=LOOK_S):
            if hurry():
                kill_at = min(kill_at, self._loop.time() + HURRY_S)
            if self._loop.time() > kill_at:
                log.warning("child_killed name=%s", self.name)
                self.leave(signal.SIGKILL)
                await self._ended.wait()

    def leave(self, signal_number: int) -> None:
        """Sends a signal and starts it no more; does not wait."""
        self._leaving = True
        if self._again is not None:
            self._again.cancel()
        if self.pid is not None:
            os.kill(self.pid, signal_number)  # ours until the reaper has said otherwise: no other process has this pid

    async def has_ended(self, *, within_s: float) -> bool:
        """Whether it has ended, waiting for that at most so long."""
        try:
            async with asyncio.timeout(within_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        return True

    def _line(self, text: str) -> None:
        self._last.append(without_priority(text)[1])
        self._say(self.name, text)

    def _on_end(self, code: int) -> None:
        self.pid = None
        if self._output is not None:
            self._output.flush()  # its last words come before the news of its end
        lived_s = self._loop.time() - self._started_at
        if self._leaving:
            log.info("child_ended name=%s exit=%d", self.name, code)
        elif self._steady:
            self._delay_s = next_delay_s(self._delay_s, lived_s=lived_s)
            log.warning(
                "child_ended name=%s exit=%d lived_s=%.1f again_in_s=%g", self.name, code, lived_s, self._delay_s
            )
            self._again = self._loop.call_later(self._delay_s, self._start_again)
        else:
            self._fail(code)
        self._ended.set()

    def _start_again(self) -> None:
        try:
            self.start()
        except HiveError as error:
            self._delay_s = next_delay_s(self._delay_s, lived_s=0.0)
            log.error("child_not_started name=%s again_in_s=%g error=%s", self.name, self._delay_s, error.message)
            self._again = self._loop.call_later(self._delay_s, self._start_again)

    def _fail(self, code: int) -> None:
        words = "\n".join(f"    {line}" for line in self._last)
        self.failure = ChildFailed(
            f"{self.name} ended with exit code {code} before it was up" + (words and f":\n{words}")
        )
        if code in range(1, 8):
            self.failure.exit_code = code


class _Output:
    """The reading end of one process's output; closes itself at its end, which a grandchild may put off."""

    def __init__(self, reading: int, on_line: Callable[[str], None]) -> None:
        self._reading = reading
        self._on_line = on_line
        self._splitter = LineSplitter()
        self._closed = False
        asyncio.get_running_loop().add_reader(reading, self.read)

    def read(self) -> None:
        """Takes what is there now; a pipe holds 64 KiB at most (pipe(7)), so one call takes all of it."""
        if self._closed:
            return
        try:
            data = os.read(self._reading, 65536)
        except BlockingIOError:
            return
        for line in self._splitter.feed(data) if data else self._splitter.rest():
            self._on_line(line)
        if not data:
            self._closed = True
            asyncio.get_running_loop().remove_reader(self._reading)
            os.close(self._reading)

    def flush(self) -> None:
        """`read`, and a line begun and not ended is one now."""
        self.read()
        for line in self._splitter.rest():
            self._on_line(line)
