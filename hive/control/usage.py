"""Usage events from the proxy's spool into SQLite, each exactly once (design.md §5).

A batch is acknowledged, by the mark of its epoch, only after the transaction that holds its rows, so a crash in between
means getting it again, and the row's key makes the second time harmless. Redis gets a copy of what was committed.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping

import msgspec

from hive.domain import UsageEvent
from hive.errors import DependencyDown, HiveError, StoreFull
from hive.link.usage import UsageBatch
from hive.store import rollups, usage
from hive.store.database import Database
from hive.store.live import Live
from hive.store.stream import MOST_EVENTS, ToldRange, entries_of, read_entry, read_lines
from hive.store.usage import UsageMark

log = logging.getLogger("hive.usage")

OLD_BATCH = 50
"""Entries of at most some 30 KB; Redis has 1 s to answer."""
RETRY_S = (0.1, 5.0)


class Settled(msgspec.Struct, frozen=True):
    """The settled event numbers of one epoch: all up to `mark`, and the ranges `ahead` of it.

    >>> one = Settled().plus(2, 3)
    >>> one, one.plus(1, 1)
    (Settled(mark=0, ahead=((2, 3),)), Settled(mark=3, ahead=()))
    """

    mark: int = 0
    ahead: tuple[tuple[int, int], ...] = ()

    def plus(self, first: int, last: int) -> Settled:
        """This, and `first` to `last`."""
        if first == self.mark + 1 and not self.ahead:
            return Settled(last)
        mark = self.mark
        ahead: list[tuple[int, int]] = []
        for low, high in sorted((*self.ahead, (first, last))):
            if low <= mark + 1:
                mark = max(mark, high)
            elif ahead and low <= ahead[-1][1] + 1:
                ahead[-1] = (ahead[-1][0], max(ahead[-1][1], high))
            else:
                ahead.append((low, high))
        return Settled(mark, tuple(ahead))

    def size(self) -> int:
        """Number of settled events."""
        return self.mark + sum(high - low + 1 for low, high in self.ahead)

    def has(self, number: int) -> bool:
        return number <= self.mark or any(low <= number <= high for low, high in self.ahead)

    @staticmethod
    def of(mark: UsageMark) -> Settled:
        """The settled numbers of a mark; an older Hive may have moved it over ranges that were ahead of it.

        >>> Settled.of(UsageMark(4, ahead=((3, 3), (5, 6), (9, 9))))
        Settled(mark=6, ahead=((9, 9),))
        """
        settled = Settled(mark.committed_to)
        for first, last in mark.ahead:
            settled = settled.plus(first, last)
        return settled


class UsageConsumer:
    """The one writer of usage rows; the owner spawns `run` and `take_over` once each, after `load`.

    `on_marks(changed)`: proxy epoch → highest number below which all is settled, after each commit that moved
    one. `on_usage(events)`: the events whose rows that commit really added. `degraded`: why nothing can be
    committed now, empty where all is well; nothing is lost meanwhile, the proxy's spool keeps it.
    """

    def __init__(
        self,
        live: Live,
        database: Database,
        *,
        on_marks: Callable[[dict[str, int]], None],
        on_usage: Callable[[list[UsageEvent]], None],
    ) -> None:
        self._live = live
        self._database = database
        self._on_marks = on_marks
        self._on_usage = on_usage
        self._marks: dict[str, UsageMark] = {}
        self._settled: dict[str, Settled] = {}
        self._added: list[UsageEvent] = []
        self._moved: dict[str, int] = {}
        self._batches: deque[tuple[float, UsageBatch]] = deque()
        """Not in SQLite yet, each with the time (monotonic) at which it came; the first may be on its way there."""
        self._something = asyncio.Event()
        self._one_commit = asyncio.Lock()
        self._taken_over = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._run: asyncio.Task[None] | None = None
        self.degraded = ""
        self.is_disk_full = False
        """True if a full disk is the reason."""
        self.foreign = 0
        """Batches and entries that were none of Hive's."""

    def __repr__(self) -> str:
        return f"<UsageConsumer {len(self._marks)} epochs, {self.lost} lost{', ' * bool(self.degraded)}{self.degraded}>"

    @property
    def marks(self) -> dict[str, int]:
        """Proxy epoch → committed to; what `DaemonTable.marks` and `Marks` carry."""
        return {epoch: mark.committed_to for epoch, mark in self._marks.items()}

    @property
    def lost(self) -> int:
        """Events known to be lost, of all epochs remembered."""
        return sum(mark.lost for mark in self._marks.values())

    @property
    def waiting(self) -> int:
        """Events that came from the proxy and are not in SQLite."""
        return sum(item.events for _, batch in self._batches for item in batch.items)

    @property
    def lag_s(self) -> float:
        """Time for which the oldest of them has waited; 0 without any."""
        return time.monotonic() - self._batches[0][0] if self._batches else 0.0

    @property
    def has_ended(self) -> bool:
        """True if `run` was begun and is over: nothing is committed any more."""
        return self._run is not None and self._run.done()

    async def load(self) -> None:
        """Reads the marks. Raises as `Database.read`."""
        self._marks = await self._database.read(usage.marks)
        self._settled = {epoch: Settled.of(mark) for epoch, mark in self._marks.items()}

    def take(self, batch: UsageBatch) -> None:
        """A batch came. The proxy bounds how much it sends before it is acknowledged."""
        self._batches.append((time.monotonic(), batch))
        self._something.set()

    def proxy_here(self, spooled: Mapping[str, int]) -> None:
        """A proxy has connected anew. `spooled`: epoch → highest event that it has: it sends those again if they are
        not acknowledged. What a killed one had in memory alone, for its disk was full, is here alone now."""
        kept = [
            (since, batch)
            for number, (since, batch) in enumerate(self._batches)
            # The first may be on its way into SQLite.
            if number == 0 or any(item.last > spooled.get(batch.epoch, 0) for item in batch.items)
        ]
        self._batches = deque(kept)

    async def run(self) -> None:
        """Commits what comes, for ever."""
        self._run = self._note_task()
        while True:
            await self._something.wait()
            self._something.clear()
            while self._batches:
                await self._commit_batch(self._batches[0][1])
                self._batches.popleft()

    async def take_over(self) -> None:
        """Commits what a Hive before 0.2 left in the stream; from then on the stream holds copies of what is in SQLite.

        Returns once that is done, as soon as there is a Redis.
        """
        self._note_task()
        delay = RETRY_S[0]
        while True:
            try:
                while entries := await self._live.old_usage(OLD_BATCH):
                    told = [one for entry in entries for one in self._known(read_entry(entry.fields), entry.id)]
                    await self._commit(told)
                    await self._live.settle_old_usage([entry.id for entry in entries])
            except DependencyDown:
                await asyncio.sleep(delay)
                delay = min(2 * delay, RETRY_S[1])
            else:
                break
        self._taken_over.set()

    def _note_task(self) -> asyncio.Task[None]:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.append(task)
        return task

    async def close(self) -> None:
        """Ends `run` and `take_over`. A commit that is under way may still happen; its events will come again."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def prune(self, spooled: Collection[str]) -> None:
        """Forgets marks that are needed no more; `spooled`: epochs with a spool at the proxy.

        Waits until the old stream is read: it may hold again what is settled, and its row pruned.
        """
        await self._taken_over.wait()
        now = time.time()
        for epoch in await self._database.write(lambda conn: usage.prune_marks(conn, spooled=spooled, now=now)):
            self._marks.pop(epoch, None)
            self._settled.pop(epoch, None)

    async def _commit_batch(self, batch: UsageBatch) -> None:
        told: list[ToldRange] = []
        settled_to = self._settled.get(batch.epoch, Settled()).mark
        if settled_to < batch.committed_to <= MOST_EVENTS:
            why = "committed to a database that was replaced"
            told.append(ToldRange(epoch=batch.epoch, first=settled_to + 1, last=batch.committed_to, why=why))
        for item in batch.items:
            told += self._known(read_lines(batch.epoch, *item), batch.epoch)
        await self._commit(told)
        if self._taken_over.is_set():
            self._live.add_usage(entries_of(batch.epoch, batch.items))

    def _known(self, found: list[ToldRange], where: object) -> list[ToldRange]:
        if not found:
            self.foreign += 1
            log.error("usage_foreign at=%r", where)
        for one in found:
            if one.event is None:
                log.warning("usage_lost epoch=%s first=%d last=%d why=%s", one.epoch, one.first, one.last, one.why)
        return found

    async def _commit(self, told: list[ToldRange]) -> None:
        """Brings them into SQLite, however long that takes."""
        delay = RETRY_S[0]
        async with self._one_commit:
            while told:
                try:
                    await self._store(told)
                    break
                except HiveError as error:
                    if not self.degraded:
                        log.error("usage_not_committed events=%d error=%s", len(told), error)
                    self.degraded, self.is_disk_full = error.message, isinstance(error, StoreFull)
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, RETRY_S[1])
            if self.degraded:
                log.info("usage_committed_again")
                self.degraded, self.is_disk_full = "", False
            self._tell()

    def _tell(self) -> None:
        added, self._added = self._added, []
        moved, self._moved = self._moved, {}
        if added:
            self._on_usage(added)
        if moved:
            self._on_marks(moved)

    async def _store(self, told: list[ToldRange]) -> None:
        """One transaction. An event SQLite will not hold is counted as lost rather than block all others."""
        try:
            await self._transact(told)
        except HiveError:
            raise
        except Exception as error:
            if len(told) > 1:
                for one in told:
                    await self._store([one])
                return
            log.error("usage_event_unusable epoch=%s event_no=%d error=%s", told[0].epoch, told[0].first, error)
            await self._transact([msgspec.structs.replace(told[0], event=None)])

    async def _transact(self, told: list[ToldRange]) -> None:
        events = [one.event for one in told if one.event is not None]
        settled, changed = self._after(told)
        now = time.time()

        def work(conn: sqlite3.Connection) -> list[UsageEvent]:
            usage.set_marks(conn, changed, now=now)
            return usage.insert(conn, self._not_pruned(events, rollups.kept(conn).requests_from))

        self._added += await self._database.write(work)
        for epoch, mark in changed.items():
            if mark.committed_to != self._marks.get(epoch, UsageMark(0)).committed_to:
                self._moved[epoch] = mark.committed_to
        self._settled.update(settled)
        self._marks.update(changed)

    def _not_pruned(self, events: list[UsageEvent], requests_from: float) -> list[UsageEvent]:
        """Leaves out events that come again after their rows may have gone: those are in the sums."""
        return [
            event
            for event in events
            if event.created_at >= requests_from or not self._settled.get(event.epoch, Settled()).has(event.event_no)
        ]

    def _after(self, told: list[ToldRange]) -> tuple[dict[str, Settled], dict[str, UsageMark]]:
        """The settled numbers once `told` is committed, and the marks that changes."""
        settled: dict[str, Settled] = {}
        lost: dict[str, int] = {}
        for one in sorted(told, key=lambda one: (one.event is None, one.first)):
            before = settled.get(one.epoch) or self._settled.get(one.epoch, Settled())
            settled[one.epoch] = after = before.plus(one.first, one.last)
            if one.event is None:
                # Only numbers heard of for the first time: a range may be told twice, or beside its events.
                lost[one.epoch] = lost.get(one.epoch, 0) + after.size() - before.size()
        marks = {
            epoch: UsageMark(after.mark, self._marks.get(epoch, UsageMark(0)).lost + lost.get(epoch, 0), after.ahead)
            for epoch, after in settled.items()
        }
        return settled, {epoch: mark for epoch, mark in marks.items() if mark != self._marks.get(epoch)}
