"""The servers of the pool's slots, started and stopped for the daemon: those that root's configuration describes.

The daemon names a slot by its id and grants memory; both are looked at before anything is made of them, so that a
daemon that was taken over gets no other program, path or unit. Nothing is decided here: what ended stays ended.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable, Container, Coroutine
from pathlib import Path
from typing import Any

import msgspec

from hive.adapters.directory import AdapterDirectory
from hive.backends.entries import ModelEntry, adapter_entries, entries_of, started_entries
from hive.backends.models_dir import ModelsDir, place_of
from hive.errors import BadRequest, HiveError, NotFound, WrongState
from hive.host import files
from hive.link.helper import BackendLog
from hive.link.message import LinkMessage
from hive.link.messages import Done
from hive.link.slots import (
    AskSlotLog,
    AskSlots,
    ProcessState,
    SlotIsRunning,
    SlotPrepare,
    SlotProcess,
    SlotsRunning,
    SlotStart,
    SlotStop,
)
from hive.settings.file import load
from hive.settings.table import Paths
from hive.slots.inference_units import GRACE_MAX_S, LOG_LINES_MAX
from hive.slots.slot_run import (
    SLOT_ID,
    RunningSlot,
    SlotEnd,
    SlotStarter,
    SlotUse,
    check_grant,
    check_id,
)
from hive.slots.waiting_supervisor import WaitingSupervisor
from hive.tasks import spawn

log = logging.getLogger("hive.sandbox")

VERBS: frozenset[type[LinkMessage]] = frozenset({SlotStart, SlotPrepare, SlotStop, AskSlots, AskSlotLog})
ENDING: frozenset[type[LinkMessage]] = frozenset({SlotStop, AskSlots})
"""Those that `hive up` asks when it ends."""
ENDS_S = 3.0
"""Longest wait, before anybody is served, for the end of what an earlier helper started to be known."""
ADOPT_AGAIN_S = 2.0
"""Between looks for what an earlier helper started, where systemd does not answer."""

Known = Callable[[], Container[str]]
"""The ids that root's configuration describes now. Blocks on a file; raises ConfigError."""
TellMoved = Callable[[SlotProcess], bool]
"""Tells the daemon; False where none is connected."""


class HeldSlot:
    """One server, from its start until the daemon knows that it ended."""

    def __init__(self, id: str, running: RunningSlot) -> None:
        self.id = id
        self.running = running
        self.state = running.state
        self.peak_bytes: int | None = None
        self.used = SlotUse([], None, 0.0)
        self.end: SlotEnd | None = None
        self.life: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<HeldSlot {self.id} {self.state} {self.running!r}>"

    async def seen(self) -> SlotProcess:
        """The server now."""
        if self.state is not ProcessState.ENDED:
            self.used = await self.running.look()
            if self.used.bytes is not None:
                self.peak_bytes = max(self.peak_bytes or 0, self.used.bytes)
        return self.process()

    def process(self) -> SlotProcess:
        """The server as it was last seen."""
        has_ended, end = self.state is ProcessState.ENDED, self.end
        return SlotProcess(
            id=self.id,
            run=self.running.run,
            state=self.state,
            pid=0 if has_ended else self.running.pid,
            pids=[] if has_ended else self.used.pids,
            age_s=self.running.age_s(),
            socket=self.running.socket,
            grant=self.running.grant,
            bytes=None if has_ended else self.used.bytes,
            peak_bytes=self.peak_bytes,
            cpu_s=self.used.cpu_s,
            exit_code=None if end is None else end.exit_code,
            why="" if end is None else end.why,
            was_oom=end is not None and end.was_oom,
            last=[] if end is None else end.last,
        )


