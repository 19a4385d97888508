"""Deep sleep on real processes, with a real zram device and a real swap file."""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.errors import LinkLost, NotSupported, Saturated, WrongState
from hive.host.memory import advise_pageout
from hive.host.paging import choose
from hive.host.process import Identity, identify
from hive.link.helper import PagedOut
from hive.runtimes import pageout
from hive.runtimes.pageout import SLICE_BYTES, by_reclaim, slices, why_not
from hive.settings.table import Paths
from hive.tasks import spawn
from tests.nobody import run_as_nobody
from tests.sandbox import heavy
from tests.sandbox.harness import A, B, Daemon, OpenHelper, alive, running
from tests.sandbox.heavy import MIB
from tests.swapspace import file_swap, is_only_swap, without_swap, zram_swap
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]

HEAP_MIB = 64


@pytest.fixture(params=["zram", "file"])
def swap(request: pytest.FixtureRequest) -> Iterator[str]:
    with (zram_swap if request.param == "zram" else file_swap)(192) as path:
        yield path


@pytest.fixture
def some_swap() -> Iterator[str]:
    with zram_swap(192) as path:
        yield path


async def heavy_agent(
    daemon: Daemon, paths: Paths, mib: int = HEAP_MIB, *, agent: str = A, **more: int
) -> list[tuple[int, str]]:
    """(pid, socket) of each of its processes, once all have their heap."""
    await running(daemon, paths, heavy.command(mib, **more), agent)
    await until(lambda: paths.log(agent).read_text().count("\n") == 1 + more.get("children", 0))
    rows = [line.split() for line in paths.log(agent).read_text().splitlines()]
    if rows[0][0] == "mlock:":
        pytest.skip(f"an agent may not lock memory here: {rows}")
    return [(int(pid), address) for pid, address in rows]


async def put_to_sleep(daemon: Daemon, agent: str = A, generation: int = 1) -> None:
    await daemon.client.freeze(agent, generation)
    await daemon.client.confirm(agent, generation)


