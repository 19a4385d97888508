"""The holders of leases that one helper knows: let in at lease.sock, watched, ended for the daemon, and told to it.

The daemon says which lease may be entered by whom, and which one ends; it never says a pid. A process becomes a holder
by what the kernel tells of its connection (lease_socket.py), and an order touches the processes of that lease only.
Nothing is decided here but what the grant says: who came too late, whose time is over.
"""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

from hive.errors import BadRequest, HiveError, NotFound, NotPermitted, NotSupported, WrongState
from hive.holders import gpu_limit
from hive.holders.hold import Hold, HolderPlaces, is_in, turn_out
from hive.holders.lease_grants import check_grace, check_lease, check_lease_id, one_line_of
from hive.holders.lease_life import HolderAct, due
from hive.holders.lease_socket import Admitted, LeaseCaller, LeaseSocket
from hive.holders.records import HolderPlace, HolderRecord, HolderRecords
from hive.holders.terminals import tell_terminal
from hive.host.cgroup import find_mount, state_label
from hive.host.process import boot_id, is_same_boot
from hive.link.leases import (
    AskLeases,
    HolderState,
    LeaseEnd,
    LeaseExpect,
    LeaseForget,
    LeaseGrant,
    LeaseHolder,
    LeasesHeld,
)
from hive.link.message import LinkMessage
from hive.link.messages import Done
from hive.settings.table import Paths
from hive.tasks import spawn

log = logging.getLogger("hive.sandbox")

VERBS: frozenset[type[LinkMessage]] = frozenset({LeaseExpect, LeaseEnd, LeaseForget, AskLeases})
MARK = "HIVE_LEASE_MARK"
KILL_AGAIN_S = 0.2
"""Between kills of what does not end: one may have forked meanwhile, another hangs in the kernel."""
WATCH_AGAIN_S = 1.0
"""After a fault of what watches for its end, which is no end."""
NOT_KILLED_S = 10.0
"""From SIGKILL until it is told that a process lives all the same."""

TellHolder = Callable[[LeaseHolder], None]
TellEntry = Callable[[str, LeaseCaller, str], None]
"""(lease, caller, `ok` or the code of the refusal): one line of the audit for each that showed a nonce."""