class ModelSlots:
    """All servers of the pool that one helper holds. `open` before its first message, `close` when it leaves."""

    def __init__(self, paths: Paths, starter: SlotStarter, known: Known) -> None:
        self._paths = paths
        self._starter = starter
        self._known = known
        self._waiting = WaitingSupervisor(paths, starter)
        self._tell: TellMoved = _nobody_to_tell
        self._held: dict[str, HeldSlot] = {}
        self._starts: dict[str, asyncio.Lock] = {}
        self._adopting: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<ModelSlots {sorted(self._held)} by {self._starter!r}>"

    async def open(self, tell: TellMoved) -> None:
        """Takes over what an earlier helper started; where that cannot be found now it is looked for again."""
        self._tell = tell
        if not await self._adopt():
            self._adopting = spawn(self._adopt_later(), name="adopt models")

    async def _adopt(self) -> bool:
        granted, awaited = self._granted(), self._waiting.marked()
        try:
            found = await self._starter.find(granted, awaited)
        except (HiveError, OSError) as error:
            log.error("slots_not_looked_for error=%s", error)
            return False
        for slot in awaited:
            self._waiting.unmark(slot)
        for slot in granted - found.keys() - self._held.keys():
            self._remove_grant(slot)
        for slot, running in found.items():
            if slot not in self._held:  # else it was started since
                held = HeldSlot(slot, running)
                log.info("slot_adopted id=%s state=%s pid=%d", slot, held.state, running.pid)
                self._hold(held)
        ends = [held.life for held in self._held.values() if held.state is ProcessState.STOPPING and held.life]
        if ends:  # told as what they are to the first who asks
            await asyncio.wait(ends, timeout=ENDS_S)
        return True

    async def _adopt_later(self) -> None:
        while True:
            await asyncio.sleep(ADOPT_AGAIN_S)
            if await self._adopt():
                return

    async def end_waiting(self) -> None:
        """The helper is about to leave: nothing waits for a grant that nobody would write."""
        try:
            await self._waiting.end()
        except HiveError as error:
            log.warning("waiting_not_ended error=%s", error.message)

    def close(self) -> None:
        """The helper leaves; servers go on."""
        self._waiting.leave()
        if self._adopting is not None:
            self._adopting.cancel()
        for held in self._held.values():
            if held.life is not None:
                held.life.cancel()
            if held.state is not ProcessState.ENDED:
                held.running.let_go()

    def do(self, message: LinkMessage, *, for_daemon: bool) -> Coroutine[Any, Any, LinkMessage]:
        """Carries out one of VERBS. `for_daemon`: the daemon asks, and knows now what ended."""
        match message:
            case SlotStart(id=slot, grant=grant):
                check_id(slot)
                check_grant(grant)
                return self._start(message)
            case SlotPrepare(id=slot):
                if slot:
                    check_id(slot)
                return self._prepare(slot)
            case SlotStop(id=slot, grace_s=grace_s):
                check_id(slot)
                if not 0 <= grace_s <= GRACE_MAX_S:
                    raise BadRequest(f"a grace of {grace_s:g} s is not from 0 to {GRACE_MAX_S:g}")
                return self._stop(slot, grace_s)
            case AskSlots():
                return self._all(for_daemon)
            case AskSlotLog(id=slot, lines=lines):
                check_id(slot)
                return self._log(slot, max(1, min(lines, LOG_LINES_MAX)))
        raise BadRequest(f"{type(message).__name__} is not about a slot")

    def reaped(self, pid: int, code: int) -> None:
        """`hive up` tells how an orphan it inherited ended."""
        for held in self._held.values():
            held.running.reaped(pid, code)

    # --- verbs ---------------------------------------------------------------------------------------------------

    async def _start(self, message: SlotStart) -> SlotIsRunning:
        slot = message.id
        async with self._starts.setdefault(slot, asyncio.Lock()):
            held = self._held.get(slot)
            if held is not None and held.state is ProcessState.STOPPING:
                raise WrongState(f"the server of {slot} is being stopped", hint="try again once it has ended")
            if held is not None and held.state is not ProcessState.ENDED:
                return SlotIsRunning(process=await held.seen())
            if slot not in await asyncio.to_thread(self._known):
                raise NotFound(f"hive.conf describes no model with the slot {slot}")
            running = await self._begun(message, await self._waiting.take(slot))
            self._held[slot] = held = HeldSlot(slot, running)
            try:
                process = await held.seen()
            finally:
                self._hold(held)  # not before: it tells nothing until this is answered
            log.info("slot_started id=%s run=%s pid=%d", slot, running.run, running.pid)
            return SlotIsRunning(process=process)

    async def _begun(self, message: SlotStart, prepared: RunningSlot | None) -> RunningSlot:
        """The grant is what a prepared one goes on with: it comes last there, and first elsewhere."""
        slot = message.id
        try:
            if prepared is None:
                await asyncio.to_thread(self._write_grant, message)
                return await self._starter.start(slot, message.grant)
            running = await self._starter.start(slot, message.grant, prepared)
            self._write_grant(message)
            return running
        except BaseException:
            self._remove_grant(slot)
            if prepared is not None:
                await prepared.stop(0.0)
                await prepared.over()
            raise
        finally:
            self._waiting.unmark(slot)

    async def _prepare(self, slot: str) -> Done:
        if not slot:
            await self._waiting.end()
            return Done()
        async with self._starts.setdefault(slot, asyncio.Lock()):
            held = self._held.get(slot)
            if held is not None and held.state is not ProcessState.ENDED:
                return Done()  # it runs, or has to end before
            if slot not in await asyncio.to_thread(self._known):
                raise NotFound(f"hive.conf describes no model with the slot {slot}")
            self._make_directory()
            await self._waiting.prepare(slot)
        return Done()

    async def _stop(self, slot: str, grace_s: float) -> Done:
        async with self._starts.setdefault(slot, asyncio.Lock()):  # one that is just being started has begun then
            held = self._held.get(slot)
            if held is None or held.state is ProcessState.ENDED:
                return Done()
            if held.state is not ProcessState.STOPPING:
                held.state = ProcessState.STOPPING
                self._tell(held.process())
        await held.running.stop(grace_s)  # also beside a stop with more grace
        if held.life is not None:
            await asyncio.wait({held.life})
        return Done()

    async def _all(self, for_daemon: bool) -> SlotsRunning:
        found = list(self._held.values())
        processes = list(await asyncio.gather(*(held.seen() for held in found)))
        if for_daemon:
            for held, process in zip(found, processes, strict=True):
                if process.state is ProcessState.ENDED:
                    self._forget(held)
        return SlotsRunning(processes=processes)

    async def _log(self, slot: str, lines: int) -> BackendLog:
        try:
            return BackendLog(text=await self._starter.log(slot, lines))
        except OSError as error:
            raise HiveError(f"cannot read what the server of {slot} wrote: {error}") from error

    # --- its life ------------------------------------------------------------------------------------------------

    def _hold(self, held: HeldSlot) -> None:
        self._held[held.id] = held
        held.life = spawn(self._live(held), name="model slot")

    async def _live(self, held: HeldSlot) -> None:
        ends = spawn(held.running.over(), name="slot over")
        comes_up = spawn(self._comes_up(held), name="slot comes up")
        try:
            held.end = await ends
        except (HiveError, OSError) as error:
            log.exception("slot_end_not_seen id=%s", held.id)
            held.end = SlotEnd(None, f"its end was not seen: {error}", False, [])
        finally:
            ends.cancel()
            comes_up.cancel()
        self._remove_grant(held.id)
        held.state = ProcessState.ENDED
        log.info(
            "slot_ended id=%s run=%s exit_code=%s why='%s'", held.id, held.running.run, held.end.exit_code, held.end.why
        )
        if self._tell(held.process()):
            self._forget(held)

    async def _comes_up(self, held: HeldSlot) -> None:
        if held.state is ProcessState.STARTING and await held.running.serves():
            process = await held.seen()
            if held.state is ProcessState.STARTING:
                held.state = ProcessState.SERVING
                log.info("slot_serves id=%s run=%s age_s=%.2f", held.id, held.running.run, process.age_s)
                self._tell(held.process())

    def _forget(self, held: HeldSlot) -> None:
        if self._held.get(held.id) is held:
            del self._held[held.id]

    # --- grants --------------------------------------------------------------------------------------------------

    def _granted(self) -> set[str]:
        names = {path.stem for path in self._paths.slot_grants.glob("*.json")}
        return {name for name in names if SLOT_ID.fullmatch(name)}

    def _make_directory(self) -> None:
        directory = self._paths.slot_grants
        with files.translated(directory):
            directory.mkdir(mode=0o755, exist_ok=True)
            directory.chmod(0o755)  # whatever the umask: its reader is another user

    def _write_grant(self, message: SlotStart) -> None:
        self._make_directory()
        files.write_whole(self._paths.slot_grant(message.id), msgspec.json.encode(message.grant), mode=0o644)

    def _remove_grant(self, slot: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(self._paths.slot_grant(slot))


def _nobody_to_tell(process: SlotProcess) -> bool:  # noqa: ARG001 - the one before `open`
    return False


def id_in(message: LinkMessage) -> str:
    """The slot that one of VERBS is about; `-` for all of them."""
    return str(getattr(message, "id", "-"))


def described(paths: Paths, config: Path | None) -> Container[str]:
    """The ids of the models in this file of settings, with `[pool] found` of those in models_dir, and of those with an
    installed adapter, as they are now: those with a server of their own. Raises ConfigError.
    """
    entries = _entries(paths, config)
    adapters = AdapterDirectory(paths.adapters)
    with_adapter = adapter_entries(entries, [(record, adapters.path(record)) for record in adapters.records()])
    return entries.keys() | with_adapter.keys()


def _entries(paths: Paths, config: Path | None) -> dict[str, ModelEntry]:
    settings = load(config, env=os.environ).settings
    if not settings.pool.found:
        return started_entries(entries_of(settings))
    place = place_of(settings.inference.models_dir, is_installed=paths.apart, state=paths.state)
    return started_entries(entries_of(settings, ModelsDir(place).paths()))
