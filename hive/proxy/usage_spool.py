"""Usage events on their way out of the proxy: on disk first, then to the Redis stream, until the daemon has them.

`record` is the only part the data path sees: it numbers the event and appends one line to this epoch's spool before
the client gets its last byte, and it never fails. All requests that end in one turn of the loop share one write, and
from there on travel as one block of lines. Everything after that is a task of its own: what was recorded is
added to the stream, added again where Redis lost it, and forgotten when the daemon's mark has passed it. The spool of
a killed proxy is replayed by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import asdict, replace

from hive.domain import UsageEvent
from hive.errors import DependencyDown
from hive.store import explain
from hive.store.live import Live
from hive.store.lock import Lock
from hive.store.spoolfile import MAX_LINE, SpoolFile
from hive.store.stream import Entry, events_entry, lost_entry

log = logging.getLogger("hive.usage")

BOUND = 50_000
"""Events of one epoch held in memory; what is beyond it is read back from the spool."""
BATCH = 500
ENTRY_EVENTS = 100
"""Events that share one entry of the stream, about 30 KB; no block has more."""
GATHER_S = 0.05
TICK_S = 1.0
RETRY_S = (0.1, 2.0)
PATIENCE_S = (10.0, 160.0)
"""A mark that stands still for so long while events fly may mean they were lost; doubles while it stays so."""
LAST_TRY_S = 1.0
HELD_S = 1.0
"""If the disk does not take an event, the last byte of its answer waits so long for the stream to have it."""

MAX_TEXT = 256


class Item(NamedTuple):
    """Event numbers `first` to `last`: a line each with their line ends between, or (None) their events are lost."""

    first: int
    last: int
    lines: bytes | None

    @property
    def events(self) -> int:
        """The number of events it holds in memory."""
        return self.last - self.first + 1 if self.lines is not None else 0


class Backlog:
    """The events of one epoch that the daemon has not committed, in order: waiting to be sent, or flying. Pure.

    >>> backlog = Backlog("p1")
    >>> backlog.add(1, b"one"), backlog.add(2, b"two")
    (True, True)
    >>> [item.lines for item in backlog.take(10, now=0.0)]
    [b'one', b'two']
    >>> backlog.commit(1, now=0.1); backlog
    <Backlog p1 0 waiting, 1 flying, mark 1 of 2>
    """

    def __init__(self, epoch: str, *, bound: int = BOUND, last: int = 0) -> None:
        self.epoch = epoch
        self.mark = 0
        self.last = last
        """Highest number there is, in memory or not."""
        self._bound = bound
        self.held = 0
        """Events in memory."""
        self._held_to = 0
        self._waiting: deque[Item] = deque()
        self._flying: deque[Item] = deque()
        self._entry_ends: deque[int] = deque()
        self._progress_at = 0.0
        self._patience_s = PATIENCE_S[0]

    def __repr__(self) -> str:
        waiting = sum(item.events for item in self._waiting)
        return f"<Backlog {self.epoch} {waiting} waiting, {self.flying} flying, mark {self.mark} of {self.last}>"

    @property
    def flying(self) -> int:
        return sum(item.events for item in self._flying)

    @property
    def entries(self) -> int:
        """The number of the stream's entries that hold what flies."""
        return len(self._entry_ends)

    @property
    def in_stream(self) -> int:
        """Events that are in the stream for sure and not committed."""
        return self._entry_ends[-1] - self.mark if self._entry_ends else 0

    @property
    def safe_to(self) -> int:
        """Highest number that is in the stream for sure, or committed."""
        return self._entry_ends[-1] if self._entry_ends else self.mark

    @property
    def done(self) -> bool:
        """Everything there is, is committed."""
        return self.mark >= self.last

    @property
    def wants_more(self) -> bool:
        """Some of it is only in the spool, and there is room for it now."""
        return self._held_to < self.last and not self._waiting and self.held < self._bound

    def add(self, last: int, lines: bytes | None, *, events: int = 1) -> bool:
        """New events, the last of them number `last`; False where they must come from the spool later, because
        memory is full or behind."""
        all_here = self._held_to >= self.last
        self.last = last
        if not all_here or self.held >= self._bound:
            return False
        self._held_to = last
        self._wait(Item(last - events + 1, last, lines))
        return True

    def _wait(self, item: Item) -> None:
        self._waiting.append(item)
        self.held += item.events

    def refill(self, lines: Iterable[tuple[int, bytes]], *, at_end: bool) -> None:
        """The next lines of the spool; a number they jump over is lost, and `at_end` so are those after them."""
        for no, line in lines:
            if no > self._held_to:
                self._note_lost(no - 1)
                self._wait(Item(no, no, line))
                self._held_to = no
        if at_end:
            self._note_lost(self.last)

    def _note_lost(self, last: int) -> None:
        if last > self._held_to:
            self._wait(Item(self._held_to + 1, last, None))
            self._held_to = last

    def take(self, limit: int, *, now: float) -> list[Item]:
        """The next items to send, with no more than `limit` events and one block; they fly from now on."""
        if not self._flying:
            self._progress_at = now
        batch: list[Item] = []
        while self._waiting and limit > 0:
            item = self._waiting.popleft()
            limit -= max(1, item.events)
            batch.append(item)
            if item.last > self.mark:
                self._flying.append(item)
            else:
                self.held -= item.events
        return batch

    def sent(self, ends: Iterable[int]) -> None:
        """Records that the items taken last are in the stream, in entries that end with these numbers."""
        self._entry_ends.extend(end for end in ends if end > self.mark)

    def put_back(self, first: int) -> None:
        """Puts back what flies from number `first` on: it was not sent after all."""
        while self._entry_ends and self._entry_ends[-1] >= first:
            self._entry_ends.pop()
        while self._flying and self._flying[-1].first >= first:
            self._waiting.appendleft(self._flying.pop())

    def commit(self, mark: int, *, now: float) -> None:
        """The daemon has everything up to `mark`. An older mark changes nothing."""
        if mark <= self.mark:
            return
        self.mark = mark
        self._held_to = max(self._held_to, mark)
        self._progress_at, self._patience_s = now, PATIENCE_S[0]
        for items in (self._flying, self._waiting):
            while items and items[0].last <= mark:
                self.held -= items.popleft().events
        while self._entry_ends and self._entry_ends[0] <= mark:
            self._entry_ends.popleft()

    def is_stalled(self, now: float) -> bool:
        """Whether the daemon should have told of something by now."""
        return bool(self._flying) and now - self._progress_at >= self._patience_s

    def send_again(self, *, now: float) -> None:
        """Everything that flies is to be sent once more, because Redis lost it or seems to have.

        What is committed is told as well, as settled: a daemon whose database was replaced would wait for it.
        """
        if not self._flying:
            return
        self.put_back(0)
        if self.mark:
            self._waiting.appendleft(Item(1, self.mark, None))
        self._progress_at = now

    def lose_patience(self) -> None:
        """Sending again did not help so far: the next time takes twice as long."""
        self._patience_s = min(2 * self._patience_s, PATIENCE_S[1])


