"""Usage events on their way out of the proxy: on disk first, then over the link, until the daemon has them.

`record` is the only part the data path sees: it numbers the event and appends one line to this epoch's spool before
the client gets its last byte, and it never fails. All requests that end in one turn of the loop share one write, and
from there on travel as one block of lines. Everything after that is a task of its own: what was recorded is sent to the
daemon, sent again where the link was lost, and forgotten when the daemon's mark has passed it. The spool of a killed
proxy is replayed by the next one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
from msgspec.structs import asdict, replace

from hive.domain import UsageEvent
from hive.link.usage import UsageBatch, UsageItem
from hive.store import explain
from hive.store.lock import Lock
from hive.store.spoolfile import MAX_LINE, SpoolFile

log = logging.getLogger("hive.usage")

BOUND = 50_000
"""Events of one epoch held in memory; what is beyond it is read back from the spool."""
BATCH = 1000
BATCH_BYTES = 1024 * 1024
"""A batch has no more than both, and one block: the link carries gates and wakes, too."""
IN_FLIGHT = 5000
"""Events of one epoch that are sent and not committed. The daemon holds no more than these of one proxy's session."""
BLOCK_EVENTS = 100
"""Events that share one write and one block of lines."""
GATHER_S = 0.1
"""Events that come within this share a batch and a transaction; it is also how late `hive usage` may be."""
TICK_S = 1.0
"""A disk that did not take an event is tried again after so long."""
LAST_TRY_S = 1.0
HELD_S = 1.0
"""If the disk does not take an event, the last byte of its answer waits so long for the daemon to have it."""

MAX_TEXT = 256


class Backlog:
    """The events of one epoch that the daemon has not committed, in order: waiting to be sent, or in flight. Pure.

    >>> backlog = Backlog("p1")
    >>> backlog.add(1, b"one"), backlog.add(2, b"two")
    (True, True)
    >>> [item.lines for item in backlog.take(10, 1000)]
    [b'one', b'two']
    >>> backlog.commit(1); backlog
    <Backlog p1 0 waiting, 1 in flight, mark 1 of 2>
    """

    def __init__(self, epoch: str, *, bound: int = BOUND, last: int = 0) -> None:
        self.epoch = epoch
        self.mark = 0
        self.last = last
        """Highest number there is, in memory or not."""
        self._bound = bound
        self.held = 0
        """Events in memory."""
        self.in_flight = 0
        """Of those, the events that are sent."""
        self._held_to = 0
        self._waiting: deque[UsageItem] = deque()
        self._flying: deque[UsageItem] = deque()

    def __repr__(self) -> str:
        waiting = self.held - self.in_flight
        return f"<Backlog {self.epoch} {waiting} waiting, {self.in_flight} in flight, mark {self.mark} of {self.last}>"

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
        self._wait(UsageItem(last - events + 1, last, lines))
        return True

    def _wait(self, item: UsageItem) -> None:
        self._waiting.append(item)
        self.held += item.events

    def refill(self, lines: Iterable[tuple[int, bytes]], *, at_end: bool) -> None:
        """The next lines of the spool; a number they jump over is lost, and `at_end` so are those after them."""
        for no, line in lines:
            if no > self._held_to:
                self._note_lost(no - 1)
                self._wait(UsageItem(no, no, line))
                self._held_to = no
        if at_end:
            self._note_lost(self.last)

    def _note_lost(self, last: int) -> None:
        if last > self._held_to:
            self._wait(UsageItem(self._held_to + 1, last, None))
            self._held_to = last

    def take(self, limit: int, limit_bytes: int) -> list[UsageItem]:
        """The next items to send, with no more than `limit` events, `limit_bytes` and one block; they fly from now
        on."""
        batch: list[UsageItem] = []
        while self._waiting and limit > 0 and limit_bytes > 0:
            item = self._waiting.popleft()
            limit -= max(1, item.events)
            limit_bytes -= len(item.lines or b"")
            batch.append(item)
            self._flying.append(item)
            self.in_flight += item.events
        return batch

    def put_back(self) -> None:
        """Puts back what is in flight: the link it went over is lost."""
        self._waiting.extendleft(reversed(self._flying))
        self._flying.clear()
        self.in_flight = 0

    def commit(self, mark: int) -> None:
        """The daemon has everything up to `mark`. An older mark changes nothing."""
        if mark <= self.mark:
            return
        self.mark = mark
        self._held_to = max(self._held_to, mark)
        while self._flying and self._flying[0].last <= mark:
            events = self._flying.popleft().events
            self.in_flight -= events
            self.held -= events
        while self._waiting and self._waiting[0].last <= mark:
            self.held -= self._waiting.popleft().events


