"""A server that an earlier version started listens elsewhere: the proxy is told that place until it stops. Helper and
proxy are played."""

from __future__ import annotations

from pathlib import Path

from hive.link.slots import ProcessState, SlotGrant, SlotProcess
from tests.pooling.pool_world import GPU, PoolWorld


async def test_a_server_is_asked_where_it_listens_and_its_successor_in_the_slots_own_place(tmp_path: Path) -> None:
    box = PoolWorld(tmp_path, {"a": 40}, total_mb=100)
    id = box.id("a")
    grant = SlotGrant(accounts={GPU: 40}, generation=3)
    box.servers.processes[id] = SlotProcess(
        id=id, run="before", state=ProcessState.SERVING, grant=grant, socket="/before/a.sock"
    )
    await box.begin()
    try:
        await box.until("a", "ready")
        assert box.proxy.last_row(id).backend.address == "/before/a.sock"
        box.use("a", 0)
        box.pool.find("a").unload_orders.add("job")
        box.pool.wake()
        await box.until("a", "cold")
        box.ask("a")
        await box.until("a", "ready")
        assert box.proxy.last_row(id).backend.address == f"/nowhere/{id}.sock"
    finally:
        await box.end()
