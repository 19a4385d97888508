"""The kernel's figures of memory and swap: the host's, one process's, a zram device's.

Everything here may be missing (a kernel without PSI, a container that hides /proc/swaps): that is None, never 0.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

KIB = 1024
SYS_BLOCK = Path("/sys/block")
PROCESS_MADVISE = 440
"""The system call's number, the same on every architecture Debian has."""
MADV_PAGEOUT = ctypes.c_int(21)
MADV_WILLNEED = ctypes.c_int(3)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def _read(path: str | Path) -> str:
    """The content of one file of the kernel, empty where it cannot be read (pressure files also fail on reading)."""
    try:
        with open(path, encoding="utf-8", errors="surrogateescape") as file:
            return file.read()
    except OSError:
        return ""


# --- the host ----------------------------------------------------------------------------------------------------


class MemInfo(NamedTuple):
    """`/proc/meminfo`, in bytes. `available_bytes`: what new work may take before the host begins to swap."""

    total_bytes: int | None
    available_bytes: int | None
    swap_total_bytes: int | None
    swap_free_bytes: int | None


_LRU = ("Active(anon)", "Inactive(anon)", "AnonPages", "Shmem")


def parse_meminfo(text: str) -> MemInfo:
    """
    >>> parse_meminfo("MemTotal:  8 kB\\nMemAvailable:  4 kB\\nSwapTotal:  0 kB\\nHugePages_Total:  2\\n")
    MemInfo(total_bytes=8192, available_bytes=4096, swap_total_bytes=0, swap_free_bytes=None)
    """
    found = _kib_fields(text, {"MemTotal", "MemAvailable", "SwapTotal", "SwapFree", "SwapCached", *_LRU})
    total, available, swap_total, swap_free = (
        found.get(name) for name in ("MemTotal", "MemAvailable", "SwapTotal", "SwapFree")
    )
    return MemInfo(total, None if available is None else available + _left_in_ram(found), swap_total, swap_free)


def read_swap_cached() -> int:
    """Bytes of the host's RAM that have a copy in swap (`SwapCached`); 0 where the kernel does not say."""
    return _kib_fields(_read("/proc/meminfo"), {"SwapCached"}).get("SwapCached", 0)


def _left_in_ram(found: dict[str, int]) -> int:
    """Bytes that were written to swap and that no process has mapped any more: the kernel drops them when asked for
    memory, and does not count them as available (seen with Linux 6.1: all of what was paged out to a disk).

    >>> _left_in_ram({"SwapCached": 40, "Active(anon)": 10, "Inactive(anon)": 90, "AnonPages": 65, "Shmem": 5})
    30
    >>> _left_in_ram({"SwapCached": 40})
    0
    """
    if not all(name in found for name in _LRU):
        return 0
    unmapped = found["Active(anon)"] + found["Inactive(anon)"] - found["AnonPages"] - found["Shmem"]
    return max(0, min(found.get("SwapCached", 0), unmapped))


def _kib_fields(text: str, names: set[str]) -> dict[str, int]:
    """`Name:   12 kB` lines in bytes; lines of another form are passed over."""
    found = {}
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name in names and value.endswith(" kB") and value[:-3].strip().isdigit():
            found[name] = int(value[:-3]) * KIB
    return found


def read_memory() -> MemInfo:
    """The memory of this host, now."""
    return parse_meminfo(_read("/proc/meminfo"))


class Pressure(NamedTuple):
    """PSI of memory: per cent of the last 10 s in which some task (every task) waited for memory."""

    some_avg10: float | None
    full_avg10: float | None


