"""The steps by which a slot's server falls asleep and wakes, and the levels it is offered.

The gate is closed before (`MakeRoom`, as for an unload). What the server says is not believed: its memory is measured
back, and after a wake it has to hold it again and to generate the token it generated before. A level that fails once is
not used again with this version of the server, which is ended then: its model is cold.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from hive.agents.transition_lock import outcome_of
from hive.audit.audit_log import AuditLog
from hive.backends import one_token
from hive.backends.backend import BackendControl, open_backend
from hive.backends.entry_sleep import why_no_sleep
from hive.backends.kinds import spec_of
from hive.domain import BackendInfo, ModelInfo
from hive.errors import BackendDown, BackendTimeout, HiveError
from hive.pool.sleep import bytes_left, has_given_back, has_retaken, offered_level
from hive.pool.state import CPU, MIB, Grant, SleepLevel, SlotState
from hive.pooling.footprints import Footprints
from hive.pooling.pooled_slot import PooledSlot
from hive.settings.pool import PoolSection

if TYPE_CHECKING:
    from hive.pooling.pooling import ModelPool

log = logging.getLogger("hive.pool")

LOOK_S = 0.05
"""Between two looks at its memory."""
LONGER = 3.0
"""A wake that takes so many times what is known hangs."""
ASKED_S = 60.0
"""A server of an earlier daemon is asked for so long whether it sleeps."""
AGAIN_S = 0.2
Begin = Callable[[PooledSlot, Callable[[], Coroutine[Any, Any, None]], str], None]


def levels_of(slot: PooledSlot, footprints: Footprints, gpu: str, settings: PoolSection) -> tuple[SleepLevel, ...]:
    """The levels at which its server may sleep now: none unless it serves on GPUs and has said that it can."""
    sleeping = spec_of(slot.entry.kind).sleeping
    if not slot.can_sleep or sleeping is None or slot.state not in (SlotState.READY, SlotState.DRAINING):
        return ()
    if why_no_sleep(slot.entry, settings, [grant.account for grant in slot.grants]):
        return ()
    charged = sum(grant.charged_bytes for grant in slot.grants)
    weights = footprints.known(slot.entry).size_bytes
    found = (
        offered_level(
            footprints.sleep(slot.entry, gpu, name),
            version=slot.backend.version,
            keeps_weights=keeps_weights,
            charged=slot.grants,
            weights_bytes=charged if weights is None else weights,
            host_bytes=_host_bytes(slot),
            load_s=footprints.load_s(slot.entry, gpu),
        )
        for name, keeps_weights in sleeping.levels.items()
    )
    return tuple(level for level in found if level is not None)


def why_not(slot: PooledSlot, pool: ModelPool) -> list[str]:
    """The reasons that it does not sleep, or not at every level, clauses."""
    accounts = [grant.account for grant in slot.grants or slot.awake]
    if not accounts and {account.id for account in pool.reading.accounts} == {CPU}:
        accounts = [CPU]
    if never := why_no_sleep(slot.entry, pool.settings.pool, accounts):
        return [never]
    reasons = []
    for name in sleeping.levels if (sleeping := spec_of(slot.entry.kind).sleeping) else ():
        known = pool.footprints.sleep(slot.entry, pool.gpu, name)
        if known.why_banned:
            version = known.banned_version or "unknown"
            reasons.append(f"level {name} failed with version {version} of its server: {known.why_banned}")
    if slot.state is SlotState.READY and not slot.can_sleep:
        reasons.append("its server was started without it")
    return reasons


class SlotSleep:
    """Begins the steps of sleep. `begin`, `end`: of the slot's steps: one at a time per slot; the end of a server."""

    fall_asleep_s = 120.0
    """A server that has not fallen asleep by then hangs."""
    wake_min_s = 60.0
    token_s = 60.0
    """The first token after a wake may take so long: graphs may be made anew."""
    look_again_s = 2.5
    """Memory is taken at once, and told within two looks of the driver."""

    def __init__(
        self,
        *,
        pool: ModelPool,
        audit_log: AuditLog,
        begin: Begin,
        end: Callable[[PooledSlot], Awaitable[object]],
    ) -> None:
        self._pool = pool
        self._audit_log = audit_log
        self._begin = begin
        self._end = end

    def __repr__(self) -> str:
        return "<SlotSleep>"

    async def ask(self, slot: PooledSlot) -> None:
        """Notes whether its server has sleep. One that does not answer is asked no more: it is ended as others are."""
        if self._may(slot):
            told = await outcome_of(self._control(slot).asleep())
            slot.can_sleep = isinstance(told, str)

    def _may(self, slot: PooledSlot) -> bool:
        accounts = [grant.account for grant in slot.grants]
        return not why_no_sleep(slot.entry, self._pool.settings.pool, accounts)

    def _control(self, slot: PooledSlot) -> BackendControl:
        return open_backend(slot.entry.kind, slot.backend.address)

    # falling asleep ---------------------------------------------------------------------------------------------------

    def fall_asleep(self, slot: PooledSlot, name: str, why: str) -> None:
        """Puts the server of a drained slot to sleep at the level `name`."""
        levels = levels_of(slot, self._pool.footprints, self._pool.gpu, self._pool.settings.pool)
        level = next((level for level in levels if level.name == name), None)
        if level is None:  # since the decision it was found not to work
            self._pool.steps.unload(slot, why)
            return
        slot.falling_asleep(level, time.monotonic())
        self._begin(slot, lambda: self._fall_asleep(slot, level, why), "sleep")

    async def _fall_asleep(self, slot: PooledSlot, level: SleepLevel, why: str) -> None:
        self._pool.counts.evicted(why)
        if not slot.token:
            token = await outcome_of(self._token(slot))
            if isinstance(token, HiveError):  # the server does not work at all, which says nothing of its sleep
                await self._ended(slot, token.message)
                return
            slot.token = token
        held = sum(_measured_or_charged(grant) for grant in slot.grants)
        try:
            await self._control(slot).fall_asleep(level.name, within_s=self.fall_asleep_s)
            kept = await self._given_back(slot, level, held)
        except HiveError as error:
            await self._failed(slot, level.name, error)
            return
        if kept is None:
            await self._ended(slot, "nothing tells what it holds")
            return
        left = sum(grant.charged_bytes for grant in kept)
        slot.asleep(
            kept, msgspec.structs.replace(level, kept_bytes=left, host_bytes=max(level.host_bytes, _host_bytes(slot)))
        )
        self._pool.counts.slept(level.name)
        log.info("slot_asleep model=%s level=%s kept_mb=%d why=%s", slot.model, level.name, left // MIB, why)
        detail = {"name": slot.model, "level": level.name, "reason": why, "kept_bytes": left}
        self._audit_log.note("model.asleep", target=slot.id, detail=detail)
        learnt = self._pool.footprints.after_sleep(slot.entry, self._pool.gpu, level.name, left)
        await outcome_of(learnt)
        self._pool.wake()

    async def _given_back(self, slot: PooledSlot, level: SleepLevel, held: int) -> tuple[Grant, ...] | None:
        """The memory it still has in each account, once that which it `held` is back; None if nothing tells. Raises
        BackendDown where it keeps too much, or has ended."""
        began, left = time.monotonic(), None
        while True:
            waited_s = time.monotonic() - began
            is_last_look = waited_s >= self._pool.rules.free_s
            if not isinstance(await outcome_of(self._pool.look(is_fresh=True)), HiveError):
                left = self._left(slot)
            if slot.is_over:
                raise BackendDown("its server ended")
            if left is not None:
                total = sum(grant.charged_bytes for grant in left)
                if has_given_back(total, held, level, is_last_look=is_last_look):
                    return left
                if is_last_look:
                    raise BackendDown(f"{total // MIB} of {held // MIB} MiB were still there {waited_s:.0f} s later")
            elif is_last_look:
                return None
            await asyncio.sleep(LOOK_S)

    def _left(self, slot: PooledSlot) -> tuple[Grant, ...] | None:
        facts = self._pool.facts(time.monotonic())
        own = facts.slot(slot.id)
        accounts = {account.id: account for account in facts.accounts}
        measured: Mapping[str, int | None] = self._pool.reading.by_slot.get(slot.id, {})
        kept = []
        for grant in slot.grants:
            if (account := accounts.get(grant.account)) is None:
                return None
            left = bytes_left(account, facts.slots, own, measured.get(grant.account))
            if left is None:
                return None
            kept.append(Grant(grant.account, left, measured.get(grant.account)))
        return tuple(kept)

    # waking -----------------------------------------------------------------------------------------------------------

    def wake(self, slot: PooledSlot, grants: tuple[Grant, ...]) -> None:
        """Wakes the server of a slot, which is charged with `grants` from now on."""
        level = slot.level
        if level is None:
            raise AssertionError(f"{slot.model} sleeps at no level")
        slot.waking(grants, time.monotonic())
        self._begin(slot, lambda: self._wake(slot, level), "wake")

    async def _wake(self, slot: PooledSlot, level: SleepLevel) -> None:
        began = time.monotonic()
        try:
            await self._control(slot).wake(level.name, within_s=max(self.wake_min_s, LONGER * level.wake_s))
            await self._check_whole(slot, level)
            if slot.is_over:
                raise BackendDown("its server ended")
        except HiveError as error:
            await self._failed(slot, level.name, error)
            return
        seconds = time.monotonic() - began
        for demand in slot.demands:
            self._pool.counts.waited(demand.band, time.monotonic() - demand.since)
        slot.ready(slot.backend, slot.models, time.monotonic())
        self._pool.swaps.serves(slot)
        self._pool.say(slot)
        self._pool.counts.woke(seconds)
        log.info("slot_woken model=%s level=%s seconds=%.2f", slot.model, level.name, seconds)
        detail = {"name": slot.model, "level": level.name, "seconds": round(seconds, 3)}
        self._audit_log.note("model.woken", target=slot.id, detail=detail)
        await outcome_of(self._pool.footprints.after_wake(slot.entry, self._pool.gpu, level.name, seconds))
        self._pool.wake()

    async def _check_whole(self, slot: PooledSlot, level: SleepLevel) -> None:
        """Raises BackendDown where it woke without its memory, or says something else than before it slept."""
        before = _measured(slot.awake)
        if before is None:  # it was put to sleep by an earlier daemon
            before = self._pool.footprints.steady_bytes(slot.entry, self._pool.gpu)
        until = time.monotonic() + self.look_again_s
        while before is not None:
            await outcome_of(self._pool.look(is_fresh=True))
            has = _measured(slot.grants)
            if has is None or has_retaken(has, level.kept_bytes, before):
                break
            if time.monotonic() >= until:
                raise BackendDown(f"it woke with {has // MIB} of {before // MIB} MiB")
            await asyncio.sleep(LOOK_S)
        token = await self._token(slot)
        if slot.token and token != slot.token:
            raise BackendDown(f"after the wake it says {token[:20]!r} where it said {slot.token[:20]!r}")

    async def _token(self, slot: PooledSlot) -> str:
        return await one_token.likeliest(slot.entry.kind, slot.backend.address, slot.model, within_s=self.token_s)

    # what goes wrong --------------------------------------------------------------------------------------------------

    async def _failed(self, slot: PooledSlot, level: str, error: HiveError) -> None:
        """The level is banned, and the server ended: who waits for the model has it loaded."""
        log.error("sleep_failed model=%s level=%s error=%s", slot.model, level, error.message)
        slot.stopping(time.monotonic())
        version, lines = slot.backend.version, [] if slot.process is None else slot.process.last
        detail = {"name": slot.model, "level": level, "reason": error.message, "version": version}
        self._audit_log.note("model.sleep_failed", target=slot.id, detail=detail)
        self._pool.counts.sleep_failed(level)
        why = error.message
        await outcome_of(self._pool.footprints.after_ban(slot.entry, self._pool.gpu, level, why, version))
        await self._end(slot)
        slot.cold()
        slot.error, slot.last_lines = f"sleep at level {level} failed: {why}", lines
        self._pool.swaps.given_up(slot, slot.error)
        self._pool.wake()

    async def _ended(self, slot: PooledSlot, why: str) -> None:
        """The server is ended instead, and no level is the worse for it."""
        log.warning("slot_not_asleep model=%s why=%s", slot.model, why)
        slot.stopping(time.monotonic())
        await self._end(slot)
        slot.cold()
        self._pool.swaps.given_up(slot, why)
        detail = {"name": slot.model, "reason": f"it could not sleep: {why}"}
        self._audit_log.note("model.unloaded", target=slot.id, detail=detail)
        self._pool.wake()

    def died(self, slot: PooledSlot) -> None:
        """The server of a sleeping slot has ended by itself."""
        slot.stopping(time.monotonic())
        self._begin(slot, lambda: self._after_death(slot), "sleeper's end")

    async def _after_death(self, slot: PooledSlot) -> None:
        process, level = slot.process, slot.level
        why = "its server ended while it slept"
        if process is not None and (process.why or process.was_oom):
            why += ": " + ("it was killed for memory" if process.was_oom else process.why)
        if process is not None and process.was_oom and level is not None:  # the host has no room for this
            await self._failed(slot, level.name, BackendDown(why))
            return
        log.error("sleeper_died model=%s why=%s", slot.model, why)
        await self._end(slot)
        slot.cold()
        slot.error, slot.last_lines = why, [] if process is None else process.last
        self._pool.swaps.given_up(slot, why)
        detail = {"name": slot.model, "reason": why, "state": str(slot.state)}
        self._audit_log.note("model.crashed", target=slot.id, detail=detail)
        self._pool.wake()

    # the next daemon --------------------------------------------------------------------------------------------------

    async def found(self, slot: PooledSlot, backend: BackendInfo, models: list[ModelInfo]) -> bool:
        """Whether a server that an earlier daemon started sleeps; then its slot does. Raises BackendDown,
        BackendTimeout where it does not tell: behind an open gate a sleeper would hold requests for ever."""
        if spec_of(slot.entry.kind).sleeping is None or any(grant.account == CPU for grant in slot.grants):
            return False
        until = time.monotonic() + ASKED_S
        while True:
            try:
                name = await self._control(slot).asleep()
                break
            except BackendTimeout:
                if time.monotonic() >= until:
                    raise
                await asyncio.sleep(AGAIN_S)
        slot.can_sleep = name is not None and self._may(slot)
        if not name:
            return False
        slot.backend, slot.models = backend, models
        level = self._found_level(slot, name)
        slot.grants = tuple(Grant(grant.account, grant.charged_bytes) for grant in slot.grants)
        held = sum(grant.charged_bytes for grant in slot.grants)
        kept = await outcome_of(self._given_back(slot, level, held))
        if kept is None or isinstance(kept, HiveError):  # it was killed in the middle of a step, perhaps
            await self._ended(slot, "nothing tells what it holds" if kept is None else kept.message)
            return True
        slot.grants = tuple(Grant(grant.account, grant.charged_bytes) for grant in slot.grants)
        left = sum(grant.charged_bytes for grant in kept)
        slot.asleep(kept, msgspec.structs.replace(level, kept_bytes=left))
        log.info("slot_found_asleep model=%s level=%s kept_mb=%d", slot.model, name, left // MIB)
        self._pool.wake()
        return True

    def _found_level(self, slot: PooledSlot, name: str) -> SleepLevel:
        known = self._pool.footprints.sleep(slot.entry, self._pool.gpu, name)
        sleeping = spec_of(slot.entry.kind).sleeping
        keeps_weights = sleeping is not None and sleeping.levels.get(name, False)
        weights = self._pool.footprints.known(slot.entry).size_bytes or 0
        host_bytes = max(_host_bytes(slot), weights if keeps_weights else 0)
        wake_s = known.wake_p95_s or self._pool.footprints.load_s(slot.entry, self._pool.gpu)
        return SleepLevel(name, known.kept_bytes or 0, host_bytes, wake_s)


def _measured(grants: tuple[Grant, ...]) -> int | None:
    """Bytes in all accounts together; None where one is not measured."""
    known = [grant.measured_bytes for grant in grants if grant.measured_bytes is not None]
    return sum(known) if known and len(known) == len(grants) else None


def _measured_or_charged(grant: Grant) -> int:
    return grant.charged_bytes if grant.measured_bytes is None else grant.measured_bytes


def _host_bytes(slot: PooledSlot) -> int:
    """Memory of the host that its server was seen to have."""
    return 0 if slot.process is None else slot.process.bytes or 0
