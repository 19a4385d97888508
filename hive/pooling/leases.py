"""The leases of this box: the line, grants, ends, and what survives whom.

A lease is a claimant of the pool's decider, and once granted a holder, as a model's server is (pooled_lease.py). What
is held is written before it is given: a row of SQLite and the word of the helper are the truth for the next daemon.
Times to live are counted by the monotonic clock of this run of the machine, so that a clock that is set harms nobody.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

from hive.agents.transition_lock import outcome_of
from hive.audit.approval import Approval
from hive.audit.audit_log import AuditLog
from hive.domain import Role
from hive.errors import (
    BadRequest,
    DependencyDown,
    HiveError,
    LeaseTooLarge,
    LeaseWaited,
    LinkLost,
    NotFound,
    NotPermitted,
    NotSupported,
    StaleToken,
    WrongState,
)
from hive.host.process import boot_id, is_same_boot
from hive.link.leases import HolderState, LeaseGrant, LeaseHolder
from hive.link.slots import SlotProcess
from hive.pool.bound import waiting_bound
from hive.pool.lease_expected import expected_line, why_waiting
from hive.pool.lease_room import why_too_large
from hive.pool.line_order import lease_line
from hive.pool.moves import CloseSlot, LoadSlot, MakeRoom, Move, OpenSlot, RefuseWaiting, UnloadSlot
from hive.pool.state import PoolFacts, SlotFacts, SlotState
from hive.pooling.lease_counts import LeaseCounts
from hive.pooling.lease_mirror import LeaseMirror
from hive.pooling.lease_rows import as_asked, as_it_was, check_limits, is_free, nearest, row_of_holder, short
from hive.pooling.pooled_lease import LeaseState, PooledLease
from hive.settings.table import Settings
from hive.store import leases as store
from hive.store.database import Database
from hive.store.leases import StoredLease
from hive.store.live import Live
from hive.tasks import spawn

if TYPE_CHECKING:
    from hive.pooling.pooling import ModelPool

log = logging.getLogger("hive.pool")

COME_S = 30.0
"""A granted job comes to lease.sock within this, or its memory goes to the next."""
LEFT_S = 30.0
"""A lease that waits without anybody who reads of it leaves the line after this."""
SILENT_S = 10.0
"""Besides `COME_S`, until the daemon ends by itself what the helper says nothing of."""
AGAIN_S = 0.5
KNOWN_S = 10.0
"""An order is answered after this at the latest where the helper, or the memory, is not known."""
FIRST_WORD_S = 2.0
"""A lease that is granted at once is answered for so late at most: its row is written, and the helper asked."""
EXPECTED_OF = 20
"""Leases at the head of the line whose waits are reckoned; others are told their place."""
BOUND_OF = 5
"""Those whose bounds are: each one's has those of all before it in it."""


class LeaseHelper(Protocol):
    """The helper's verbs for leases (sandbox/client.py). Each raises LinkLost, TimedOut, or what it answered with."""

    async def lease_expect(self, grant: LeaseGrant, wait_s: float = 30.0) -> None: ...

    async def lease_end(self, id: str, why: str, *, grace_s: float) -> None: ...

    async def lease_forget(self, id: str) -> None: ...

    async def leases(self) -> dict[str, LeaseHolder]: ...


