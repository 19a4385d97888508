"""A load that hangs: the real helper, supervisor and warden with a scripted server that waits for what never comes."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.link.slots import SlotProcess
from hive.pool import load_movement
from hive.pooling.pooled_slot import PooledSlot
from hive.sandbox.client import SandboxClient
from hive.settings.pool import slot_id
from hive.settings.table import Paths
from tests.pooling.pool_world import PoolWorld
from tests.sandbox.harness import alive
from tests.sandbox.model_servers import helper, left, pids
from tests.waiting import until

STILL_S = 2.0
A = slot_id("a")


@pytest.fixture
def paths() -> Iterator[Paths]:
    """Not pytest's tmp_path: sockets in it have long names."""
    top = Path(tempfile.mkdtemp(prefix="hive-"))
    top.chmod(0o711)
    found = Paths(state=top / "d", runtime=top / "r")
    yield found
    for pid in left(found):
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(top)


@pytest.fixture
async def box(tmp_path: Path, paths: Paths, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PoolWorld]:
    """A pool before a real helper; a load that stands still for two seconds has ended."""
    monkeypatch.setattr(PooledSlot, "still_s", STILL_S)
    monkeypatch.setattr(load_movement, "OVER_S", 0.5)
    monkeypatch.setattr("hive.pooling.pooling.LOOK_S", 0.1)
    box = PoolWorld(tmp_path, {"a": 40}, total_mb=100)

    def moved(process: SlotProcess) -> None:
        box.pool.slot_moved(process)

    waits_for = paths.state.with_name("weights")
    os.mkfifo(waits_for)
    async with helper(paths, "signals", "--wait-for", str(waits_for), known=lambda: {A}):
        client: Any = SandboxClient(paths.sandbox_socket, role="daemon", epoch="test", on_slot_moved=moved)
        await until(lambda: client.connected)
        box.servers = client
        box.memory._servers = client
        box.pool = box.make()
        await box.begin()
        yield box
        await box.end()
        client.close()


async def test_a_load_that_stands_still_is_ended_with_the_reason_and_nothing_of_it_is_left(
    box: PoolWorld, paths: Paths
) -> None:
    box.ask("a")
    await until(lambda: pids(paths))
    (server,) = pids(paths)
    await until(lambda: box.pool.find("a").failures == 1)
    slot = box.pool.find("a")
    assert slot.error == "its load stood still: no CPU was used and no memory taken for 2 s"
    assert not alive(server)
    assert slot.grants == ()
    assert box.audit.acts[-1][0] == "model.load_failed"
    assert slot.retry_at > 0


async def test_a_server_that_is_stopped_during_its_load_is_ended_too(box: PoolWorld, paths: Paths) -> None:
    box.ask("a")
    await until(lambda: pids(paths))
    (server,) = pids(paths)
    os.kill(server, signal.SIGSTOP)
    await until(lambda: box.pool.find("a").failures == 1)
    assert "stood still" in box.pool.find("a").error
    assert not alive(server)