class SlowKernel:
    """Takes its time over the first slice with anything in it: it is paged out, but the call returns with `go_on`."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def advise(self, pidfd: int, start: int, length: int) -> None:
        advise_pageout(pidfd, start, length)
        if length == SLICE_BYTES:
            self.begun.set()
            self.go_on.wait()


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[SlowKernel]:
    kernel = SlowKernel()
    monkeypatch.setattr(pageout, "advise_pageout", kernel.advise)
    yield kernel
    kernel.go_on.set()


A_LOOK_BYTES = 4 * mmap.PAGESIZE
"""Memory that comes back when another program on this machine reads its command line or environment, as `ps` does."""


# --- what it gains -----------------------------------------------------------------------------------------------


@pytest.mark.root
async def test_a_sleepers_memory_leaves_ram_and_is_whole_after_it_woke(paths: Paths, daemon: Daemon, swap: str) -> None:
    [(_, address)] = await heavy_agent(daemon, paths)
    checksum = heavy.ask(address, b"sum")
    before = (await daemon.client.stat([A]))[A]
    assert before.swap_bytes == 0
    assert before.held_bytes is not None
    assert before.held_bytes > HEAP_MIB * MIB
    is_zram = swap.startswith("/dev/zram")
    paged = await heavy.paged_out_keeping(daemon, 0 if is_zram else 0.7 * before.held_bytes)
    assert paged.how == "madvise"
    if is_zram:
        assert paged.kept_bytes < 0.3 * before.held_bytes
    else:  # what was written lies in the swap cache until somebody needs room
        assert paged.kept_bytes > 0.7 * before.held_bytes
    assert paged.swap_bytes > HEAP_MIB * MIB
    asleep = (await daemon.client.stat([A]))[A]
    assert asleep.state == "frozen"
    assert asleep.swap_bytes == pytest.approx(paged.swap_bytes, abs=A_LOOK_BYTES)
    await daemon.client.thaw(A)
    assert await asyncio.to_thread(heavy.ask, address, b"sum") == checksum
    assert (await daemon.client.stat([A]))[A].swap_bytes < paged.swap_bytes


@pytest.mark.root
async def test_every_process_of_an_agent_is_paged_out(paths: Paths, daemon: Daemon, some_swap: str) -> None:
    processes = await heavy_agent(daemon, paths, 16, children=2)
    sums = {address: heavy.ask(address, b"sum") for _, address in processes}
    await put_to_sleep(daemon)
    paged = await daemon.client.page_out(A, 1)
    assert paged.swap_bytes > 3 * 16 * MIB
    for pid, _ in processes:
        assert sum(part.swap_bytes for part in heavy.mappings(pid)) > 16 * MIB
    await daemon.client.thaw(A)
    assert {address: await asyncio.to_thread(heavy.ask, address, b"sum") for _, address in processes} == sums


@pytest.mark.root
async def test_an_agent_pages_out_as_often_as_it_sleeps(paths: Paths, daemon: Daemon, some_swap: str) -> None:
    [(_, address)] = await heavy_agent(daemon, paths, 16)
    checksum = heavy.ask(address, b"sum")
    for generation in (1, 2, 3):
        await put_to_sleep(daemon, generation=generation)
        assert (await daemon.client.page_out(A, generation)).swap_bytes > 16 * MIB
        assert (await daemon.client.page_out(A, generation)).swap_bytes > 16 * MIB
        await daemon.client.thaw(A)
        assert await asyncio.to_thread(heavy.ask, address, b"sum") == checksum


@pytest.mark.root
async def test_mapped_files_stay_in_ram_and_locked_memory_too(paths: Paths, daemon: Daemon, some_swap: str) -> None:
    [(pid, _)] = await heavy_agent(daemon, paths, 16, locked_mib=4)
    await put_to_sleep(daemon)
    before = heavy.mappings(pid)
    await daemon.client.page_out(A, 1)
    after = heavy.mappings(pid)
    assert [(part.name, part.rss_bytes) for part in after if part.is_file] == [
        (part.name, part.rss_bytes) for part in before if part.is_file
    ]
    assert sum(part.rss_bytes for part in after if part.is_file) > MIB
    assert [part.rss_bytes for part in after if part.locked_bytes] == [4 * MIB]
    assert sum(part.swap_bytes for part in after) > 16 * MIB


# --- a wake wins -------------------------------------------------------------------------------------------------


@pytest.mark.root
async def test_a_thaw_wins_over_a_page_out_at_once(
    paths: Paths, daemon: Daemon, some_swap: str, slow: SlowKernel
) -> None:
    """The agent answers while the kernel is at a slice of its memory; after that slice nothing more is paged out."""
    [(_, address)] = await heavy_agent(daemon, paths)
    checksum = heavy.ask(address, b"sum")
    await put_to_sleep(daemon)
    paging = spawn(daemon.client.page_out(A, 1), name="page out")
    await until(slow.begun.is_set)
    await daemon.client.thaw(A)
    assert await asyncio.to_thread(heavy.ask, address, b"sum") == checksum
    assert not paging.done()
    slow.go_on.set()
    with pytest.raises(WrongState, match="woken"):
        await paging
    assert (await daemon.client.stat([A]))[A].swap_bytes <= 2 * SLICE_BYTES


@pytest.mark.root
async def test_a_page_out_that_waits_for_its_turn_is_given_up_before_it_begins(
    paths: Paths, daemon: Daemon, some_swap: str, slow: SlowKernel
) -> None:
    for agent in (A, B):
        await heavy_agent(daemon, paths, 16, agent=agent)
        await put_to_sleep(daemon, agent)
    first = spawn(daemon.client.page_out(A, 1), name="page out A")
    await until(slow.begun.is_set)
    second = spawn(daemon.client.page_out(B, 1), name="page out B")
    await daemon.client.stat([B])
    await daemon.client.thaw(B)
    slow.go_on.set()
    with pytest.raises(WrongState, match="woken"):
        await second
    assert (await first).swap_bytes > 16 * MIB
    assert (await daemon.client.stat([B]))[B].swap_bytes == 0


@pytest.mark.root
async def test_after_a_wake_not_one_slice_more_is_paged_out(paths: Paths, daemon: Daemon, some_swap: str) -> None:
    [(pid, _)] = await heavy_agent(daemon, paths)
    await put_to_sleep(daemon)
    asked = 0

    def woken_after_four() -> bool:
        nonlocal asked
        asked += 1
        return asked > 4

    with pytest.raises(WrongState, match="woken"):
        await pageout.page_out(lambda: [pid], None, give_up=woken_after_four)
    swapped = (await daemon.client.stat([A]))[A].swap_bytes
    assert 0 < swapped <= 4 * SLICE_BYTES


@pytest.mark.root
async def test_while_one_pages_out_another_is_frozen_and_thawed(
    paths: Paths, daemon: Daemon, some_swap: str, slow: SlowKernel
) -> None:
    """The helper's loop does not wait for the kernel."""
    await heavy_agent(daemon, paths, 16)
    [(_, other)] = await heavy_agent(daemon, paths, 1, agent=B)
    await put_to_sleep(daemon, A)
    paging = spawn(daemon.client.page_out(A, 1), name="page out")
    await until(slow.begun.is_set)
    await put_to_sleep(daemon, B)
    await daemon.client.thaw(B)
    assert await asyncio.to_thread(heavy.ask, other, b"ping") == b"pong"
    assert not paging.done()
    slow.go_on.set()
    assert (await paging).swap_bytes > 16 * MIB


