"""The journal of transitions: each is written to the audit table with its record, published, and told to listeners."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from hive.agents.transition_lock import outcome_of
from hive.audit.actors import origin_of, user_of
from hive.audit.feed import Event, Events, Feed
from hive.audit.refusals import RefusalCounter
from hive.audit.shielded import carried_through
from hive.domain import Agent, AgentStatus
from hive.errors import HiveError
from hive.store import acts, anchors, audit, explain
from hive.store.acts import acts_of
from hive.store.anchors import anchors_of
from hive.store.audit import AuditEntry, AuditRecord, Filter
from hive.store.chain import START, Head
from hive.store.channels import AgentChanged, SystemEvent
from hive.store.database import Database
from hive.store.live import Live
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

UNWRITTEN_MAX = 10_000
"""Rows kept while the disk is full; beyond it the oldest are gone."""

PRUNE_S = 3600.0
WRITTEN_SOON_S = 2.0
"""Longest wait of somebody who only looks: a database that another program has locked is waited for by who writes."""
WRITE_S = 5.0
"""So long a row that nothing else takes along may wait, and so long an act of the `hive` command."""

ANCHOR_EVERY = 100
"""Rows between two heads of the chain that are noted outside the database."""


def event_of(row: AuditRecord) -> Event:
    """The event a row of the audit table is: `{"at", "kind", "agent", "actor", "outcome", …detail}`.

    A transition's detail is `{"name", "from", "to", "generation", "reason"}`.
    """
    return {"at": row.at, "kind": row.act, "agent": row.target, "actor": row.actor, "outcome": row.outcome} | row.detail


def event_row(act: str, *, target: str, actor: str, detail: dict[str, Any]) -> AuditRecord:
    """The row of an event that is no transition, as of now."""
    return AuditRecord(
        at=time.time(), actor=actor, act=act, target=target, origin=origin_of(actor), detail=detail | user_of(actor)
    )


def transition_of(before: Agent, after: Agent, actor: str) -> AuditRecord:
    """The row of one transition. A pause that ended awake is `agent.stayed_awake`, not another `agent.running`."""
    act = f"agent.{after.status}"
    if before.status is AgentStatus.PAUSING and after.status is AgentStatus.RUNNING:
        act = "agent.stayed_awake"
    return AuditRecord(
        at=after.since,
        actor=actor,
        act=act,
        target=after.id,
        origin=origin_of(actor),
        detail={
            "name": after.name,
            "from": str(before.status),
            "to": str(after.status),
            "generation": after.generation,
            "reason": after.reason,
        }
        | user_of(actor),
    )


def _pruning(to: Head, now: float, orders_from: int) -> Callable[[sqlite3.Connection], int]:
    return lambda conn: audit.prune(conn, to, now=now, orders_from=orders_from)


class AuditLog:
    """`changed` and `note` never wait and never fail; rows are written with a record (`take`), by `record` or `flush`.

    The chain's head is noted in a file beside the database and in the log: every ANCHOR_EVERY rows, at the start and at
    the end, and before the oldest rows go. What the `hive` command did without a daemon is taken in (hive.store.acts).
    """

    def __init__(self, database: Database, live: Live) -> None:
        self._database = database
        self._live = live
        self._events = Events()
        self._unwritten: deque[AuditRecord] = deque()
        self._refusals = RefusalCounter()
        self._acts = acts_of(database.path)
        self._anchors = anchors_of(database.path)
        self._anchored = START
        self._noting = asyncio.Lock()
        """Held for each write to the file of the anchors."""
        self._taking_in = asyncio.Lock()
        self._not_taken_in = ""
        """The reason, as the log has it."""

    def __repr__(self) -> str:
        return f"<AuditLog {len(self._unwritten)} unwritten>"

    def changed(self, before: Agent, after: Agent, actor: str) -> None:
        row = transition_of(before, after, actor)
        self._keep(row)
        self._events.publish(event_of(row))
        self._live.publish(
            AgentChanged(
                at=row.at,
                agent=after.id,
                name=after.name,
                was=str(before.status),
                now=str(after.status),
                generation=after.generation,
                reason=after.reason,
                actor=actor,
            )
        )

    def note(
        self, act: str, *, target: str = "hive", actor: str = "hive", detail: dict[str, Any] | None = None
    ) -> None:
        """Anything that is no transition: `agent.created`, `backend.up`, `proxy.lost` …"""
        row = event_row(act, target=target, actor=actor, detail=detail or {})
        self._keep(row)
        self.tell(row)

    def tell(self, row: AuditRecord) -> None:
        """Tells the listeners of an event that is in the table, or on its way."""
        self._events.publish(event_of(row))
        self._live.publish(SystemEvent(at=row.at, kind=row.act, detail={"target": row.target} | row.detail))

    def _keep(self, *rows: AuditRecord) -> None:
        """Keeps rows to be written. Of too many the oldest go, permitted orders last."""
        self._unwritten.extend(rows)
        while len(self._unwritten) > UNWRITTEN_MAX:
            others = (number for number, row in enumerate(self._unwritten) if not audit.is_permitted_order(row))
            del self._unwritten[next(others, 0)]

    def take(self) -> list[AuditRecord]:
        """The rows not written yet, now the caller's to write in its own transaction, or to `give_back`."""
        rows = list(self._unwritten)
        self._unwritten.clear()
        return rows

    def give_back(self, rows: list[AuditRecord]) -> None:
        """They were not written."""
        self._unwritten.extendleft(reversed(rows))
        self._keep()

    def wrote(self, head: Head) -> None:
        """The chain ends with `head` now, on the disk."""
        if head.id - self._anchored.id >= ANCHOR_EVERY:
            spawn(self._anchor(head), name="audit anchor")

    async def record(self, row: AuditRecord) -> None:
        """Written when this returns; where it could not be, it is later, and the log says so.

        Of what one person is refused again and again all but the first is counted, and written once the minute is over.
        """
        if audit.is_refusal(row) and not self._refusals.is_row(row):
            return
        self._keep(row)
        if isinstance(error := await outcome_of(self.flush()), HiveError):
            log.error("audit_late act=%s actor=%s error=%s", row.act, row.actor, error.message)

    async def flush(self) -> Head:
        """Writes what no record took along, behind those that did; returns the last row.

        Raises as `Database.write`; then nothing is lost.

        A cancelled caller ends nothing: a write that has begun is not undone, and its rows would be given back and
        written again.
        """
        return await carried_through(self.write_with(audit.head))

    async def write_with(self, work: Callable[[sqlite3.Connection], object], *more: AuditRecord) -> Head:
        """Writes the rows that wait, and then `more`, in one transaction with `work`; returns the last row.

        Raises as `Database.write`: then the rows that waited wait on. Not to be cancelled; `flush` says why.
        """
        rows = self.take()

        def both(conn: sqlite3.Connection) -> Head:
            work(conn)
            return audit.append_all(conn, [*rows, *more])

        try:
            head = await self._database.write(both)
        except BaseException:
            self.give_back(rows)
            raise
        self.wrote(head)
        return head

    async def begin(self) -> None:
        """Takes the rows of an older Hive into the chain, and notes where it stands. Raises as `Database.write`."""
        head = await self._database.write(audit.head)
        try:
            noted = await asyncio.to_thread(anchors.read, self._anchors)
        except OSError as error:
            log.error("audit_heads_unreadable path=%s error=%s", self._anchors, error.strerror or error)
            return
        last = max(noted.heads, default=START)
        if not await self._database.read(lambda conn: audit.has(conn, last)):
            log.error("audit_not_as_noted head=%d:%s: hive audit verify names the first row that is wrong", *last)
        if not noted.heads:
            await self._begin_noting(head)
        self._anchored = last
        if head.id and head != last:
            await self._anchor(head)
        await self._take_in()

    async def _begin_noting(self, head: Head) -> None:
        """Nothing vouches for the rows there are: they are new, restored, an older Hive's, or the file was removed."""
        begun_after = await self._database.read(audit.begun_after)
        if head.id:
            log.warning(
                "audit_heads_begun path=%s head=%d: nothing vouches for the rows before", self._anchors, head.id
            )
        if begun_after != START:
            await self._anchor(begun_after, is_beginning=True)

    async def close(self) -> None:
        """Writes what is unwritten, and notes the last row."""
        self._keep(*self._refusals.take())
        head = await outcome_of(self.flush())
        if isinstance(head, HiveError):
            log.error("audit_lost rows=%d error=%s", len(self._unwritten), head.message)
        elif head != self._anchored:
            await self._anchor(head)
        async with self._noting:
            pass  # a head that was just being noted in a thread is in the file now

    async def _anchor(self, head: Head, *, is_beginning: bool = False) -> None:
        self._anchored = head
        try:
            await self._note(head, is_beginning=is_beginning)
        except OSError as error:
            log.error("audit_head_not_noted path=%s error=%s", self._anchors, error.strerror or error)

    async def _note(self, head: Head, *, is_beginning: bool) -> None:
        """Raises OSError where the file does not take it; the log has it."""
        log.info("audit_head head=%d:%s%s", *head, " pruned=yes" if is_beginning else "")
        async with self._noting:
            await asyncio.to_thread(anchors.append, self._anchors, head, now=time.time(), is_beginning=is_beginning)

    async def page(self, asked: Filter, limit: int) -> list[AuditEntry]:
        """Rows, the newest first; also those that are just being written. Raises as `Database.read`."""
        await self._take_in()
        with contextlib.suppress(HiveError):
            await self.flush()
        found: list[AuditEntry] = await self._database.read(lambda conn: audit.page(conn, asked, limit))
        return found

    async def run(self) -> None:
        """Writes what waits every few seconds, and prunes the table now and every hour, until cancelled."""
        await asyncio.gather(self._prune_always(), self._write_always())

    async def _prune_always(self) -> None:
        while True:
            if isinstance(pruned := await outcome_of(self.prune()), HiveError):
                log.warning("audit_not_pruned error=%s", pruned.message)
            elif pruned:
                log.info("audit_pruned rows=%d", pruned)
            await asyncio.sleep(PRUNE_S)

    async def _write_always(self) -> None:
        while True:
            await asyncio.sleep(WRITE_S)
            self._keep(*self._refusals.take(now=time.time()))
            if self._unwritten:
                await outcome_of(self.flush())  # where it fails, all else that is written fails too, and says so
            await self._take_in()

    async def _take_in(self) -> None:
        """Takes in the acts that the `hive` command noted, as rows; where that fails, they wait on."""
        if not self._acts.exists():
            return
        async with self._taking_in:
            try:
                found = await asyncio.to_thread(acts.read, self._acts)
                head = await self._database.write(lambda conn: acts.take_in(conn, found, now=time.time()))
                await asyncio.to_thread(acts.remove, self._acts, found)
            except (OSError, HiveError) as error:
                if str(error) != self._not_taken_in:
                    log.warning("acts_not_taken_in path=%s error=%s", self._acts, error)
                self._not_taken_in = str(error)
                return
        self._not_taken_in = ""
        if head is not None:
            self.wrote(head)

    async def prune(self) -> int:
        """Deletes its oldest rows (see audit.py); returns their number. Raises as `Database.write`, StoreFull."""
        now, pruned, orders_from = time.time(), 0, None
        before: Head = await self._database.read(audit.begun_after)
        while (to := await self._database.write(lambda conn: audit.prunable(conn, now=now))) is not None:
            try:
                # Before they go: a beginning that nobody noted is taken for a forged one.
                await self._note(to, is_beginning=True)
            except OSError as error:
                raise explain.os_error(error, self._anchors) from error
            if orders_from is None:
                orders_from = await self._database.read(audit.kept_orders_from)
            pruned += await self._database.write(_pruning(to, now, orders_from))
        if pruned:
            await self._forget_heads(before)
        return pruned

    async def _forget_heads(self, before: Head) -> None:
        """Forgets the heads of rows gone before this round: a verification meanwhile may look for those that go now."""
        try:
            async with self._noting:
                await asyncio.to_thread(anchors.keep_from, self._anchors, before.id)
        except OSError as error:
            log.info("audit_heads_kept path=%s error=%s", self._anchors, error.strerror or error)

    async def past(self, limit: int, agent: str = "") -> list[Event]:
        """The last `limit` events, oldest first, of this agent alone where one is named (by id); also those that are
        just being written, if that takes no longer than `WRITTEN_SOON_S`. Raises as `Database.read`."""
        # A full disk, or somebody's lock, hides what could not be written, and nothing else.
        await asyncio.wait({spawn(outcome_of(self.flush()), name="flush audit")}, timeout=WRITTEN_SOON_S)
        found: list[Event] = await self._database.read(lambda conn: [*map(event_of, audit.tail(conn, limit, agent))])
        return found

    def subscribe(self) -> Feed:
        return self._events.subscribe()