class UsageSpool:
    """The proxy's usage events. One per process and spool directory (`flock` in it).

    The owner spawns `run` once, calls `marks` with the marks that the daemon sends, `attach` and `detach` as the link
    comes and goes, and `close` at the end. Raises WrongState naming the pid where another proxy has the directory,
    NotPermitted, ConfigError, StoreFull.
    """

    def __init__(self, directory: Path, epoch: str, *, bound: int = BOUND) -> None:
        self.epoch = epoch
        self.lost = 0
        """Events neither disk nor memory could take."""
        self.lost_ranges: deque[tuple[int, int]] = deque(maxlen=100)
        """Their numbers, (first, last) each; the daemon is told the same."""
        self._tell: Callable[[UsageBatch], None] | None = None
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

    def spooled(self) -> dict[str, int]:
        """Epoch → highest event number, of this proxy and of killed ones whose spool is still here."""
        return {**{backlog.epoch: backlog.last for _, backlog in self._old}, self.epoch: self._last}

    def record(self, event: UsageEvent, then: Callable[[], None] | None = None) -> int:
        """Numbers the event and appends it to the spool; returns its number. Call it before the answer's last byte;
        never raises.

        Without `then` it is on disk when this returns (no fsync: it survives kill -9, not a power cut). With it, at
        the end of this turn of the loop, in one write with all the others of the turn; `then`, called right after
        that, lets the last byte go. On a full disk `then` waits until the disk has taken the line after all, or the
        daemon has committed the event, HELD_S at most. `epoch` and `event_no` of the argument are set here.
        """
        no = self._last + 1
        event.epoch, event.event_no = self.epoch, no
        try:
            line = self._encode(event)
            if len(line) >= MAX_LINE:
                line = self._encode(_shortened(event))
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
        if then is None or len(self._lines) >= BLOCK_EVENTS:
            self._write()
        if then is not None:
            self._then.append(then)
            if not self._scheduled:
                self._scheduled = True
                self._loop.call_soon(self._end_turn)
        return no

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
        """Lets those last bytes go whose events are on the disk or committed by now, or that waited for HELD_S;
        `every`: all of them."""
        if self._let_go_at is not None:
            self._let_go_at.cancel()
            self._let_go_at = None
        now = self._loop.time()
        while self._held:
            last, until, then = self._held[0]
            if self._file.full and last > self._backlog.mark and now < until and not every:
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
        """The daemon tells how far it has committed: frees memory and disk."""
        for backlog in self._backlogs():
            if backlog.epoch in marks:
                backlog.commit(marks[backlog.epoch])
        self._forget_done()
        self._file.trim(self._backlog.mark)
        if self._held:
            self._let_go()
        self._something.set()

    def _backlogs(self) -> list[Backlog]:
        return [*(backlog for _, backlog in self._old), self._backlog]

    def _forget_done(self) -> None:
        for file, backlog in self._old:
            if backlog.done:
                log.info("usage_replayed epoch=%s events=%d", backlog.epoch, backlog.last)
                file.close(delete=True)
        self._old = [old for old in self._old if not old[1].done]

    def attach(self, tell: Callable[[UsageBatch], None]) -> None:
        """The daemon is connected and has told its marks: what waits is sent with `tell` from now on."""
        self._tell = tell
        self._something.set()

    def detach(self) -> None:
        """The link is lost: what is in flight is sent again over the next one."""
        self._tell = None
        for backlog in self._backlogs():
            backlog.put_back()
        self._something.set()

    async def run(self) -> None:
        """Sends what was recorded, for ever."""
        self._task = asyncio.current_task()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S if self._file.full else None):
                    await self._something.wait()
            self._something.clear()
            await asyncio.sleep(GATHER_S)
            self._file.retry(self._backlog.mark)
            await self._send()
            if self._held:
                self._let_go()

    async def close(self) -> None:
        """Ends `run`, and waits a moment for the daemon to commit what it did not have; the rest stays for the next
        proxy."""
        self._end_turn()
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_TRY_S):
                await self._send_all()
        self._file.retry(self._backlog.mark)
        self._let_go(every=True)
        if self._file.full and not self._backlog.done:
            log.error("usage_not_kept epoch=%s to=%d: neither the disk nor the daemon took it", self.epoch, self._last)
        for file, backlog in [*self._old, (self._file, self._backlog)]:
            file.close(delete=backlog.done)
        self._lock.release()

    async def _send_all(self) -> None:
        """Returns when the daemon has all events of this epoch, or is not connected."""
        while self._tell is not None and not self._backlog.done:
            self._something.clear()
            await self._send()
            await self._something.wait()

    async def _send(self) -> None:
        """Sends what is not in flight yet, as far as IN_FLIGHT permits."""
        # Of killed proxies one at a time: memory.
        for file, backlog in [(self._file, self._backlog), *self._old[:1]]:
            while backlog.in_flight < IN_FLIGHT:
                while self._tell is not None and backlog.wants_more:
                    backlog.refill(file.read(), at_end=file.at_end)
                    await asyncio.sleep(0)  # a long file must not hold the data path up
                if self._tell is None or not (items := backlog.take(BATCH, BATCH_BYTES)):
                    break
                self._tell(UsageBatch(epoch=backlog.epoch, committed_to=backlog.mark, items=items))


def _shortened(event: UsageEvent) -> UsageEvent:
    """The event with every text cut to a length no honest one has."""
    return replace(event, **{name: text[:MAX_TEXT] for name, text in asdict(event).items() if isinstance(text, str)})


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