@pytest.mark.root
async def test_two_page_outs_take_turns(paths: Paths, daemon: Daemon, some_swap: str) -> None:
    for agent in (A, B):
        await heavy_agent(daemon, paths, 32, agent=agent)
        await put_to_sleep(daemon, agent)
    both = await asyncio.gather(daemon.client.page_out(A, 1), daemon.client.page_out(B, 1))
    assert min(paged.swap_bytes for paged in both) > 32 * MIB


@pytest.mark.root
@pytest.mark.parametrize("how", ["stop", "remove", "kill"])
async def test_an_agent_is_stopped_removed_or_killed_while_it_pages_out(
    paths: Paths, daemon: Daemon, some_swap: str, slow: SlowKernel, how: str
) -> None:
    [(pid, _)] = await heavy_agent(daemon, paths, 16)
    await put_to_sleep(daemon)
    paging = spawn(daemon.client.page_out(A, 1), name="page out")
    await until(slow.begun.is_set)
    ending = None
    if how == "kill":
        os.kill(pid, signal.SIGKILL)
    else:
        verb = daemon.client.remove(A) if how == "remove" else daemon.client.stop(A, grace_s=5)
        ending = spawn(verb, name=how)
    await until(lambda: not alive(pid))
    slow.go_on.set()
    with pytest.raises(WrongState):
        await paging
    if ending is None:
        await until(lambda: daemon.ended)
    else:
        await ending


@pytest.mark.root
async def test_a_helper_leaves_while_an_agent_pages_out(
    paths: Paths, open_helper: OpenHelper, connect: Connect, some_swap: str, slow: SlowKernel
) -> None:
    helper = await open_helper()
    daemon = await connect()
    [(_, address)] = await heavy_agent(daemon, paths, 16)
    await put_to_sleep(daemon)
    paging = spawn(daemon.client.page_out(A, 1), name="page out")
    await until(slow.begun.is_set)
    await helper.leave()
    with pytest.raises(LinkLost):
        await paging
    assert await asyncio.to_thread(heavy.ask, address, b"ping") == b"pong"


# --- what does not work is said, and changes nothing -------------------------------------------------------------


@pytest.mark.root
@pytest.mark.parametrize("kind", [zram_swap, file_swap])
async def test_a_full_swap_is_said_and_the_rest_stays_in_ram(
    paths: Paths, daemon: Daemon, kind: Callable[[int], AbstractContextManager[str]]
) -> None:
    [(_, address)] = await heavy_agent(daemon, paths)
    checksum = heavy.ask(address, b"sum")
    await put_to_sleep(daemon)
    with kind(24) as path:
        if not is_only_swap(path):
            pytest.skip("this host has swap of its own")
        with pytest.raises(Saturated, match=r"swap has no room: \d of 23 MiB are free"):
            await daemon.client.page_out(A, 1)
        asleep = (await daemon.client.stat([A]))[A]
        assert asleep.state == "frozen"
        assert 16 * MIB < asleep.swap_bytes < 24 * MIB
        await daemon.client.thaw(A)
        assert await asyncio.to_thread(heavy.ask, address, b"sum") == checksum


