"""Adapters in the proxy: a name means other weights in one step, also for requests that wait; over real sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hive.domain import BackendKind, ModelInfo
from hive.link.adapters import AdapterDrained, AdapterRoute, DrainAdapter
from hive.link.message import LinkMessage
from hive.link.pool import SlotGone, SlotRow
from hive.proxy.adapter_drains import AdapterDrains
from tests.proxy.harness import Backend, Client, answer, get, nothing_is_held, proxied, read_request
from tests.proxy.test_slots import Pool, ask, content, named, pooled
from tests.waiting import until

OLD, NEW = "red@000000000001", "red@000000000002"


def own(pool: Pool, server: str, engine: str) -> SlotRow:
    """The slot of an adapter of its own at this server."""
    row = pool.row(server, at_server=engine, adapter="red")
    return SlotRow(**{name: getattr(row, name) for name in row.__struct_fields__} | {"models": [RED]})


RED = ModelInfo(name="red", parent="a")


def route(engine: str, slot: str = "", **other: Any) -> AdapterRoute:
    return AdapterRoute(name="red", base="a", at_server=engine, slot=slot, **other)


async def listed(client: Client) -> dict[str, Any]:
    _, _, body = await client.ask(get(b"/v1/models"))
    return {model["id"]: model for model in json.loads(body)["data"]}


async def test_a_slot_with_an_adapter_is_reached_by_its_route_alone(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        adapters = AdapterDrains(pool.proxy.path)
        pool.tell(pool.row("a"), own(pool, "b", OLD))
        client = await pool.client()
        assert await content(client, "red") == (404, "model_not_found")
        assert list(await listed(client)) == ["a"]
        adapters.heard([route(OLD, "b-1")])
        assert await content(client, "red") == (200, "b")
        assert (await listed(client))["red"]["parent"] == "a"
        assert json.loads(pool.servers["b"].requests[0][1])["model"] == OLD
        assert pool.proxy.events[-1].model == "red"
        assert await content(client, OLD) == (404, "model_not_found")


async def test_the_answer_tells_which_weights_it_is_of(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), own(pool, "b", OLD))
        client = await pool.client()
        for told, expected in (
            (route(OLD, "b-1"), OLD.encode()),
            (AdapterRoute(name="red", base="a", instead="a"), b"a"),
        ):
            AdapterDrains(pool.proxy.path).heard([told])
            status, fields, _ = await client.ask(ask("red"))
            assert (status, fields[b"x-hive-model"]) == (200, expected)
        _, fields, _ = await client.ask(ask("a"))
        assert b"x-hive-model" not in fields


async def test_what_is_not_loaded_is_refused_and_what_is_coming_is_asked_again(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        adapters = AdapterDrains(pool.proxy.path)
        pool.tell(pool.row("a"))
        client = await pool.client()
        adapters.heard([AdapterRoute(name="red", base="a")])
        assert await content(client, "red") == (404, "adapter_not_loaded")
        adapters.heard([AdapterRoute(name="red", base="a", is_coming=True)])
        status, fields, _ = await client.ask(ask("red"))
        assert (status, fields[b"retry-after"]) == (503, b"1")
        assert await content(client, "a") == (200, "a")


async def test_requests_that_wait_for_the_old_weights_are_answered_by_the_new_ones(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b", "c") as pool:
        adapters, go_on = AdapterDrains(pool.proxy.path), asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            await go_on.wait()
            writer.write(named("b"))

        pool.servers["b"].script = slow
        pool.tell(pool.row("a"), SlotRow(**fields_of(own(pool, "b", OLD), places=1)), own(pool, "c", NEW))
        adapters.heard([route(OLD, "b-1")])
        first, *others = [await pool.client() for _ in range(4)]
        asked = asyncio.ensure_future(content(first, "red"))
        await until(lambda: pool.proxy.path.slots.pooled["b-1"].line.running == 1)
        waiting = [asyncio.ensure_future(content(client, "red")) for client in others]
        await pool.waits("b", 3)
        adapters.heard([route(NEW, "c-1")])
        assert await asyncio.gather(*waiting) == [(200, "c")] * 3
        drained: list[LinkMessage] = []

        def reply(message: LinkMessage, descriptors: Sequence[int] = ()) -> None:
            drained.append(message)

        adapters.drain(DrainAdapter(slot="b-1", at_server=OLD, drain_s=5), reply)
        await asyncio.sleep(0.1)
        assert drained == []
        go_on.set()
        assert await asked == (200, "b")
        await until(lambda: drained == [AdapterDrained(left=0)])
        pool.orders.order(SlotGone(id="b-1"), None)
        assert "b-1" not in pool.proxy.path.slots.pooled
        assert nothing_is_held(pool.proxy)


async def test_requests_that_wait_at_a_closed_gate_follow_the_name_too(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b", "c") as pool:
        adapters = AdapterDrains(pool.proxy.path)
        closed = SlotRow(**fields_of(own(pool, "b", OLD), is_open=False))
        pool.tell(pool.row("a"), closed, own(pool, "c", NEW))
        adapters.heard([route(OLD, "b-1")])
        asked = asyncio.ensure_future(content(await pool.client(), "red"))
        await pool.waits("b")
        adapters.heard([route(NEW, "c-1")])
        assert await asked == (200, "c")
        other = asyncio.ensure_future(content(await pool.client(), "red"))
        assert await other == (200, "c")


async def test_requests_that_wait_for_what_is_unloaded_are_refused(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        adapters = AdapterDrains(pool.proxy.path)
        pool.tell(pool.row("a"), SlotRow(**fields_of(own(pool, "b", OLD), is_open=False)))
        adapters.heard([route(OLD, "b-1")])
        asked = asyncio.ensure_future(content(await pool.client(), "red"))
        await pool.waits("b")
        adapters.heard([AdapterRoute(name="red", base="a")])
        assert await asked == (404, "adapter_not_loaded")


async def test_adapters_at_the_server_in_use_share_its_line_and_hide_its_names(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, _):
        server = Backend()
        server.reply = answer(b'{"choices":[{"message":{"content":"x"}}],"usage":{"completion_tokens":1}}')
        await server.start()
        try:
            proxy.use(server, BackendKind.VLLM, models=("a",))
            backend = proxy.path.slot.backend
            models = [ModelInfo(name="a"), ModelInfo(name=OLD, parent="a"), ModelInfo(name="mine", parent="a")]
            proxy.path.use_backend(backend, models)
            adapters = AdapterDrains(proxy.path)
            adapters.heard([route(OLD)])
            client = await Client.unix(proxy.socket_path)
            assert (await client.ask(ask("red")))[0] == 200
            adapters.heard([route(NEW)])
            assert (await client.ask(ask("red")))[0] == 200
            assert [json.loads(body)["model"] for _, body in server.requests] == [OLD, NEW]
            assert sorted(await listed(client)) == ["a", "mine", "red"]
        finally:
            await server.stop()


def fields_of(row: SlotRow, **changes: Any) -> dict[str, Any]:
    """The fields of a row with these changes; `places` is the backend's."""
    found = {name: getattr(row, name) for name in row.__struct_fields__}
    if (places := changes.pop("places", None)) is not None:
        backend = row.backend
        found["backend"] = type(backend)(
            **{name: getattr(backend, name) for name in backend.__struct_fields__} | {"places": places}
        )
    return found | changes
