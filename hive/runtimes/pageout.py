"""Deep sleep: the anonymous memory of frozen processes goes to swap, slice by slice, until a wake interrupts it.

One thread does it for the whole helper: page-outs take turns and do not compete with the agents for the cores. Files
that are mapped (programs, libraries) stay: throwing them out would slow down the neighbours that share them.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hive.errors import NotSupported, Saturated, WrongState
from hive.host.charge import read_pss
from hive.host.memory import advise_pageout, held_by, read_memory, read_swap_cached
from hive.host.paging import NOT_PERMITTED, choose
from hive.host.paging import why_not as why_not  # what every runtime asks, beside `page_out`
from hive.host.process import Identity, identify, write_control
from hive.link.helper import PagedOut

MIB = 1024 * 1024
SLICE_BYTES = 4 * MIB
"""Paged out at one go: nothing can interrupt the kernel meanwhile (2 to 10 ms to zram on one core)."""
TURN_S = 0.01
"""After this long, at a slice's end, the next agent's page-out has the thread."""
FRUITLESS_MAX = 4
"""So many times in a row the kernel may reclaim less than asked (EAGAIN, normal) before the rest is left to it."""

Steps = Generator[None, None, None]
"""One slice each. Runs in the thread only, closing included."""

_thread = ThreadPoolExecutor(1, thread_name_prefix="page-out")
_DONE = object()


async def page_out(pids: Callable[[], list[int]], leaf: Path | None, *, give_up: Callable[[], bool]) -> PagedOut:
    """Pages out the anonymous memory of the frozen processes `pids()` names; `leaf`: the cgroup they are in, or None.

    `give_up` is asked between slices of 4 MiB, in another thread: it must only read. What was paged out stays so.
    Raises WrongState as soon as `give_up()` and where none is left, NotSupported where this host has no swap or does
    not allow it, Saturated where swap has no room.
    """
    began = time.monotonic()
    means = choose(leaf)
    processes = _identify(pids)
    cached = read_swap_cached()
    steps = by_madvise(processes) if means.reclaim is None else by_reclaim(means.reclaim, means.arguments)
    try:
        more = True
        while more:
            _must_sleep(give_up)
            more = await _in_thread(lambda: _turn(steps, leaf, give_up))
    finally:
        _thread.submit(steps.close)
    _must_sleep(give_up)
    took_ms = (time.monotonic() - began) * 1000
    swap_bytes = held_by(who.pid for who in processes).swap_bytes
    kept = await asyncio.to_thread(read_pss, [who.pid for who in processes])
    kept_bytes = (kept.held_bytes if kept else 0) + left_in_cache(cached, read_swap_cached(), swap_bytes)
    return PagedOut(took_ms=took_ms, kept_bytes=kept_bytes, swap_bytes=swap_bytes, how=means.how)


def left_in_cache(before: int, after: int, swap_bytes: int) -> int:
    """Bytes of what was written to swap that are in RAM still, by the host's swap cache before and after.

    On a swap file all of it stays there until somebody needs room; zram frees it at once.

    >>> left_in_cache(1000, 9000, 7000), left_in_cache(1000, 6000, 7000), left_in_cache(1000, 900, 7000)
    (7000, 5000, 0)
    """
    return min(swap_bytes, max(0, after - before))


async def _in_thread(work: Callable[[], bool]) -> bool:
    return await asyncio.get_running_loop().run_in_executor(_thread, work)


def _must_sleep(give_up: Callable[[], bool]) -> None:
    if give_up():
        raise WrongState("woken, stopped or ended while its memory was paged out")


def _identify(pids: Callable[[], list[int]]) -> list[Identity]:
    """Identifies exactly the processes listed: a pid that is listed again after its look was not reused meanwhile."""
    seen = [who for pid in pids() if (who := identify(pid)) is not None]
    still = set(pids())
    members = [who for who in seen if who.pid in still]
    if not members:
        raise WrongState("no process of it is left")
    return members


def _turn(steps: Steps, leaf: Path | None, give_up: Callable[[], bool]) -> bool:
    """Takes slices for about `TURN_S`. Whether there is more to do.

    Before each of them swap's room is looked at: where it is full the kernel passes over the rest and says nothing.
    """
    until = time.monotonic() + TURN_S
    while not give_up() and time.monotonic() < until:
        _check_room(leaf)
        if next(steps, _DONE) is _DONE:
            return False
    return True


# --- room in swap ------------------------------------------------------------------------------------------------


def _check_room(leaf: Path | None) -> None:
    """Raises Saturated where the next slice may find no room in swap."""
    memory = read_memory()
    if (free := memory.swap_free_bytes) is not None and free < SLICE_BYTES:
        total_mib = (memory.swap_total_bytes or 0) // MIB
        raise Saturated(f"swap has no room: {free // MIB} of {total_mib} MiB are free", hint="give this host more swap")
    room = None if leaf is None else _room_in(leaf)
    if leaf is not None and room is not None and room < min(SLICE_BYTES, _anonymous_bytes(leaf)):
        raise Saturated(f"swap has no room for this agent: its cgroup allows {room // MIB} MiB more")


def _room_in(leaf: Path) -> int | None:
    """Bytes of swap its cgroup still allows, None where it sets no limit."""
    try:
        return int((leaf / "memory.swap.max").read_text()) - int((leaf / "memory.swap.current").read_text())
    except (OSError, ValueError):
        return None


# --- the two ways ------------------------------------------------------------------------------------------------


def by_reclaim(reclaim: Path, how: str) -> Steps:
    """Has the kernel choose what of the cgroup's anonymous memory goes, until it has got that much or finds no more."""
    wanted, fruitless = _anonymous_bytes(reclaim.parent), 0
    while wanted > 0 and fruitless < FRUITLESS_MAX:
        amount = min(SLICE_BYTES, wanted)
        try:
            write_control(reclaim, f"{amount}{how}".encode())
            wanted, fruitless = wanted - amount, 0
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENODEV):
                return
            if error.errno not in (errno.EAGAIN, errno.EBUSY):
                raise
            fruitless += 1
        yield