class UsageSpool:
    """The proxy's usage events. One per process and spool directory (`flock` in it).

    The owner spawns `run` once, calls `marks` with the marks that the daemon sends, and `close` at the end. Raises
    WrongState naming the pid where another proxy has the directory, NotPermitted, ConfigError, StoreFull.
    """

    def __init__(self, directory: Path, epoch: str, live: Live, *, bound: int = BOUND) -> None:
        self.epoch = epoch
        self.lost = 0
        """Events neither disk nor memory could take."""
        self.lost_ranges: deque[tuple[int, int]] = deque(maxlen=100)
        """Their numbers, (first, last) each; the daemon is told the same through the stream."""
        self._live = live
        self._run_id = ""
        self._heard = False
        self._something = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._encode = msgspec.json.Encoder().encode
        self._last = 0
        self._backlog = Backlog(epoch, bound=bound)
        self._loop = asyncio.get_running_loop()
        self._lines: list[bytes] = []
        """Lines of the events recorded in this turn of the loop; the last of them is number `_last`."""
        self._then: deque[Callable[[], None]] = deque()
        self._held: deque[tuple[int, float, Callable[[], None]]] = deque()
        """(highest number of its turn, until when, last byte) where the disk took that turn's lines in part or not."""
        self._let_go_at: asyncio.TimerHandle | None = None
        self._scheduled = False
        try:
            directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise explain.os_error(error, directory) from error
        self._lock = Lock(directory / "lock", what="the usage spool")
        self._file = SpoolFile(directory / f"{epoch}.jsonl")
        try:
            self._old = list(_left_behind(directory, bound))
        except OSError as error:
            self._lock.release()
            raise explain.os_error(error, directory) from error

    def __repr__(self) -> str:
        return f"<UsageSpool {self._backlog!r}, {len(self._old)} old, {self.lost} lost>"

    @property
    def degraded(self) -> str:
        """The reason why events are not safe now; empty if they are."""
        return f"the usage spool {self._file.path.parent} cannot be written" if self._file.full else ""

    @property
    def waiting(self) -> int:
        """Events of this epoch the daemon has not committed."""
        return self._last - self._backlog.mark

    @property
    def sent(self) -> int:
        """Of those, the events that are in the stream."""
        return self._backlog.in_stream

    def spooled(self) -> dict[str, int]:
        """Epoch → highest event number, of this proxy and of killed ones whose spool is still here."""
        return {**{backlog.epoch: backlog.last for _, backlog in self._old}, self.epoch: self._last}

    def record(self, event: UsageEvent, then: Callable[[], None] | None = None) -> None:
        """Numbers the event and appends it to the spool. Call it before the answer's last byte; never raises.

        Without `then` it is on disk when this returns (no fsync: it survives kill -9, not a power cut). With it, at
        the end of this turn of the loop, in one write with all the others of the turn; `then`, called right after
        that, lets the last byte go. On a full disk `then` waits until the disk has taken the line after all, or the
        stream has the event, HELD_S at most. `epoch` and `event_no` of the argument are ignored.
        """
        no = self._last + 1
        try:
            line = self._encode(replace(event, epoch=self.epoch, event_no=no))
            if len(line) >= MAX_LINE:
                line = self._encode(_shortened(event, self.epoch, no))
        except (ValueError, TypeError, OverflowError) as error:
            log.error("usage_event_not_json event=%.200r error=%s", event, error)
            self._write()
            self._last = no
            self._backlog.add(no, None)
            self._note_lost(no, no)
            self._something.set()
        else:
            self._last = no
            self._lines.append(line)
        if then is None or len(self._lines) >= ENTRY_EVENTS:
            self._write()
        if then is not None:
            self._then.append(then)
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._end_turn)

    def _end_turn(self) -> None:
        """Writes what was recorded in this turn, and lets the last bytes of those answers go."""
        self._scheduled = False
        self._write()
        if self._file.full:
            self._hold()
            return
        try:
            while self._then:
                self._then.popleft()()
        finally:
            if self._then:  # one of them raised; the others' clients must not wait for ever
                self._scheduled = True
                self._loop.call_soon(self._end_turn)

    def _hold(self) -> None:
        """The last bytes of this turn wait: what it cost is in memory alone, and a kill -9 would take it along."""
        until = self._loop.time() + HELD_S
        self._held.extend((self._last, until, then) for then in self._then)
        self._then.clear()
        if self._held and self._let_go_at is None:
            self._let_go_at = self._loop.call_at(until, self._let_go)

    def _let_go(self, *, every: bool = False) -> None:
        """Lets those last bytes go whose events are on the disk or in the stream by now, or that waited for HELD_S;
        `every`: all of them."""
        if self._let_go_at is not None:
            self._let_go_at.cancel()
            self._let_go_at = None
        now = self._loop.time()
        while self._held:
            last, until, then = self._held[0]
            if self._file.full and last > self._backlog.safe_to and now < until and not every:
                self._let_go_at = self._loop.call_at(until, self._let_go)
                return
            self._held.popleft()
            try:
                then()
            except Exception:  # the others' clients must not wait for ever
                log.exception("answer_not_ended")

    def _write(self) -> None:
        """One write for all lines that have none yet."""
        if not self._lines:
            return
        last, events = self._last, len(self._lines)
        lines = b"\n".join(self._lines)
        self._lines.clear()
        in_memory = self._backlog.add(last, lines, events=events)
        if not self._file.append(last, lines + b"\n", in_memory=in_memory) and not in_memory:
            self._note_lost(last - events + 1, last)
        self._something.set()

    def _note_lost(self, first: int, last: int) -> None:
        self.lost += last - first + 1
        if self.lost_ranges and self.lost_ranges[-1][1] == first - 1:
            self.lost_ranges[-1] = (self.lost_ranges[-1][0], last)
            return
        self.lost_ranges.append((first, last))
        log.error("usage_dropped epoch=%s from=%d lost=%d", self.epoch, first, self.lost)

    def marks(self, marks: dict[str, int]) -> None:
        """The daemon tells how far it has committed: frees memory and disk. The first call begins the replay."""
        now = asyncio.get_running_loop().time()
        self._heard = True
        for _, backlog in [*self._old, (self._file, self._backlog)]:
            if backlog.epoch in marks:
                backlog.commit(marks[backlog.epoch], now=now)
        self._forget_done()
        self._file.trim(self._backlog.mark)
        self._something.set()

    def _forget_done(self) -> None:
        for file, backlog in self._old:
            if backlog.done:
                log.info("usage_replayed epoch=%s events=%d", backlog.epoch, backlog.last)
                file.close(delete=True)
        self._old = [old for old in self._old if not old[1].done]

    async def run(self) -> None:
        """Sends what was recorded, for ever."""
        self._task = asyncio.current_task()
        delay = RETRY_S[0]
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._something.wait()
            self._something.clear()
            await asyncio.sleep(GATHER_S)
            self._file.retry(self._backlog.mark)
            try:
                await self._send()
                delay = RETRY_S[0]
            except DependencyDown:
                await asyncio.sleep(delay)
                delay = min(2 * delay, RETRY_S[1])
            if self._held:
                self._let_go()

    async def close(self) -> None:
        """Ends `run`, sends what waits if Redis answers at once; what is not committed stays for the next proxy."""
        self._end_turn()
        if self._task is not None:
            # Again and again: on Python 3.11 wait_for, which redis-py uses, may swallow a cancellation (gh-86296).
            while not self._task.done():
                self._task.cancel()
                await asyncio.wait([self._task], timeout=1)
            if self._live.up:
                with contextlib.suppress(DependencyDown, TimeoutError):
                    async with asyncio.timeout(LAST_TRY_S):
                        await self._send()
        self._file.retry(self._backlog.mark)
        self._let_go(every=True)
        if self._file.full and self._last > self._backlog.safe_to:
            log.error("usage_not_kept epoch=%s to=%d: neither the disk nor Redis took it", self.epoch, self._last)
        for file, backlog in [*self._old, (self._file, self._backlog)]:
            file.close(delete=backlog.done)
        self._lock.release()

    def _sources(self) -> list[tuple[SpoolFile, Backlog]]:
        """The source of this epoch, and once the daemon was heard the oldest one of a killed proxy (one at a time:
        memory)."""
        return [(self._file, self._backlog), *(self._old[:1] if self._heard else [])]

    async def _send(self) -> None:
        """Adds to the stream what is not in it. Raises DependencyDown; what was not added waits."""
        loop = asyncio.get_running_loop()
        await self._look_for_losses(loop.time())
        for file, backlog in self._sources():
            while True:
                while backlog.wants_more:
                    backlog.refill(file.read(), at_end=file.at_end)
                    await asyncio.sleep(0)  # a long file must not hold the data path up
                batch = backlog.take(BATCH, now=loop.time())
                if not batch:
                    break
                groups = _groups(batch)
                try:
                    await self._live.add_usage([_entry(backlog.epoch, group) for group in groups])
                except BaseException:
                    backlog.put_back(batch[0].first)
                    raise
                backlog.sent(group[-1].last for group in groups)
                self._notice_run()

    async def _look_for_losses(self, now: float) -> None:
        self._notice_run()
        stalled = [backlog for _, backlog in self._sources() if backlog.is_stalled(now)]
        if not stalled:
            return
        # While the daemon is away its mark stands still too, but then everything sent is still in the stream.
        if await self._live.usage_length() < sum(backlog.entries for _, backlog in self._sources()):
            for backlog in stalled:
                log.warning("usage_sent_again epoch=%s events=%d mark=%d", backlog.epoch, backlog.flying, backlog.mark)
                backlog.send_again(now=now)
                backlog.lose_patience()

    def _notice_run(self) -> None:
        """Another Redis than before may have nothing of what flies."""
        run_id = self._live.run_id
        if run_id and self._run_id and run_id != self._run_id:
            for _, backlog in self._sources():
                log.warning("usage_sent_again epoch=%s events=%d run_id=%s", backlog.epoch, backlog.flying, run_id)
                backlog.send_again(now=asyncio.get_running_loop().time())
        self._run_id = run_id


