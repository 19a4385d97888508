"""Memory and swap as the kernel tells them, read on this host, and zram turned on and off for real."""

from __future__ import annotations

import errno
import mmap
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.errors import BadRequest, HiveError, NotSupported
from hive.host import memory, zram
from hive.host.memory import HeldMemory, MemInfo, Pressure, Swap
from tests.nobody import run_as_nobody
from tests.swapspace import alone, file_swap, zram_swap

MIB = 1024 * 1024
GIB = 1024 * MIB

# --- reading -----------------------------------------------------------------------------------------------------


def test_this_host_says_how_much_memory_it_has() -> None:
    found = memory.read_memory()
    assert found.total_bytes == os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    assert found.available_bytes is not None
    assert 0 < found.available_bytes <= found.total_bytes


def test_what_the_kernel_does_not_say_is_none_and_not_zero() -> None:
    assert memory.parse_meminfo("") == MemInfo(None, None, None, None)
    assert memory.parse_meminfo("MemTotal: unknown\nSwapFree:\n") == MemInfo(None, None, None, None)


@pytest.mark.parametrize(
    ("swap_cached", "anon_pages", "available"),
    [(218, 214, 258), (218, 432, 40), (9, 214, 49), (0, 214, 40), (218, 500, 40)],
)
def test_what_lies_in_ram_only_because_it_was_not_dropped_yet_is_available(
    swap_cached: int, anon_pages: int, available: int
) -> None:
    """The first row is what Linux 6.1 said after nine agents were paged out to a disk."""
    text = (
        f"MemAvailable: 40 kB\nSwapCached: {swap_cached} kB\nActive(anon): 0 kB\nInactive(anon): 434 kB\n"
        f"AnonPages: {anon_pages} kB\nShmem: 2 kB\n"
    )
    assert memory.parse_meminfo(text).available_bytes == available * 1024


@pytest.mark.parametrize(
    ("text", "pressure"),
    [
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n", Pressure(0.0, None)),
        (
            "some avg10=99.30 avg60=1 avg300=1 total=5\nfull avg10=12.50 avg60=0 avg300=0 total=1\n",
            Pressure(99.3, 12.5),
        ),
        ("", Pressure(None, None)),
        ("\n", Pressure(None, None)),
    ],
)
def test_pressure_is_read(text: str, pressure: Pressure) -> None:
    assert memory.parse_pressure(text) == pressure


@pytest.mark.skipif(not Path("/proc/pressure/memory").exists(), reason="this kernel counts no pressure")
def test_the_pressure_of_this_host_is_a_share_of_time() -> None:
    found = memory.read_pressure()
    assert found.some_avg10 is None or 0 <= found.some_avg10 <= 100


def test_a_file_the_kernel_lacks_reads_as_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(memory, "SYS_BLOCK", tmp_path / "none")
    assert memory.read_zrams() == []
    assert memory.read_zram("/dev/zram0") is None


def test_a_swap_file_with_a_blank_and_a_backslash_in_its_name() -> None:
    line = "Filename Type Size Used Priority\n/a\\040b\\134c file 1024 4 -2\n/dev/zram1 partition 2048 0 100\n"
    assert memory.parse_swaps(line) == [
        Swap("/a b\\c", "file", MIB, 4096, -2),
        Swap("/dev/zram1", "partition", 2 * MIB, 0, 100),
    ]
    assert [swap.is_zram for swap in memory.parse_swaps(line)] == [False, True]


def test_processes_are_counted_together_and_the_dead_hold_nothing() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    own = memory.held_by([os.getpid()])
    assert own.rss_bytes > 4 * MIB
    assert memory.held_by([child.pid]) == HeldMemory(0, 0)
    assert memory.held_by([os.getpid(), child.pid, os.getpid()]).rss_bytes >= 2 * own.rss_bytes - MIB


# --- process_madvise ---------------------------------------------------------------------------------------------


@pytest.fixture
def own_pidfd() -> Iterator[int]:
    fd = os.pidfd_open(os.getpid())
    yield fd
    os.close(fd)


def test_advice_on_no_memory_only_asks_whether_it_may_be_given(own_pidfd: int) -> None:
    memory.advise_pageout(own_pidfd, 0, 0)


def test_advice_on_memory_that_is_not_there_is_told_apart(own_pidfd: int) -> None:
    with pytest.raises(OSError, match=os.strerror(errno.ENOMEM)):
        memory.advise_pageout(own_pidfd, 4096, 4096)


def test_advice_to_a_process_that_ended_is_no_such_process() -> None:
    child = subprocess.Popen(["true"])
    fd = os.pidfd_open(child.pid)
    child.wait()
    with pytest.raises(ProcessLookupError):
        memory.advise_pageout(fd, 4096, 4096)
    os.close(fd)


