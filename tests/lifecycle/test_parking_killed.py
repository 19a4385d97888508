"""kill -9 before every change that a save or a restore makes to disk and record: the next start finds all in order."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from hive.lifecycle.parked_files import ParkedFiles, drop_file
from hive.store import parked_slots as store
from hive.store.database import Database
from hive.store.parked_slots import ParkedSlot
from tests.install.killed_install import Killer, in_fork
from tests.lifecycle.test_parked_files import CONTENTS, KEY, NAME, ROW

MOST_PLACES = 60
OTHERS = CONTENTS[::-1]


def written(files: ParkedFiles, contents: bytes) -> None:
    """As the engine writes it."""
    (files.engine / NAME).write_bytes(contents)


def recorded(path: Path, work: Callable[[Database], object]) -> None:
    database = Database.open(path)
    try:
        asyncio.run(work(database))  # type: ignore[arg-type]
    finally:
        database.close()


def put(path: Path, row: ParkedSlot) -> None:
    recorded(path, lambda database: database.write(lambda conn: store.put(conn, row)))


def rows_in(path: Path) -> list[ParkedSlot]:
    database = Database.open(path)
    try:
        return database.read_now(store.rows)
    finally:
        database.close()


def save(directory: Path, record: Path, killer: Killer) -> None:
    """The steps of a save in their order (`Parking`), over what an earlier one has left."""
    files, [old] = ParkedFiles(directory, KEY), rows_in(record)
    written(files, OTHERS)
    row = files.take_in(NAME, files.placed(ROW))
    files.drop_engines(NAME)
    killer._count()
    put(record, row)
    killer._count()
    drop_file(old)
    killer._count()


def restore(directory: Path, record: Path, killer: Killer) -> None:
    """The steps of a restore in their order (`Parking`)."""
    files, [row] = ParkedFiles(directory, KEY), rows_in(record)
    files.hand_out(row, NAME)
    killer._count()
    files.drop_engines(NAME)
    drop_file(row)
    killer._count()
    recorded(record, lambda database: database.write(lambda conn: store.drop(conn, [row.agent])))
    killer._count()


@pytest.mark.parametrize("work", [save, restore])
def test_a_kill_before_any_change_leaves_whole_files_that_are_known(
    tmp_path: Path, work: Callable[[Path, Path, Killer], None]
) -> None:
    ended = []
    for number in range(1, MOST_PLACES):
        base = tmp_path / str(number)
        base.mkdir()
        directory, record = base / "kept", base / "hive.db"
        files = ParkedFiles(directory, KEY)
        files.prepare([])
        written(files, CONTENTS)
        first = files.take_in(NAME, files.placed(ROW))
        files.drop_engines(NAME)
        put(record, first)
        status = in_fork(lambda: work(directory, record, Killer(directory, number)))  # noqa: B023 - called at once
        ended.append(os.waitstatus_to_exitcode(status))
        check_the_next_start(directory, record)
        if ended[-1] == 0:
            break
    assert ended == [-signal.SIGKILL] * (len(ended) - 1) + [0]
    assert len(ended) > 5


def check_the_next_start(directory: Path, record: Path) -> None:
    """Checks that what it keeps is one of the two that were whole, and that all else is gone."""
    files, rows = ParkedFiles(directory, KEY), rows_in(record)
    gone = files.prepare(rows)
    left = [row for row in rows if row.agent not in gone]
    there = sorted(str(path) for path in directory.glob("*/*"))
    assert there == [row.file for row in left]
    for row in left:
        files.hand_out(row, NAME)
        assert (files.engine / NAME).read_bytes() in (CONTENTS, OTHERS)
