"""Saves that are cancelled while a file is copied: the copy goes on in its thread, and nothing of it is left."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest

from hive.lifecycle.parked_files import ParkedFiles
from hive.lifecycle.parking_counts import ParkingCounts
from hive.lifecycle.slot_saver import SlotSaver
from hive.lifecycle.slot_transfers import SlotTransfers
from hive.lifecycle.whole_steps import ended
from hive.settings.table import Settings
from hive.store.parked_slots import ParkedSlot
from tests.lifecycle.test_parked_files import CONTENTS, KEY, NAME, ROW


class SlowFiles(ParkedFiles):
    """Copies when the test says so."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, KEY)
        self.begun, self.go = threading.Event(), threading.Event()

    def take_in(self, name: str, row: ParkedSlot) -> ParkedSlot:
        self.begun.set()
        self.go.wait(60)
        return super().take_in(name, row)


def saver() -> SlotSaver:
    nothing: Any = None
    return SlotSaver(
        record=nothing,
        servers=nothing,
        transfers=SlotTransfers(),
        counts=ParkingCounts(),
        roster=nothing,
        proxy_link=nothing,
        settings=Settings,
        group_of=lambda agent: agent.id,
    )


@pytest.mark.parametrize("times", [1, 2])
async def test_a_copy_that_is_cancelled_leaves_no_file(tmp_path: Path, times: int) -> None:
    files = SlowFiles(tmp_path / "kept")
    files.prepare([])
    (files.engine / NAME).write_bytes(CONTENTS)
    held: Any = None
    copying = asyncio.ensure_future(saver()._taken_in(files, NAME, files.placed(ROW), held))
    await asyncio.to_thread(files.begun.wait, 60)
    for _ in range(times):
        copying.cancel()
        await asyncio.sleep(0)
    assert not copying.done(), "the thread still writes"
    files.go.set()
    with pytest.raises(asyncio.CancelledError):
        await copying
    assert list(files.directory.glob("g-*/*")) == []


async def test_a_step_is_over_when_its_caller_is_however_often_that_is_cancelled() -> None:
    go, done = asyncio.Event(), list[str]()

    async def step() -> None:
        await go.wait()
        done.append("all of it")

    calling = asyncio.ensure_future(ended(step()))
    for _ in range(3):
        await asyncio.sleep(0)
        calling.cancel()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert done == ["all of it"]