def parse_pressure(text: str) -> Pressure:
    """
    >>> parse_pressure("some avg10=1.50 avg60=0.20 avg300=0.00 total=9\\nfull avg10=0.25 avg60=0 avg300=0 total=1\\n")
    Pressure(some_avg10=1.5, full_avg10=0.25)
    >>> parse_pressure("")
    Pressure(some_avg10=None, full_avg10=None)
    """
    averages: dict[str, float] = {}
    for line in text.splitlines():
        kind, *fields = line.split() or [""]
        for field in fields:
            if field.startswith("avg10="):
                averages[kind] = float(field.removeprefix("avg10="))
    return Pressure(averages.get("some"), averages.get("full"))


def read_pressure() -> Pressure:
    """The memory pressure of this host, now; None where the kernel counts none (no PSI, or booted with `psi=0`)."""
    return parse_pressure(_read("/proc/pressure/memory"))


# --- swap --------------------------------------------------------------------------------------------------------


class Swap(NamedTuple):
    """One line of `/proc/swaps`. `kind`: `partition` (zram too) or `file`. Of two with room the higher priority fills
    first."""

    path: str
    kind: str
    size_bytes: int
    used_bytes: int
    priority: int

    @property
    def is_zram(self) -> bool:
        return self.path.startswith("/dev/zram")


def parse_swaps(text: str) -> list[Swap]:
    """A path is written with its blanks as octal numbers.

    >>> parse_swaps("Filename  Type  Size  Used  Priority\\n/a\\\\040b  file  64  8  -2\\n")
    [Swap(path='/a b', kind='file', size_bytes=65536, used_bytes=8192, priority=-2)]
    """
    found = []
    for line in text.splitlines()[1:]:
        fields = line.split()
        if len(fields) == 5:
            path = fields[0].replace("\\040", " ").replace("\\011", "\t").replace("\\012", "\n").replace("\\134", "\\")
            size, used, priority = (int(field) for field in fields[2:])
            found.append(Swap(path, fields[1], size * KIB, used * KIB, priority))
    return found


def read_swaps() -> list[Swap] | None:
    """All that are on; None where the kernel does not say."""
    text = _read("/proc/swaps")
    return parse_swaps(text) if text else None


class ZramDevice(NamedTuple):
    """One zram device. `disksize_bytes`: what it may hold, uncompressed. `algorithm`: what compresses it."""

    device: str
    algorithm: str
    disksize_bytes: int
    original_bytes: int
    """Uncompressed size of what is in it."""
    memory_bytes: int
    """`mem_used_total`: RAM it takes for that, its own bookkeeping of pages included."""


def parse_mm_stat(text: str) -> tuple[int, int] | None:
    """(`orig_data_size`, `mem_used_total`) in bytes, the first and third number (kernel: blockdev/zram.rst).

    >>> parse_mm_stat("    4096       63    20480        0    20480        0        0        0        0\\n")
    (4096, 20480)
    """
    numbers = [int(field) for field in text.split() if field.isdigit()]
    return (numbers[0], numbers[2]) if len(numbers) >= 3 else None


def read_zram(device: str) -> ZramDevice | None:
    """The figures of one device (`/dev/zram0`); None where there is none or its kernel does not say."""
    directory = SYS_BLOCK / Path(device).name
    sizes, disksize = parse_mm_stat(_read(directory / "mm_stat")), _read(directory / "disksize").strip()
    if sizes is None or not disksize.isdigit():
        return None
    return ZramDevice(device, chosen(_read(directory / "comp_algorithm")), int(disksize), *sizes)


def chosen(algorithms: str) -> str:
    """The one in brackets, as the kernel marks the value in use.

    >>> chosen("lzo-rle [lz4] zstd"), chosen("")
    ('lz4', '')
    """
    return next((word.strip("[]") for word in algorithms.split() if word.startswith("[")), "")


def read_zrams() -> list[ZramDevice]:
    """Every zram device of this host, whether it is used as swap or not."""
    try:
        names = sorted(name for name in os.listdir(SYS_BLOCK) if name.startswith("zram"))
    except OSError:
        return []
    return [zram for name in names if (zram := read_zram(f"/dev/{name}")) is not None]