# --- zram --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("total_gib", "swaps_gib", "wanted_gib"),
    [(8, [], 16), (8, [4], 12), (8, [8, 8], None), (8, [15], None), (8, [14], 2)],
)
def test_the_plan_adds_what_is_missing_to_twice_the_ram(
    total_gib: int, swaps_gib: list[int], wanted_gib: int | None
) -> None:
    swaps = [Swap(f"/swap{size}", "file", size * GIB, 0, -2) for size in swaps_gib]
    plan = zram.plan(MemInfo(total_gib * GIB, GIB, None, None), swaps)
    assert (None if plan is None else plan.size_bytes) == (None if wanted_gib is None else wanted_gib * GIB)


def test_a_host_that_does_not_say_what_it_has_gets_no_plan() -> None:
    assert zram.plan(MemInfo(None, None, None, None), []) is None
    assert zram.plan(MemInfo(GIB, None, None, None), None) is None


@pytest.mark.root
def test_zram_is_turned_on_and_off_again() -> None:
    with zram_swap(32) as device:
        swap = next(swap for swap in memory.read_swaps() or () if swap.path == device)
        assert (swap.is_zram, swap.priority) == (True, 32767)
        assert 31 * MIB < swap.size_bytes <= 32 * MIB
        found = memory.read_zram(device)
        assert found is not None
        assert found.disksize_bytes == 32 * MIB
        assert found.algorithm in zram.PREFERRED
        assert found.memory_bytes > 0
        assert found in memory.read_zrams()
    assert not Path(device).exists()
    assert device not in [swap.path for swap in memory.read_swaps() or ()]


@pytest.mark.root
def test_neighbours_are_read_from_swap_as_before_where_a_disk_is_in_use() -> None:
    before = zram.PAGE_CLUSTER.read_text()
    with file_swap(16):
        assert zram.read_single_pages() is None
        assert zram.PAGE_CLUSTER.read_text() == before


@pytest.mark.root
@pytest.mark.parametrize(("size_bytes", "algorithm"), [(4096, None), (32 * MIB, "nonsense"), (2**63, "lzo")])
def test_what_the_kernel_refuses_leaves_no_device(size_bytes: int, algorithm: str | None) -> None:
    with alone():
        if not zram.CONTROL.exists():
            pytest.skip("this kernel has no zram")
        before = memory.read_zrams()
        with pytest.raises(HiveError):
            zram.set_up(size_bytes, algorithm)
        assert memory.read_zrams() == before


@pytest.mark.root
def test_an_algorithm_that_is_not_there_is_answered_with_those_that_are() -> None:
    with alone():
        if not zram.CONTROL.exists():
            pytest.skip("this kernel has no zram")
        with pytest.raises(BadRequest, match="does not know nonsense") as refused:
            zram.set_up(32 * MIB, "nonsense")
    assert "lz" in refused.value.hint


def test_a_kernel_without_zram_says_what_serves_as_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(zram, "CONTROL", tmp_path / "none")
    monkeypatch.setattr(zram, "PATH", str(tmp_path))
    with pytest.raises(NotSupported, match="no zram") as refused:
        zram.set_up(32 * MIB)
    assert "swap file" in refused.value.hint


@pytest.mark.root
def test_a_user_is_told_that_only_root_may() -> None:
    if not zram.CONTROL.exists():
        pytest.skip("this kernel has no zram")
    program = "from hive.host import zram\nfrom hive.errors import NotPermitted\n" + (
        "try: zram.set_up(1 << 25)\nexcept NotPermitted as refused: print(refused.message, '/', refused.hint)"
    )
    assert run_as_nobody(program) == "only root may set up zram / type it with sudo in front\n"


@pytest.mark.root
def test_a_device_that_is_used_otherwise_stays(tmp_path: Path) -> None:
    with zram_swap(32) as device, open(device, "rb"):
        monkey = pytest.MonkeyPatch()
        monkey.setattr(zram, "REMOVE_WITHIN_S", 0.05)
        with pytest.raises(HiveError, match="busy"):
            zram.take_down(device)
        monkey.undo()
        assert Path(device).exists()


@pytest.mark.root
def test_a_swap_file_is_listed_with_its_size() -> None:
    with file_swap(16) as path:
        swap = next(swap for swap in memory.read_swaps() or () if swap.path == path)
        assert (swap.kind, swap.is_zram, swap.priority) == ("file", False, 32767)
        assert memory.read_memory().swap_total_bytes is not None
        assert (memory.read_memory().swap_total_bytes or 0) >= swap.size_bytes
