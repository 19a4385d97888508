"""One started container: frozen and thawed through its engine, looked at in the kernel, woken also without the engine.

Docker believes its own record: paused behind its back it cannot be unpaused, thawed behind its back it stays `paused`
and its unpause fails with `container not paused` (seen with 20.10). So Hive pauses and unpauses through the engine.
Only where the engine does not answer a wake in time the kernel is told directly, and the engine's record is put right
once it answers again: frozen for a moment, then unpaused properly.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hive.errors import DependencyDown, HiveError, NotFound, NotSupported, TimedOut, WrongState
from hive.host.engine import ANSWER_S, Engine
from hive.host.files import storage_error
from hive.host.process import ProcessTable, wait_until_over
from hive.link.helper import PagedOut, Stat
from hive.runtimes import pageout
from hive.runtimes.container_exec import enter_container
from hive.runtimes.container_group import ContainerGroup, GroupUsage
from hive.runtimes.container_log import ContainerLog
from hive.runtimes.container_notes import Notes
from hive.runtimes.dialling import to_port
from hive.runtimes.entering import Entered, EnteredProgram
from hive.runtimes.runtime import Run
from hive.tasks import spawn

log = logging.getLogger("hive.sandbox")

LOOK_S = 0.002
"""Between looks at the kernel."""
WAKE_S = 0.5
"""An engine that takes longer for a wake is passed over; it takes 10 ms (Docker 20.10)."""
SETTLE_S = 1.0
"""Between attempts to put right the record of an engine that was passed over."""
STOP_S = 1.0
"""For each step of a stop that needs the engine; then it is done without."""
KILL_S = 4.0
"""Until a container that survives SIGKILL counts as stuck in the kernel."""
EXIT_CODE_S = 3.0
"""For the engine to have noticed the end."""


class RunningContainer:
    """See `Running` for the contract. A pause by hand is none of Hive's: it is said in `Stat`, and left alone."""

    freezer = "docker"

    def __init__(
        self,
        run: Run,
        engine: Engine,
        notes: Notes,
        output: ContainerLog,
        *,
        agent: str,
        port: int | None,
        ended_fd: int,
        lacking: Callable[[], str],
        clear: Callable[[], Awaitable[None]],
    ) -> None:
        """`lacking()`: what of its limits the engine does not enforce; `clear()`: removes what is left of it there."""
        self.run = run
        self.ended_fd = ended_fd
        self.address = notes.address
        self.why_ended = ""
        self._engine = engine
        self._notes = notes
        self._output = output
        self._agent = agent
        self._port = port
        self._lacking = lacking
        self._clear = clear
        self._group = ContainerGroup.of(run.main.pid, run.handle)
        self._lock = asyncio.Lock()
        self._noted = notes.asleep
        """The engine may hold a pause of Hive's, or be about to."""
        self._wanted = self._noted
        """Hive wants it frozen."""
        self._thawing: asyncio.Task[None] | None = None
        self._settling: asyncio.Task[None] | None = None
        self._said_paused = False
        self._looks_paused = self._noted
        self._oom_kills = 0
        """Number of its processes that the kernel killed for memory, as its group said last."""
        self._seen_end_fd = os.dup(ended_fd)
        asyncio.get_running_loop().add_reader(self._seen_end_fd, self._main_ended)

    def __repr__(self) -> str:
        return f"<RunningContainer {self.run.handle[:12]} {self.run.main.pid}{' asleep' if self._noted else ''}>"

    # --- asleep --------------------------------------------------------------------------------------------------

    def is_over(self) -> bool:
        """Whether its main process ended, and with it, being the first of its pid namespace, all others."""
        return not self.run.main.is_alive()

    def _is_stopped(self) -> bool:
        """Whether nothing of it runs, for whatever reason; from the kernel where its cgroup can be seen."""
        return self._looks_paused if self._group is None else self._group.is_frozen()

    def is_frozen(self) -> bool:
        return self._noted and self._is_stopped()

    def is_half_frozen(self) -> bool:
        """Whether a pause is noted and it is not stopped: the engine may still be about to do it."""
        return self._noted and not self._is_stopped()

    async def freeze(self, *, deadline_s: float, give_up: Callable[[], bool]) -> None:
        if not self._noted and self._is_stopped():
            raise WrongState(f"the container of {self._agent} was paused by hand", hint="docker unpause it first")
        self._wanted = True
        try:
            if self._thawing is not None:  # what looks frozen may be about to run
                await asyncio.wait({self._thawing}, timeout=deadline_s)
            if not self.is_frozen():
                await self._freeze(deadline_s, give_up)
        except DependencyDown as error:
            self.thaw_now()
            # As such it would look to the daemon as if the helper were away, which it tries again at once.
            raise HiveError(error.message, hint=error.hint) from error
        except BaseException:
            self.thaw_now()
            raise

    async def _freeze(self, deadline_s: float, give_up: Callable[[], bool]) -> None:
        until = time.monotonic() + deadline_s
        try:
            self._notes.asleep = self._noted = True
        except OSError as error:
            raise storage_error(error) from error
        pausing = spawn(self._pause(deadline_s), name=f"pause {self._agent}")
        while not pausing.done() or not self._is_stopped():
            if give_up() or self.is_over():
                raise WrongState("woken, stopped or ended while it was being frozen")
            if pausing.done() and (why := pausing.result()) is not None:
                raise why
            if time.monotonic() > until:
                raise TimedOut(f"its processes did not all stop within {deadline_s:g} s")
            await asyncio.wait({pausing}, timeout=LOOK_S)
            if pausing.done() and not self._is_stopped():
                await asyncio.sleep(LOOK_S)

    async def _pause(self, limit_s: float) -> HiveError | None:
        """Pauses it. Returns the reason against it, None once the engine has paused it."""
        async with self._lock:
            try:
                try:
                    await self._call("pause", timeout_s=limit_s)
                except WrongState:  # 409: it is paused, or called so, or does not run
                    if not self._is_stopped():
                        await self._correct()
                        await self._call("pause", timeout_s=limit_s)
            except HiveError as error:
                return error
            self._looks_paused = True
            return None

    async def page_out(self, *, give_up: Callable[[], bool]) -> PagedOut:
        if not self.is_frozen():
            raise WrongState(f"the container of {self._agent} is not frozen")
        unified = None if self._group is None else self._group.unified
        return await pageout.page_out(self.pids, unified, give_up=give_up)

    # --- awake ---------------------------------------------------------------------------------------------------

    def thaw_now(self) -> bool:
        self._wanted = False
        if not self._noted or self.is_over() or (self._is_settling() and not self._is_stopped()):
            return True
        if self._thawing is None or self._thawing.done():
            self._thawing = spawn(self._thaw(), name=f"unpause {self._agent}")
        return False

    def _is_settling(self) -> bool:
        return self._settling is not None and not self._settling.done()

    async def thaw(self, *, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        while not self.thaw_now():
            assert self._thawing is not None
            await asyncio.wait({self._thawing}, timeout=max(0.0, until - time.monotonic()))
            if self._thawing.done() and not self._is_stopped():
                return
            if time.monotonic() > until:
                raise TimedOut(f"its processes did not all continue within {deadline_s:g} s")
            await asyncio.sleep(LOOK_S)

    async def _thaw(self) -> None:
        """After this it runs. The note goes once the engine knows it too; until then that is tried again."""
        async with self._lock:
            if not self._noted or self._wanted:
                return
            if await self._unpause():
                self._noted = self._notes.asleep = False
            elif not self._is_settling():
                self._settling = spawn(self._settle(), name=f"settle {self._agent}")

    async def _unpause(self) -> bool:
        """Makes it run, with the engine or without; returns whether the engine says that it runs."""
        try:
            await self._call("unpause", timeout_s=WAKE_S)
        except NotFound:
            return True
        except (DependencyDown, TimedOut) as error:
            log.warning("container_thawed_without_engine agent=%s error=%r", self._agent, error.message)
            self._thaw_in_the_kernel()
            return False
        except HiveError:  # 500: it does not pause it, or only in its record
            return await self._correct()
        self._looks_paused = False
        return True

    async def _correct(self) -> bool:
        """The engine's record and the kernel seem to differ: makes both say that it runs. Whether they do.

        A record that says it runs while it does not may be about to change: the engine hears of its own pauses and
        unpauses a moment later (from containerd) and then takes them down once more. So that is no agreement yet.
        """
        agreed = True
        try:
            if (await self._inspect(WAKE_S))["State"]["Paused"]:
                log.info("container_record_corrected agent=%s", self._agent)
                if self._group is not None:
                    self._group.freeze()
                await self._call("unpause", timeout_s=WAKE_S)
            elif self._group is not None:
                agreed = not self._group.is_frozen()
        except NotFound:
            return True
        except (HiveError, OSError):
            return False
        finally:
            self._thaw_in_the_kernel()
        self._looks_paused = False
        return agreed

    def _thaw_in_the_kernel(self) -> None:
        if self._group is not None:
            self._group.thaw()

    async def _settle(self) -> None:
        """Until the engine says twice that it runs: a pause it was too slow for may still come after the unpause."""
        agreed = 0
        while agreed < 2:
            await asyncio.sleep(SETTLE_S)
            async with self._lock:
                if not self._noted or self._wanted or self.is_over():
                    return
                agreed = agreed + 1 if await self._unpause() else 0
        self._noted = self._notes.asleep = False

    # --- truth ---------------------------------------------------------------------------------------------------

    def stat(self, snapshot: ProcessTable) -> Stat:  # noqa: ARG002 - the kernel counts by container
        usage = GroupUsage(0, 0, 0, 1) if self._group is None else self._group.usage()
        stopped = self._is_stopped()
        self._say_if_paused_by_hand(stopped and not self._noted)
        return Stat(
            state="frozen" if stopped else "running",
            pid=self.run.main.pid,
            cpu_us=usage.cpu_us,
            rss_bytes=usage.rss_bytes,
            swap_bytes=usage.swap_bytes,
            processes=usage.processes,
            freezer=f"{self.freezer}, paused by hand" if self._said_paused else self.freezer,
            address=self.address,
            limits=self._lacking(),
        )

    def _say_if_paused_by_hand(self, so: bool) -> None:
        if so and not self._said_paused:
            log.warning("container_paused_by_hand agent=%s container=%s", self._agent, self.run.handle[:12])
        elif self._said_paused and not so:
            log.info("container_unpaused_by_hand agent=%s container=%s", self._agent, self.run.handle[:12])
        self._said_paused = so

    def pids(self) -> list[int]:
        return [self.run.main.pid] if self._group is None else self._group.pids()

    def memory_group(self) -> Path | None:
        return None if self._group is None else self._group.memory

    # --- the end -------------------------------------------------------------------------------------------------

    async def stop(self, *, grace_s: float) -> bool:
        with contextlib.suppress(TimedOut):
            await self.thaw(deadline_s=STOP_S)
        try:
            # The engine, unlike a signal from here, also unpauses what was paused by hand.
            await self._call("kill", query={"signal": await self._stop_signal()}, timeout_s=STOP_S)
        except (NotFound, WrongState):
            pass  # it is over
        except HiveError:
            self.run.main.send(signal.SIGTERM)
        await wait_until_over(self.is_over, grace_s)
        return await self.kill()

    async def _stop_signal(self) -> str:
        """The signal by which the image asks to be stopped."""
        return (await self._inspect(STOP_S))["Config"].get("StopSignal") or "SIGTERM"

    async def kill(self) -> bool:
        self._wanted = False
        until = time.monotonic() + KILL_S
        if not self.is_over():
            with contextlib.suppress(HiveError):
                await self._call("kill", timeout_s=STOP_S)
        while not self.is_over():
            self._thaw_in_the_kernel()  # v1: what is frozen hears SIGKILL only then
            self.run.main.send(signal.SIGKILL)
            if time.monotonic() > until:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def connect(self) -> socket.socket:
        if self._port is None:
            raise NotSupported("it has no port that only the helper gets to")
        return await to_port(self.ended_fd, self._port)

    def _main_ended(self) -> None:
        """Asks the kernel at once: the engine removes the group soon, and itself misses some ends by memory."""
        self._count_oom_kills()
        self._forget_end()

    def _count_oom_kills(self) -> None:
        if self._group is not None:
            self._oom_kills = max(self._oom_kills, self._group.oom_kills())

    def _forget_end(self) -> None:
        if self._seen_end_fd >= 0:
            asyncio.get_running_loop().remove_reader(self._seen_end_fd)
            os.close(self._seen_end_fd)
            self._seen_end_fd = -1

    async def reap(self) -> int | None:
        self._count_oom_kills()
        self._wanted = self._noted = self._notes.asleep = False
        await self._output.finish()
        exit_code = await self._how_it_ended()
        # Also so that nobody starts it again by hand (`docker restart`): Hive starts its agents.
        with contextlib.suppress(HiveError):
            await self._clear()
        return exit_code

    async def _how_it_ended(self) -> int | None:
        """Its exit code, None where it is unknown; notes the reason. Hive removes it only afterwards.

        Docker 20.10 with v1 groups learns of an end by memory from a notice that comes after the end, or never: on a
        busy machine of one in 40 it said `OOMKilled: false` for good.
        """
        exit_code, status, was_oom = None, "", self._oom_kills > 0
        try:
            exit_code = int((await self._call("wait", timeout_s=EXIT_CODE_S))["StatusCode"])
            state = (await self._inspect())["State"]
            status, was_oom = state["Status"], was_oom or state["OOMKilled"]
        except NotFound:
            status = "removing"
        except HiveError:
            pass  # what the kernel said counts all the same
        if status in ("removing", "dead"):
            self.why_ended = "its container was removed by hand"
            log.warning("container_removed_by_hand agent=%s container=%s", self._agent, self.run.handle[:12])
        elif was_oom:
            self.why_ended = "out of memory"
            log.warning("agent_out_of_memory agent=%s", self._agent)
        return exit_code

    def close(self) -> None:
        for task in (self._settling, self._thawing):
            if task is not None:
                task.cancel()
        self._output.close()
        self._forget_end()
        if self.ended_fd >= 0:
            os.close(self.ended_fd)
            self.ended_fd = -1

    # --- the engine ----------------------------------------------------------------------------------------------

    async def enter(self, program: EnteredProgram) -> Entered:
        """Enters as the container's user, with no right it has not; see `Enterable`."""
        if self._is_stopped():
            raise WrongState(f"the container of {self._agent} is asleep", hint="wake it first")
        return await enter_container(self._engine, self.run.handle, program)

    async def _call(self, verb: str, *, query: dict[str, str] | None = None, timeout_s: float = ANSWER_S) -> Any:
        target = f"/containers/{self.run.handle}/{verb}"
        return await self._engine.ask("POST", target, query=query, timeout_s=timeout_s)

    async def _inspect(self, timeout_s: float = ANSWER_S) -> Any:
        return await self._engine.ask("GET", f"/containers/{self.run.handle}/json", timeout_s=timeout_s)
