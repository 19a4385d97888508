"""A real llama-server as the server of a slot: it hangs, it is killed, and another one follows."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path

import pytest

from hive.domain import BackendInfo, BackendKind, ModelInfo
from hive.link.pool import SlotFlow, SlotRow
from hive.proxy import slot_flows
from tests.llama import MODEL, serve
from tests.proxy.harness import CHAT, STREAM
from tests.proxy.test_slot_crashes import crash
from tests.proxy.test_slots import Pool, ask, pooled
from tests.waiting import until

pytestmark = pytest.mark.llama


async def test_a_server_that_hangs_moves_nothing_and_one_that_is_killed_blames_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slot_flows, "EACH_S", 0.1)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    async with pooled(tmp_path, tier_low_max_tokens=0) as pool:
        client, other = await pool.client(), await pool.client()
        with serve(first, on_socket=True) as server:
            pool.tell(row(server.address, 1))
            asked = STREAM[:-1] + b',"max_tokens":8000,"ignore_eos":true}'
            client.writer.write(ask(MODEL, body=asked))
            await asyncio.wait_for(client.reader.readuntil(b'"content"'), 20)
            await until(lambda: at(pool).no_data_s == 0.0)
            server.process.send_signal(signal.SIGSTOP)
            await until(lambda: (at(pool).moved_s or 0.0) > 0.5)
            flow = at(pool)
            assert (flow.in_flight, flow.no_head_s, flow.agents) == (1, None, ["a1"])
            assert flow.no_data_s == flow.moved_s
            server.process.kill()
            rest = await asyncio.wait_for(client.reader.read(), 20)
            assert b"broke off its answer" in rest
            assert b"[DONE]" not in rest
            assert crash(pool, "m").agents == ["a1"]
            other.writer.write(ask(MODEL, body=CHAT[:-1] + b',"max_tokens":4}'))
            await until(lambda: pool.proxy.path.slots.pooled["m-1"].gate.is_lost)
            await until(lambda: any(told.slots["m-1"].waiting for told in pool.told))
        with serve(second, on_socket=True) as server:
            pool.tell(row(server.address, 2))
            status, _, body = await other.answer()
            assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 4)
            pool.tell()


def row(address: str, generation: int) -> SlotRow:
    backend = BackendInfo(kind=BackendKind.LLAMA, address=address, up=True, places=4)
    return SlotRow(
        id="m-1", generation=generation, is_open=True, backend=backend, models=[ModelInfo(name=MODEL)], wait_s=60.0
    )


def at(pool: Pool) -> SlotFlow:
    """The last word on the slot."""
    flow = pool.flows[-1].slots.get("m-1") if pool.flows else None
    return SlotFlow(in_flight=0) if flow is None else flow
