"""Servers of the pool as units of systemd: `hive-model@ID.service`, where Hive is installed.

The unit's main process is the supervisor, which tells systemd when its server serves and why it ended. Nothing is
started again by systemd.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from pathlib import Path

import msgspec

from hive.errors import HiveError, NotFound, TimedOut
from hive.host import systemd
from hive.host.process import Identity, identify
from hive.link.slots import ProcessState, SlotGrant
from hive.settings.table import Paths
from hive.slots.inference_units import BEGAN, CLOCKS_S
from hive.slots.slot_run import LAST_LINES, WHY_LINES, RunningSlot, SlotEnd, SlotUse, last_of
from hive.slots.unit_groups import UnitGroups
from hive.tasks import spawn

UNIT = "hive-model@{}.service"
PATTERN = "hive-model@*.service"
LOAD_S = 24 * 3600.0
"""Longest wait for a start: the supervisor itself ends a load that takes too long."""
BEGUN_S = 30.0
"""Until the unit has a main process: jobs that no other may replace go first."""
LOOK_S = 0.05
"""Between looks for it."""
CALM_S = 0.5
"""Between looks at a start that an earlier helper asked for, and at a unit that is being stopped."""
_SHOWN = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "MainPID",
    "InvocationID",
    "ControlGroup",
    "StatusText",
    BEGAN,
)
_STATES = {
    "activating": ProcessState.STARTING,
    "active": ProcessState.SERVING,
    "reloading": ProcessState.SERVING,
    "deactivating": ProcessState.STOPPING,
}
OOM = "oom-kill"


def unit_of_slot(slot: str) -> str:
    """
    >>> unit_of_slot("qwen3-8b-f9b30c0d")
    'hive-model@qwen3-8b-f9b30c0d.service'
    """
    return UNIT.format(slot)


class ModelUnit:
    """One server as a unit; see `RunningSlot`."""

    def __init__(
        self, unit: str, shown: dict[str, str], grant: SlotGrant | None, job: asyncio.Task[HiveError | None] | None
    ) -> None:
        """`shown`: its properties now; `job`: the start that was asked for here, None for a unit that was found."""
        self.unit = unit
        self.run = shown.get("InvocationID", "")
        self.pid = int(shown.get("MainPID") or 0)
        self.state = _STATES.get(shown.get("ActiveState", ""), ProcessState.STOPPING)
        self.grant = grant
        self.socket = ""
        self._job = job
        self._main: Identity | None = identify(self.pid) if self.pid else None
        ago_s = systemd.seconds_since(shown.get(BEGAN, ""))
        self._began_at = time.monotonic() - (ago_s or 0.0)
        self._since = None if ago_s is None else time.time() - ago_s - CLOCKS_S
        self._groups = UnitGroups.of(shown.get("ControlGroup", ""))

    def __repr__(self) -> str:
        return f"<ModelUnit {self.unit} {self.pid}>"

    def age_s(self) -> float:
        return time.monotonic() - self._began_at

    def lives(self) -> bool:
        return self._main is not None and self._main.is_alive()

    async def serves(self) -> bool:
        if self._job is not None:
            await asyncio.wait({self._job})
        while True:
            shown = await systemd.show(self.unit, "ActiveState", "InvocationID")
            if shown.get("InvocationID") != self.run or shown.get("ActiveState") != "activating":
                return shown.get("InvocationID") == self.run and shown.get("ActiveState") == "active"
            await asyncio.sleep(CALM_S)

    async def over(self) -> SlotEnd:
        if self._main is not None:
            await _ended(self._main)
        while True:
            try:
                shown = await systemd.show(self.unit, *_SHOWN, *systemd.HOW_IT_ENDED)
            except HiveError:  # a PID 1 that does not answer now
                await asyncio.sleep(CALM_S)
                continue
            if shown.get("InvocationID") not in (self.run, "") or shown.get("ActiveState") in ("inactive", "failed"):
                break
            await asyncio.sleep(LOOK_S)
        if self._job is not None:
            self._job.cancel()
            if self.grant is None:  # it waited in vain, which is no failure
                await systemd.forget(self.unit)
        return await self._end(shown)

    async def _end(self, shown: dict[str, str]) -> SlotEnd:
        last = list[str]()
        with contextlib.suppress(HiveError):  # without the journal its end is told without its last lines
            last = last_of(await read_log(self.unit, LAST_LINES, self._since))
        if shown.get("InvocationID") != self.run:  # systemd forgets at once what ended well, and nothing else
            return SlotEnd(0, "it was stopped", was_oom=False, last=last)
        ended = systemd.ended_of(shown, int(shown.get("ExecMainPID") or 0))
        result = shown.get("Result", "") if ended is None else ended.why
        said = shown.get("StatusText", "")
        if result == OOM:
            why = "the kernel killed it: out of memory"
        elif said and not said.startswith("serves"):
            why = said
        else:
            why = ": ".join(filter(None, [result or "it ended", " | ".join(last[-WHY_LINES:])]))
        return SlotEnd(None if ended is None else ended.code, why, result == OOM, last)

    async def stop(self, grace_s: float) -> None:
        await systemd.end_unit(self.unit, grace_s=grace_s)

    async def look(self) -> SlotUse:
        return await asyncio.to_thread(self._groups.use, self.pid)

    def reaped(self, pid: int, code: int) -> None:
        """systemd tells itself how it ended."""

    def let_go(self) -> None:
        if self._job is not None:
            self._job.cancel()


class SlotUnits:
    """Starts servers as units; see `SlotStarter`."""

    def __init__(self, paths: Paths) -> None:
        self._paths = paths

    def __repr__(self) -> str:
        return "<SlotUnits>"

    async def prepare(self, slot: str) -> RunningSlot:
        """Its unit is `activating` while it waits, as it is later while its server loads."""
        return await self._begin(slot, None)

    async def start(self, slot: str, grant: SlotGrant, prepared: RunningSlot | None = None) -> RunningSlot:
        if prepared is not None:
            prepared.grant = grant
            return prepared
        return await self._begin(slot, grant)

    async def _begin(self, slot: str, grant: SlotGrant | None) -> RunningSlot:
        unit = unit_of_slot(slot)
        before = (await systemd.show(unit, "InvocationID")).get("InvocationID", "")
        job = spawn(_started(unit), name="start model")
        until = time.monotonic() + BEGUN_S
        while True:
            shown = await systemd.show(unit, *_SHOWN)
            if shown.get("LoadState") == "not-found":
                job.cancel()
                raise NotFound(f"there is no unit {unit}", hint="hive install puts hive-model@.service there")
            if shown.get("MainPID", "0") != "0":
                return ModelUnit(unit, shown, grant, job)
            if job.done() and shown.get("InvocationID") != before:  # it began, and has ended already
                return ModelUnit(unit, shown, grant, job)
            if job.done() and (error := job.result()) is not None:
                raise error
            if time.monotonic() > until:
                job.cancel()
                await systemd.end_unit(unit, grace_s=0)
                raise TimedOut(f"{unit} did not begin within {BEGUN_S:g} s", hint=f"systemctl status {unit}")
            await asyncio.sleep(LOOK_S)

    async def find(self, granted: set[str], awaited: set[str]) -> dict[str, RunningSlot]:
        for slot in awaited:
            await systemd.end_unit(unit_of_slot(slot), grace_s=0)
            await systemd.forget(unit_of_slot(slot))
        prefix, suffix = UNIT.split("{}")
        running = {unit.removeprefix(prefix).removesuffix(suffix) for unit in await systemd.units_like(PATTERN) if unit}
        found: dict[str, RunningSlot] = {}
        for slot in sorted(running | granted):
            shown = await systemd.show(unit_of_slot(slot), *_SHOWN)
            is_there = shown.get("ActiveState") in _STATES
            if is_there or slot in granted:
                unit = found[slot] = ModelUnit(unit_of_slot(slot), shown, read_grant(self._paths, slot), None)
                unit.socket = socket_before(self._paths, slot, unit.pid)
        return found

    async def log(self, slot: str, lines: int) -> str:
        unit = unit_of_slot(slot)
        shown = await systemd.show(unit, BEGAN)
        ago_s = systemd.seconds_since(shown.get(BEGAN, ""))
        return await read_log(unit, lines, None if ago_s is None else time.time() - ago_s - CLOCKS_S)


async def _started(unit: str) -> HiveError | None:
    """Returns when it serves, or with the error where it failed: once it has begun, its end tells that better."""
    try:
        await systemd.start_unit(unit, limit_s=LOAD_S)
    except HiveError as error:
        return error
    return None


async def read_log(unit: str, lines: int, since: float | None) -> str:
    """The last lines of the server and its supervisor, without what systemd says of them."""
    return await systemd.read_service(unit, lines=lines, since=since, only_its_own=True)


def read_grant(paths: Paths, slot: str) -> SlotGrant | None:
    """The grant a server was started with; None where it cannot be read."""
    try:
        return msgspec.json.decode(paths.slot_grant(slot).read_bytes(), type=SlotGrant)
    except (OSError, msgspec.MsgspecError):
        return None


def socket_before(paths: Paths, slot: str, pid: int) -> str:
    """Socket of a server that was started when all of them had one directory; empty for any other."""
    before = str(paths.slot_socket_before(slot))
    with contextlib.suppress(OSError):
        if os.fsencode(before) in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"):
            return before
    return ""


async def _ended(who: Identity) -> None:
    """Returns once this process has ended."""
    fd = who.open()
    if fd is None:
        return
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(fd, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(fd)
        os.close(fd)
