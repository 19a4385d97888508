"""Swap in compressed RAM: what setting it up would do (`plan`), doing it, and undoing it.

A device made here is there until `take_down` or the next boot; /sys/class/zram-control is the kernel's way (Linux 4.2,
blockdev/zram.rst).
"""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from hive.errors import BadRequest, HiveError, NotPermitted, NotSupported
from hive.host.memory import SYS_BLOCK, MemInfo, Swap, read_swaps
from hive.host.process import spawn, write_control

CONTROL = Path("/sys/class/zram-control")
MIB = 1024 * 1024
SHARE = 2.0
"""Swap wanted, as a multiple of RAM: with 10 % of the agents awake and 30 % of the others' memory kept, 2.7 times as
many fit (1 / (0.1 + 0.9 × 0.3)), and most of them are in swap. An empty device costs 0.4 % of its size."""
PRIORITY = 100
"""Above the kernel's own priorities (negative), so that zram fills before a disk."""
PREFERRED = ("zstd", "lz4", "lzo-rle", "lzo")
"""Ways to compress, the one that takes the least RAM first.

Heaps of agents are 18 to 32 % smaller with zstd than with lz4, and a wake and its turn take 10 to 25 ms more; the
kernel's level for it is 1 to 3, where more gains nothing.
"""
PAGE_CLUSTER = Path("/proc/sys/vm/page-cluster")
REMOVE_WITHIN_S = 2.0
"""udev may have a new device open for a moment, and what is open cannot be removed."""
PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
IN_CONTAINER = "in this container nobody can: swap is turned on by its host, for all that run there"
SYS_ADMIN = 1 << 21
"""CAP_SYS_ADMIN (capability.h), needed to turn swap on."""
NO_ZRAM = "this kernel has no zram; a swap file serves deep sleep as well"


class ZramPlan(NamedTuple):
    """The device and swap to set up. `sentences`: the same for people, in order."""

    size_bytes: int
    algorithm: str
    sentences: tuple[str, ...]


def plan(memory: MemInfo, swaps: Sequence[Swap] | None) -> ZramPlan | None:
    """The parts that deep sleep lacks here; None where there is swap enough, or where the kernel says too little.

    >>> gib = 1024**3
    >>> plan(MemInfo(8 * gib, 6 * gib, 0, 0), []).sentences[0]
    'make a zram device of 16384 MiB (zstd, or lz4): its content is compressed and stays in RAM'
    >>> plan(MemInfo(8 * gib, 6 * gib, 16 * gib, 9 * gib), [Swap("/swap", "file", 16 * gib, 7 * gib, -2)]) is None
    True
    """
    if memory.total_bytes is None or swaps is None:
        return None
    wanted_mib = int(memory.total_bytes * SHARE) // MIB
    missing_mib = wanted_mib - sum(swap.size_bytes for swap in swaps) // MIB
    if missing_mib < wanted_mib // 10:
        return None
    return ZramPlan(
        size_bytes=missing_mib * MIB,
        algorithm=PREFERRED[0],
        sentences=(
            f"make a zram device of {missing_mib} MiB ({PREFERRED[0]}, or {PREFERRED[1]}): its content is "
            "compressed and stays in RAM",
            f"turn it on as swap with priority {PRIORITY}, before any disk",
            "it lasts until the next boot",
        ),
    )


def why_not() -> str:
    """The reason that no zram device can be set up here, by root either; empty where nothing is known against it.

    Changes nothing: a module that is not loaded yet is looked for in its directory.
    """
    if is_kept_from(*(_said(name) for name in ("status", "uid_map", "mounts"))):
        return IN_CONTAINER
    if CONTROL.exists() or any(path.exists() for path in _modules()):
        return ""
    return NO_ZRAM


def is_kept_from(status: str, uid_map: str, mounts: str) -> bool:
    """Whether a system with these files in /proc/self is kept from devices of its kernel, as containers are.

    Nobody in it can be permitted to turn swap on, its root is not the machine's, its /sys is read-only, or a device
    that is made does not appear in its /dev. One that was given all of this is not kept from anything.

    >>> bound, whole = "CapBnd:\\t000001ffffffffff\\n", "0 0 4294967295"
    >>> mounts = "sysfs /sys sysfs rw 0 0\\nudev /dev devtmpfs rw 0 0\\n"
    >>> is_kept_from(bound, whole, mounts), is_kept_from("CapBnd:\\t00000000a80425fb\\n", whole, mounts)
    (False, True)
    >>> is_kept_from(bound, "0 100000 65536", mounts), is_kept_from(bound, whole, mounts.replace("devtmpfs", "tmpfs"))
    (True, True)
    """
    bounding = next((line.split()[1] for line in status.splitlines() if line.startswith("CapBnd:")), "")
    found = {words[1]: words for line in mounts.splitlines() if len(words := line.split()) > 3}  # the last one counts
    system, devices = found.get("/sys", ()), found.get("/dev", ())
    return (
        bool(bounding and not int(bounding, 16) & SYS_ADMIN)
        or (bool(uid_map.strip()) and uid_map.split() != ["0", "0", "4294967295"])
        or bool(system and "rw" not in system[3].split(","))
        or bool(devices and devices[2] != "devtmpfs")
    )