def _groups(items: Iterable[Item]) -> list[list[Item]]:
    """Items that share an entry: events of consecutive numbers together, lost numbers alone. Pure.

    >>> [len(group) for group in _groups([Item(1, 1, b"a"), Item(2, 2, b"b"), Item(3, 9, None), Item(10, 10, b"c")])]
    [2, 1, 1]
    """
    groups: list[list[Item]] = []
    for item in items:
        before = groups[-1][-1] if groups else None
        if (
            before is not None
            and before.lines is not None
            and item.lines is not None
            and item.first == before.last + 1
            and item.last - groups[-1][0].first < ENTRY_EVENTS
        ):
            groups[-1].append(item)
        else:
            groups.append([item])
    return groups


def _entry(epoch: str, group: Sequence[Item]) -> Entry:
    lines = b"\n".join(item.lines for item in group if item.lines is not None)
    first, last = group[0].first, group[-1].last
    return events_entry(epoch, first, lines.split(b"\n")) if lines else lost_entry(epoch, first, last)


def _shortened(event: UsageEvent, epoch: str, no: int) -> UsageEvent:
    """The event with every text cut to a length no honest one has."""
    texts = {name: text[:MAX_TEXT] for name, text in asdict(event).items() if isinstance(text, str)}
    return replace(event, **{**texts, "epoch": epoch, "event_no": no})


def _left_behind(directory: Path, bound: int) -> Iterable[tuple[SpoolFile, Backlog]]:
    """The spools of killed proxies, oldest first; one without a whole event is put aside, an empty one removed.

    Raises OSError.
    """
    for path in directory.glob("*.tmp"):
        path.unlink()
    files = [path for path in directory.glob("*.jsonl") if path.is_file() and not path.is_symlink()]
    for path in sorted(files, key=lambda path: path.stat().st_mtime):
        file = SpoolFile.found(path)
        if file.last:
            yield file, Backlog(path.stem, bound=bound, last=file.last)
        elif path.stat().st_size:
            file.close(delete=False)
            aside = path.with_suffix(".damaged")
            path.rename(aside)
            log.error("spool_damaged file=%s: it holds no usage event", aside)
        else:
            file.close(delete=True)