def _now() -> float:
    """Seconds since the boot, which nobody sets back, and which go on in a suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class HeldLease:
    """One lease, from its grant until the daemon has booked its end."""

    def __init__(self, record: HolderRecord) -> None:
        self.record = record
        self.hold: Hold | None = None
        self.changed = asyncio.Event()
        self.life: asyncio.Task[None] | None = None
        self.is_entering = False
        self.bytes: int | None = None
        self.pids: list[int] = []

    def __repr__(self) -> str:
        return f"<HeldLease {self.id} {self.record.state}>"

    @property
    def id(self) -> str:
        return self.record.grant.id

    async def seen(self) -> LeaseHolder:
        """The holder now; as it was last seen where it cannot be looked at."""
        if self.hold is not None:
            try:
                self.pids, self.bytes = await self.hold.look()
            except (HiveError, OSError, ValueError) as error:
                log.warning("lease_not_looked_at id=%s error=%s", self.id, error)
        return self.told()

    def told(self) -> LeaseHolder:
        """The holder as it was last seen."""
        record, is_over = self.record, self.record.state is HolderState.ENDED
        is_in = record.state in (HolderState.RUNNING, HolderState.ENDING) and record.main is not None
        return LeaseHolder(
            id=self.id,
            token=record.grant.token,
            state=record.state,
            grant=record.grant,
            pid=record.main.pid if is_in and record.main is not None else 0,
            pids=[] if is_over else self.pids,
            age_s=0.0 if record.since is None else max(0.0, _now() - record.since),
            bytes=None if is_over else self.bytes,
            enforced=record.enforced,
            held_by="" if record.place is None else record.place.held_by,
            why=record.why,
        )


class LeaseHolders:
    """All leases that one helper knows. `open` before its first message, `close` when it leaves."""

    def __init__(
        self,
        paths: Paths,
        places: Sequence[HolderPlaces],
        *,
        group: int | None = None,
        services: frozenset[int] = frozenset(),
    ) -> None:
        """`places`: ways to hold, the best first. `group`: of the people that may come in, None for this user alone.
        `services`: uids of Hive's own services, none of which may come in: it would leave the unit that bounds it.
        """
        self._paths = paths
        self._places = places
        self._group = group
        self._services = services
        self._label = state_label(paths.state)
        self._records = HolderRecords(paths.lease_records)
        self._held: dict[str, HeldLease] = {}
        self._tell: TellHolder = lambda _: None
        self._tell_entry: TellEntry = lambda *_: None
        self._socket: LeaseSocket

    def __repr__(self) -> str:
        return f"<LeaseHolders {list(self._held.values())}>"

    async def open(self, tell: TellHolder, tell_entry: TellEntry) -> None:
        """Takes over what an earlier helper knew, then listens. Raises OSError."""
        self._tell, self._tell_entry = tell, tell_entry
        for record in self._records.load().values():
            self._adopt(record)
        self._socket = LeaseSocket(self._paths.lease_socket, group=self._group, admit=self._admit)

    def close(self) -> None:
        """The helper leaves; holders go on."""
        self._socket.close()
        for held in self._held.values():
            if held.life is not None:
                held.life.cancel()
            if held.hold is not None:
                held.hold.let_go()

    def do(self, message: LinkMessage) -> LinkMessage | Coroutine[Any, Any, LinkMessage]:
        """Carries out one of VERBS."""
        match message:
            case LeaseExpect(grant=grant, wait_s=wait_s):
                check_lease(grant, wait_s)
                return self._expect(grant, wait_s)
            case LeaseEnd(id=id, why=why, grace_s=grace_s):
                check_lease_id(id)
                check_grace(grace_s)
                if (held := self._held.get(id)) is not None:
                    self._end(held, one_line_of(why), grace_s)
                return Done()
            case LeaseForget(id=id):
                check_lease_id(id)
                return self._forget(id)
            case AskLeases():
                return self._all()
        raise BadRequest(f"{type(message).__name__} is not about a lease")

    # --- verbs ---------------------------------------------------------------------------------------------------

    def _expect(self, grant: LeaseGrant, wait_s: float) -> Done:
        held = self._held.get(grant.id)
        if held is not None and (held.record.state is not HolderState.EXPECTED or held.is_entering):
            raise WrongState(f"lease {grant.id} is {held.record.state}: nobody is let in any more")
        record = HolderRecord(
            grant=grant,
            state=HolderState.EXPECTED,
            mark=f"{MARK}={self._label}.{grant.id}.{secrets.token_hex(8)}",
            boot=boot_id(),
            enter_until=_now() + wait_s,
        )
        self._records.save(record)
        if held is None:
            self._live(HeldLease(record))
        else:
            held.record = record
            held.changed.set()
        return Done()

    def _forget(self, id: str) -> Done:
        held = self._held.get(id)
        if held is not None:
            if held.record.state is not HolderState.ENDED:
                raise WrongState(f"lease {id} is {held.record.state}, and has not ended")
            del self._held[id]
        self._records.remove(id)
        return Done()

    async def _all(self) -> LeasesHeld:
        return LeasesHeld(holders=list(await asyncio.gather(*(held.seen() for held in self._held.values()))))

    def _end(self, held: HeldLease, why: str, grace_s: float) -> None:
        """SIGTERM to all of it now, SIGKILL after the grace; of two orders the nearer one holds."""
        record = held.record
        if record.state is HolderState.ENDED:
            return
        if record.state is HolderState.EXPECTED and not held.is_entering:
            self._ended(held, why)
            held.changed.set()
            return
        kill_at = _now() + grace_s
        is_first = record.kill_at is None
        record.kill_at = kill_at if record.kill_at is None else min(record.kill_at, kill_at)
        record.why = record.why or why
        if held.is_entering:
            return  # as soon as it is in
        record.state = HolderState.ENDING
        self._save(held)
        if is_first:
            self._terminate(held)
        held.changed.set()

    def _terminate(self, held: HeldLease) -> None:
        record = held.record
        left_s = max(0.0, (record.kill_at or 0.0) - _now())
        log.info("lease_ending id=%s grace_s=%.0f why='%s'", held.id, left_s, record.why)
        if record.main is not None:
            tell_terminal(
                record.main, record.grant.uid, f"hive: lease {held.id} ends within {left_s:.0f} s: {record.why}"
            )
        if held.hold is not None:
            held.hold.terminate()
        self._tell(held.told())

    # --- coming in -----------------------------------------------------------------------------------------------

    async def _admit(self, caller: LeaseCaller) -> Admitted:
        held = self._granted_by(caller.nonce)
        id = "-" if held is None else held.id
        try:
            if held is None:
                raise NotFound("no lease waits for this nonce", hint="it is valid once, for some seconds")
            admitted = await self._let_in(held, caller)
        except HiveError as error:
            log.warning("lease_refused id=%s pid=%d uid=%d error=%s", id, caller.main.pid, caller.uid, error.message)
            self._tell_entry(id, caller, error.code)
            raise
        self._tell_entry(id, caller, "ok")
        return admitted

    def _granted_by(self, nonce: str) -> HeldLease | None:
        shown = nonce.encode(errors="replace")
        found = [held for held in self._held.values() if hmac.compare_digest(held.record.grant.nonce.encode(), shown)]
        return found[0] if found else None

    async def _let_in(self, held: HeldLease, caller: LeaseCaller) -> Admitted:
        """The process that came in may ask again, where the answer was lost with an earlier helper."""
        record = held.record
        if caller.uid in self._services:
            raise NotPermitted("a service of Hive holds no lease")
        if caller.uid != record.grant.uid:
            raise NotPermitted(f"lease {held.id} was granted to uid {record.grant.uid}, not to {caller.uid}")
        if record.state is HolderState.RUNNING and record.main == caller.main:
            return _admitted(held)
        if record.state is HolderState.ENDED:
            raise WrongState(f"lease {held.id} is over: {record.why or 'its program has ended'}")
        if record.state is not HolderState.EXPECTED or held.is_entering:
            raise NotPermitted(f"the nonce of lease {held.id} was used already")
        if _now() > record.enter_until:
            raise NotPermitted(f"the nonce of lease {held.id} came too late")
        held.is_entering = True
        try:
            await self._enter(held, caller)
        finally:
            held.is_entering = False
            held.changed.set()
        return _admitted(held)

    async def _enter(self, held: HeldLease, caller: LeaseCaller) -> None:
        """Writes down who comes in and how, moves it, and looks whether it was the one that was moved."""
        record, main = held.record, caller.main
        record.main = main
        try:
            hold = await self._placed(held)
        except HiveError:
            self._not_in(held)
            raise
        if not main.is_alive():
            if record.place is not None and record.place.group:
                turn_out(Path(record.place.group), main)
            self._not_in(held)
            raise NotPermitted("the process that connected has ended")
        held.hold = hold
        record.since = _now()
        record.enforced = self._bounded(record)
        record.state = HolderState.RUNNING if record.kill_at is None else HolderState.ENDING
        self._save(held)
        log.info("lease_entered id=%s pid=%d uid=%d held_by=%s", held.id, main.pid, caller.uid, _held_by(record))
        await held.seen()
        if record.state is HolderState.ENDING:
            self._terminate(held)
        else:
            self._tell(held.told())

    async def _placed(self, held: HeldLease) -> Hold:
        """Its hold, by the best way that does. Raises HiveError."""
        record, main = held.record, held.record.main
        assert main is not None
        why = NotSupported("there is no way to hold its processes")
        for places in self._places:
            try:
                record.place = places.plan(held.id, main)
                self._records.save(record)
                record.place = await places.enter(held.id, record.place, main)
            except NotSupported as error:
                why = error
                continue
            return places.hold(record.place, main, record.mark)
        raise why

    def _not_in(self, held: HeldLease) -> None:
        """Its caller was not let in; it may come again until its time is over. An order to end it holds."""
        record = held.record
        record.main = record.place = None
        self._save(held)
        if record.kill_at is not None:
            self._ended(held, record.why)

    @staticmethod
    def _bounded(record: HolderRecord) -> str:
        mount = find_mount(Path("/proc/self/mounts").read_text())
        if mount is None or record.place is None or not record.place.group:
            return ""
        return gpu_limit.bound(Path(record.place.group), record.grant.accounts, root=mount)

    # --- its life ------------------------------------------------------------------------------------------------

    def _live(self, held: HeldLease) -> None:
        self._held[held.id] = held
        held.life = spawn(self._lives(held), name="lease")

    async def _lives(self, held: HeldLease) -> None:
        """Does what is due until its end: the only place that ends one by the clock."""
        over: asyncio.Task[None] | None = None
        try:
            while held.record.state is not HolderState.ENDED:
                if over is None and held.hold is not None:
                    over = spawn(held.hold.over(), name="lease over")
                if over is not None and over.done():
                    if (fault := over.exception()) is None:
                        self._ended(held, held.record.why)
                        return
                    log.error("lease_not_watched id=%s error=%s: %s", held.id, type(fault).__name__, fault)
                    over = None
                    await asyncio.sleep(WATCH_AGAIN_S)
                    continue
                held.changed.clear()
                act, in_s = (None, 0.0) if held.is_entering else due(held.record, _now())
                if act is not None and in_s == 0.0:
                    await self._act(held, act, over)
                    continue
                await self._moment(held, over, in_s if act is not None else None)
        finally:
            if over is not None:
                over.cancel()

    @staticmethod
    async def _moment(held: HeldLease, over: asyncio.Task[None] | None, limit_s: float | None) -> None:
        """Waits for a change, for its end, or for `limit_s`."""
        changed = spawn(held.changed.wait(), name="lease changed")
        try:
            await asyncio.wait(
                {changed, *([over] if over is not None else [])},
                timeout=limit_s,
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            changed.cancel()

    async def _act(self, held: HeldLease, act: HolderAct, over: asyncio.Task[None] | None) -> None:
        record = held.record
        match act:
            case HolderAct.EXPIRE:
                self._ended(held, "nobody came for it in time")
            case HolderAct.END:
                self._end(held, f"its time of {record.grant.max_s:g} s is over", record.grant.grace_s)
            case HolderAct.KILL if held.hold is not None:
                if record.kill_at is not None and _now() - record.kill_at > NOT_KILLED_S:
                    log.error("lease_not_killed id=%s pids=%s", held.id, held.hold.pids())
                    record.kill_at = _now()
                held.hold.kill()
                await self._moment(held, over, KILL_AGAIN_S)
            case _:  # nothing is left that could be killed
                self._ended(held, record.why)

    def _ended(self, held: HeldLease, why: str) -> None:
        record = held.record
        record.state, record.why = HolderState.ENDED, why
        if held.hold is not None:
            held.hold.remove()
            held.hold = None
        self._save(held)
        log.info("lease_ended id=%s why='%s'", held.id, why)
        self._tell(held.told())

    def _save(self, held: HeldLease) -> None:
        try:
            self._records.save(held.record)
        except HiveError as error:  # what runs goes on; the next helper knows it as it was written last
            log.error("lease_record_not_written id=%s error=%s", held.id, error.message)

    # --- what an earlier helper knew -----------------------------------------------------------------------------

    def _adopt(self, record: HolderRecord) -> None:
        """Knows a lease again. One that was being entered is in if its process is where it was to be."""
        held = HeldLease(record)
        self._held[held.id] = held
        if record.state is HolderState.ENDED:
            return
        if not is_same_boot(record.boot, boot_id()):
            self._ended(held, "the machine was started anew")
            return
        if record.state is HolderState.EXPECTED and not self._has_entered(held):
            self._live(held)
            return
        place, main = record.place, record.main
        assert place is not None
        assert main is not None
        held.hold = self._places_of(place).hold(place, main, record.mark)
        if record.state is HolderState.EXPECTED:
            record.since, record.enforced = _now(), self._bounded(record)
            record.state = HolderState.RUNNING
            self._save(held)
        held.pids = held.hold.pids()
        log.info("lease_adopted id=%s state=%s pid=%d held_by=%s", held.id, record.state, main.pid, place.held_by)
        if record.state is HolderState.ENDING:
            held.hold.terminate()  # the other one may have been killed before it did
        self._live(held)

    def _has_entered(self, held: HeldLease) -> bool:
        """Whether the process that was coming in is where it was to be; else nobody is, and it may come again."""
        record = held.record
        if record.main is None or record.place is None:
            return False
        if record.main.is_alive() and (not record.place.group or is_in(Path(record.place.group), record.main)):
            return True
        record.main = record.place = None
        self._save(held)
        return False

    def _places_of(self, place: HolderPlace) -> HolderPlaces:
        """The way that holds it, also where this helper would take another one for a new one."""
        return next((one for one in self._places if one.holds == place.held_by), self._places[-1])


def _held_by(record: HolderRecord) -> str:
    return "" if record.place is None else record.place.held_by


def _admitted(held: HeldLease) -> Admitted:
    name, _, value = held.record.mark.partition("=")
    return Admitted(held.id, held.record.enforced, _held_by(held.record), {name: value})


def id_in_lease(message: LinkMessage) -> str:
    """The lease that one of VERBS is about; `-` for all of them."""
    return message.grant.id if isinstance(message, LeaseExpect) else str(getattr(message, "id", "-"))
