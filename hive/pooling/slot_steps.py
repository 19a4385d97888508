"""The long steps of a slot: closing its gate, loading, unloading, and what follows a crash. One at a time per slot."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from hive.agents.transition_lock import outcome_of
from hive.audit.audit_log import AuditLog
from hive.backends.entries import ModelEntry
from hive.domain import BackendInfo, ModelInfo
from hive.errors import BackendDown, BackendTimeout, HiveError, LinkLost
from hive.link.pool import CrashBlame, LoadCharged, SlotBusy, SlotClosed, SlotFlow
from hive.link.proxy_link import ProxyGates
from hive.link.slots import ProcessState, SlotProcess
from hive.pool.accounts import MemoryBack, memory_back
from hive.pool.decider import RENEWED
from hive.pool.state import CPU, Grant, MemoryAccount, SlotState
from hive.pool.turns import after_failure
from hive.pooling.pool_backend import BackendSlot
from hive.pooling.pooled_lease import PooledLease
from hive.pooling.pooled_slot import Described, PooledSlot, grant_of
from hive.pooling.slot_servers import SlotServers
from hive.pooling.slot_sleep import SlotSleep
from hive.settings.pool import CATEGORIES
from hive.settings.table import Settings
from hive.tasks import spawn
from hive.worker.profile import TimeoutProfile
from hive.worker.restarts import ServerEnd, delay_s

if TYPE_CHECKING:
    from hive.pooling.pooling import ModelPool

log = logging.getLogger("hive.pool")

FIRST_LOAD_S = 600.0
"""Longest load of a model whose loads are not known."""
LOADS_LONGER = 3.0
"""A load that takes so many times its p95 hangs."""
LOAD_MIN_S = 60.0
SLOW_DISK_BYTES_PER_S = 50e6
BACK_LOOK_S = 0.05
"""Between two looks whether a server's memory is back."""
AGAIN_S = 0.5
ASK_AGAIN_S = 0.1
ANSWERS_WITHIN_S = 60.0
"""A server that works already, or has served for a moment only, may answer questions so late: vLLM's first answers took
seconds on a busy machine."""
FIRST_S = 1.0
"""The requests that waited for a load have their server for themselves for so long."""
RENEW_S = 3600.0
"""Requests that a flush waits for have so long; it gives up by itself before that."""
OUT_OF_MEMORY_EXIT = 77
"""Exit code of a runner whose engine had no memory left; the same as in hive.runner.faults, which imports nothing."""
PROFILE = TimeoutProfile()
OUT_OF_MEMORY = ("out of memory", "failed to allocate", "bad_alloc")
Describe = Callable[[ModelEntry, str, Settings], Awaitable[tuple[BackendInfo, ModelInfo | None]]]


