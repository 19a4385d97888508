"""Parked slots: what a llama-server has read for an agent, kept on the disk while the agent sleeps (decision 047).

Nothing waits for it but an agent's first request after its sleep. Whatever does not fit is deleted, never mended.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, TypeVarTuple

import msgspec

from hive.agents.roster import Roster
from hive.agents.transition_lock import outcome_of
from hive.backends.backend import BackendControl, open_backend
from hive.backends.kinds import spec_of
from hive.control.active_backend import Active
from hive.domain import Agent, AgentStatus, SleepDepth, UsageEvent, origin_of
from hive.errors import HiveError, NotFound, NotSupported, TimedOut, WrongState
from hive.lifecycle.parked_files import BEGINS, NotAsItWas, ParkedFiles, beyond, drop_file
from hive.lifecycle.parking_counts import Found, ParkingCounts
from hive.lifecycle.slot_key import facts_of
from hive.link.link import LinkReply, failed
from hive.link.messages import Done, Failed
from hive.link.parking import ParkedIs, ParkedOver, SlotOf, UseParked
from hive.link.proxy_link import ProxyGates
from hive.models.cache_epochs import FlushKind, FlushScope
from hive.models.salts import cache_group
from hive.pooling.pooling import ModelPool
from hive.settings.table import Settings, TenantRow
from hive.shapes.cache import ParkingView
from hive.store import parked_slots as store
from hive.store.database import Database
from hive.store.parked_slots import ParkedSlot
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

MIB = 1024 * 1024
POST_WITHIN_S = 1.0
"""Of the time that a request waits: a server that is asked later would hardly answer in it."""
ANSWER_WITHIN_S = 1.8
AT_ONCE = 2
"""Slots that are saved at once: a server answers nobody meanwhile."""
_NO_ROW = TenantRow()
_Args = TypeVarTuple("_Args")
_R = TypeVar("_R")


class _Transfer:
    """Something that is saved or restored now. `is_flushed`: a flush of it began meanwhile."""

    def __init__(self, group: str, server: str) -> None:
        self.group = group
        self.server = server
        self.is_flushed = False
        self.over = asyncio.Event()


class TooLate(HiveError):
    """A request will not wait for it."""


class _EarlyReply:
    """The answer to a question that is answered early, or at its end."""

    def __init__(self, reply: LinkReply) -> None:
        self._reply = reply
        self.is_given = False

    def give(self, answer: Done | Failed) -> None:
        if not self.is_given:
            self.is_given = True
            self._reply(answer)


class _Scope(NamedTuple):
    """Scope of a flush, with the names that rows have."""

    scope: FlushScope
    groups: Sequence[str]
    server: str

    def has(self, group: str, server: str) -> bool:
        match self.scope.kind:
            case FlushKind.TENANT:
                return group in self.groups
            case FlushKind.MODEL:
                return server == self.server
            case _:
                return True


class Parking:
    """One for the daemon; keeps nothing where `[inference] llama_slot_dir` is empty."""

    def __init__(
        self,
        *,
        key: bytes,
        settings: Callable[[], Settings],
        roster: Roster,
        active: Active,
        pool: ModelPool,
        proxy_link: ProxyGates,
        database: Database,
    ) -> None:
        directory = settings().inference.llama_slot_dir
        self._files = ParkedFiles(Path(directory), key) if directory else None
        self._settings = settings
        self._roster = roster
        self._active = active
        self._pool = pool
        self._proxy_link = proxy_link
        self._database = database
        self._rows: dict[str, ParkedSlot] = {}
        self._saving: dict[str, asyncio.Task[None]] = {}
        self._again: dict[str, Agent] = {}
        """Agents that fell asleep once more while a cancelled save of them ends."""
        self._gone: set[str] = set()
        """Agents that were forgotten while something of them was saved."""
        self._restoring: set[asyncio.Task[None]] = set()
        self._transfers: set[_Transfer] = set()
        self._in_use: set[str] = set()
        """Names in the engines' directory."""
        self._serials: dict[str, int] = {}
        self._elsewhere: set[tuple[str, str, int]] = set()
        """Servers that write into another directory, by slot, address and generation."""
        self._per_token: dict[str, float] = {}
        """Bytes of a slot for each token, by what it is made for."""
        self._slept: set[str] = set()
        """Agents that had a slot when they fell asleep."""
        self._under_flush: list[_Scope] = []
        self._turn = asyncio.Semaphore(AT_ONCE)
        self._said: set[str] = set()
        self._is_leaving = False
        self.counts = ParkingCounts()

    def __repr__(self) -> str:
        return f"<Parking of {len(self._rows)}, {len(self._saving)} being saved>"

    @property
    def is_on(self) -> bool:
        return self._files is not None

    async def begin(self) -> None:
        """Takes up what an earlier daemon left, and removes what it left half. Where it is off nothing is taken up, and
        everything removed: no flush would reach it."""
        rows, gone = await self._database.read(store.rows), set[str]()
        if self._files is not None:
            try:
                gone = set(await asyncio.to_thread(self._files.prepare, rows))
            except OSError as error:
                log.error("parking_off directory=%s error=%s", self._files.directory, error)
                self._files = None
        known = {life.agent.id for life in self._roster} if self._files is not None else set[str]()
        self._rows = {row.agent: row for row in rows}
        dropped = [row for row in rows if row.agent in gone or row.agent not in known]
        try:
            await self._drop(dropped)
        except OSError as error:  # the row stays, and is tried again at the next start
            log.error("parked_file_not_removed error=%s", error)
            for row in dropped:
                self._rows.pop(row.agent, None)
        self._tell_all()

    def proxy_here(self) -> None:
        self._tell_all()

    def _tell_all(self) -> None:
        for row in self._rows.values():
            self._tell(row)

    def _tell(self, row: ParkedSlot) -> None:
        serial = self._serials.get(row.agent, 0)
        self._proxy_link.say(ParkedIs(agent=row.agent, server=row.server, there=True, serial=serial))

    def used(self, events: Iterable[UsageEvent]) -> None:
        """Requests ended."""
        self.counts.used(events)

    def view(self) -> ParkingView | None:
        if self._files is None:
            return None
        return self.counts.view(files=len(self._rows), held_bytes=sum(row.bytes for row in self._rows.values()))

    # sleeping and waking ----------------------------------------------------------------------------------------------

    def changed(self, before: Agent, after: Agent) -> None:
        """An agent has another status, or another depth of sleep. Never waits."""
        if self._files is None:
            return
        agent = after.id
        if after.status is not AgentStatus.PAUSED:
            self._again.pop(agent, None)
            if (saving := self._saving.get(agent)) is not None:
                saving.cancel()
            if after.status is AgentStatus.RUNNING and agent in self._slept:
                self._slept.discard(agent)
                if agent not in self._rows:
                    self.counts.found(agent, Found.COLD)
            return
        if self._is_due(before, after):
            if agent in self._saving:
                self._again[agent] = after
            else:
                self._begin_save(after)

    def _begin_save(self, agent: Agent) -> None:
        task = self._saving[agent.id] = spawn(self._save(agent), name=f"park {agent.name}")
        task.add_done_callback(lambda _: self._saved(agent.id))

    def _saved(self, agent: str) -> None:
        """A save has ended, well or not."""
        self._saving.pop(agent, None)
        if agent in self._gone:
            self._gone.discard(agent)
            self._forget_row(agent)
        if (again := self._again.pop(agent, None)) is not None and not self._is_leaving:
            self._begin_save(again)

    def _is_due(self, before: Agent, after: Agent) -> bool:
        if self._settings().inference.llama_slots_at == "deep":
            return after.depth is SleepDepth.DEEP and before.depth is not SleepDepth.DEEP
        return before.status is not AgentStatus.PAUSED

    def forgotten(self, agent: str) -> None:
        """The agent is removed, or is another tenant's."""
        self._slept.discard(agent)
        self.counts.forget(agent)
        self._again.pop(agent, None)
        if (saving := self._saving.get(agent)) is not None:
            saving.cancel()
            self._gone.add(agent)
        self._forget_row(agent)

    def _forget_row(self, agent: str) -> None:
        if (row := self._rows.get(agent)) is not None:
            spawn(self._drop_quietly([row]), name="unpark")

    async def _save(self, agent: Agent) -> None:
        try:
            async with self._turn:
                await self._save_in_turn(agent)
        except NotFound:
            pass  # nothing of it is in any slot
        except HiveError as error:
            self._say_once("slot_not_parked", agent.name, error.message)
        except OSError as error:
            why = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else str(error)
            self._say_once("slot_not_parked", agent.name, why)

    async def _save_in_turn(self, agent: Agent) -> None:
        files = self._files
        held = await self._proxy_link.slot_of(agent.id)
        self.counts.slept()
        self._slept.add(agent.id)
        if files is None or held.group != self._group_of(agent):
            return
        with self._transfer(held.group, held.server) as transfer:
            await self._save_slot(files, agent, held, transfer)

    async def _save_slot(self, files: ParkedFiles, agent: Agent, held: SlotOf, transfer: _Transfer) -> None:
        control, made_for = await self._server(held)
        most = self._settings().inference.llama_slots_max_mb * MIB
        await self._check_room(files, control, agent, held, self._per_token.get(made_for, 0.0), most)
        with self._named() as name:
            try:
                tokens, written = await _ended(
                    control.converse(lambda server: _saving(control, server, held.slot, name))
                )
                if not tokens:
                    return
                self._per_token[made_for] = written / tokens
                if written > most:
                    raise WrongState(_too_large(most))
                row = ParkedSlot(
                    agent=agent.id,
                    group=held.group,
                    server=held.server,
                    made_for=made_for,
                    file="",
                    bytes=written,
                    tokens=tokens,
                    tag="",
                    at=time.time(),
                )
                row = await self._taken_in(files, name, row, held)
            finally:
                await _in_thread(files.drop_engines, name)
        await _in_thread(files.sweep, self._in_use)  # as it is then: what is written has its name there before
        try:
            now = await self._proxy_link.slot_of(agent.id)
            if (now.serial, now.server, now.slot) != (held.serial, held.server, held.slot):
                raise WrongState("another request came there meanwhile")
            if (await self._server(held))[1] != made_for:
                raise WrongState("the server is another one meanwhile")
            if transfer.is_flushed:
                raise WrongState("it was flushed meanwhile")
        except BaseException:
            await _in_thread(drop_file, row)
            raise
        self._serials[agent.id] = held.serial
        await _ended(self._keep(row, most, transfer))

    async def _check_room(
        self, files: ParkedFiles, control: BackendControl, agent: Agent, held: SlotOf, per_token: float, most: int
    ) -> None:
        """Raises WrongState where the slot would be too large, by the size of a token in an earlier one."""
        there = await control.kept(agent.spec.model or "")
        tokens = next((one.tokens or 0 for one in there if one.slot == held.slot), 0)
        expected = int(tokens * per_token)
        if expected > most:
            raise WrongState(_too_large(most))
        if 2 * expected > await asyncio.to_thread(files.free_bytes):  # the engine's file, and Hive's
            raise WrongState("the disk has no room for it")

    async def _taken_in(self, files: ParkedFiles, name: str, row: ParkedSlot, held: SlotOf) -> ParkedSlot:
        try:
            return await _in_thread(files.take_in, name, row)
        except FileNotFoundError:
            self._elsewhere.add(self._which(held))
            log.error(
                "slots_written_elsewhere address=%s: its --slot-save-path is not %s; it left a file %s there, to be"
                " deleted by hand, and none of its slots is kept",
                held.address,
                files.engine,
                name,
            )
            raise NotSupported("its server writes into another directory") from None

    def _which(self, at: SlotOf | UseParked) -> tuple[str, str, int]:
        slot = self._pool.slots.get(at.server)
        return at.server, at.address, 0 if slot is None else slot.generation

    @contextmanager
    def _named(self) -> Iterator[str]:
        """A name for a file of an engine, in use as long as it lasts."""
        name = f"{BEGINS}{secrets.token_hex(16)}"
        self._in_use.add(name)
        try:
            yield name
        finally:
            self._in_use.discard(name)

    async def _keep(self, row: ParkedSlot, most_bytes: int, transfer: _Transfer) -> None:
        old = self._rows.get(row.agent)
        try:
            await self._database.write(lambda conn: store.put(conn, row))
        except HiveError:
            await asyncio.to_thread(drop_file, row)
            raise
        self._rows[row.agent] = row
        if old is not None and old.file != row.file:
            await asyncio.to_thread(drop_file, old)
        self.counts.saved += 1
        if self._roster.get(row.agent) is None or transfer.is_flushed:  # removed, or flushed, meanwhile
            await self._drop([row])
            return
        await self._drop(beyond(self._rows.values(), most_bytes=most_bytes))
        if row.agent in self._rows:
            self._tell(row)

    def _group_of(self, agent: Agent) -> str:
        row = self._settings().tenants.get(agent.spec.tenant, _NO_ROW)
        return cache_group(agent.spec.tenant, row.cache_group)

    async def _server(self, at: SlotOf | UseParked) -> tuple[BackendControl, str]:
        """The server, and a digest of all that a slot of it is good for. Raises NotFound where another one is there."""
        if at.server:
            slot = self._pool.slots.get(at.server)
            kind, address = ("", "") if slot is None else (slot.entry.kind, slot.backend.address)
        else:
            own = self._active.control
            kind, address = ("", "") if own is None else (own.kind, own.address)
        if address != at.address or not address:
            raise NotFound("that server is gone")
        origin = origin_of(address)
        if not origin.is_here:
            raise NotSupported("a server on another machine writes to that machine's disk")
        if self._which(at) in self._elsewhere:
            raise NotSupported("its server writes into another directory")
        control = open_backend(kind, address)
        asking = spec_of(kind).asking
        if asking.slots_made_for is None:
            raise NotSupported(f"{kind} saves no slot")
        told, files = await control.converse(asking.slots_made_for)
        facts = await asyncio.to_thread(facts_of, origin.dialled, files)
        return control, hashlib.sha256(msgspec.json.encode([kind, at.server, told, facts])).hexdigest()

    # the first request after it ---------------------------------------------------------------------------------------

    def use(self, asked: UseParked, reply: LinkReply) -> None:
        """The proxy asks for what an agent left."""
        task = spawn(self._answer(asked, reply), name="unpark")
        self._restoring.add(task)
        task.add_done_callback(self._restoring.discard)

    async def _answer(self, asked: UseParked, reply: LinkReply) -> None:
        row = self._rows.pop(asked.agent, None)
        answer = _EarlyReply(reply)
        try:
            if row is None:
                raise NotFound("nothing is there")
            if asked.is_own or not asked.is_kept:
                self.counts.found(asked.agent, Found.OWN if asked.is_own else Found.COLD)
            else:
                with self._transfer(row.group, row.server) as transfer:
                    await self._restore(row, asked, transfer, answer)
                if not answer.is_given:
                    self.counts.found(asked.agent, Found.RESTORED)
        except (HiveError, OSError) as error:
            why = error.message if isinstance(error, HiveError) else str(error)
            if row is not None and not answer.is_given:
                self._refused(asked.agent, why)
            answer.give(failed(error if isinstance(error, HiveError) else NotAsItWas(why)))
        else:
            answer.give(Done())
        finally:
            if not self._is_leaving:
                self._proxy_link.say(ParkedOver(server=asked.server, slot=asked.slot, serial=asked.serial))
            if row is not None:
                await self._drop_quietly([row])

    def _refused(self, agent: str, why: str) -> None:
        self.counts.found(agent, Found.REFUSED)
        log.warning("slot_not_restored agent=%s error=%r", agent, why)

    async def _restore(self, row: ParkedSlot, asked: UseParked, transfer: _Transfer, answer: _EarlyReply) -> None:
        """Returns, or raises, once nothing comes to the slot any more; what comes too late is answered before."""
        files, began = self._files, time.monotonic()
        life = self._roster.get(row.agent)
        if files is None or life is None:
            raise WrongState("the agent is gone")
        if row.group != asked.group or row.group != self._group_of(life.agent):
            raise WrongState("it is of another tenant")
        control, made_for = await self._server(asked)
        if (row.server, row.made_for) != (asked.server, made_for):
            raise WrongState("it is of another model, build or context")
        busy = next(
            (one.is_busy for one in await control.kept(life.agent.spec.model or "") if one.slot == asked.slot), True
        )
        if busy:
            raise WrongState("the slot is busy")
        restore = spec_of(control.kind).asking.restore_slot
        assert restore is not None
        with self._named() as name:
            try:
                await _in_thread(files.hand_out, row, name)
                if time.monotonic() - began > POST_WITHIN_S:
                    raise TooLate("reading it took too long")
                if transfer.is_flushed:
                    raise WrongState("it was flushed meanwhile")
                asking = spawn(
                    _outcome(control.converse(lambda server: restore(server, asked.slot, name))), name="unpark"
                )
                try:
                    await asyncio.wait([asking], timeout=max(0.0, began + ANSWER_WITHIN_S - time.monotonic()))
                    if not asking.done():
                        self._refused(asked.agent, "the server did not answer in time")
                        answer.give(failed(TimedOut("the server did not answer in time")))
                    told = await asyncio.shield(asking)
                except asyncio.CancelledError:
                    asking.cancel()
                    raise
            finally:
                await _in_thread(files.drop_engines, name)
        if isinstance(told, Exception):
            raise told
        if told != (row.tokens, row.bytes):
            raise NotAsItWas(f"the server read {told[0]} of {row.tokens} tokens")

    # deleting ---------------------------------------------------------------------------------------------------------

    @contextmanager
    def _transfer(self, group: str, server: str) -> Iterator[_Transfer]:
        """Something is saved or restored as long as it lasts. Raises WrongState where it is flushed now."""
        if any(scope.has(group, server) for scope in self._under_flush):
            raise WrongState("the prompt cache is being flushed")
        transfer = _Transfer(group, server)
        self._transfers.add(transfer)
        try:
            yield transfer
        finally:
            self._transfers.discard(transfer)
            transfer.over.set()

    @contextmanager
    def flushing(self, scope: FlushScope, *, groups: Sequence[str], server: str) -> Iterator[None]:
        """As long as it lasts, nothing of the scope is saved and nothing of it restored."""
        mine = _Scope(scope, groups, server)
        self._under_flush.append(mine)
        for transfer in self._transfers:
            transfer.is_flushed = transfer.is_flushed or mine.has(transfer.group, transfer.server)
        try:
            yield
        finally:
            self._under_flush.remove(mine)

    async def flush(self, scope: FlushScope, *, groups: Sequence[str], server: str) -> None:
        """Returns once nothing of the scope is on the disk, and nothing of it on its way into a slot. Raises as
        `Database.write`, OSError."""
        mine = _Scope(scope, groups, server)
        for transfer in [transfer for transfer in self._transfers if mine.has(transfer.group, transfer.server)]:
            await transfer.over.wait()
        await self._drop([row for row in self._rows.values() if mine.has(row.group, row.server)])

    async def _drop(self, rows: Sequence[ParkedSlot]) -> None:
        """Their files first: what has none is nothing."""
        if not rows:
            return
        for row in rows:
            if self._rows.get(row.agent) is row:
                del self._rows[row.agent]
            if row.agent not in self._rows:
                self._proxy_link.say(ParkedIs(agent=row.agent, server=row.server, there=False))
            await asyncio.to_thread(drop_file, row)
        await self._database.write(
            lambda conn: store.drop(conn, [row.agent for row in rows if row.agent not in self._rows])
        )

    async def _drop_quietly(self, rows: Sequence[ParkedSlot]) -> None:
        try:
            outcome = await outcome_of(self._drop(rows))
        except OSError as error:
            self._say_once("parked_file_not_removed", rows[0].agent, str(error))
        else:
            if isinstance(outcome, HiveError):
                self._say_once("parked_row_not_removed", rows[0].agent, outcome.message)

    def _say_once(self, event: str, agent: str, why: str) -> None:
        if (key := f"{event} {why[:60]}") not in self._said and len(self._said) < 100:
            self._said.add(key)
            log.warning("parking_failed what=%s agent=%s error=%r said_once=true", event, agent, why)

    async def close(self) -> None:
        """The daemon leaves."""
        self._is_leaving = True
        tasks = [*self._saving.values(), *self._restoring]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _saving(control: BackendControl, server: Any, slot: int, name: str) -> Any:
    save = spec_of(control.kind).asking.save_slot
    assert save is not None
    return save(server, slot, name)


def _too_large(most: int) -> str:
    return f"its slot is larger than llama_slots_max_mb = {most // MIB}"


async def _in_thread(work: Callable[[*_Args], _R], *args: *_Args) -> _R:
    """The result of blocking work, which is over when this is, cancelled or not."""
    return await _ended(asyncio.to_thread(work, *args))


async def _ended(work: Coroutine[Any, Any, _R]) -> _R:
    """The result of work that is over when this is, cancelled or not, and however often: a wake is several changes."""
    task, cancelled = spawn(_outcome(work), name="parking step"), None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
    found = task.result()
    if isinstance(found, Exception):
        raise found
    return found


async def _outcome(work: Coroutine[Any, Any, _R]) -> _R | Exception:
    try:
        return await work
    except Exception as error:  # raised where it is waited for
        return error