# --- one process -------------------------------------------------------------------------------------------------


class HeldMemory(NamedTuple):
    """Memory held by a process: RAM (shared pages counted in full) and swap."""

    rss_bytes: int
    swap_bytes: int


def parse_status(text: str) -> HeldMemory:
    """The memory in `/proc/<pid>/status`. A zombie and a kernel thread have neither line: they hold nothing.

    >>> parse_status("Name:\\tx\\nVmRSS:\\t    8 kB\\nVmSwap:\\t    4 kB\\n")
    HeldMemory(rss_bytes=8192, swap_bytes=4096)
    """
    start = text.find("VmRSS:")
    if start < 0:
        return HeldMemory(0, 0)
    # Not all of its 60 lines: a list of all agents asks for that of every process.
    found = _kib_fields(text[start : text.find("\n", text.find("VmSwap:", start))], {"VmRSS", "VmSwap"})
    return HeldMemory(found.get("VmRSS", 0), found.get("VmSwap", 0))


def held_by(pids: Iterable[int]) -> HeldMemory:
    """Memory held by all of them together; a process that is gone holds none. About 25 µs each."""
    each = [parse_status(_read(f"/proc/{pid}/status")) for pid in pids]
    return HeldMemory(sum(held.rss_bytes for held in each), sum(held.swap_bytes for held in each))


class _Range(ctypes.Structure):
    """`struct iovec`."""

    _fields_ = (("start", ctypes.c_void_p), ("length", ctypes.c_size_t))


def advise_pageout(pidfd: int, start: int, length: int) -> None:
    """`process_madvise(MADV_PAGEOUT)` of one range, at most until its pages are on their way to swap.

    Pages shared with another process stay where they are. Gives up the GIL meanwhile; 4 MiB to zram take 2 to 10 ms.
    `length` 0 asks only whether this may be done. Raises OSError: ESRCH (it ended), EPERM (CAP_SYS_NICE is missing,
    or leave to read it), EINVAL (locked, huge or device memory), ENOMEM (not mapped), ENOSYS (before Linux 5.10).
    """
    vector = _Range(start, length)
    arguments = ctypes.c_int(pidfd), ctypes.byref(vector), ctypes.c_size_t(1), MADV_PAGEOUT, ctypes.c_uint(0)
    if _libc.syscall(ctypes.c_long(PROCESS_MADVISE), *arguments) < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def advise_willneed(pidfd: int, ranges: Sequence[tuple[int, int]]) -> bool:
    """`process_madvise(MADV_WILLNEED)`: begins to read what of these ranges is in swap, without waiting for the disk.

    (start, length) each, at most 1,024. A range that is not mapped any more is passed over. False where nothing more
    can be done: the process is gone, or this is not permitted.
    """
    while ranges:
        vector = (_Range * len(ranges))(*(_Range(start, length) for start, length in ranges))
        arguments = ctypes.c_int(pidfd), vector, ctypes.c_size_t(len(ranges)), MADV_WILLNEED, ctypes.c_uint(0)
        done = _libc.syscall(ctypes.c_long(PROCESS_MADVISE), *arguments)
        if done < 0 and ctypes.get_errno() not in (errno.ENOMEM, errno.EINVAL, errno.EAGAIN, errno.EBADF):
            return False
        ranges = ranges[_count_of(ranges, max(done, 0)) :]
    return True


def _count_of(ranges: Sequence[tuple[int, int]], done_bytes: int) -> int:
    """Number of ranges that are over with once so many bytes were advised: those, and the one that failed behind them.

    >>> _count_of([(0, 10), (20, 10), (40, 10)], 10), _count_of([(0, 10)], 10), _count_of([(0, 10), (20, 5)], 0)
    (2, 1, 1)
    """
    for number, (_, length) in enumerate(ranges):
        if done_bytes < length:
            return number + 1
        done_bytes -= length
    return len(ranges)
