"""Real swap for a test or a benchmark: on for its time, surely off afterwards, one session of this host at a time.

What is on is written into the lock file, so that the next session turns off what a killed one left.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

import pytest

from hive.errors import NotPermitted, NotSupported
from hive.host import zram
from hive.host.memory import read_swaps

LOCK = Path("/run/hive-swap-test.lock")
WAIT_S = 60.0
PRIORITY = 32767
"""The highest there is: a swap of the host's own is not touched before ours is full."""


@contextmanager
def alone() -> Iterator[TextIO]:
    """No other session turns swap on or off meanwhile; skipped where one takes too long."""
    if os.geteuid() != 0:
        pytest.skip("only root turns swap on")
    with open(LOCK, "a+") as lock:
        until = time.monotonic() + WAIT_S
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    pytest.skip(f"another session has used swap for {WAIT_S:g} s")
                time.sleep(0.05)
        lock.seek(0)
        _turn_off(lock.read())
        yield lock


def _turn_off(left: str) -> None:
    if left and any(swap.path == left for swap in read_swaps() or ()):
        subprocess.run(["swapoff", left], check=True)
    if left.startswith("/dev/zram") and Path("/sys/block", Path(left).name).exists():
        zram.take_down(left)
    elif left:
        shutil.rmtree(Path(left).parent, ignore_errors=True)


def _note(lock: TextIO, what: str) -> None:
    lock.seek(0)
    lock.truncate()
    lock.write(what)
    lock.flush()


@contextmanager
def without_swap() -> Iterator[None]:
    """A host without any; skipped where it has one of its own."""
    with alone():
        if read_swaps() != []:
            pytest.skip(f"this host has swap of its own: {read_swaps()}")
        yield


@contextmanager
def zram_swap(size_mib: int, algorithm: str | None = None) -> Iterator[str]:
    """The device's path."""
    with alone() as lock:
        try:
            device = zram.set_up(size_mib * 1024 * 1024, algorithm, priority=PRIORITY)
        except (NotPermitted, NotSupported) as error:
            pytest.skip(f"no zram here: {error.message}")
        _note(lock, device)
        try:
            yield device
        finally:
            zram.take_down(device)
            _note(lock, "")


@contextmanager
def file_swap(size_mib: int) -> Iterator[str]:
    """The file's path."""
    with alone() as lock, tempfile.TemporaryDirectory(prefix="hive-swap-") as directory:
        path = f"{directory}/swap"
        _note(lock, path)
        with open(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600), "wb") as file:
            os.posix_fallocate(file.fileno(), 0, size_mib * 1024 * 1024)
        subprocess.run(["mkswap", path], check=True, capture_output=True)
        on = subprocess.run(["swapon", "--priority", str(PRIORITY), path], capture_output=True, text=True)
        if on.returncode:
            _note(lock, "")
            pytest.skip(f"no swap file here: {on.stderr.strip()}")
        try:
            yield path
        finally:
            subprocess.run(["swapoff", path], check=True)
            _note(lock, "")


def is_only_swap(path: str) -> bool:
    return [swap.path for swap in read_swaps() or ()] == [path]