class PoolLeases:
    """Every lease that waits or is held, by id. Every method is called on the loop. `rows`: those of the last daemon.

    `why_off`: for which there are no leases here, empty where there may be.
    """

    def __init__(
        self,
        rows: Iterable[StoredLease],
        *,
        settings: Callable[[], Settings],
        database: Database,
        audit_log: AuditLog,
        helper: LeaseHelper,
        live: Live | None = None,
        why_off: str = "",
    ) -> None:
        self.counts = LeaseCounts()
        self.why_off = why_off
        self._settings = settings
        self._database = database
        self._audit_log = audit_log
        self._helper = helper
        self._mirror = LeaseMirror(live)
        self._boot = boot_id()
        self._is_closing = False
        self._is_wanted = 0
        """So many are being asked for, and are not in the line yet."""
        self._asking = asyncio.Lock()
        self._leases: dict[str, PooledLease] = {}
        self._strangers: dict[str, PooledLease] = {}
        """Leases of an earlier run of this machine: nothing of them is left but the row."""
        self.pool: ModelPool
        now = time.monotonic()
        for row in rows:
            lease = PooledLease(row, now)
            if is_same_boot(row.boot, self._boot):
                self._leases[lease.id] = lease
                as_it_was(lease)
            else:
                self._strangers[lease.id] = lease

    def __repr__(self) -> str:
        return f"<PoolLeases {len(self._leases)}>"

    def __iter__(self) -> Iterator[PooledLease]:
        return iter(self._living())

    def _living(self) -> list[PooledLease]:
        return [lease for lease in self._leases.values() if lease.state is not LeaseState.ENDED]

    def get(self, id: str) -> PooledLease | None:
        """One that waits or is held."""
        return self._leases.get(id)

    @property
    def grace_s(self) -> float:
        """The time between SIGTERM and SIGKILL of one that did not say."""
        return self._settings().lease.grace_s

    @property
    def has_any(self) -> bool:
        """Whether the pool has to decide about leases, now or soon."""
        return bool(self._leases or self._strangers or self._is_wanted)

    # for the pool -----------------------------------------------------------------------------------------------------

    def facts(self) -> tuple[SlotFacts, ...]:
        """All leases, as the decider sees them."""
        return tuple(lease.facts() for lease in self._leases.values())

    def did(self, move: Move, now: float) -> bool:
        """Takes a move of the decider that is about a lease alone. Whether it was."""
        if isinstance(move, MakeRoom):
            for leaving in move.claim.leaving:
                if (victim := self._leases.get(leaving.slot)) is not None and victim.slot_state is SlotState.READY:
                    victim.slot_state, victim.closed_at = SlotState.DRAINING, now
            return False
        lease = self._leases.get(getattr(move, "slot", ""))
        if lease is None:
            return False
        match move:
            case LoadSlot(grants=grants):
                lease.granted(grants, now)
                self._step(lease, self._begin(lease), "grant")
            case RefuseWaiting(why=why):
                self._leave_line(lease, why, LeaseTooLarge.code)
            case OpenSlot():
                lease.slot_state = SlotState.READY
            case CloseSlot():
                lease.slot_state, lease.closed_at = SlotState.DRAINING, now
            case UnloadSlot(why=why):
                self._audit_log.note("lease.preempted", target=lease.id, detail=self._detail(lease, reason=why))
                self.counts.preempted()
                self._end(lease, f"its memory is wanted: {why}", "lease_preempted")
            case _:
                return False
        return True

    @property
    def has_holders(self) -> bool:
        """Whether a process may hold a lease."""
        return any(lease.is_job and lease.grants for lease in self._leases.values())

    async def holders(self) -> dict[str, LeaseHolder]:
        """The helper's holders, where there may be some. Raises LinkLost."""
        return await self._helper.leases() if self.has_holders else {}

    def processes(self, holders: Mapping[str, LeaseHolder] | None = None) -> dict[str, SlotProcess]:
        """The processes of leases: to be measured with the models' servers. `holders`: the helper's last word."""
        for id, holder in (holders or {}).items():
            if (lease := self._leases.get(id)) is not None:
                lease.saw(holder)
        found = {lease.id: lease.process() for lease in self._leases.values()}
        return {id: process for id, process in found.items() if process is not None}

    def unseen(self) -> dict[str, dict[str, int]]:
        """Bytes by account of those whose processes nobody names: what is used beyond all others is taken for theirs,
        up to their charge. Overdue ones first: of what nobody can tell whose it is, nothing is given away."""
        overdue_first = sorted(self._leases.values(), key=lambda lease: lease.state is not LeaseState.OVERDUE)
        return {
            lease.id: {grant.account: grant.charged_bytes for grant in lease.grants}
            for lease in overdue_first
            if not lease.is_job and lease.grants and not lease.is_releasing
        }

    def overdue(self) -> list[str]:
        """Those whose time to live is over."""
        return [lease.id for lease in self._leases.values() if lease.state is LeaseState.OVERDUE]

    def measured(self, by_slot: Mapping[str, Mapping[str, int | None]]) -> None:
        """Takes the measurement of all leases: what one has more than its charge is booked, and told once."""
        for lease in list(self._leases.values()):
            lease.measured(dict(by_slot.get(lease.id, {})))
            if lease.is_job and lease.overrun_mb and not lease.is_over_told and lease.state is LeaseState.RUNNING:
                lease.is_over_told = True
                detail = self._detail(lease, used_mb=lease.used_mb, asked_mb=lease.row.mb)
                self._audit_log.note("lease.overrun", target=lease.id, detail=detail)
                log.warning("lease_overrun id=%s used_mb=%s asked_mb=%d", lease.id, lease.used_mb, lease.row.mb)
                self.counts.overran()
                if self._settings().lease.overrun == "end":
                    self._end(lease, f"it had {lease.used_mb} MiB of the {lease.row.mb} it asked for", "lease_overrun")
            if lease.state is LeaseState.OVERDUE and is_free(lease):
                self._release(lease, "its time to live was over, and its memory is free", "lease_over")

    def look_at_times(self, now: float, *, is_away: bool = False) -> float | None:
        """Does what time alone brings; when to look again, None if time alone changes nothing. `is_away`: the helper,
        or its word, is: nobody can come in, and nobody may have been able to read."""
        alarms: list[float] = []
        for lease in list(self._leases.values()):
            at = self._time_of(lease, now, is_away=is_away)
            if at is not None:
                alarms.append(max(at, now + 0.01))
        self._mirror.say(self._living(), now)
        return min(alarms, default=None)

    def _time_of(self, lease: PooledLease, now: float, *, is_away: bool) -> float | None:
        row = lease.row
        if lease.is_in_line:
            if row.wait_s and now >= row.asked_s + row.wait_s:
                self._leave_line(lease, f"it waited {row.wait_s:g} s", LeaseWaited.code)
                return None
            if is_away:
                lease.left_at = now
            if not lease.readers and now >= lease.left_at + LEFT_S:
                self._leave_line(lease, "nobody waits for it any more", "")
                return None
            gives_up = row.asked_s + row.wait_s if row.wait_s else now + LEFT_S
            return gives_up if lease.readers else min(gives_up, lease.left_at + LEFT_S)
        if lease.is_releasing or (is_away and lease.is_job):
            return None
        if lease.slot_state is SlotState.LOADING:
            nobody = lease.is_job and not lease.nonce and not lease.readers and now >= lease.left_at + LEFT_S
            ends_at = lease.moved_at + COME_S + SILENT_S if lease.state is LeaseState.GRANTED else None
            if nobody or (ends_at is not None and now >= ends_at):
                self._end(lease, "nobody came to hold it", "")
                return None
            return ends_at
        if lease.state is LeaseState.RUNNING and row.until_s is not None:
            if now < row.until_s:
                return row.until_s
            if lease.is_job:
                self._end(lease, f"its time of {row.max_s:g} s is over", "lease_over")
            else:
                self._overdue(lease)
        return None

    def tell(self, facts: PoolFacts, now: float) -> None:
        """Tells those who wait in line their place, what is before them, and how long it will take."""
        line = lease_line(facts)
        if not line:
            return
        expected = expected_line(facts, now, most=EXPECTED_OF)
        before: list[str] = []
        for place, slot in enumerate(line, start=1):
            lease = self._leases[slot.id]
            was = lease.place, lease.before, lease.why, lease.ready_in_s is None, lease.bound_s is None
            lease.place, lease.before = place, nearest(before)
            lease.bound_s = None
            lease.ready_in_s = expected.get(slot.id)
            if place <= BOUND_OF:
                lease.bound_s = waiting_bound(facts, slot.id, slot.waiting[0], now).seconds
            if place <= EXPECTED_OF:
                lease.why = why_waiting(facts, slot, before, now)
            before.append(short(lease))
            if was != (lease.place, lease.before, lease.why, lease.ready_in_s is None, lease.bound_s is None):
                lease.tell()

    async def adopt(self) -> dict[str, LeaseHolder]:
        """Puts right what an earlier daemon or helper left: to be called with every new link to the helper. The
        helper's word on all holders. Raises HiveError where that is not known."""
        for lease in list(self._strangers.values()):
            lease.keep(state=str(LeaseState.ENDED), ended_at=time.time(), why="the machine was started anew")
            if not isinstance(await outcome_of(self._written(lease)), HiveError):
                del self._strangers[lease.id]
        told = await outcome_of(self._helper.leases())
        if isinstance(told, HiveError) and not isinstance(told, BadRequest | NotPermitted | NotSupported):
            raise told  # one that is slow or fails still has them
        found = {} if isinstance(told, HiveError) else told  # a helper that is older than this daemon knows of none
        for lease in list(self._leases.values()):
            if lease.is_job and lease.grants and not lease.is_releasing:
                self._adopt(lease, found.get(lease.id))
            elif lease.is_releasing and lease.stepping is None:
                self._step(lease, self._free(lease), "free")
        for id, holder in found.items():
            if id not in self._leases:
                self._step_alone(self._adopt_stranger(holder), f"stranger {id}")
        return found

    def _adopt(self, lease: PooledLease, holder: LeaseHolder | None) -> None:
        if holder is None:
            if lease.stepping is not None:
                return  # its grant is on the way, or its end
            never_began = lease.state in (LeaseState.WAITING, LeaseState.GRANTED) and lease.holder is None
            lease.goes_back = never_began and lease.state is not LeaseState.ENDING
            self._release(lease, "its holder is gone", "")
            return
        lease.nonce = holder.grant.nonce if holder.grant is not None and holder.state is HolderState.EXPECTED else ""
        self.holder_moved(holder)
        if holder.state is HolderState.EXPECTED and lease.state is LeaseState.WAITING and lease.stepping is None:
            self._waits_for_program(lease)  # the daemon that granted it told nobody of that
        if lease.state is LeaseState.ENDING and holder.state in (HolderState.RUNNING, HolderState.EXPECTED):
            self._step(lease, self._end_at_helper(lease, lease.row.why), "end")

    async def _adopt_stranger(self, holder: LeaseHolder) -> None:
        """A holder of no lease that is known: a lease that has ended is ended there too; one that no row tells of, as
        the database is an older one, is booked."""
        row = await self._database.read(lambda conn: store.get(conn, holder.token))
        grant = holder.grant
        if holder.state is HolderState.ENDED:
            await outcome_of(self._helper.lease_forget(holder.id))
        elif row is not None or grant is None or holder.state is HolderState.EXPECTED:
            grace_s = self.grace_s if grant is None else grant.grace_s
            await outcome_of(self._helper.lease_end(holder.id, "its lease is over", grace_s=grace_s))
        else:
            row = row_of_holder(holder, grant, self._boot)
            await outcome_of(self._database.write(lambda conn: store.add(conn, row)))
            lease = self._leases[row.id] = PooledLease(row, time.monotonic())
            as_it_was(lease)
            log.warning("lease_of_no_row id=%s", row.id)
            self.holder_moved(holder)
            self.pool.wake()

    def holder_moved(self, holder: LeaseHolder) -> None:
        """The helper says that a holder has come, is being ended, or is gone."""
        lease = self._leases.get(holder.id)
        if lease is None and holder.state is HolderState.ENDED and not self._is_closing:
            self._step_alone(self._helper.lease_forget(holder.id), f"forget {holder.id}")
        if lease is None or self._is_closing or not lease.grants or lease.is_releasing:
            return
        lease.saw(holder)
        now = time.monotonic()
        match holder.state:
            case HolderState.RUNNING if lease.slot_state is SlotState.LOADING or lease.state is LeaseState.GRANTED:
                self._runs(lease, now - holder.age_s)
            case HolderState.ENDING if lease.state is not LeaseState.ENDING:
                self._ending(lease, holder.why or "it is being ended", "lease_over")
            case HolderState.ENDED:
                lease.goes_back = lease.state is LeaseState.WAITING
                self._release(lease, lease.row.why or holder.why or "its program has ended", lease.row.code)
        self.pool.wake()

    def close(self) -> list[asyncio.Task[None]]:
        """Ends what is under way; leases go on, for the next daemon."""
        self._is_closing = True
        tasks = [lease.stepping for lease in self._leases.values() if lease.stepping is not None]
        for task in tasks:
            task.cancel()
        return tasks

    # asking -----------------------------------------------------------------------------------------------------------

    async def ask(self, wanted: StoredLease, role: Role, approval: Approval) -> PooledLease:
        """A lease in line, or granted already; with `wait_s` 0 one that is granted. `wanted`: without token, boot and
        times. Raises LeaseTooLarge, NotPermitted, LeaseWaited, LinkLost, TooManyRequests, WrongState where there are
        none here, and as `Approval.burn`."""
        if self.why_off:
            raise WrongState(f"there are no leases here: {self.why_off}")
        self._is_wanted += 1
        try:
            self.pool.wake()
            await self._known()
            async with self._asking:  # of two at the same time the second one counts the first
                own = [lease.row for lease in self._living() if lease.row.actor == wanted.actor]
                check_limits(wanted, own, self._settings().lease, role)
                lease = await self._put_in_line(wanted, role, approval)
        finally:
            self._is_wanted -= 1
        self.pool.wake()
        await self._first_word(lease)
        return lease

    async def _put_in_line(self, wanted: StoredLease, role: Role, approval: Approval) -> PooledLease:
        now = time.monotonic()
        row = as_asked(wanted, self._settings(), self._boot, now, role)
        lease = PooledLease(row, now)
        if why := why_too_large(self.pool.facts(now), lease.facts()):
            raise LeaseTooLarge(why, hint="--preemptible or --all, if the share of leases is in the way; hive pool")

        def work(conn: sqlite3.Connection) -> int:
            approval.burn(conn)
            return store.add(conn, row)

        token = await self._database.write(work)
        lease.keep(token=token)
        self._leases[lease.id] = lease
        return lease

    async def _known(self) -> None:
        try:
            async with asyncio.timeout(KNOWN_S):
                await self.pool.adopted()
        except TimeoutError:
            raise LinkLost("the helper is not connected") from None
        if not self.pool.reading.accounts:
            raise DependencyDown(self.pool.reading.why_not or "no memory is known to be leased")

    async def _first_word(self, lease: PooledLease) -> None:
        """Returns after a decision about it. Raises LeaseWaited where it does not wait and got nothing."""
        with suppress(TimeoutError):  # while the helper is away nothing is decided
            async with asyncio.timeout(KNOWN_S):
                await self.pool.passed()
        if lease.is_in_line and not lease.row.wait_s:
            self._leave_line(lease, "there is no room for it now", LeaseWaited.code)
        until = time.monotonic() + FIRST_WORD_S
        while lease.state is LeaseState.WAITING and not lease.is_in_line and time.monotonic() < until:
            await self.wait(lease, FIRST_WORD_S)
        if lease.row.wait_s:
            return
        if lease.state is LeaseState.WAITING:
            self._end(lease, "it was not granted at once", LeaseWaited.code)
            raise LeaseWaited("it was not granted at once")
        if lease.state is LeaseState.ENDED:
            raise LeaseWaited(lease.why or "there is no room for it now")

    async def wait(self, lease: PooledLease, within_s: float) -> None:
        """Returns once there is news of it, or after `within_s`."""
        changed = lease.changed
        try:
            async with asyncio.timeout(within_s):
                await changed.wait()
        except TimeoutError:
            return

    def read(self, lease: PooledLease, by: int) -> None:
        """Another reader waits for news of it, or leaves."""
        lease.readers += by
        lease.left_at = time.monotonic()
        self.pool.wake()

    def find(self, id: str) -> PooledLease:
        """Raises NotFound."""
        if (lease := self._leases.get(id)) is not None and lease.state is not LeaseState.ENDED:
            return lease
        raise NotFound(f"there is no lease {id[:40]!r} that waits or is held", hint="hive lease list --ended 20")

    async def ended(self, id: str) -> StoredLease | None:
        """The row of a lease that has ended; None where there is none."""
        number = id.removeprefix("l-")
        if not number.isdigit() or len(number) > 15:
            return None
        return await self._database.read(lambda conn: store.get(conn, int(number)))

    async def all_ended(self, limit: int) -> list[StoredLease]:
        """The last that have ended."""
        return await self._database.read(lambda conn: store.ended(conn, limit))

    async def _owned(self, id: str, token: int | None, actor: str, role: Role) -> PooledLease:
        """Raises NotFound, NotPermitted for somebody else's, StaleToken for one that is over."""
        is_living = id in {lease.id for lease in self._living()}
        if not is_living and id == f"l-{token}" and (id in self._leases or await self.ended(id) is not None):
            raise StaleToken(f"lease {id} is over")
        lease = self.find(id)
        if actor != lease.row.actor and role is not Role.ADMIN:
            raise NotPermitted(f"{lease.id} is not yours", hint="an operator ends it: hive lease end")
        if token != lease.row.token:
            raise StaleToken(f"{token} is not the token of {lease.id}")
        return lease

    async def renew(self, id: str, token: int, ttl_s: float | None, actor: str, role: Role) -> PooledLease:
        """Lets a held lease live for another `ttl_s`, an overdue one too. Raises NotFound, NotPermitted, StaleToken,
        WrongState for a job, which needs no renewal, and for one that ends."""
        lease = await self._owned(id, token, actor, role)
        if lease.is_job:
            raise WrongState(f"{lease.id} is held by its program, and needs no renewal")
        if lease.state not in (LeaseState.RUNNING, LeaseState.OVERDUE):
            raise WrongState(f"{lease.id} is {lease.state}: {lease.why}")
        ttl_s = ttl_s or lease.row.ttl_s or 0.0
        until = time.monotonic() + ttl_s
        if lease.ends_at is not None:
            until = min(until, lease.ends_at)
        if until <= time.monotonic():
            raise StaleToken(f"the longest time of {lease.id} is over")
        lease.state, lease.why = LeaseState.RUNNING, "it is held"
        lease.keep(ttl_s=ttl_s, until_s=until, state=str(LeaseState.RUNNING))
        self.pool.wake()
        await self._written(lease)
        return lease

    async def release(self, id: str, token: int, actor: str, role: Role) -> PooledLease:
        """Its holder gives it back, or leaves the line. Raises NotFound, NotPermitted, StaleToken."""
        lease = await self._owned(id, token, actor, role)
        self._end(lease, "its holder gave it back", "")
        return lease

    async def end(self, id: str, actor: str, approval: Approval) -> PooledLease:
        """An operator ends it. Raises NotFound, and as `Approval.burn`."""
        lease = self.find(id)
        await self._database.write(approval.burn)
        if lease.state is not LeaseState.ENDED:  # it may have ended meanwhile: what was asked for is so
            self._end(lease, f"ended by {actor}", "lease_ended")
        return lease

    # steps ------------------------------------------------------------------------------------------------------------

    def _step(self, lease: PooledLease, work: Coroutine[Any, Any, None], name: str) -> None:
        if lease.stepping is not None:
            lease.stepping.cancel()
        lease.stepping = task = spawn(self._carried_out(lease, work), name=f"{name} {lease.id}")
        task.add_done_callback(lambda done: _stepped(lease, done))

    def _step_alone(self, work: Coroutine[Any, Any, None], name: str) -> None:
        spawn(outcome_of(work), name=name)

    async def _carried_out(self, lease: PooledLease, work: Coroutine[Any, Any, None]) -> None:
        """Does a step. After a fault in it the lease is released: nothing stays charged for ever."""
        try:
            await work
        except HiveError as error:
            log.error("lease_step_failed id=%s error=%s", lease.id, error.message)
            self._failed(lease, error.message)
        except Exception as error:
            log.exception("lease_step_failed id=%s", lease.id)
            self._failed(lease, f"{type(error).__name__}: {error}")
        self.pool.wake()

    def _failed(self, lease: PooledLease, why: str) -> None:
        if lease.slot_state is SlotState.LOADING and not lease.is_releasing:
            asyncio.get_running_loop().call_soon(self._release, lease, why, HiveError.code)

    async def _begin(self, lease: PooledLease) -> None:
        """The row, then the helper, then its asker: in this order nothing is held that nobody would know of."""
        now = time.monotonic()
        until = None
        if not lease.is_job:
            until = now + (lease.row.ttl_s or 0.0)
            if lease.row.max_s is not None:
                until = min(until, now + lease.row.max_s)
        lease.keep(state=str(LeaseState.GRANTED), granted_s=now, granted_at=time.time(), until_s=until)
        await self._written(lease)
        if lease.is_job:
            grant = lease.grant_for_helper()
            while True:
                try:
                    await self._helper.lease_expect(grant, wait_s=COME_S)
                    break
                except LinkLost:
                    await asyncio.sleep(AGAIN_S)
        self.counts.granted(lease.row.kind, now - lease.row.asked_s)
        self._audit_log.note("lease.granted", target=lease.id, detail=self._detail(lease))
        log.info("lease_granted id=%s accounts=%s waited_s=%.1f", lease.id, lease.row.accounts, now - lease.row.asked_s)
        if lease.is_job:
            if lease.slot_state is SlotState.LOADING:
                self._waits_for_program(lease)
        else:
            self._runs(lease, now)
        self._mirror.soon()
        lease.tell()

    @staticmethod
    def _waits_for_program(lease: PooledLease) -> None:
        """The helper expects its holder, which may have heard of it only now."""
        lease.state, lease.why, lease.place = LeaseState.GRANTED, "its program is waited for", None
        lease.moved_at = time.monotonic()
        lease.tell()

    def _runs(self, lease: PooledLease, since: float) -> None:
        """Its holder is there."""
        lease.state, lease.slot_state, lease.why, lease.place = LeaseState.RUNNING, SlotState.READY, "it is held", None
        lease.nonce = ""
        until = lease.row.until_s
        if lease.is_job:
            until = None if lease.row.max_s is None else since + lease.row.max_s
        lease.keep(state=str(LeaseState.RUNNING), granted_s=since, until_s=until)
        if lease.is_job:
            self._step_alone(self._written(lease), f"keep {lease.id}")
        lease.tell()

    def _end(self, lease: PooledLease, why: str, code: str) -> None:
        """Ends a lease, whatever it is doing: one in line leaves it, a program is told to end, what is held by none of
        ours counts as given back."""
        if lease.is_in_line:
            self._leave_line(lease, why, code)
        elif lease.is_releasing:
            if lease.goes_back:  # it would wait again
                lease.goes_back, lease.state, lease.why = False, LeaseState.ENDING, why
                lease.keep(why=why, code=code)
                lease.tell()
        elif lease.state is LeaseState.ENDING and lease.is_job:
            return
        elif lease.is_job:
            self._ending(lease, why, code)
            self._step(lease, self._end_at_helper(lease, why), "end")
        else:
            self._release(lease, why, code)

    def _ending(self, lease: PooledLease, why: str, code: str) -> None:
        now = time.monotonic()
        lease.state, lease.slot_state, lease.moved_at, lease.why = LeaseState.ENDING, SlotState.STOPPING, now, why
        lease.keep(state=str(LeaseState.ENDING), why=why, code=code)
        lease.tell()
        self.pool.wake()

    async def _end_at_helper(self, lease: PooledLease, why: str) -> None:
        """The helper ends its holder; `holder_moved` tells when that is done."""
        await outcome_of(self._written(lease))
        while True:
            try:
                await self._helper.lease_end(lease.id, why, grace_s=lease.row.grace_s)
                holder = (await self._helper.leases()).get(lease.id)
                break
            except LinkLost:
                await asyncio.sleep(AGAIN_S)
        if holder is None or holder.state is HolderState.ENDED:
            asyncio.get_running_loop().call_soon(self._release, lease, why, lease.row.code)

    def _overdue(self, lease: PooledLease) -> None:
        lease.state = LeaseState.OVERDUE
        lease.why = "its time to live is over; its memory is given to nobody until it is seen to be free"
        lease.keep(state=str(LeaseState.OVERDUE))
        self.counts.was_overdue()
        self._audit_log.note("lease.overdue", target=lease.id, detail=self._detail(lease))
        log.warning("lease_overdue id=%s", lease.id)
        self._step_alone(self._written(lease), f"keep {lease.id}")
        lease.tell()

    def _leave_line(self, lease: PooledLease, why: str, code: str) -> None:
        self._over(lease, why, code)
        self._step_alone(self._forget(lease), f"keep {lease.id}")

    def _release(self, lease: PooledLease, why: str, code: str) -> None:
        """Nobody holds it any more: its memory is waited for, then it is over."""
        if lease.is_releasing:
            return
        lease.is_releasing = True
        lease.state = LeaseState.WAITING if lease.goes_back else LeaseState.ENDING
        lease.slot_state, lease.moved_at = SlotState.STOPPING, time.monotonic()
        lease.why = why
        lease.keep(why=why, code=code)
        lease.tell()
        self._step(lease, self._free(lease), "free")
        self.pool.wake()

    async def _free(self, lease: PooledLease) -> None:
        await self.pool.steps.until_back(lease)
        if lease.is_job:
            await outcome_of(self._helper.lease_forget(lease.id))
        if lease.goes_back:
            lease.back_in_line(time.monotonic())
            lease.tell()
            await self._written(lease)
            return
        self._over(lease, lease.row.why, lease.row.code)
        await self._forget(lease)

    async def _forget(self, lease: PooledLease) -> None:
        """It is known here until its row says that it is over."""
        await outcome_of(self._written(lease))
        self._leases.pop(lease.id, None)

    def _over(self, lease: PooledLease, why: str, code: str) -> None:
        """It is over, and in no books."""
        now = time.monotonic()
        had = lease.row.granted_s is not None
        lease.state, lease.slot_state, lease.grants, lease.why = LeaseState.ENDED, SlotState.COLD, (), why
        lease.place, lease.nonce = None, ""
        lease.keep(state=str(LeaseState.ENDED), ended_at=time.time(), why=why, code=code)
        self.counts.ended(code)
        seconds = now - (lease.row.granted_s if lease.row.granted_s is not None else lease.row.asked_s)
        about = {"held_s": round(seconds, 1)} if had else {"waited_s": round(seconds, 1)}
        self._audit_log.note("lease.ended", target=lease.id, detail=self._detail(lease, reason=why, **about))
        log.info("lease_ended id=%s why=%s", lease.id, why)
        if had:
            self._mirror.drop(lease.id)
        lease.tell()
        self.pool.wake()

    async def _written(self, lease: PooledLease) -> None:
        """Raises as `Database.write` does."""
        row = lease.row
        if row.token:
            await self._database.write(lambda conn: store.update(conn, row))

    def _detail(self, lease: PooledLease, **more: object) -> dict[str, Any]:
        row = lease.row
        accounts = ", ".join(sorted(row.accounts))
        return {"name": row.label or lease.id, "user": row.actor, "mb": row.mb, "accounts": accounts, **more}


def _stepped(lease: PooledLease, done: asyncio.Task[None]) -> None:
    if lease.stepping is done:
        lease.stepping = None