@pytest.mark.root
async def test_without_swap_nothing_changes_and_it_is_said_why(paths: Paths, daemon: Daemon) -> None:
    await heavy_agent(daemon, paths, 16)
    await put_to_sleep(daemon)
    with without_swap():
        before = (await daemon.client.stat([A]))[A]
        with pytest.raises(NotSupported, match="deep sleep: this host has no swap") as refused:
            await daemon.client.page_out(A, 1)
        assert "zram" in refused.value.hint
        assert (await daemon.client.stat([A]))[A] == before
        assert why_not(None) == "deep sleep: this host has no swap"


AS_A_USER = """
import asyncio, os, signal, subprocess
from hive.errors import NotSupported
from hive.runtimes.pageout import page_out, why_not
child = subprocess.Popen(["sleep", "100"])
child.send_signal(signal.SIGSTOP)
print(why_not(None))
try:
    asyncio.run(page_out(lambda: [child.pid], None, give_up=lambda: False))
except NotSupported as refused:
    print(refused.message)
child.kill()
child.wait()
"""


@pytest.mark.root
def test_a_user_is_told_what_it_takes(some_swap: str) -> None:
    sentence = (
        "deep sleep: not permitted here (it takes CAP_SYS_PTRACE and CAP_SYS_NICE, or a delegated cgroup with the"
        " memory controller)\n"
    )
    assert run_as_nobody(AS_A_USER) == 2 * sentence


@pytest.mark.root
def test_root_may_page_out_where_there_is_swap(some_swap: str) -> None:
    assert why_not(None) == ""
    assert choose(None).how == "madvise"


async def nothing_left(pids: Callable[[], list[int]]) -> PagedOut:
    return await pageout.page_out(pids, None, give_up=lambda: False)


@pytest.mark.root
async def test_of_an_agent_that_ended_nothing_is_paged_out(some_swap: str) -> None:
    for pids in ([], [2**22 + 1]):
        with pytest.raises(WrongState, match="no process"):
            await nothing_left(lambda pids=pids: pids)  # type: ignore[misc]


@pytest.mark.root
async def test_a_process_that_is_listed_only_once_is_not_touched(some_swap: str) -> None:
    """It left the agent between the two looks; the process with its pid now is not known."""
    looks = iter([[os.getpid()], []])
    with pytest.raises(WrongState, match="no process"):
        await nothing_left(lambda: next(looks))


@pytest.mark.root
def test_a_process_that_ended_meanwhile_is_passed_over(some_swap: str) -> None:
    """Its number may be another's by now, which the start time tells."""
    own = identify(os.getpid())
    assert own is not None
    stranger = Identity(own.pid, own.start_ticks - 1, own.boot)
    assert list(pageout.by_madvise([stranger])) == []


# --- the cgroup's own reclaim, where the kernel's part is played by files ---------------------------------------


@pytest.fixture
def leaf(tmp_path: Path) -> Path:
    """The look of a leaf with the v2 memory controller; the kernel of the test host has it on v1."""
    (tmp_path / "memory.stat").write_text(f"file 4096\nanon {10 * MIB}\nanon_thp 0\n")
    (tmp_path / "memory.reclaim").touch()
    return tmp_path


