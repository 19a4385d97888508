"""The pool in the daemon: gathers the facts, asks the decider, and carries out its moves.

One task decides; the long steps of a slot (close, load, unload) are tasks of their own, and wake it when they are done.
What the daemon knows is not kept on the disk: the servers, the helper and the proxy tell it to the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from hive.agents.transition_lock import outcome_of
from hive.audit.audit_log import AuditLog
from hive.backends.entries import ModelEntry
from hive.domain import BackendInfo, Band, ModelInfo
from hive.errors import HiveError, LinkLost, ModelNotFound, NotFound, WrongState, did_you_mean
from hive.link.leases import LeaseHolder
from hive.link.pool import SlotDemands, SlotFlows, SlotRow
from hive.link.proxy_link import ProxyGates
from hive.link.slots import ProcessState, SlotProcess
from hive.pool.bound import waiting_bound
from hive.pool.decider import choose
from hive.pool.expected import expected_in_s
from hive.pool.load_cause import load_cause
from hive.pool.moves import (
    CloseSlot,
    CutSlot,
    DropClaim,
    LoadSlot,
    MakeRoom,
    Move,
    OpenSlot,
    RefuseWaiting,
    Rest,
    SleepSlot,
    UnloadSlot,
)
from hive.pool.next_up import next_up
from hive.pool.state import CPU, MIB, Claim, Demand, Grant, PoolFacts, Rules, SlotFacts, SlotState
from hive.pool.turns import turn_s
from hive.pooling.draft_models import room_for, why_no_draft_model
from hive.pooling.entry_facts import model_info, models_offered, why_no_need
from hive.pooling.footprints import Footprints
from hive.pooling.leases import PoolLeases
from hive.pooling.pool_backend import PoolBackends
from hive.pooling.pool_clients import PoolClients
from hive.pooling.pool_counts import PoolCounts
from hive.pooling.pool_memory import MemoryReading, PoolMemory
from hive.pooling.pooled_slot import HELD, PooledSlot, grants_in, permitted
from hive.pooling.preparing import Preparing
from hive.pooling.slot_server import describe
from hive.pooling.slot_servers import PoolServers
from hive.pooling.slot_sleep import levels_of
from hive.pooling.slot_steps import Describe, SlotSteps
from hive.pooling.swaps import Swaps
from hive.settings.pool import PoolSection
from hive.settings.table import Settings
from hive.tasks import spawn

log = logging.getLogger("hive.pool")

LOOK_S = 1.0
"""Between two looks at memory and processes while a model is loaded or waited for."""
IDLE_LOOK_S = 30.0
REFUSES_BY_S = 0.1
"""Nobody is refused for want of memory by an older look: who held it may have ended since."""
GATHER_S = 0.005
"""Changes that come within this time are decided about together."""
READ_S = 30.0
"""Between two looks at the models' files."""
AGAIN_S = 0.5
MOVES_MAX = 200
"""Moves in one pass. More would be a fault: each move changes the facts it was made from."""
TAKEN_OVER_S = 1.5
"""The servers of an earlier daemon have so long to say what they are, until the API answers."""
SETTLED_S = 2.0
"""After a load, requests that waited for it are at the server within this time; else they have left."""


