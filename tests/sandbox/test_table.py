"""The helper's table: a file for each agent, replaced whole, private, and never set back by a slow disk."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from pathlib import Path

import msgspec
import pytest

from hive.errors import ConfigError
from hive.host.process import Identity
from hive.link.specs import SandboxSpec
from hive.runtimes.runtime import Run
from hive.sandbox.table import AgentRecords, Record

SPEC = SandboxSpec(name="a", command=["x"], env={"TOKEN": "secret"}, home="/h", log="/l")
RUN = Run(main=Identity(7, 8, "b"), leaf=None, since=1.0)


async def test_a_saved_record_is_read_back_and_private(tmp_path: Path) -> None:
    table = AgentRecords.load(tmp_path / "sandbox.d")
    table.records["a1"] = Record(spec=SPEC, run=RUN)
    await table.save_durably("a1")
    assert AgentRecords.load(tmp_path / "sandbox.d").records == table.records
    assert stat.S_IMODE((tmp_path / "sandbox.d").stat().st_mode) == 0o700
    assert stat.S_IMODE((tmp_path / "sandbox.d" / "a1.json").stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "sandbox.d") == ["a1.json"]


async def test_what_is_written_for_one_agent_does_not_grow_with_the_others(tmp_path: Path) -> None:
    """One file held everybody: with 1,000 agents each start wrote a megabyte, twice, and creating took five times as
    long as in the beginning."""
    table = AgentRecords.load(tmp_path / "sandbox.d")
    for number in range(100):
        table.records[f"a{number}"] = Record(spec=SPEC)
        table.save(f"a{number}")
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "sandbox.d").iterdir()}
    table.records["a7"].run = RUN
    table.save("a7")
    await table.save_durably("a7")
    await table.remove("a8")
    after = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "sandbox.d").iterdir()}
    assert {name for name, at in before.items() if after.get(name) != at} == {"a7.json", "a8.json"}
    assert AgentRecords.load(tmp_path / "sandbox.d").records == table.records


async def test_a_missing_table_is_an_empty_one(tmp_path: Path) -> None:
    assert AgentRecords.load(tmp_path / "sandbox.d").records == {}


async def test_a_table_in_one_file_is_taken_over(tmp_path: Path) -> None:
    """Agents that live when Hive is upgraded are known to the new helper, and to the old one after a downgrade."""
    whole = {"version": 1, "agents": {"a1": Record(spec=SPEC, run=RUN), "a2": Record(spec=SPEC)}}
    (tmp_path / "sandbox.json").write_bytes(msgspec.json.encode(whole))
    (tmp_path / "sandbox.d").mkdir()
    (tmp_path / "sandbox.d" / "a1.json").write_bytes(b'{"version": 2, "agent": ')  # cut short the first time
    (tmp_path / "sandbox.d" / "a1.json").rename(tmp_path / "sandbox.d" / "a1.new")
    table = AgentRecords.load(tmp_path / "sandbox.d")
    assert table.records == whole["agents"]
    table.records["a1"].run = None
    table.save("a1")
    assert AgentRecords.load(tmp_path / "sandbox.d").records["a1"].run is None, "taken over once"
    assert msgspec.json.decode((tmp_path / "sandbox.json").read_bytes()) == msgspec.to_builtins(whole)


async def test_what_an_older_hive_wrote_after_an_upgrade_was_undone_is_taken_over_anew(tmp_path: Path) -> None:
    path, fresh = tmp_path / "sandbox.json", tmp_path / "sandbox.fresh"
    path.write_bytes(msgspec.json.encode({"version": 1, "agents": {"a1": Record(spec=SPEC)}}))
    table = AgentRecords.load(tmp_path / "sandbox.d")
    table.records["a3"] = Record(spec=SPEC)
    table.save("a3")
    later = {"a1": Record(spec=SPEC, run=RUN), "a2": Record(spec=SPEC)}
    fresh.write_bytes(msgspec.json.encode({"version": 1, "agents": later}))
    fresh.replace(path)
    assert AgentRecords.load(tmp_path / "sandbox.d").records == later
    assert AgentRecords.load(tmp_path / "sandbox.d").records == later


async def test_of_a_removed_agent_nothing_is_left_in_the_old_file(tmp_path: Path) -> None:
    """Its environment has its secrets."""
    (tmp_path / "sandbox.json").write_bytes(msgspec.json.encode({"version": 1, "agents": {"a1": Record(spec=SPEC)}}))
    table = AgentRecords.load(tmp_path / "sandbox.d")
    await table.remove("a1")
    assert not (tmp_path / "sandbox.json").exists()
    assert AgentRecords.load(tmp_path / "sandbox.d").records == {}


async def test_a_record_of_a_later_hive_is_refused(tmp_path: Path) -> None:
    (tmp_path / "sandbox.d").mkdir()
    (tmp_path / "sandbox.d" / "a1.json").write_text('{"version": 3, "agent": {}}')
    with pytest.raises(ConfigError, match="version 3"):
        AgentRecords.load(tmp_path / "sandbox.d")


async def test_two_records_never_have_the_same_mark() -> None:
    assert Record(spec=SPEC).mark != Record(spec=SPEC).mark


async def test_a_slow_durable_save_does_not_bring_back_an_old_pid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk stands still while a pid is written down: what reaches the file last must have it."""
    record = Record(spec=SPEC)
    table = AgentRecords.load(tmp_path / "sandbox.d")
    table.records["a1"] = record
    at_the_disk, go_on = threading.Event(), threading.Event()
    fsync = os.fsync

    def slow_fsync(fd: int) -> None:
        at_the_disk.set()
        go_on.wait(60)
        fsync(fd)

    monkeypatch.setattr("hive.sandbox.table.os.fsync", slow_fsync)
    durable = asyncio.create_task(table.save_durably("a1"))
    assert await asyncio.to_thread(at_the_disk.wait, 20)
    record.run = RUN
    table.save("a1")
    go_on.set()
    await durable
    assert AgentRecords.load(tmp_path / "sandbox.d").records["a1"].run == RUN
