"""The helper's table: replaced whole, private, and never set back by a slow disk."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from pathlib import Path

import pytest

from hive.errors import ConfigError
from hive.host.process import Identity
from hive.link.specs import SandboxSpec
from hive.sandbox import table as table_module
from hive.sandbox.runtime import Run
from hive.sandbox.table import Record, Table

SPEC = SandboxSpec(name="a", command=["x"], env={"TOKEN": "secret"}, home="/h", log="/l")
RUN = Run(main=Identity(7, 8, "b"), leaf=None, since=1.0)


async def test_a_saved_table_is_read_back_and_private(tmp_path: Path) -> None:
    table = Table(tmp_path / "sandbox.json", {"a1": Record(spec=SPEC, run=RUN)})
    await table.save_durably()
    assert Table.load(tmp_path / "sandbox.json").records == table.records
    assert stat.S_IMODE((tmp_path / "sandbox.json").stat().st_mode) == 0o600
    assert os.listdir(tmp_path) == ["sandbox.json"]


async def test_a_missing_table_is_an_empty_one(tmp_path: Path) -> None:
    assert Table.load(tmp_path / "sandbox.json").records == {}


async def test_a_table_of_a_later_hive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sandbox.json").write_text('{"version": 2, "agents": {}}')
    with pytest.raises(ConfigError, match="version 2"):
        Table.load(tmp_path / "sandbox.json")


async def test_two_records_never_have_the_same_mark() -> None:
    assert Record(spec=SPEC).mark != Record(spec=SPEC).mark


async def test_a_slow_durable_save_does_not_bring_back_an_old_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stands still while a pid is written down: what reaches the file last must have it."""
    record = Record(spec=SPEC)
    table = Table(tmp_path / "sandbox.json", {"a1": record})
    at_the_disk, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow_fsync(fd: int) -> None:
        at_the_disk.set()
        go_on.wait(20)
        fsync(fd)

    monkeypatch.setattr(table_module.os, "fsync", slow_fsync)
    durable = asyncio.create_task(table.save_durably())
    assert await asyncio.to_thread(at_the_disk.wait, 20)
    record.run = RUN
    table.save()
    go_on.set()
    await durable
    assert Table.load(tmp_path / "sandbox.json").records["a1"].run == RUN
