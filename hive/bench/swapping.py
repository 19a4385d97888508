"""Swap for the time of one run: a zram device or a file, with the highest priority, so that it is filled first."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from hive.errors import HiveError, NotSupported
from hive.host import zram
from hive.host.memory import SYS_BLOCK, read_swaps, read_zrams

MIB = 1024 * 1024
PRIORITY = 32767
"""The highest there is: a swap of the host's own is not touched before ours is full."""
KINDS = ("zram", "file")

Note = Callable[..., None]
"""Writes down what is made (leftovers.py), before it is."""


def turn_on(kind: str, size_bytes: int, directory: Path, note: Note) -> str:
    """Makes swap of this kind and turns it on; its path. Raises NotSupported, NotPermitted, HiveError."""
    return _zram(size_bytes, note) if kind == "zram" else _file(size_bytes, directory / "swap", note)


def _zram(size_bytes: int, note: Note) -> str:
    note(zram_before=[device.device for device in read_zrams()], zram_bytes=size_bytes)
    device = zram.set_up(size_bytes, priority=PRIORITY)
    note(swap=device, zram_before=None)
    return device


def _file(size_bytes: int, path: Path, note: Note) -> str:
    free = shutil.disk_usage(path.parent).free
    if free < size_bytes + 256 * MIB:
        raise NotSupported(
            f"a swap file of {size_bytes // MIB} MiB does not fit into {path.parent} ({free // MIB} MiB free)",
            hint="a smaller --box needs less, or use --swap zram",
        )
    note(swap=str(path))
    with open(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
        os.posix_fallocate(file.fileno(), 0, size_bytes)
    _run("mkswap", str(path))
    _run("swapon", "--priority", str(PRIORITY), str(path))
    return str(path)


def turn_off(path: str) -> None:
    """Turns it off and removes it, whatever of it there is. What is in it comes back into RAM first."""
    if path.startswith("/dev/zram"):
        if (SYS_BLOCK / Path(path).name).exists():
            zram.take_down(path)
        return
    if any(swap.path == path for swap in read_swaps() or ()):
        _run("swapoff", path)
    Path(path).unlink(missing_ok=True)


def drop_zram(before: Sequence[str], size_bytes: int) -> None:
    """Removes the device that was being made when the run was killed: another than those before it, of our size."""
    for device in read_zrams():
        if device.device not in before and device.disksize_bytes in (0, size_bytes):
            with contextlib.suppress(HiveError):  # somebody else's, in use
                zram.take_down(device.device)


def _run(*command: str) -> None:
    try:
        zram.run_tool(*command)
    except HiveError as error:
        raise NotSupported(f"no swap file here: {error.message}") from error