def test_reclaim_asks_for_all_of_it_in_slices(leaf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    monkeypatch.setattr(pageout, "write_control", lambda _, data: written.append(data))
    assert len(list(by_reclaim(leaf / "memory.reclaim", " swappiness=max"))) == 3
    assert written == [b"4194304 swappiness=max", b"4194304 swappiness=max", b"2097152 swappiness=max"]


def test_reclaim_that_gains_less_than_asked_is_tried_again_but_not_for_ever(
    leaf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = [errno.EAGAIN, 0, errno.EAGAIN, errno.EAGAIN, errno.EAGAIN, errno.EAGAIN, 0]

    def write(path: Path, data: bytes) -> None:
        if number := answers.pop(0):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(pageout, "write_control", write)
    assert len(list(by_reclaim(leaf / "memory.reclaim", ""))) == 6


def test_reclaim_of_a_cgroup_that_is_gone_ends(leaf: Path) -> None:
    (leaf / "memory.reclaim").unlink()
    assert list(by_reclaim(leaf / "memory.reclaim", "")) == []
    assert list(by_reclaim(leaf / "gone" / "memory.reclaim", "")) == []


@pytest.mark.root
def test_a_cgroup_whose_reclaim_can_be_written_is_preferred(some_swap: str, leaf: Path) -> None:
    assert choose(leaf).how == "reclaim"
    (leaf / "memory.reclaim").unlink()
    assert choose(leaf).how == "madvise"
    assert why_not(leaf) == ""


@pytest.mark.root
def test_a_cgroup_that_allows_no_swap_has_no_room(some_swap: str, leaf: Path) -> None:
    (leaf / "memory.swap.max").write_text(f"{6 * MIB}\n")
    (leaf / "memory.swap.current").write_text(f"{3 * MIB}\n")
    with pytest.raises(Saturated, match="its cgroup allows 3 MiB more"):
        pageout._check_room(leaf)
    (leaf / "memory.swap.max").write_text("max\n")
    assert pageout._room_in(leaf) is None


@pytest.mark.root
def test_a_cgroup_whose_last_pages_just_fit_into_its_swap_has_room(some_swap: str, leaf: Path) -> None:
    (leaf / "memory.swap.max").write_text(f"{6 * MIB}\n")
    (leaf / "memory.swap.current").write_text(f"{4 * MIB}\n")
    (leaf / "memory.stat").write_text(f"anon {2 * MIB}\n")
    pageout._check_room(leaf)
    (leaf / "memory.stat").write_text(f"anon {2 * MIB + 4096}\n")
    with pytest.raises(Saturated, match="its cgroup allows 2 MiB more"):
        pageout._check_room(leaf)


# --- which ranges ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "is_own"),
    [
        ("1000-2000 rw-p 00000000 00:00 0 [heap]", True),
        ("1000-2000 rw-p 00000000 00:00 0 [stack]", True),
        ("1000-2000 rw-p 00000000 00:00 0 ", True),
        ("1000-2000 r--p 00000000 00:00 0 ", True),
        ("1000-2000 rwxp 00000000 00:00 0 ", True),
        ("1000-2000 rw-p 00000000 00:00 0 [anon:glibc: malloc]", True),
        ("1000-2000 ---p 00000000 00:00 0 ", False),
        ("1000-2000 rw-s 00000000 00:01 0 /dev/zero (deleted)", False),
        ("1000-2000 rw-s 00000000 00:00 0 [anon_shmem:x]", False),
        ("1000-2000 rw-p 00000000 08:01 77 /usr/lib/libc.so.6", False),
        ("1000-2000 r-xp 00000000 08:01 77 /usr/bin/python3", False),
        ("1000-2000 rw-p 00000000 00:0f 12 /anon_hugepage (deleted)", False),
        ("1000-2000 rw-s 00000000 00:05 1027 /memfd:x (deleted)", False),
        ("1000-2000 r--p 00000000 00:00 0 [vvar]", False),
        ("1000-2000 r-xp 00000000 00:00 0 [vdso]", False),
        ("ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 [vsyscall]", False),
        ("nonsense", False),
    ],
)
def test_only_private_memory_without_a_file_is_paged_out(line: str, is_own: bool) -> None:
    assert bool(list(slices(line + "\n"))) is is_own


@given(st.lists(st.tuples(st.integers(1, 3000), st.integers(1, 9000)), max_size=5))
def test_slices_cover_each_range_exactly_and_none_is_larger_than_promised(gaps: list[tuple[int, int]]) -> None:
    ranges, at = [], 0
    for gap, pages in gaps:
        ranges.append((at + gap * 4096, at + (gap + pages) * 4096))
        at = ranges[-1][1]
    cut = list(slices("".join(f"{start:x}-{end:x} rw-p 0 00:00 0 \n" for start, end in ranges)))
    assert all(0 < length <= SLICE_BYTES for _, length in cut)
    assert all(start // SLICE_BYTES == (start + length - 1) // SLICE_BYTES for start, length in cut)
    assert sum(length for _, length in cut) == sum(end - start for start, end in ranges)
    whole = {page for start, length in cut for page in range(start, start + length, 4096)}
    assert whole == {page for start, end in ranges for page in range(start, end, 4096)}
