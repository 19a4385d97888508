"""One server kept running: started, watched, ended on a verdict, started again. The one writer of a worker's state."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping

from hive.backends.command_line import Launch
from hive.errors import BackendDown, BackendTimeout, DependencyDown, HiveError, WrongState
from hive.host.cgroup import Leaf
from hive.tasks import spawn
from hive.worker.child import ServerProcess
from hive.worker.judge import FailReason
from hive.worker.place import check, free
from hive.worker.profile import TimeoutProfile
from hive.worker.readiness import until_it_generates
from hive.worker.records import Restart, WorkerState
from hive.worker.restarts import ServerEnd, delay_s
from hive.worker.stream import Clock, Progress
from hive.worker.watching import ServerWatch

log = logging.getLogger("hive.worker")
RESTARTS_KEPT = 50
LAST_LINES = 5
"""Lines of the server's output that an error shows."""


class ServerKeeper:
    """`requests()`: those under way; `fail(reasons)`: ends them. `model` is asked for the first token.

    The server runs in `leaf` where there is one. Requests are for a ready server alone, and none outlives it.
    """

    def __init__(
        self,
        launch: Launch,
        profile: TimeoutProfile,
        *,
        model: str,
        places: int,
        leaf: Leaf | None,
        requests: Callable[[], Mapping[int, Progress]],
        fail: Callable[[Mapping[int, FailReason]], None],
        clock: Clock,
    ) -> None:
        if launch.socket is None:
            raise WrongState("a worker's server listens on a unix socket")
        self.socket = launch.socket
        self.state = WorkerState.COLD
        self.last_error: str | None = None
        self.last_healthy_at: float | None = None
        self.restart_count = 0
        self.restarts: deque[Restart] = deque(maxlen=RESTARTS_KEPT)
        self.process: ServerProcess | None = None
        self.watch: ServerWatch | None = None
        self._launch = launch
        self._profile = profile
        self._model = model
        self._places = places
        self._leaf = leaf
        self._requests = requests
        self._fail = fail
        self._clock = clock
        self._ends: deque[ServerEnd] = deque(maxlen=max(64, profile.crash_limit))
        self._task: asyncio.Task[None] | None = None
        self._asked_restart: str | None = None
        self._interrupted = asyncio.Event()
        """Set where somebody asked for a restart."""
        self._settled = asyncio.Event()
        """Set while the state is ready, failed or cold."""
        self._last_log: list[str] = []

    def __repr__(self) -> str:
        return f"<ServerKeeper {self.state}, {self.restart_count} restarts>"

    # --- what the worker asks for ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Returns once the server has generated a token. Raises HiveError where it does not; then nothing is left."""
        if self._task is not None and not self._task.done():
            raise WrongState(f"the worker is {self.state}")
        self._ends.clear()
        self._settled.clear()
        self._set(WorkerState.LOADING)
        self._task = spawn(self._keep(), name="keep-server")
        try:
            await self._settled.wait()
        except BaseException:
            await self.stop()
            raise
        if self.state is not WorkerState.READY:
            raise DependencyDown(self.last_error or f"the worker is {self.state}")

    async def stop(self) -> None:
        """Wins over a start and a restart under way. Returns once nothing is left of the server."""
        task, process = self._task, self.process
        if process is not None:
            process.leave()
        if self.state not in (WorkerState.COLD, WorkerState.FAILED):
            self._set(WorkerState.STOPPING)
        self._fail_all(FailReason.WORKER_RESTARTED)
        if task is not None:
            task.cancel()
            await asyncio.wait([task])
        if self.process is not None:
            await self._end()
        self._set(WorkerState.COLD)

    async def restart(self, reason: str) -> None:
        """Ends the server and starts it again at once; returns when it is ready. Raises WrongState, HiveError."""
        if self._task is None or self._task.done():
            raise WrongState(f"the worker is {self.state}: it has nothing to restart")
        self._asked_restart = reason
        self._settled.clear()
        self._interrupted.set()
        await self._settled.wait()
        if self.state is not WorkerState.READY:
            raise DependencyDown(self.last_error or f"the worker is {self.state}")

    def lines(self, count: int) -> list[str]:
        """Last lines of the server's output; of the one before, where this one said nothing yet."""
        return (self.process.log.last(count) if self.process is not None else []) or self._last_log[-count:]

    # --- its task ---------------------------------------------------------------------------------------------------

    async def _keep(self) -> None:
        """Until it is cancelled or gives up. What nobody thought of is an end too: nobody waits for ever."""
        try:
            await self._run()
        except Exception as error:
            log.exception("server_not_kept")
            self._fail_all(FailReason.WORKER_RESTARTED)
            await self._end()
            self._give_up(f"{type(error).__name__}: {error}")

    async def _run(self) -> None:
        """Start, watch, end, wait, again."""
        is_first = True
        while True:
            begun_at = self._clock()
            try:
                await self._come_up()
            except HiveError as error:
                reason, why = FailReason.SERVER_DIED.value, error.message
                await self._end()
                if is_first:
                    self._give_up(why)
                    return
            else:
                is_first = False
                self._set(WorkerState.READY)
                reason = await self._stay()
                why = self._why(reason)
                self._set(WorkerState.RESTARTING)
                self._fail_all(FailReason.WORKER_RESTARTED)
                await self._end()
            self.restarts.append(Restart(time.time(), reason))
            wait_s: float | None = 0.0
            if self._asked_restart is None:
                self.last_error = why
                self._ends.append(ServerEnd(self._clock(), self._clock() - begun_at))
                wait_s = delay_s(self._ends, self._profile, now=self._clock())
                if wait_s is None:
                    self._give_up(f"{why}; it ended {self._profile.crash_limit} times in a short time")
                    return
            self._set(WorkerState.RESTARTING)
            log.warning("server_restarts reason=%s again_in_s=%g", reason, wait_s)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._interrupted.wait()  # a restart somebody asks for waits for nothing
            self._asked_restart = None
            self._interrupted.clear()
            self.restart_count += 1
            self._set(WorkerState.LOADING)

    async def _come_up(self) -> None:
        check(self._launch.needed)
        free(self.socket)
        self.process = ServerProcess(self._launch.command, self._launch.environment, leaf=self._leaf)
        await self.process.start()
        try:
            async with asyncio.timeout(self._profile.load_timeout_s):
                await until_it_generates(self.process, self.socket, self._model, self._clock)
        except TimeoutError:
            limit = f"{self._profile.load_timeout_s:g} s"
            raise BackendTimeout(f"the server generated nothing within {limit}{self._last_words()}") from None
        except BackendDown as error:
            raise BackendDown(f"{error.message}{self._last_words()}") from None

    async def _stay(self) -> str:
        """While it is ready: returns the reason for its end."""
        assert self.process is not None
        self.last_healthy_at = time.time()
        watch = self.watch = ServerWatch(
            self.process,
            self._profile,
            places=self._places,
            requests=self._requests,
            fail=self._fail,
            clock=self._clock,
        )
        over = spawn(watch.until_over(), name="watch-server")
        interrupted = spawn(self._interrupted.wait(), name="restart-asked")
        try:
            await asyncio.wait({over, interrupted}, return_when=asyncio.FIRST_COMPLETED)
            return over.result().value if over.done() else self._asked_restart or FailReason.WORKER_RESTARTED.value
        finally:
            self.watch = None
            self.last_healthy_at = time.time()
            over.cancel()
            interrupted.cancel()

    async def _end(self) -> None:
        process = self.process
        if process is not None:
            await process.end()
            self._last_log = process.log.last()
            self.process = None
            self.socket.unlink(missing_ok=True)

    def _give_up(self, why: str) -> None:
        self.last_error = why
        self._set(WorkerState.FAILED)
        log.error("server_failed error=%s", why)

    def _set(self, state: WorkerState) -> None:
        self.state = state
        if state in (WorkerState.READY, WorkerState.FAILED, WorkerState.COLD) and self._asked_restart is None:
            self._settled.set()
        elif state in (WorkerState.FAILED, WorkerState.COLD):
            self._asked_restart = None
            self._settled.set()

    def _fail_all(self, reason: FailReason) -> None:
        if requests := self._requests():
            self._fail(dict.fromkeys(requests, reason))

    def _why(self, reason: str) -> str:
        code = None if self.process is None else self.process.code
        ended = f"{reason}: the server ended with exit code {code}" if code is not None else reason
        return ended + self._last_words()

    def _last_words(self) -> str:
        lines = [] if self.process is None else self.process.log.last(LAST_LINES)
        return "".join(f"\n    {line}" for line in lines)
