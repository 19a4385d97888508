"""One running virtual machine: asleep and awake by its VMM's API, everything else by its VMM's process.

The truth is what `GET /` says; a pause is believed no sooner, and after one that failed the machine is resumed whatever
it says of itself: Firecracker stops its event loop even where it could not stop the guest (api_server_adapter.rs).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from hive.errors import HiveError, NotSupported, TimedOut, WrongState
from hive.host.firecracker import why_not_pause
from hive.host.limits import Fence
from hive.host.process import ProcessTable, exit_code, wait_until_over
from hive.link.helper import PagedOut, Stat
from hive.runtimes import pageout, vmm
from hive.runtimes.dialling import to_vmm
from hive.runtimes.log_pipes import AgentOutput
from hive.runtimes.machine_dir import MachineDir
from hive.runtimes.process import ProcessGroup, remove_groups
from hive.runtimes.runtime import Run
from hive.runtimes.vmm import PAUSED, RUNNING, Vmm
from hive.tasks import spawn

log = logging.getLogger("hive.sandbox")

KILL_S = 2.0
"""Seconds until a VMM that survives SIGKILL counts as stuck in the kernel."""
THAW_S = 2.0
"""Limit for a sleeping machine to wake at a stop; after that it is killed."""
REFRESH_S = 10.0
"""A truth older than this is asked for anew when somebody looks: a stranger may have paused or resumed it."""
ENDS_S = 0.5
"""From an API that hung up to the end of its process."""
PRESS_AGAIN_S = 1.0
"""Delay between two presses of Ctrl-Alt-Del: a guest whose keyboard driver is not up yet loses them without a word."""
LOOK_S = 0.002


class RunningMachine:
    """One started agent; see `Running` for the contract."""

    freezer = "firecracker"

    def __init__(
        self,
        run: Run,
        api: Vmm,
        group: ProcessGroup,
        fence: Fence,
        *,
        address: str,
        place: MachineDir,
        ended_fd: int,
        output: AgentOutput | None,
        child: subprocess.Popen[bytes] | None = None,
    ) -> None:
        """`group`: the VMM's process, and whatever may come of it; `output`: what it prints into, where that is this
        helper's; `child` where it is this process's own."""
        self.run = run
        self.address = address
        self._place = place
        self.ended_fd = ended_fd
        self._api = api
        self._group = group
        self._fence = fence
        self._child = child
        self._output = output
        self._owes_resume = False
        """A Pause was sent, by this helper or perhaps by an earlier one, and no Resumed was verified since."""
        self._cpu_us_asleep: int | None = None
        """CPU time used when it was first seen asleep. The later use of its VMM, for Hive's questions, is not the
        agent's."""
        self._resuming: asyncio.Task[None] | None = None
        self._refreshing: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<RunningMachine {self.run.main.pid} {self._state or 'not heard of'}>"

    @property
    def _state(self) -> str:
        return self._api.last.state if self._api.last else ""

    def _is_alive(self) -> bool:
        return self.run.main.is_alive()

    def _why_not_pause(self) -> str:
        version = self._api.last.vmm_version if self._api.last else ""
        return why_not_pause(version, has_vsock=True)

    # --- asleep and awake ----------------------------------------------------------------------------------------

    async def freeze(self, *, deadline_s: float, give_up: Callable[[], bool]) -> None:
        if why := self._why_not_pause():
            raise NotSupported(f"{why}; the agent stays awake")
        until = time.monotonic() + deadline_s
        if self._is_resuming():
            await self._wait(self._resuming, until, give_up)
        self._owes_resume, self._cpu_us_asleep = True, None
        pausing = spawn(self._pause(until), name=f"pause {self.run.main.pid}")
        try:
            await self._wait(pausing, until, give_up)
            if (why_not := pausing.result()) is not None:
                raise why_not
        except BaseException:
            self.thaw_now()
            raise

    async def _wait(self, task: asyncio.Task[object] | None, until: float, give_up: Callable[[], bool]) -> None:
        """Until the task is done, whatever came of it; it goes on where this gives up."""
        while True:
            if give_up():
                raise WrongState("woken, stopped or ended while it was being paused")
            if task is None or task.done():
                return
            if (left_s := until - time.monotonic()) <= 0:
                raise TimedOut("its machine was not paused in time")
            await asyncio.wait({task}, timeout=min(LOOK_S, left_s))

    async def _pause(self, until: float) -> HiveError | None:
        """Pauses it. Returns the reason against it, None where it is paused (answers other than 204 may mean that
        too)."""
        why: HiveError | None = None
        try:
            await self._api.call(vmm.PAUSE, limit_s=max(until - time.monotonic(), LOOK_S))
        except TimedOut as late:
            return late
        except HiveError as refused:
            why = refused
        try:
            state = (await self._api.ask()).state
        except HiveError as unheard:
            return unheard
        return None if state == PAUSED else why or WrongState(f"it was to be paused, and is {state}")

    def _is_resuming(self) -> bool:
        return self._resuming is not None and not self._resuming.done()

    def thaw_now(self) -> bool:
        """Never where it is known to run: with some versions every Resumed does harm (see `why_not_pause`)."""
        if not self._is_alive() or (self._state == RUNNING and not self._owes_resume and not self._is_resuming()):
            return True
        if not self._is_resuming():
            self._owes_resume = True
            self._resuming = spawn(self._resume(), name=f"resume {self.run.main.pid}")
        return False

    async def _resume(self) -> None:
        """Resumes it, until that is verified or it is gone, even with callers waiting: a pause may land late.

        In line behind a Pause still under way, which its VMM answers first.
        """
        wait_s, said = LOOK_S, False
        while self._is_alive():
            try:
                await self._api.call(vmm.RESUME)
                if (await self._api.ask()).state == RUNNING:
                    self._owes_resume = False
                    return
            except HiveError as error:
                if not said and self._is_alive():
                    log.warning("machine_not_resumed pid=%d error=%s", self.run.main.pid, error)
                    said = True
            await asyncio.sleep(wait_s)
            wait_s = min(wait_s * 2, 0.5)

    async def thaw(self, *, deadline_s: float) -> None:
        until = time.monotonic() + deadline_s
        while not self.thaw_now():
            assert self._resuming is not None, "thaw_now resumes it or says it runs"
            await asyncio.wait({self._resuming}, timeout=max(until - time.monotonic(), 0))
            if not self._resuming.done():
                raise TimedOut(f"its machine was not resumed within {deadline_s:g} s")

    def is_frozen(self) -> bool:
        return self._state == PAUSED and self._is_alive()

    def is_half_frozen(self) -> bool:
        return self._owes_resume and self._state != PAUSED and self._is_alive()

    async def learn(self) -> str:
        """The state it reports, empty where it does not answer. For a machine an earlier helper started.

        That one may have been killed at a Pause, so this one owes a Resumed, unless no Hive pauses such a version.
        """
        with contextlib.suppress(HiveError):
            await self._api.ask()
        self._owes_resume = self._state != RUNNING or not self._why_not_pause()
        return self._state

    async def connect(self) -> socket.socket:
        if not self.address:
            raise NotSupported("it has no port that only the helper gets to")
        return await to_vmm(self._place.top, self._place.vsock, pid=self.run.main.pid)

    # --- what it uses --------------------------------------------------------------------------------------------

    def pids(self) -> list[int]:
        return self._group.pids()

    def memory_group(self) -> Path | None:
        return self._fence.memory

    def stat(self, snapshot: ProcessTable) -> Stat:
        if time.monotonic() - self._api.last_at > REFRESH_S and not self._is_refreshing():
            self._refreshing = spawn(self._refresh(), name=f"ask {self.run.main.pid}")
        is_frozen = self.is_frozen()
        cpu_us, rss_bytes, processes, swap_bytes = self._group.usage(snapshot)
        if is_frozen:
            self._cpu_us_asleep = cpu_us = cpu_us if self._cpu_us_asleep is None else self._cpu_us_asleep
        return Stat(
            state="frozen" if is_frozen else "running",
            pid=self.run.main.pid,
            cpu_us=cpu_us,
            rss_bytes=rss_bytes,
            processes=processes,
            swap_bytes=swap_bytes,
            freezer=self.freezer,
            address=self.address,
            limits=self._fence.lacking,
        )

    def _is_refreshing(self) -> bool:
        return self._refreshing is not None and not self._refreshing.done()

    async def _refresh(self) -> None:
        """Asks its state anew. A machine that does not answer counts as before; the next wake or pause learns more."""
        with contextlib.suppress(HiveError):
            await self._api.ask()

    async def page_out(self, *, give_up: Callable[[], bool]) -> PagedOut:
        if (pages := await self._api.ask_huge_pages()) not in vmm.SWAPPABLE_PAGES:
            raise NotSupported(f"deep sleep: its memory is in huge pages ({pages}), which cannot be swapped out")
        leaf = None if self.run.leaf is None else Path(self.run.leaf)
        return await pageout.page_out(self._group.pids, leaf, give_up=give_up)

    # --- the end -------------------------------------------------------------------------------------------------

    async def stop(self, *, grace_s: float) -> bool:
        """Ctrl-Alt-Del is how a guest is asked to end; a paused one would never hear of it, so it is woken first."""
        until = time.monotonic() + grace_s
        try:
            await self.thaw(deadline_s=min(THAW_S, grace_s))
            await self._api.call(vmm.CTRL_ALT_DEL)
        except HiveError as error:
            if not await self.ends_by_itself(within_s=min(ENDS_S, grace_s)):  # the answer of one that ends may be lost
                log.warning("machine_not_asked_to_end pid=%d error=%s", self.run.main.pid, error)
        else:
            await self._press_until_it_ends(until)
        return await self.kill()

    async def _press_until_it_ends(self, until: float) -> None:
        """Presses the keys again and again. After four presses that no guest read, the VMM refuses more (1.15.1)."""
        while (left_s := until - time.monotonic()) > 0:
            if await self.ends_by_itself(within_s=min(PRESS_AGAIN_S, left_s)):
                return
            with contextlib.suppress(HiveError):
                await self._api.call(vmm.CTRL_ALT_DEL, limit_s=min(PRESS_AGAIN_S, left_s))

    async def ends_by_itself(self, *, within_s: float) -> bool:
        """Whether its VMM is gone, or goes within this time."""
        await wait_until_over(lambda: not self._is_alive(), within_s)
        return not self._is_alive()

    async def kill(self) -> bool:
        until = time.monotonic() + KILL_S
        while self._is_alive() or self._group.pids():
            self.run.main.send(signal.SIGKILL)
            self._group.kill()
            if time.monotonic() > until:
                return False
            await asyncio.sleep(LOOK_S)
        return True

    async def reap(self) -> int | None:
        """Reaps the VMM. Returns its exit code: 0 when its guest shut down or rebooted, whatever ran in it."""
        await self.finish_output()
        if self._child is None:
            return None
        returncode = self._child.poll()
        return None if returncode is None else exit_code(returncode)

    async def finish_output(self) -> None:
        """Waits, after its end, until all it printed is in its log."""
        if self._output is not None:
            await self._output.finish()

    def close(self) -> None:
        if self._output is not None:
            self._output.close()
        for task in (self._resuming, self._refreshing):
            if task is not None:
                task.cancel()
        if self.ended_fd >= 0:
            os.close(self.ended_fd)
            self.ended_fd = -1
        if self._child is not None:
            # It lives on without this helper: Popen must not complain when it is collected.
            self._child.returncode = self._child.poll() or 0
        remove_groups(self._group, self._fence)
