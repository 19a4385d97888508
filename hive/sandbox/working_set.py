"""The working set of a deep sleeper: the pages it used since its last wake, read from swap beside the next one.

What an agent touches in a turn after a deep sleep is nearly the same each time (95 to 100 % with Python, 69 % with
Node), and a fifth of its memory. It is what is present, and only its own, when it sleeps again: nothing was right
after the last page-out. Read beside the thaw it takes away most of what a wake from a swap file costs; from zram it
is the same work on another core, so there it is left alone.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from hive.host.memory import advise_willneed, read_swaps
from hive.host.paging import is_on_a_disk
from hive.host.process import Identity, identify
from hive.runtimes.pageout import maps_of, slices

PAGE_BYTES = 4096
LONGEST_BYTES = 32 << 20
"""Of one agent: more is a heap walked from end to end, and reading that all takes longer than the turn."""
AT_ONCE_BYTES = 1 << 20
"""Asked for in one call; between two of them a sleep or an end is noticed."""
RANGES_AT_ONCE = 512
"""The kernel takes 1,024."""
_ENTRY_BYTES = 8
_OWN = re.compile(rb"[\x81\x83\x85\x87]+")
"""The uppermost bytes of pagemap entries (kernel: admin-guide/mm/pagemap.rst) of pages that are present, anonymous and
mapped by this process alone, so not a template's."""

_thread = ThreadPoolExecutor(1, thread_name_prefix="prefetch")


def own_pages(top: bytes, start: int) -> Iterator[tuple[int, int]]:
    """(address, length) of each run of own pages that are present; `top`: the uppermost byte of each entry.

    >>> list(own_pages(bytes([0x81, 0x81, 0x40, 0xA1, 0x80, 0x81]), 0x10000))
    [(65536, 8192), (86016, 4096)]
    """
    for found in _OWN.finditer(top):
        yield start + found.start() * PAGE_BYTES, (found.end() - found.start()) * PAGE_BYTES


def batches(ranges: array[int]) -> Iterator[list[tuple[int, int]]]:
    """The ranges in groups of about `AT_ONCE_BYTES`.

    >>> [len(batch) for batch in batches(array("Q", [0, 1 << 19, 1 << 20, 1 << 19, 1 << 21, 4096]))]
    [2, 1]
    """
    batch: list[tuple[int, int]] = []
    size = 0
    for start, length in zip(islice(ranges, 0, None, 2), islice(ranges, 1, None, 2), strict=True):
        batch.append((start, length))
        size += length
        if size >= AT_ONCE_BYTES or len(batch) == RANGES_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class WorkingSet:
    """Of one started agent. What it does in threads ends within a call of `halt`, whatever the disk does."""

    def __init__(self, pids: Callable[[], list[int]]) -> None:
        self._pids = pids
        self._ranges: dict[Identity, array[int]] = {}
        """Start, length, start, length …: a list of pairs takes ten times as much."""
        self._paged_out_in: int | None = None
        self._halted = threading.Event()
        self._sizes: deque[int] = deque(maxlen=2)

    def __repr__(self) -> str:
        return f"<WorkingSet {self.size_bytes} bytes of {len(self._ranges)} processes>"

    @property
    def size_bytes(self) -> int | None:
        """The larger of the last two that were recorded; None before."""
        return max(self._sizes, default=None)

    async def record(self, sleep: int) -> None:
        """Before it is paged out in `sleep`. Not where the last page-out was of this sleep, or there was none."""
        if self._paged_out_in in (None, sleep):
            return
        members = [who for pid in self._pids() if (who := identify(pid)) is not None]
        self._paged_out_in = None  # until this page-out is through, too
        self._ranges, size_bytes = await asyncio.to_thread(_look, members)
        if self._ranges:
            self._sizes.append(size_bytes)

    def paged_out(self, sleep: int) -> None:
        """All of it was, in this sleep: what is present from now on was used."""
        self._paged_out_in = sleep

    def prefetch(self, sleep: int) -> None:
        """Right after the thaw from `sleep`: begins to read it, where it was paged out to a disk. Returns at once."""
        if self._paged_out_in != sleep or not self._ranges or not is_on_a_disk(read_swaps() or ()):
            return
        self._halted = threading.Event()
        _thread.submit(_read, dict(self._ranges), self._halted)

    def halt(self) -> None:
        """It sleeps again or has ended: nothing more is read."""
        self._halted.set()


def _look(members: list[Identity]) -> tuple[dict[Identity, array[int]], int]:
    """The own pages present of each, at most `LONGEST_BYTES` in all, and the size of all that there are in bytes.

    Nothing where they may not be looked at.
    """
    found: dict[Identity, array[int]] = {}
    left, size_bytes = LONGEST_BYTES, 0
    for who in members:
        ranges = array("Q")
        try:
            with open(f"/proc/{who.pid}/pagemap", "rb", buffering=0) as pagemap:
                for start, length in slices(maps_of(who)):
                    pagemap.seek(start // PAGE_BYTES * _ENTRY_BYTES)
                    top = pagemap.read(length // PAGE_BYTES * _ENTRY_BYTES)[_ENTRY_BYTES - 1 :: _ENTRY_BYTES]
                    for address, size in own_pages(top, start):
                        taken = min(size, left)
                        if taken:
                            ranges.extend((address, taken))
                        left -= taken
                        size_bytes += size
        except OSError:
            continue  # it is gone, or is not to be looked at
        if ranges and who.stat() is not None:
            found[who] = ranges
    return found, size_bytes


def _read(ranges: dict[Identity, array[int]], halted: threading.Event) -> None:
    """Has the kernel read them. What is not mapped any more, or not permitted, is passed over: it was only a help."""
    for who, of_one in ranges.items():
        pidfd = who.open()
        if pidfd is None:
            continue
        try:
            for batch in batches(of_one):
                if halted.is_set():
                    return
                if not advise_willneed(pidfd, batch):
                    break
        finally:
            os.close(pidfd)