def _anonymous_bytes(leaf: Path) -> int:
    """Anonymous memory in RAM, by `memory.stat`; 0 where the cgroup is gone."""
    try:
        lines = (leaf / "memory.stat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("anon ")), 0)


def by_madvise(processes: list[Identity]) -> Steps:
    """Range by range what only this process has. What the kernel refuses (locked, huge) is passed over."""
    for who in processes:
        pidfd = who.open()
        if pidfd is None:
            continue
        try:
            for start, length in slices(maps_of(who)):
                try:
                    advise_pageout(pidfd, start, length)
                except PermissionError as error:
                    raise NotSupported(f"{NOT_PERMITTED} (process_madvise: {error.strerror})") from error
                except ProcessLookupError:
                    break
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.ENOMEM, errno.EAGAIN, errno.EINTR, errno.EFAULT):
                        raise
                yield
        finally:
            os.close(pidfd)


def maps_of(who: Identity) -> str:
    """`/proc/<pid>/maps` of exactly this process, empty where it is gone. Raises NotSupported where it is hidden."""
    try:
        with open(f"/proc/{who.pid}/maps", errors="surrogateescape") as file:
            text = file.read()
    except PermissionError as error:
        raise NotSupported(f"{NOT_PERMITTED} (its memory map may not be read)") from error
    except OSError:
        return ""
    return text if who.stat() is not None else ""


def slices(maps: str) -> Iterator[tuple[int, int]]:
    """(start, length) of what may be paged out, at most `SLICE_BYTES` each and cut at multiples of that.

    Private memory without a file behind it: heap, stack, what was mapped for data. Not what nobody may touch (`---p`):
    runtimes reserve terabytes so.

    >>> list(slices("400000-800000 r-xp 0 08:01 7 /bin/x\\na00000-e00000 rw-p 0 00:00 0 [heap]\\n"))
    [(10485760, 2097152), (12582912, 2097152)]
    """
    for line in maps.splitlines():
        if not _is_own_memory(line.split(maxsplit=5)):
            continue
        start, end = (int(number, 16) for number in line.split(" ", 1)[0].split("-"))
        while start < end:
            stop = min(end, (start // SLICE_BYTES + 1) * SLICE_BYTES)
            yield start, stop - start
            start = stop


def _is_own_memory(fields: list[str]) -> bool:
    """Whether one line of maps is own memory: `address permissions offset device inode [name]`."""
    if len(fields) < 5 or fields[4] != "0" or fields[1][3:] != "p" or fields[1].startswith("---"):
        return False
    name = fields[5] if len(fields) > 5 else ""
    return name in {"", "[heap]", "[stack]"} or name.startswith("[anon:")
