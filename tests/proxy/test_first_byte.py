"""The longest silence of a server before its answer: the proxy's own time, or that of one server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec

from hive.files.conf_edit import applied_by
from hive.proxy.life import changed
from hive.settings.edit import Name
from hive.settings.pool import ModelRow, PoolSection, slot_id
from hive.settings.table import Settings
from tests.proxy.harness import CHAT, Client, Proxy, nothing_is_held, post, proxied, read_request
from tests.proxy.test_slots import content, pooled
from tests.waiting import until

SHORT_S = 0.2


async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
    await read_request(reader)
    await reader.read()


def use(proxy: Proxy, *, first_byte_s: float, **models: ModelRow) -> None:
    settings = proxy.path.settings
    inference = msgspec.structs.replace(settings.inference, first_byte_s=first_byte_s)
    proxy.path.use_settings(msgspec.structs.replace(settings, inference=inference, models=models))


async def test_the_backends_own_time_counts_and_is_named(tmp_path: Path) -> None:
    """Before a vLLM whose second host had died one request in eight hung for 300 s."""
    async with proxied(tmp_path) as (proxy, backend):
        backend.script = silent
        client = await Client.unix(proxy.socket_path)
        use(proxy, first_byte_s=SHORT_S)  # as after `hive config set` and a reload
        status, _, body = await client.ask(post(b"/v1/chat/completions", CHAT))
        assert (status, json.loads(body)["error"]["message"]) == (504, "the backend sent nothing for 0.2 s")
        await until(lambda: nothing_is_held(proxy))


async def test_without_one_it_is_the_proxys_and_a_longer_one_outlasts_that(tmp_path: Path) -> None:
    async with proxied(tmp_path, first_byte_s=SHORT_S) as (proxy, backend):
        backend.script = silent
        client = await Client.unix(proxy.socket_path)
        assert proxy.path.slot.first_byte_s == SHORT_S
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 504
        use(proxy, first_byte_s=300)
        backend.script = None
        assert proxy.path.slot.first_byte_s == 300
        assert (await client.ask(post(b"/v1/chat/completions", CHAT)))[0] == 200


async def test_each_model_of_the_pool_may_have_its_own(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        rows = [msgspec.structs.replace(pool.row(model), id=slot_id(model)) for model in ("a", "b")]
        use(pool.proxy, first_byte_s=0, a=ModelRow(file="/a.gguf", first_byte_s=SHORT_S), b=ModelRow(file="/b.gguf"))
        pool.tell(*rows)
        slots = pool.proxy.path.slots.pooled
        assert [slots[slot_id(model)].first_byte_s for model in ("a", "b")] == [SHORT_S, 300]
        released = asyncio.Event()
        reply = pool.servers["b"].reply

        async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            await released.wait()
            writer.write(reply)
            await reader.read()

        pool.servers["a"].script, pool.servers["b"].script = silent, late
        first, second = await pool.client(), await pool.client()
        waiting = asyncio.create_task(content(second, "b"))
        assert await content(first, "a") == (504, "backend_timeout")
        released.set()
        assert await waiting == (200, "b")


def test_it_is_taken_over_by_a_reload() -> None:
    before = Settings(pool=PoolSection(), models={"m": ModelRow(file="/m.gguf"), "n": ModelRow(file="/n.gguf")})
    inference = msgspec.structs.replace(before.inference, first_byte_s=5)
    after = msgspec.structs.replace(
        before, inference=inference, models={**before.models, "m": ModelRow(file="/m.gguf", first_byte_s=9)}
    )
    assert changed(before, after).live == ["inference.first_byte_s", "[model m] first_byte_s"]
    for name in (Name("inference", "first_byte_s"), Name("model m", "first_byte_s"), Name("proxy", "first_byte_s")):
        assert "systemctl reload hive-proxy" in applied_by(name)