class ModelPool:
    """Every slot there is, by id. Every method is called on the loop.

    `helper`: starts and stops the servers; `address_of`: where that of an entry listens. `pins`: what operators have
    pinned or unpinned, by model. `why_not_approved`: why the pool may not load an entry with files of this digest by
    itself, a clause; empty where it may.
    """

    def __init__(
        self,
        entries: Mapping[str, ModelEntry],
        *,
        settings: Callable[[], Settings],
        helper: PoolServers,
        proxy_link: ProxyGates,
        memory: PoolMemory,
        footprints: Footprints,
        clients: PoolClients,
        leases: PoolLeases,
        audit_log: AuditLog,
        address_of: Callable[[ModelEntry], str],
        pins: Mapping[str, bool],
        describe: Describe = describe,
        why_not_approved: Callable[[ModelEntry, str], str] = lambda entry, digest: "",  # noqa: ARG005
    ) -> None:
        self.counts = PoolCounts()
        self.clients = clients
        self.leases = leases
        leases.pool = self
        self.footprints = footprints
        self._memory = memory
        self._settings = settings
        self._helper = helper
        self._proxy_link = proxy_link
        self._audit_log = audit_log
        self._preparing = Preparing(helper)
        self._claims: tuple[Claim, ...] = ()
        self.swaps = Swaps(self)
        self._changed = asyncio.Event()
        self._reading_files: asyncio.Task[None] | None = None
        self._passed = asyncio.Event()
        self._adopted = asyncio.Event()
        self._is_closing = self._has_file_news = False
        self._why_not_approved = why_not_approved
        self._looked_at = self._files_read_at = float("-inf")
        self._is_look_wanted = False
        self.reading = MemoryReading((), {}, {})
        self._address_of = address_of
        self.before_open: Callable[[PooledSlot], Awaitable[None]] = _nothing_before
        """Done with a server that serves, before its gate opens; it raises nothing."""
        self.slots: dict[str, PooledSlot] = {}
        for entry in entries.values():
            slot = self.slots[entry.id] = self._slot_of(entry)
            if entry.is_remote or pins.get(entry.name, entry.row.pin):
                slot.pinned_at = time.monotonic()
        self.backends = PoolBackends(
            is_on=bool(self.slots),
            settings=settings,
            footprints=footprints,
            look=lambda kind: helper.look_at_backend(kind),
            wake=self.wake,
            gpu=lambda: self.gpu,
        )
        self.steps = SlotSteps(
            settings=settings,
            helper=helper,
            proxy_link=proxy_link,
            audit_log=audit_log,
            pool=self,
            describe=describe,
        )

    def __repr__(self) -> str:
        return f"<ModelPool of {len(self.slots)} slots, {sum(slot.state in HELD for slot in self.slots.values())} held>"

    @property
    def has_slots(self) -> bool:
        return bool(self.slots)

    def offered(self) -> dict[str, tuple[ModelInfo, bool]]:
        """Every model by name, and whether it is loaded. Those with an adapter are offered by its name alone."""
        return {
            model.name: (model, slot.state is SlotState.READY)
            for slot in self.slots.values()
            if slot.entry.adapter is None
            for model in slot.models
        }

    def _slot_of(self, entry: ModelEntry) -> PooledSlot:
        backend = BackendInfo(kind=entry.kind, address=self._address_of(entry), label=f"{entry.name} of the pool")
        return PooledSlot(entry, backend, self.models_of(entry))

    def add(self, entry: ModelEntry) -> PooledSlot:
        """Takes an entry in while it runs; the slot that is there already where its id is known."""
        if (known := self.slots.get(entry.id)) is not None:
            return known
        slot = self.slots[entry.id] = self._slot_of(entry)
        self.files_changed()
        return slot

    def remove(self, id: str) -> None:
        """Takes a slot out whose server has ended. Raises WrongState while it has one; nothing is done where it is
        gone."""
        slot = self.slots.get(id)
        if slot is None:
            return
        if slot.state in HELD:
            raise WrongState(f"{slot.model} has a server still")
        del self.slots[id]
        self._claims = tuple(claim for claim in self._claims if claim.slot != id)
        self._proxy_link.slot_gone(id)
        self.wake()

    def find(self, model: str) -> PooledSlot:
        """The slot of this model. Raises NotFound with the names there are."""
        for slot in self.slots.values():
            if model in (slot.model, slot.id) or any(model == one.name for one in slot.models):
                return slot
        adapters = {slot.entry.adapter.name for slot in self.slots.values() if slot.entry.adapter is not None}
        if model in adapters:
            raise NotFound(f"{model[:80]} is an adapter, and no model of the pool", hint=f"hive adapter show {model}")
        names = sorted(slot.model for slot in self.slots.values())
        hint = did_you_mean(model, names) or (
            "hive pool lists them" if names else "describe it in hive.conf: [model NAME]"
        )
        raise ModelNotFound(f"the pool has no model {model[:80]!r}", hint=hint)

    @property
    def settings(self) -> Settings:
        return self._settings()

    @property
    def rules(self) -> Rules:
        settings = self._settings()
        return msgspec.structs.replace(rules_of(settings.pool), lease_share=settings.lease.share)

    @property
    def loaded(self) -> list[str]:
        """The ids of the slots that are loaded, or are being loaded."""
        return [slot.id for slot in self.slots.values() if slot.state in (SlotState.LOADING, SlotState.READY)]

    def load_again(self, ids: Sequence[str]) -> None:
        """Has these slots loaded as by an order, as far as they are there and not loaded."""
        now = time.monotonic()
        for slot in (self.slots[id] for id in ids if id in self.slots):
            if slot.state not in (SlotState.LOADING, SlotState.READY):
                slot.order = slot.order or Demand(Band.NORMAL, now)
        self.wake()

    def claim(self, claim: Claim) -> None:
        """Has a load of this claim be the next move of its slot; nobody else is given its memory."""
        self._claims = (*(other for other in self._claims if other.slot != claim.slot), claim)
        self.wake()

    # its life ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Decides whenever a fact has changed, until cancelled."""
        while not self._is_closing:
            if not self.slots and not self.leases.has_any:
                self._changed.clear()
                await self._changed.wait()
                continue
            try:
                wait_s = await self._pass()
            except LinkLost:
                self._adopted.clear()
                self.leases.look_at_times(time.monotonic(), is_away=True)
                await asyncio.sleep(AGAIN_S)
                continue
            except HiveError as error:
                log.error("pool_not_looked_at error=%s", error.message)
                self.leases.look_at_times(time.monotonic(), is_away=True)
                await asyncio.sleep(AGAIN_S)
                continue
            except Exception:  # one fault of Hive's own does not end the pool
                log.exception("pool_pass_failed")
                await asyncio.sleep(LOOK_S)
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            await asyncio.sleep(GATHER_S)

    async def _pass(self) -> float:
        """Takes the facts anew and decides; in how many seconds at most again."""
        if not self._adopted.is_set():
            await self._adopt()
        leases_until = self.leases.look_at_times(time.monotonic())
        if self._is_look_wanted:
            self._is_look_wanted = False
            await self.look(is_fresh=True)
        elif time.monotonic() - self._looked_at >= (LOOK_S if self._is_busy else IDLE_LOOK_S):
            await self.look()
        if time.monotonic() - self._files_read_at >= READ_S and (
            self._reading_files is None or self._reading_files.done()
        ):
            self._reading_files = spawn(self._read_files(), name="models' files")  # a disk that hangs holds up nothing
        self._changed.clear()
        until = self._decide()
        now = time.monotonic()
        facts = self.facts(now)
        self._prepare(facts, now)
        self._tell(facts, now)
        self.leases.tell(facts, now)
        self._passed.set()
        self._passed = asyncio.Event()
        wait_s = LOOK_S if self._is_busy else IDLE_LOOK_S
        times = [at - time.monotonic() + 0.001 for at in (until, leases_until) if at is not None]
        return max(0.0, min([wait_s, *times]))

    def wake(self) -> None:
        """Has it decide anew."""
        self._changed.set()

    async def passed(self) -> None:
        """Returns after the next decision."""
        await self._passed.wait()

    async def close(self) -> None:
        """Ends the steps; servers go on, for the next daemon. One that ends from now on has not crashed: with the
        machine everything ends at once."""
        self._is_closing = True
        tasks = [slot.stepping for slot in self.slots.values() if slot.stepping is not None]
        for task in tasks:
            task.cancel()
        tasks += self.leases.close()
        await asyncio.gather(*tasks, return_exceptions=True)

    @property
    def _is_busy(self) -> bool:
        models = any(slot.state in HELD or slot.waiting or slot.pinned_at is not None for slot in self.slots.values())
        return models or bool(self.backends.known) or self.leases.has_any or self._is_refused_for_others

    @property
    def _is_refused_for_others(self) -> bool:
        """Whether a model is refused that may fit as soon as others end."""
        has_others = any(one.foreign_bytes or one.strangers_bytes for one in self.reading.accounts)
        return has_others and any(slot.never for slot in self.slots.values())

    # the helper -------------------------------------------------------------------------------------------------------

    def helper_here(self) -> None:
        """The helper has connected (again): what runs is asked anew."""
        self._adopted.clear()
        self._preparing.helper_here()
        self.wake()

    @property
    def has_adopted(self) -> bool:
        """Whether it is known which servers run."""
        return self._adopted.is_set() or not (self.slots or self.leases.has_any)

    async def known(self) -> None:
        """Returns once it is known which servers run."""
        if self.slots or self.leases.has_any:
            await self.adopted()

    async def adopted(self) -> None:
        """Returns once the helper has told what runs."""
        await self._adopted.wait()

    async def _adopt(self) -> None:
        """Takes over the servers that run, ends those of no entry, and sees what has ended meanwhile."""
        if self._files_read_at < 0:
            self._reading_files = reading = self._reading_files or spawn(self._read_files(), name="models' files")
            await asyncio.wait([reading], timeout=TAKEN_OVER_S)  # a disk that hangs holds up what runs no longer
        processes = await self._helper.slots() if self.slots else {}
        holders = await self.leases.adopt()
        self.reading = await self._measured(processes, holders)
        for id, process in processes.items():
            slot = self.slots.get(id)
            if slot is None:
                log.warning("slot_of_no_entry id=%s", id)
                spawn(outcome_of(self._helper.slot_stop(id, grace_s=self.steps.grace_s)), name=f"stop {id}")
            elif process.state is not ProcessState.ENDED and slot.state in (SlotState.COLD, SlotState.FAILED):
                self._take_over(slot, process)
            else:
                self.slot_moved(process)
        for slot in self.slots.values():
            if slot.id not in processes and slot.process is not None and slot.process.state is not ProcessState.ENDED:
                self.slot_moved(
                    SlotProcess(id=slot.id, run=slot.process.run, state=ProcessState.ENDED, why="it is gone")
                )
        taken = [slot.stepping for slot in self.slots.values() if slot.came_up.is_set() and slot.stepping is not None]
        if taken:  # their gates stay open
            await asyncio.wait(taken, timeout=TAKEN_OVER_S)
        await self.look()
        self.swaps.adopt()
        self._adopted.set()

    def files_changed(self) -> None:
        """Has the models' files read anew, or what is told instead of them."""
        self._has_file_news = True
        self._files_read_at = float("-inf")
        self.wake()

    async def _read_files(self) -> None:
        """Reads the models' files, those that have changed."""
        self._has_file_news = False
        for slot in list(self.slots.values()):  # one may come or go meanwhile
            await self.footprints.facts_of(slot.entry)
            models = self.models_of(slot.entry)
            if slot.state is SlotState.COLD:
                slot.models = models
            elif models != slot.models and self.footprints.known(slot.entry).offers:  # its server reads them itself
                slot.models = models
                self.say(slot)
        self._files_read_at = float("-inf") if self._has_file_news else time.monotonic()
        self.wake()

    def _take_over(self, slot: PooledSlot, process: SlotProcess) -> None:
        """A server of an earlier daemon: it is ready, or still loading, or being stopped."""
        now = time.monotonic()
        grant = process.grant
        slot.generation = max(slot.generation, (grant.generation if grant is not None else 1) - 1)
        slot.loading(grants_in(grant) or self._charged_anyway(slot), now - process.age_s)
        slot.process = process
        if process.socket:  # it was started by an earlier version
            slot.backend = msgspec.structs.replace(slot.backend, address=process.socket)
        log.info("slot_taken_over id=%s state=%s generation=%d", slot.id, process.state, slot.generation)
        if process.state is ProcessState.STOPPING:
            self.steps.unload(slot, "it was being stopped")
            return
        self.steps.go_on_loading(slot)

    def _charged_anyway(self, slot: PooledSlot) -> tuple[Grant, ...]:
        """The charge of a server whose grant cannot be read any more: all of it in the first account it may be in."""
        accounts = permitted(slot.entry) or tuple(account.id for account in self.reading.accounts) or (CPU,)
        estimate = self.footprints.need(slot.entry, self.gpu)
        return (Grant(accounts[0], 0 if estimate is None else estimate.bytes),)

    def slot_moved(self, process: SlotProcess) -> None:
        """The helper says that a server serves, or has ended."""
        slot = self.slots.get(process.id)
        if slot is not None and self._adopted.is_set() and not self._is_closing and is_found(slot, process):
            self._take_over(slot, process)
            self.wake()
        if self._is_closing or slot is None or slot.state not in HELD:
            return
        if slot.process is not None and slot.process.run != process.run:
            return
        slot.saw(process)
        self._see_end(slot)
        self.wake()

    def _see_end(self, slot: PooledSlot) -> None:
        """A server that has ended while requests could be there has crashed; Ollama gives up models by itself."""
        is_used = slot.state in (SlotState.READY, SlotState.DRAINING)
        if slot.is_over and slot.process is not None and is_used and not self._is_closing:
            (self.steps.dropped if slot.process.was_dropped else self.steps.crashed)(slot, slot.process)
        elif slot.is_over and slot.state is SlotState.ASLEEP:
            self.steps.sleep.died(slot)

    async def refresh(self) -> None:
        """Looks at memory for somebody who wants to see it, where the last look is old: an idle pool looks rarely."""
        if self._adopted.is_set() and time.monotonic() - self._looked_at >= LOOK_S:
            await outcome_of(self.look())

    async def look(self, *, is_fresh: bool = False) -> MemoryReading:
        """Measures all accounts and all servers. `is_fresh`: the GPUs by a look that begins now; else they may be seen
        as they were a second ago. Raises LinkLost."""
        known = {slot.id: slot.process.run for slot in self.slots.values() if slot.process is not None}
        processes = await self._helper.slots() if self.slots else {}
        self.reading = await self._measured(processes, await self.leases.holders(), is_fresh=is_fresh)
        self._looked_at = time.monotonic()
        self.footprints.gpu_bytes = min(
            (one.total_bytes for one in self.reading.accounts if one.id != CPU), default=None
        )
        self.backends.measured(self.reading.by_slot)
        self.leases.measured(self.reading.by_slot)
        for slot in self.slots.values():
            process = processes.get(slot.id)
            if slot.process is None or slot.state not in HELD:
                continue
            if process is None and known.get(slot.id) == slot.process.run:  # its end was told to nobody
                process = SlotProcess(id=slot.id, run=slot.process.run, state=ProcessState.ENDED, why="it is gone")
            if process is not None and slot.process.run == process.run:
                slot.saw(process)
                slot.measured(self.reading.by_slot.get(slot.id, {}))
                slot.load_looked_at(self.reading.by_slot.get(slot.id, {}), self._looked_at)
                self._see_end(slot)
                self.steps.judge(slot, slot.process)
        return self.reading

    async def _measured(
        self, processes: Mapping[str, SlotProcess], holders: Mapping[str, LeaseHolder], *, is_fresh: bool = False
    ) -> MemoryReading:
        """All accounts with the models' servers, the services and the leases in them."""
        services, leases = await self.backends.processes(), self.leases.processes(holders)
        return await self._memory.look(
            {**processes, **services, **leases},
            programs=leases.keys(),
            unseen=self.leases.unseen(),
            overdue=self.leases.overdue(),
            is_fresh=is_fresh,
        )

    # the proxy --------------------------------------------------------------------------------------------------------

    def rows(self) -> list[SlotRow]:
        """Every slot, for a proxy that connects."""
        now = time.monotonic()
        facts = self.facts(now)
        rows = []
        for slot in self.slots.values():
            slot.told_row, slot.told_at = self._row(slot, facts, now), now
            rows.append(slot.told_row)
        return rows

    def proxy_here(self) -> None:
        """A proxy has connected: orders to an earlier one are void."""
        for slot in self.slots.values():
            slot.proxy_changed()
            if slot.state is SlotState.DRAINING and not slot.is_drained:
                self.steps.close(slot, is_idle_only=False)
        self.wake()

    def proxy_lost(self) -> None:
        self.clients.link_lost()
        for slot in self.slots.values():
            slot.demands, slot.more_demands = (), 0
        self.wake()

    def demands(self, told: SlotDemands) -> None:
        now = time.monotonic()
        for id, demand in told.slots.items():
            if (slot := self.slots.get(id)) is not None:
                if demand.waiting and not slot.demands and now < slot.turn_lost_until:
                    self.counts.thrash()
                slot.demanded(demand, now)
        self.clients.waiting(told, self._models, now)
        self.wake()

    def flows(self, told: SlotFlows) -> None:
        now = time.monotonic()
        for id, flow in told.slots.items():
            if (slot := self.slots.get(id)) is not None:
                slot.flowed(flow, now)
        self.clients.flows(told, self._models, now)
        self.wake()

    @property
    def _models(self) -> dict[str, str]:
        return {slot.id: slot.model for slot in self.slots.values()}

    def say(self, slot: PooledSlot, *, even_closing: bool = False) -> None:
        """Tells the proxy what this slot is now, if it does not know."""
        now = time.monotonic()
        self._say(slot, self.facts(now), now, even_closing=even_closing)

    def _say(self, slot: PooledSlot, facts: PoolFacts, now: float, *, even_closing: bool = False) -> None:
        if slot.is_closing and not even_closing:
            return  # the order to close says it
        row = self._row(slot, facts, now)
        if slot.is_news(row, now):
            slot.told_row, slot.told_at = row, now
            self._proxy_link.slot_is(row)

    def _tell(self, facts: PoolFacts, now: float) -> None:
        for slot in self.slots.values():
            self._say(slot, facts, now)

    def _row(self, slot: PooledSlot, facts: PoolFacts, now: float) -> SlotRow:
        ready_in_s: float | None = None
        if not slot.is_open and not slot.never and not slot.barred and (slot.waiting or slot.state in HELD):
            ready_in_s = expected_in_s(facts, slot.id, now)
        load_s = facts.slot(slot.id).reload_s
        return slot.row(wait_s=self._settings().pool.load_wait_s, ready_in_s=ready_in_s, load_s=load_s)

    # the facts --------------------------------------------------------------------------------------------------------

    def facts(self, now: float) -> PoolFacts:
        """All that the decider is told."""
        models = tuple(self.slot_facts(slot, now) for slot in self.slots.values())
        accounts, rules = self.reading.accounts, self.rules
        return PoolFacts(
            slots=(*models, *self.backends.facts(accounts, models, rules), *self.leases.facts(), *self.swaps.facts()),
            accounts=accounts,
            claims=self._claims,
            exclusive=self.backends.order,
            rules=rules,
        )

    def slot_facts(self, slot: PooledSlot, now: float) -> SlotFacts:
        """The slot as the decider sees it; one that cannot be loaded at all wants nothing."""
        settings = self._settings().pool
        keep_s = slot.entry.row.keep_alive_s
        facts = slot.facts(
            need_bytes=self.need_bytes(slot),
            load_s=self.footprints.load_s(slot.entry, self.gpu),
            unload_s=self.footprints.unload_s(slot.entry, self.gpu),
            audience=self.clients.audience(slot.model, now),
            keep_alive_s=slot.keep_s(settings.keep_alive_s if keep_s < 0 else keep_s, now),
            levels=levels_of(slot, self.footprints, self.gpu, settings),
        )
        if (slot.barred and not slot.grants) or (slot.entry.is_remote and slot.state is SlotState.COLD):
            return msgspec.structs.replace(facts, pinned_at=None, waiting=())
        return facts

    def need_bytes(self, slot: PooledSlot) -> int:
        """The charge of a load; more than there is where nothing is known."""
        estimate = self.footprints.need(slot.entry, self.gpu)
        return 1 << 60 if estimate is None else estimate.bytes

    def models_of(self, entry: ModelEntry) -> list[ModelInfo]:
        """The models of its server, as its files tell them."""
        return models_offered(entry, self.footprints.known(entry))

    def model_info(self, entry: ModelEntry) -> ModelInfo:
        """The model of an entry as its files describe it."""
        return model_info(entry, self.footprints.known(entry))

    @property
    def gpu(self) -> str:
        """The kind of the accounts that models are loaded into: a part of what a footprint depends on."""
        return next((name for id, name in self.reading.names.items() if id != CPU), CPU)

    # deciding ---------------------------------------------------------------------------------------------------------

    def _decide(self) -> float | None:
        """Carries out moves until there is none; when to decide again, None if only a change of facts matters."""
        if self._is_closing or not self._adopted.is_set():
            return None
        self._use_remotes(time.monotonic())
        if not self.reading.accounts:
            return None
        for _ in range(MOVES_MAX):
            now = time.monotonic()
            self._revive(now)
            move = choose(self.facts(now), now)
            if isinstance(move, Rest):
                return move.until
            if isinstance(move, RefuseWaiting) and now - self._looked_at > REFUSES_BY_S:
                self._is_look_wanted = True
                return now
            log.info("pool_move %s", move)
            self._do(move, now)
        log.error("pool_moves_without_end last=%s", move)
        return time.monotonic() + LOOK_S

    def _use_remotes(self, now: float) -> None:
        """Makes the models ready whose server is somebody else's: they take no memory, so nothing decides about them
        but whether their server is up."""
        if self._files_read_at < 0:
            return  # it is to be read anew whether they are up
        for slot in self.slots.values():
            if slot.entry.is_remote and slot.state is SlotState.COLD:
                slot.why_not = self._why_not(slot)
                if not slot.why_not:
                    slot.loading((), now)
                    self.steps.load(slot, "its server is up")

    def _prepare(self, facts: PoolFacts, now: float) -> None:
        """Has a supervisor wait for the load that comes next."""
        if self._adopted.is_set() and not self._is_closing:
            is_wanted = self._settings().pool.prepare
            self._preparing.want(next_up(facts, now, self.slots) if is_wanted else "", at_once=bool(facts.claims))

    def _revive(self, now: float) -> None:
        """Slots that were given up are tried again after a while; refused waits are looked at again."""
        hold_s = self._settings().pool.fail_hold_s
        for slot in self.slots.values():
            slot.why_not = self._why_not(slot)
            self.look_at_approval(slot)
            slot.is_settled = slot.is_settled or now >= slot.ready_at + SETTLED_S
            if slot.state is SlotState.FAILED and hold_s and now >= slot.ended_at + hold_s:
                slot.state, slot.failures, slot.retry_at = SlotState.COLD, 0, 0.0
                slot.ends.clear()
        if any(slot.never for slot in self.slots.values()):
            facts = self.facts(now)
            for slot in self.slots.values():
                if slot.never and waiting_bound(facts, slot.id, Demand(Band.NORMAL, now), now).seconds is not None:
                    slot.never = ""

    def look_at_approval(self, slot: PooledSlot) -> None:
        """Takes anew whether the pool may load this by itself."""
        slot.unapproved = self._why_not_approved(slot.entry, self.footprints.known(slot.entry).digest)

    def _why_not(self, slot: PooledSlot) -> str:
        """The reason that a model cannot be loaded whatever else happens, a clause."""
        files = self.footprints.known(slot.entry)
        if not files.can_load:
            return files.why_not
        if self.footprints.need(slot.entry, self.gpu) is None:
            return why_no_need(files, slot.entry)
        if (draft := self.footprints.draft(slot.entry)) is None:
            return ""
        if not self.footprints.draft_bytes(slot.entry) and not slot.entry.row.vram_mb:
            return f"nothing tells how much memory its draft model takes: set vram_mb in {slot.entry.origin}"
        return why_no_draft_model(
            slot.entry.kind,
            files,
            draft,
            draft_bytes=self.footprints.draft_bytes(slot.entry),
            room=room_for(self.reading.accounts, permitted(slot.entry)),
            share=self._settings().inference.speculative_memory_share,
        )

    def _do(self, move: Move, now: float) -> None:
        if isinstance(move, LoadSlot | DropClaim):
            self._claims = tuple(claim for claim in self._claims if claim.slot != move.slot)
        if self.backends.did(move) or self.leases.did(move, now):
            return
        match move:
            case LoadSlot(slot=id, grants=grants, why=why):
                slot = self.slots[id]
                self._preparing.used(id)
                slot.cause = load_cause(self.slot_facts(slot, now), self.rules)
                if slot.state is SlotState.ASLEEP:
                    self.steps.sleep.wake(slot, grants)
                else:
                    slot.loading(grants, now)
                    self.steps.load(slot, why)
            case UnloadSlot(slot=id, why=why):
                self.steps.unload(self.slots[id], why)
            case MakeRoom(claim=claim):
                self._claims += (claim,)
                for leaving in claim.leaving:
                    if (victim := self.slots.get(leaving.slot)) is None:
                        continue  # a lease
                    victim.turn_lost_until = self._turn_ends_at(victim)
                    if victim.state is SlotState.READY:
                        victim.draining(now)
                        self.steps.close(victim, is_idle_only=leaving.idle_only)
            case CloseSlot(slot=id):
                self.slots[id].draining(now)
                self.steps.close(self.slots[id], is_idle_only=False)
            case OpenSlot(slot=id):
                self.steps.open(self.slots[id])
            case CutSlot(slot=id):
                self.steps.cut(self.slots[id])
                self.counts.cut()
            case RefuseWaiting(slot=id, why=why):
                self._refuse(self.slots[id], why)
            case SleepSlot(slot=id, level=level, why=why):
                self.steps.sleep.fall_asleep(self.slots[id], level, why)
            case DropClaim(slot=id, why=why):
                if id in self.slots:
                    self.swaps.given_up(self.slots[id], why)
            case Rest():
                return

    def _turn_ends_at(self, slot: PooledSlot) -> float:
        load_s = self.footprints.load_s(slot.entry, self.gpu)
        return slot.ready_at + turn_s(load_s, load_s, self._settings().pool.swap_share)

    def _refuse(self, slot: PooledSlot, why: str) -> None:
        slot.never, slot.demands, slot.order = why, (), None
        log.warning("pool_refuses model=%s why=%s", slot.model, why)


async def _nothing_before(slot: PooledSlot) -> None:
    """The server needs nothing before its gate opens."""


def is_found(slot: PooledSlot, process: SlotProcess) -> bool:
    """Whether a server serves that nobody has started for the pool: somebody asked Ollama for the model past Hive."""
    is_new = slot.process is None or slot.process.run != process.run
    return slot.state is SlotState.COLD and process.state is ProcessState.SERVING and process.grant is None and is_new


def rules_of(settings: PoolSection) -> Rules:
    """The settings as the decider needs them."""
    return Rules(
        swap_share=settings.swap_share,
        swap_share_high=settings.swap_share_high,
        patience_high_s=settings.patience_high_s,
        patience_normal_s=settings.patience_normal_s,
        patience_low_s=settings.patience_low_s,
        audience_s=settings.audience_s,
        drain_s=settings.drain_s,
        free_s=settings.free_s,
        foreign_margin=1 + settings.foreign_margin_percent / 100,
        host_ram_bytes=settings.host_ram_mb * MIB,
        finish_loads=settings.finish_loads,
        unload_idle=True,
    )