def _said(name: str) -> str:
    """Empty where the kernel does not say."""
    try:
        return Path("/proc/self", name).read_text()
    except OSError:
        return ""


def _modules() -> Iterator[Path]:
    """Paths the module may have, compressed or not."""
    drivers = Path("/lib/modules", os.uname().release, "kernel/drivers/block/zram")
    return (drivers / f"zram.ko{end}" for end in ("", ".xz", ".zst", ".gz"))


def set_up(size_bytes: int, algorithm: str | None = None, *, priority: int = PRIORITY) -> str:
    """Makes a device of `size_bytes` (uncompressed) and turns it on as swap; its path.

    `algorithm` None: the best this kernel has. Raises NotPermitted, NotSupported (no zram), BadRequest (size,
    algorithm), HiveError; then nothing is left of it.
    """
    if size_bytes < MIB:
        raise BadRequest(f"a zram device of {size_bytes} bytes is too small")
    device = _add()
    try:
        _configure(SYS_BLOCK / Path(device).name, size_bytes, algorithm)
        run_tool("mkswap", device)
        run_tool("swapon", "--priority", str(priority), device)
    except BaseException:
        _remove(device)
        raise
    return device


def read_single_pages() -> int | None:
    """Turns the kernel's reading of neighbours from swap off where all swap is zram: one page costs as much each.

    The value of before (`vm.page-cluster`, pages as a power of two), which is back with the next boot; None where
    nothing was changed: a disk is in use as well, it was so already, or it may not be written.
    """
    try:
        before = int(PAGE_CLUSTER.read_text())
    except (OSError, ValueError):
        return None
    if before == 0 or not all(swap.is_zram for swap in read_swaps() or ()):
        return None
    try:
        write_control(PAGE_CLUSTER, b"0")
    except OSError:
        return None
    return before


def take_down(device: str) -> None:
    """Turns a device off as swap and removes it; what is in it comes back into RAM first, which takes its time.

    Raises NotPermitted, HiveError (RAM has no room for what is in it, it is used otherwise).
    """
    if any(swap.path == device for swap in read_swaps() or ()):
        run_tool("swapoff", device)
    _remove(device)


def _add() -> str:
    """A new device; the module is loaded where it is none of the kernel's own."""
    if not CONTROL.exists():
        with contextlib.suppress(HiveError):
            run_tool("modprobe", "zram", "num_devices=0")
    with _translated():
        return f"/dev/zram{int((CONTROL / 'hot_add').read_text())}"


def _configure(directory: Path, size_bytes: int, algorithm: str | None) -> None:
    """The algorithm comes first: with a size the device is in use."""
    with _translated():
        available = (directory / "comp_algorithm").read_text().replace("[", "").replace("]", "").split()
        wanted = algorithm or choose_algorithm(available)
        if wanted not in available:
            raise BadRequest(f"this kernel's zram does not know {wanted}", hint=f"it knows {', '.join(available)}")
        write_control(directory / "comp_algorithm", wanted.encode())
        write_control(directory / "disksize", str(size_bytes).encode())


def choose_algorithm(available: Sequence[str]) -> str:
    """
    >>> choose_algorithm(["lzo-rle", "lz4", "zstd"]), choose_algorithm(["lzo-rle", "lz4"]), choose_algorithm(["842"])
    ('zstd', 'lz4', '842')
    """
    return next((name for name in PREFERRED if name in available), available[0])


def _remove(device: str) -> None:
    until = time.monotonic() + REMOVE_WITHIN_S
    number = Path(device).name.removeprefix("zram").encode()
    while True:
        with _translated():
            try:
                write_control(CONTROL / "hot_remove", number)
                return
            except OSError as error:
                if error.errno != errno.EBUSY or time.monotonic() > until:
                    raise
        time.sleep(0.01)


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotSupported("this kernel has no zram", hint="a swap file serves deep sleep as well") from error
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise NotPermitted("only root may set up zram", hint="type it with sudo in front") from error
        raise HiveError(f"the kernel refuses that zram device: {error.strerror}") from error


def run_tool(*command: str) -> None:
    """Runs one of the system's programs to its end. Raises HiveError with the last line it wrote."""
    reading, writing = os.pipe()
    with open(reading, errors="replace") as output:
        try:
            child = spawn(command, env={"PATH": PATH}, stdout_fd=writing)
        finally:
            os.close(writing)
        said = output.read().strip().splitlines()
        if child.wait() != 0:
            raise HiveError(said[-1] if said else f"{command[0]} failed")