class SlotSteps:
    """Begins the steps of the pool's slots. A step that another one replaces is cancelled."""

    grace_s = 10.0
    """A server that is stopped has so long to end by itself."""
    stall_s = PROFILE.prefill_liveness_timeout_s or math.inf
    """A server in use that stands still for so long is ended."""

    def __init__(
        self,
        *,
        settings: Callable[[], Settings],
        helper: SlotServers,
        proxy_link: ProxyGates,
        audit_log: AuditLog,
        pool: ModelPool,
        describe: Describe,
    ) -> None:
        self._settings = settings
        self._helper = helper
        self._proxy_link = proxy_link
        self._audit_log = audit_log
        self._pool = pool
        self._describe = describe
        self.sleep = SlotSleep(pool=pool, audit_log=audit_log, begin=self._begin, end=self._end)

    def _begin(self, slot: PooledSlot, work: Callable[[], Coroutine[Any, Any, None]], name: str) -> None:
        if slot.stepping is not None:
            slot.stepping.cancel()
        slot.stepping = spawn(self._carry_out(slot, work), name=f"{name} {slot.model}")

    async def _carry_out(self, slot: PooledSlot, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Does a step. After a fault of Hive's own in it no slot stays between two states: one that serves goes on, the
        server of any other one is ended."""
        try:
            await work()
        except Exception as error:
            log.exception("slot_step_failed model=%s state=%s", slot.model, slot.state)
            if slot.state is SlotState.DRAINING:
                slot.opened()
            elif slot.state is not SlotState.READY:
                await self._not_loaded(slot, HiveError(f"{type(error).__name__}: {error}"))
            self._pool.wake()

    # gates ------------------------------------------------------------------------------------------------------------

    def open(self, slot: PooledSlot) -> None:
        """Opens the gate of a draining slot again."""
        if slot.stepping is not None:
            slot.stepping.cancel()
        slot.opened()
        self._pool.say(slot)

    def close(self, slot: PooledSlot, *, is_idle_only: bool) -> None:
        """Closes the gate of a slot that is draining; if only while it is idle, a busy one is ready again."""
        self._begin(slot, lambda: self._close(slot, is_idle_only=is_idle_only), "close")

    async def _close(self, slot: PooledSlot, *, is_idle_only: bool) -> None:
        answer = await self._closed(slot, None if is_idle_only else self._drain_s(slot))
        if isinstance(answer, SlotClosed):
            slot.is_drained, slot.is_closing = True, False
            slot.was_cut = slot.was_cut or answer.cut > 0
        elif answer is not None:
            slot.opened()  # its end, if it has come, is seen with the next look
            slot.flow = SlotFlow(in_flight=max(1, answer.in_flight), band=slot.flow.band)
        self._pool.wake()

    def _drain_s(self, slot: PooledSlot) -> float:
        if slot.was_cut:
            return 0.0
        slot.is_patient = slot.renewing and not slot.unload_ordered
        return RENEW_S if slot.is_patient else self._pool.rules.drain_s

    def cut(self, slot: PooledSlot) -> None:
        """The proxy cuts by itself at the end of the time it was given; a flush gave it more than others."""
        slot.was_cut = True
        if slot.is_patient:
            slot.is_patient = False
            self.close(slot, is_idle_only=False)

    async def _closed(self, slot: PooledSlot, drain_s: float | None) -> SlotClosed | SlotBusy | None:
        """The proxy's answer; None if it is gone: the next one is asked again (`ModelPool.proxy_here`).

        One that does not know this generation is told of it, and asked again.
        """
        wait_s = self._settings().pool.load_wait_s
        until = time.monotonic() + (drain_s or 0.0)
        while True:
            left_s = None if drain_s is None else max(0.0, until - time.monotonic())
            try:
                answer = await self._proxy_link.close_slot(slot.id, slot.generation, wait_s=wait_s, drain_s=left_s)
            except LinkLost:
                return None
            except HiveError as error:
                log.error("slot_not_closed model=%s error=%s", slot.model, error.message)
                await asyncio.sleep(AGAIN_S)
                continue
            finally:
                slot.told_row = None  # the gate is closed there, or not, whatever was told before
            if isinstance(answer, SlotClosed) or drain_s is None:
                return answer
            await asyncio.sleep(ASK_AGAIN_S)
            self._pool.say(slot, even_closing=True)  # it does not know this generation

    # loading ----------------------------------------------------------------------------------------------------------

    def load(self, slot: PooledSlot, why: str) -> None:
        """Starts the server of a slot that is loading."""
        self._begin(slot, lambda: self._load(slot, why, is_new=True), "load")

    def go_on_loading(self, slot: PooledSlot) -> None:
        """Follows the load that an earlier daemon began."""
        if slot.process is not None and slot.process.state is ProcessState.SERVING:
            slot.came_up.set()
        self._begin(slot, lambda: self._load(slot, "an earlier daemon began it", is_new=False), "load")

    async def _load(self, slot: PooledSlot, why: str, *, is_new: bool) -> None:
        began = time.monotonic()
        try:
            if is_new:
                slot.saw(await self._with_helper(lambda: self._helper.slot_start(slot.id, grant_of(slot))))
            await self._came_up(slot)
            known = self._known(slot) if is_new else None
            backend, models = known or await self._told(slot)
            if is_new:
                await self.sleep.ask(slot)
            elif await self.sleep.found(slot, backend, models):
                self._pool.swaps.serves(slot)
                return
            await self._pool.before_open(slot)
            if slot.is_over:
                raise BackendDown(ended(slot.process))
        except HiveError as error:
            await self._not_loaded(slot, error)
            return
        seconds = time.monotonic() - began
        for demand in slot.demands:
            self._pool.counts.waited(demand.band, time.monotonic() - demand.since)
        if is_new:
            self._charge(slot, seconds)
        slot.ready(backend, models, time.monotonic())
        self._pool.swaps.serves(slot)
        self._pool.say(slot)
        log.info("slot_ready model=%s generation=%d seconds=%.2f", slot.model, slot.generation, seconds)
        if is_new:
            self._pool.counts.loaded(slot.model, why, seconds)
            detail = {"name": slot.model, "reason": why, "seconds": round(seconds, 3)}
            self._audit_log.note("model.loaded", target=slot.id, detail=detail)
            await self._learn(slot, seconds)
        if slot.entry.is_ollamas:
            slot.charged_as_measured()
        self._pool.wake()
        if known is not None:
            await self._ask_again(slot, slot.generation)

    def _charge(self, slot: PooledSlot, seconds: float) -> None:
        """Has the tenant pay whose demand the load was for; before the gate opens, so that it counts for the line."""
        if (cause := slot.cause) is not None:
            self._proxy_link.load_charged(
                LoadCharged(id=slot.id, tenant=cause.tenant, agent=cause.agent, band=cause.band, seconds=seconds)
            )

    async def _with_helper(self, ask: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """The helper's answer, from the next one too: what it is asked may be asked twice."""
        while True:
            try:
                return await ask()
            except LinkLost:
                await asyncio.sleep(AGAIN_S)

    async def _came_up(self, slot: PooledSlot) -> None:
        """Returns when the server serves. Raises BackendDown with its last lines, BackendTimeout."""
        limit_s = FIRST_LOAD_S
        if self._pool.footprints.has_loaded(slot.entry, self._pool.gpu):
            size = self._pool.footprints.known(slot.entry).size_bytes or 0
            known_s = LOADS_LONGER * self._pool.footprints.load_s(slot.entry, self._pool.gpu)
            limit_s = max(LOAD_MIN_S, known_s, size / SLOW_DISK_BYTES_PER_S)  # the file may be in no cache this time
        up = spawn(slot.came_up.wait(), name="came up")
        gone = spawn(slot.went.wait(), name="went")
        stands = spawn(slot.stands.wait(), name="stands still")
        try:
            await asyncio.wait({up, gone, stands}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            up.cancel()
            gone.cancel()
            stands.cancel()
        if slot.is_over:
            raise BackendDown(ended(slot.process))
        if slot.stands.is_set() and not slot.came_up.is_set():
            raise BackendTimeout(f"its load stood still: no CPU was used and no memory taken for {slot.still_s:g} s")
        if not slot.came_up.is_set():
            raise BackendTimeout(f"its server did not serve within {limit_s:.0f} s")

    def _known(self, slot: PooledSlot) -> tuple[BackendInfo, list[ModelInfo]] | None:
        """The server as it described itself after an earlier load of the same files; None where it has to be asked."""
        described = slot.described
        if described is None or described.entry != slot.entry or described.info != self._pool.model_info(slot.entry):
            return None
        return msgspec.structs.replace(described.backend, address=slot.backend.address), described.models

    async def _ask_again(self, slot: PooledSlot, generation: int) -> None:
        """Asks a server that was opened by what it said earlier: its program may be another one since. The requests
        that waited for it go first."""
        await asyncio.sleep(FIRST_S)
        told = await outcome_of(self._told(slot))
        if isinstance(told, HiveError) or slot.generation != generation or not slot.is_open:
            return  # it serves; the next load asks
        slot.backend, slot.models = told
        self._pool.say(slot)

    async def _told(self, slot: PooledSlot) -> tuple[BackendInfo, list[ModelInfo]]:
        """The server and its model as it describes them; the size and the digest of the entry's file stay."""
        until = time.monotonic() + ANSWERS_WITHIN_S
        while True:
            try:
                backend, told = await self._describe(slot.entry, slot.backend.address, self._settings())
                break
            except BackendTimeout:
                if time.monotonic() >= until:
                    raise
        info = model = self._pool.model_info(slot.entry)
        if told is not None:
            model = msgspec.structs.replace(
                info,
                context_length=told.context_length or info.context_length,
                capabilities=told.capabilities or info.capabilities,
                template=told.template,
                meta=told.meta,
            )
        models = self._pool.models_of(slot.entry) if self._pool.footprints.known(slot.entry).offers else [model]
        if not slot.entry.is_ollamas:  # that one is no server of its own
            slot.described = Described(slot.entry, info, backend, models)
        return backend, models

    async def _learn(self, slot: PooledSlot, seconds: float) -> None:
        """Measures what the load has taken, and keeps it."""
        if isinstance(reading := await outcome_of(self._pool.look(is_fresh=True)), HiveError):
            return
        by_account = reading.by_slot.get(slot.id, {})
        known = [by_account.get(grant.account) for grant in slot.grants]
        measured = [bytes for bytes in known if bytes is not None]
        if not measured or len(measured) < len(known):
            return  # a part of it says nothing of the whole
        peak = max(sum(measured), slot.peak_bytes, host_peak(slot))
        learnt = self._pool.footprints.after_load(slot.entry, self._pool.gpu, sum(measured), peak, seconds)
        if isinstance(error := await outcome_of(learnt), HiveError):
            log.warning("footprint_not_kept model=%s error=%s", slot.model, error.message)

    def _learn_peak(self, slot: PooledSlot) -> None:
        """Keeps the most memory that its server was seen to take while it served. Nobody waits for the disk."""
        if peak := max(slot.peak_bytes, host_peak(slot)):
            learnt = self._pool.footprints.after_peak(slot.entry, self._pool.gpu, peak)
            spawn(outcome_of(learnt), name=f"peak of {slot.model}")

    async def _not_loaded(self, slot: PooledSlot, error: HiveError) -> None:
        """A load has failed: its server is stopped, and it is tried again after a while."""
        process, grants = slot.process, slot.grants
        now = time.monotonic()
        slot.stopping(now)
        if process is not None and process.was_dropped:
            await self._after_drop(slot, process.why)
            return
        was_oom = process is not None and (
            process.was_oom or says_out_of_memory(process) or bool(out_of_memory(process.last))
        )
        lines = [] if process is None else process.last
        log.error("load_failed model=%s error=%s", slot.model, error.message)
        await self._end(slot)
        slot.failures += 1
        slot.ended_at = time.monotonic()
        state, retry_at = after_failure(slot.failures, slot.ended_at, self._pool.rules)
        if was_oom and slot.failures == 1:
            retry_at = slot.ended_at  # once more, with more memory
        if was_oom and not has_been_taken(grants, self._pool.reading.accounts):
            charged = sum(grant.charged_bytes for grant in grants)
            await outcome_of(self._pool.footprints.after_oom(slot.entry, self._pool.gpu, charged))
        slot.failed(state, error.message, lines, retry_at)
        self._pool.swaps.given_up(slot, error.message)
        detail = {"name": slot.model, "reason": error.message, "state": str(state)}
        self._audit_log.note("model.load_failed", target=slot.id, detail=detail)
        self._pool.wake()

    # unloading --------------------------------------------------------------------------------------------------------

    def unload(self, slot: PooledSlot, why: str) -> None:
        """Stops the server of a slot; one that is open is closed before, and stays if it is in use."""
        is_open = slot.state is SlotState.READY
        slot.stopping(time.monotonic())
        slot.is_closing = is_open
        self._begin(slot, lambda: self._unload(slot, why, is_open=is_open), "unload")

    async def _unload(self, slot: PooledSlot, why: str, *, is_open: bool) -> None:
        if is_open:
            answer = await self._closed(slot, None)
            if not isinstance(answer, SlotClosed) and not slot.is_over:
                slot.opened()
                slot.used_at = time.monotonic()
                self._pool.wake()
                return
        slot.is_closing = False
        slot.unload_orders.clear()
        slot.renewing = slot.renewing and why == RENEWED  # else it leaves for somebody else
        self._learn_peak(slot)
        if (seconds := await self._end(slot)) is not None:
            learnt = self._pool.footprints.after_unload(slot.entry, self._pool.gpu, seconds)
            spawn(outcome_of(learnt), name=f"unload of {slot.model}")
        slot.cold()
        self._pool.swaps.given_up(slot, why)
        log.info("slot_cold model=%s why=%s", slot.model, why)
        self._pool.counts.evicted(why)
        self._audit_log.note("model.unloaded", target=slot.id, detail={"name": slot.model, "reason": why})
        self._pool.wake()

    async def _end(self, slot: PooledSlot) -> float | None:
        """Returns when nothing of the server is left, and its memory is back or booked as foreign: after how many
        seconds it was back, None if it was not."""
        ordered = 0.0

        async def stop() -> None:
            nonlocal ordered
            ordered = time.monotonic()
            await self._helper.slot_stop(slot.id, grace_s=self.grace_s)

        while True:
            stopped = await outcome_of(self._with_helper(stop))
            if not isinstance(stopped, HiveError):
                break
            log.error("slot_not_stopped model=%s error=%s", slot.model, stopped.message)
            slot.error = f"its server cannot be stopped: {stopped.message}"
            await asyncio.sleep(5.0)
        is_back = await self.until_back(slot)
        return time.monotonic() - ordered if is_back else None

    async def until_back(self, slot: PooledSlot | BackendSlot | PooledLease) -> bool:
        """Returns when the memory of a server that has ended is back (True), or booked as foreign after `free_s`."""
        began = time.monotonic()
        is_back = await self._is_back(slot, 0.0)
        while not is_back:  # the driver tells no change: it has to be looked at
            await asyncio.sleep(BACK_LOOK_S)
            is_back = await self._is_back(slot, time.monotonic() - began)
        return time.monotonic() - began < self._pool.rules.free_s

    async def _is_back(self, slot: PooledSlot | BackendSlot | PooledLease, waited_s: float) -> bool:
        """Whether the slot's memory is back on its GPUs; the host has that of a process back with its end."""
        gpus = {grant.account for grant in slot.grants} - {CPU}
        if not gpus:
            return True
        reading = await outcome_of(self._pool.look(is_fresh=True))
        if isinstance(reading, HiveError):
            return waited_s >= self._pool.rules.free_s
        facts = self._pool.facts(time.monotonic())
        accounts = [account for account in facts.accounts if account.id in gpus]
        own = facts.slot(slot.id)
        verdicts = [memory_back(account, facts.slots, own, waited_s, facts.rules) for account in accounts]
        if any(verdict is MemoryBack.WAIT for verdict, _ in verdicts):
            return False
        for account, (verdict, rest) in zip(accounts, verdicts, strict=True):
            if verdict is MemoryBack.FOREIGN:
                log.error("memory_not_back model=%s account=%s bytes=%d", slot.model, account.id, rest)
                detail = {"name": slot.model, "account": account.id, "bytes": rest}
                self._audit_log.note("pool.foreign", target=slot.id, detail=detail)
        return True

    # crashes ----------------------------------------------------------------------------------------------------------

    def crashed(self, slot: PooledSlot, process: SlotProcess) -> None:
        """The server of a slot that was in use has ended by itself."""
        lived_s = time.monotonic() - slot.ready_at
        slot.stopping(time.monotonic())
        slot.is_closing = False
        self._pool.say(slot)
        self._begin(slot, lambda: self._after_crash(slot, ended(process), lived_s), "crash")

    def dropped(self, slot: PooledSlot, process: SlotProcess) -> None:
        """The model of a slot is in no memory any more, by the doing of its server: it is cold, and that is all."""
        slot.stopping(time.monotonic())
        slot.is_closing = False
        self._pool.say(slot)
        self._begin(slot, lambda: self._after_drop(slot, process.why), "drop")

    async def _after_drop(self, slot: PooledSlot, why: str) -> None:
        self._learn_peak(slot)
        await self._end(slot)
        slot.cold()
        self._pool.swaps.given_up(slot, why)
        log.info("slot_dropped model=%s why=%s", slot.model, why)
        self._pool.counts.dropped()
        self._audit_log.note("model.unloaded", target=slot.id, detail={"name": slot.model, "reason": why})
        self._pool.wake()

    def judge(self, slot: PooledSlot, process: SlotProcess) -> None:
        """Ends a server none of whose requests has moved, and that has used no core and no GPU, for `stall_s`."""
        now, gpus = time.monotonic(), {grant.account for grant in slot.grants} - {CPU}
        if slot.state is not SlotState.READY or not slot.flow.in_flight:
            slot.stall.moved(process.cpu_s, now)
            return
        slot.stall.saw(cpu_s=process.cpu_s, gpus_idle=gpus <= self._pool.reading.idle_gpus, now=now)
        if min(slot.stall.stood_s(now), slot.flow.moved_s or 0.0) < self.stall_s:
            return
        slot.stopping(now)
        self._pool.say(slot)
        what = "no CPU and no GPU was" if gpus else "no CPU was"
        why = f"stall_timeout: no request moved and {what} used for {self.stall_s:g} s"
        self._begin(slot, lambda: self._after_crash(slot, why, now - slot.ready_at), "stall")

    async def _after_crash(self, slot: PooledSlot, why: str, lived_s: float) -> None:
        process, charged = slot.process, sum(grant.charged_bytes for grant in slot.grants)
        log.error("server_crashed model=%s generation=%d why=%s", slot.model, slot.generation, why)
        blame = await outcome_of(self._proxy_link.slot_crashed(slot.id, slot.generation))
        self._learn_peak(slot)
        await self._end(slot)
        is_runner = slot.entry.kind in CATEGORIES
        if process is not None and is_runner and (says_out_of_memory(process) or out_of_memory(process.last)):
            await outcome_of(self._pool.footprints.after_oom(slot.entry, self._pool.gpu, charged))
        now = slot.ended_at = time.monotonic()
        state, retry_at = SlotState.COLD, now
        if not (isinstance(blame, CrashBlame) and (blame.slowed or blame.refused)):
            slot.ends.append((now, lived_s))
            del slot.ends[: -PROFILE.crash_limit]
            wait_s = delay_s([ServerEnd(*end) for end in slot.ends], PROFILE, now=now)
            state, retry_at = (SlotState.FAILED, now) if wait_s is None else (SlotState.COLD, now + wait_s)
        slot.failed(state, why, [] if process is None else process.last, retry_at)
        self._pool.swaps.given_up(slot, why)
        detail = {"name": slot.model, "reason": why, "state": str(state)}
        if isinstance(blame, CrashBlame) and blame.agents:
            detail["agents"] = ", ".join(blame.agents)
        self._audit_log.note("model.crashed", target=slot.id, detail=detail)
        self._pool.wake()


def host_peak(slot: PooledSlot) -> int:
    """The most memory of the host that its server was seen to take, where that is what it is charged; else 0."""
    is_on_host = all(grant.account == CPU for grant in slot.grants)
    return 0 if slot.process is None or not is_on_host else slot.process.peak_bytes or 0


def ended(process: SlotProcess | None) -> str:
    """The end of a server in words.

    >>> ended(SlotProcess(id="m", run="1", state=ProcessState.ENDED, exit_code=1, last=["no such file"]))
    'its server ended with exit code 1: no such file'
    >>> ended(SlotProcess(id="m", run="1", state=ProcessState.ENDED, was_oom=True))
    'its server was killed for memory'
    """
    if process is None:
        return "its server is gone"
    if process.was_oom:
        return "its server was killed for memory"
    if says_out_of_memory(process):
        return "its engine had no memory left"
    code = "" if process.exit_code is None else f" with exit code {process.exit_code}"
    if (line := out_of_memory(process.last)) and line not in process.why:
        code += f", for want of memory ({line.strip()})"
    why = process.why or (process.last[-1] if process.last else "")
    return f"its server ended{code}" + (f": {why}" if why else "")


def says_out_of_memory(process: SlotProcess) -> bool:
    """Whether it is a runner that ended because its engine had no memory left (hive.runner.faults).

    >>> says_out_of_memory(SlotProcess(id="m", run="1", state=ProcessState.ENDED, exit_code=77))
    True
    """
    return process.exit_code == OUT_OF_MEMORY_EXIT


def out_of_memory(lines: list[str]) -> str:
    """The first of a server's last lines that says that it had too little memory; empty where none does.

    >>> out_of_memory(["load_model: loading", "cudaMalloc failed: Out of memory", "failed to allocate CUDA0 buffer"])
    'cudaMalloc failed: Out of memory'
    """
    return next((line for line in lines if any(word in line.lower() for word in OUT_OF_MEMORY)), "")


def has_been_taken(grants: Iterable[Grant], accounts: Iterable[MemoryAccount]) -> bool:
    """Whether less is free now than a server that has ended had been promised: others have taken it, and that it died
    for memory says nothing of the model.

    >>> promised = [Grant("g", 500)]
    >>> [has_been_taken(promised, [MemoryAccount("g", 1000, used_bytes=used)]) for used in (600, 400, None)]
    [True, False, False]
    """
    promised = {grant.account: grant.charged_bytes for grant in grants}
    return any(
        account.used_bytes is not None and account.total_bytes - account.used_bytes < promised.get(account.id, 0)
        for account in accounts
    )
