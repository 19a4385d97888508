"""The record of what a density run has on this host: swap, control groups, a directory. Cleaned at the end of the run;
what a killed run left, at the begin of the next.

It is /run/hive-bench.json, written before a thing is made; it is locked as long as a run lives, so that two never
measure at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from hive.bench.box import end_group
from hive.bench.swapping import drop_zram, turn_off
from hive.errors import HiveError, Saturated
from hive.host.cgroup import find_mount, subtree_name

RECORD = Path("/run/hive-bench.json")
LOCK = Path("/run/hive-bench.lock")


class Left(msgspec.Struct, kw_only=True):
    """All that a run may leave. `groups`: control groups with their processes. `zram_before`: devices that were there
    before ours was made; None while none is made. `swap`: a swap file or device of ours."""

    directory: str = ""
    groups: list[str] = []
    swap: str = ""
    zram_before: list[str] | None = None
    zram_bytes: int = 0


class RunRecord:
    """The record of this run."""

    def __init__(self, left: Left) -> None:
        self.left = left

    def __repr__(self) -> str:
        return f"<RunRecord {self.left}>"

    def note(self, **changes: object) -> None:
        """Writes what is about to be made, or is gone."""
        self.left = msgspec.structs.replace(self.left, **changes)
        written = RECORD.with_suffix(".new")
        written.write_bytes(msgspec.json.encode(self.left))
        os.replace(written, RECORD)

    def add_group(self, group: Path) -> None:
        self.note(groups=[*self.left.groups, str(group)])

    def clean(self) -> None:
        """Ends and removes all of it; can be repeated. Raises HiveError; the record then stays."""
        left = self.left
        for group in (Path(group) for group in left.groups):
            end_group(group)
        if left.swap:
            turn_off(left.swap)
        if left.zram_before is not None:
            drop_zram(left.zram_before, left.zram_bytes)
        if left.directory:
            _remove_directory(Path(left.directory))
        RECORD.unlink(missing_ok=True)
        self.left = Left()


def _remove_directory(directory: Path) -> None:
    """The run's own directory, and the groups that a Hive with its state in there made in v2."""
    mount = find_mount(Path("/proc/self/mounts").read_text())
    if mount is not None:
        end_group(mount / subtree_name(directory / "state"))
    shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def alone() -> Iterator[RunRecord]:
    """Holds the lock of runs; nothing of an earlier one is left, and at the end nothing of this one.

    Raises Saturated where another run goes on.
    """
    with open(LOCK, "a") as lock:
        _lock(lock)
        leftovers = RunRecord(_read())
        leftovers.clean()
        try:
            yield leftovers
        finally:
            leftovers.clean()


def _lock(lock: IO[str]) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise Saturated(
            "another density run is going on here, and two would measure each other", hint="wait for its end"
        ) from None


def _read() -> Left:
    """Nothing where no run left anything. Raises HiveError where the record cannot be read."""
    try:
        return msgspec.json.decode(RECORD.read_bytes(), type=Left)
    except FileNotFoundError:
        return Left()
    except (OSError, msgspec.DecodeError) as error:
        raise HiveError(f"{RECORD} cannot be read: {error}", hint="remove it, and look at `swapon --show`") from error
