"""Several inference servers behind one port: over real sockets, with the daemon's words spoken by the test."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from hive.domain import BackendInfo, BackendKind, ModelInfo
from hive.errors import LinkLost
from hive.link.message import LinkMessage
from hive.link.messages import Failed
from hive.link.pool import CloseSlotGate, SlotBusy, SlotClosed, SlotDemand, SlotDemands, SlotFlows, SlotIs, SlotRow
from hive.proxy import slot_orders
from hive.proxy.slot_orders import SlotOrders
from hive.proxy.under_way import queue_now
from hive.queue.gate import GateState
from hive.settings.pool import PoolSection
from tests.proxy.harness import (
    CHAT,
    JSON_ANSWER,
    STREAM,
    Backend,
    Client,
    Proxy,
    answer,
    chunked,
    full_backlog,
    get,
    nothing_is_held,
    post,
    proxied,
    read_request,
)
from tests.proxy.test_prewarms import asked, outcome, sending
from tests.waiting import until

CHAT_AT = b"/v1/chat/completions"
FIRST = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
LAST = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def ask(model: str, at: bytes = CHAT_AT, body: bytes = CHAT) -> bytes:
    return post(at, body.replace(b'"m"', b'"%b"' % model.encode()))


def named(model: str) -> bytes:
    return answer(JSON_ANSWER.replace(b'"hi"', b'"%b"' % model.encode()))


class Pool:
    """A proxy before three servers, one model each, and the daemon's words to it."""

    def __init__(self, proxy: Proxy, servers: dict[str, Backend]) -> None:
        self.proxy, self.servers = proxy, servers
        self.told: list[SlotDemands] = []
        self.flows: list[SlotFlows] = []
        self.is_daemon_there = True
        self.orders = SlotOrders(proxy.path, self._hear)

    def _hear(self, message: LinkMessage) -> None:
        if not self.is_daemon_there:
            raise LinkLost("no daemon")
        if isinstance(message, SlotFlows):
            self.flows.append(message)
            return
        assert isinstance(message, SlotDemands)
        self.told.append(message)

    def row(self, model: str, *, is_open: bool = True, generation: int = 1, **other: Any) -> SlotRow:
        kind = {"o": BackendKind.OLLAMA, "v": BackendKind.VLLM, "w": BackendKind.WHISPER}.get(
            model[0], BackendKind.LLAMA
        )
        address = self.servers[model].address if is_open else ""
        return SlotRow(
            id=f"{model}-1",
            generation=generation,
            is_open=is_open,
            backend=BackendInfo(kind=kind, address=address, up=is_open, places=other.pop("places", None)),
            models=[ModelInfo(name=model)],
            wait_s=other.pop("wait_s", 30.0),
            **other,
        )

    def tell(self, *rows: SlotRow) -> None:
        self.orders.heard(list(rows))

    def close(self, model: str, *, generation: int = 1, drain_s: float | None = None) -> list[LinkMessage]:
        """Asks for it; the answer is in the list once it has come."""
        answers: list[LinkMessage] = []
        message = CloseSlotGate(id=f"{model}-1", generation=generation, wait_s=30.0, drain_s=drain_s)
        self.orders.order(message, lambda said, _=(): answers.append(said))
        return answers

    async def client(self) -> Client:
        return await Client.unix(self.proxy.socket_path)

    async def waits(self, model: str, count: int = 1) -> None:
        await until(lambda: self.proxy.path.slots.pooled[f"{model}-1"].line.waiting == count)


@asynccontextmanager
async def pooled(tmp_path: Path, *models: str, **settings: Any) -> AsyncIterator[Pool]:
    """The servers are there; the daemon has said nothing yet, and there is no active backend."""
    async with proxied(tmp_path, **settings) as (proxy, _):
        proxy.path.use_backend(None, [])
        servers = {model: Backend() for model in models}
        for model, server in servers.items():
            server.reply = named(model)
            await server.start()
        try:
            yield Pool(proxy, servers)
        finally:
            for server in servers.values():
                await server.stop()


async def content(client: Client, model: str) -> tuple[int, str]:
    status, _, body = await client.ask(ask(model))
    told = json.loads(body)
    return status, told["choices"][0]["message"]["content"] if status == 200 else told["error"]["code"]


async def test_the_model_decides_which_server_answers(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b", "v") as pool:
        pool.tell(*(pool.row(model) for model in "abv"))
        client = await pool.client()
        for model in "abvba":
            assert await content(client, model) == (200, model)
        assert [len(pool.servers[model].requests) for model in "abv"] == [2, 2, 1]
        assert [event.backend for event in pool.proxy.events] == ["llama", "llama", "vllm", "llama", "llama"]
        assert await content(client, "x") == (404, "model_not_found")
        assert nothing_is_held(pool.proxy)


async def test_a_body_is_made_for_the_kind_of_its_model_s_server(tmp_path: Path) -> None:
    """A field that one server is told in vain, or under another name, the next one is not told."""
    async with pooled(tmp_path, "a", "o", "v") as pool:
        pool.tell(*(pool.row(model) for model in "aov"))
        pool.servers["o"].reply = answer(b'{"model":"o","message":{"content":"o"},"done":true}')
        client = await pool.client()
        for model in "aov":
            assert (await client.ask(ask(model, b"/api/chat", CHAT[:-1] + b',"stream":false}')))[0] == 200
        sent = {model: pool.servers[model].requests[0] for model in "aov"}
        assert [sent[model][0].split()[1] for model in "aov"] == [
            b"/v1/chat/completions",
            b"/api/chat",
            b"/v1/chat/completions",
        ]
        assert "cache_salt" in json.loads(sent["v"][1])
        assert "cache_salt" not in json.loads(sent["a"][1])


OLLAMA_SAYS = answer(
    b'{"model":"beta:q4_0","created_at":"2026-05-04T14:56:49Z","message":{"role":"assistant","content":"x"},"done":true}'
)


async def test_a_model_of_an_ollama_is_asked_by_its_name_there_and_kept_for_ever(tmp_path: Path) -> None:
    async with pooled(tmp_path, "o") as pool:
        pool.tell(pool.row("o", at_server="beta:q4_0"))
        pool.servers["o"].reply = OLLAMA_SAYS
        client = await pool.client()
        body = CHAT[:-1] + b',"stream":false,"keep_alive":0}'
        status, fields, told = await client.ask(ask("o", b"/api/chat", body))
        assert (status, json.loads(told)["model"]) == (200, "o")
        assert fields[b"x-hive-dropped"] == b"keep_alive"
        (_, sent) = pool.servers["o"].requests[0]
        assert {name: json.loads(sent)[name] for name in ("model", "keep_alive")} == {
            "model": "beta:q4_0",
            "keep_alive": -1,
        }
        assert [event.model for event in pool.proxy.events] == ["o"]
        await client.ask(ask("o"))  # at /v1 Ollama has no such field
        assert "keep_alive" not in json.loads(pool.servers["o"].requests[1][1])


async def test_what_a_slot_describes_is_the_slots_by_any_name_that_the_active_backend_has_for_it(
    tmp_path: Path,
) -> None:
    async with pooled(tmp_path, "o") as pool:
        server = pool.servers["o"]
        server.reply = OLLAMA_SAYS
        active = BackendInfo(kind=BackendKind.OLLAMA, address=server.address, up=True)
        there = [ModelInfo(name=name) for name in ("beta:q4_0", "o:latest", "other")]
        pool.proxy.path.use_backend(active, there)
        row = pool.row("o", is_open=False, at_server="beta:q4_0")
        pool.tell(msgspec.structs.replace(row, backend=active))
        client = await pool.client()
        _, _, body = await client.ask(get(b"/v1/models"))
        assert [model["id"] for model in json.loads(body)["data"]] == ["beta:q4_0", "other", "o"]
        waiting = [await pool.client() for _ in range(3)]
        for one, name in zip(waiting, ("o", "o:latest", "beta:q4_0"), strict=True):
            one.writer.write(ask(name, b"/api/chat", CHAT[:-1] + b',"stream":false}'))
        await pool.waits("o", 3)
        assert (await client.ask(ask("other", b"/api/chat", CHAT[:-1] + b',"stream":false}')))[0] == 200
        pool.tell(pool.row("o", generation=2, at_server="beta:q4_0"))
        told = [json.loads((await one.answer())[2])["model"] for one in waiting]
        assert told == ["o", "o:latest", "beta:q4_0"]
        assert {json.loads(sent)["model"] for _, sent in server.requests} == {"other", "beta:q4_0"}


async def test_every_list_has_the_models_of_all_servers(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "o") as pool:
        pool.tell(pool.row("a"), pool.row("o", is_open=False))
        client = await pool.client()
        _, _, body = await client.ask(get(b"/v1/models"))
        assert [model["id"] for model in json.loads(body)["data"]] == ["a", "o"]
        _, _, body = await client.ask(get(b"/api/tags"))
        assert [model["name"] for model in json.loads(body)["models"]] == ["a", "o"]
        status, _, body = await client.ask(post(CHAT_AT, b'{"messages":[]}'))
        assert (status, "model" in json.loads(body)["error"]["message"]) == (400, True)
        assert all(not server.requests for server in pool.servers.values())


async def test_a_cold_model_waits_and_is_told_of_while_a_warm_one_answers(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b", is_open=False))
        waiting, other = await pool.client(), await pool.client()
        waiting.writer.write(ask("b"))
        await pool.waits("b")
        assert await content(other, "a") == (200, "a")
        await until(lambda: bool(pool.told))
        (demand,) = pool.told[-1].slots["b-1"].waiting
        assert (demand.agent, demand.tenant, demand.band) == (pool.proxy.row.id, "default", "normal")
        assert 0 <= demand.age_s < 10 < demand.left_s <= 30
        pool.orders.order(SlotIs(slot=pool.row("b", generation=2)), None)
        assert (await waiting.answer())[0] == 200
        await until(lambda: pool.told[-1].slots.get("b-1") is not None and not pool.told[-1].slots["b-1"].waiting)
        assert nothing_is_held(pool.proxy)


async def test_the_queue_tells_which_slot_a_request_is_for_and_that_it_waits_for_a_load(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a", places=1), pool.row("b", is_open=False))
        release = hold(pool.servers["a"])
        clients = [await pool.client() for _ in range(3)]
        for client, request in zip(clients, (ask("a", body=STREAM), ask("a", body=STREAM), ask("b")), strict=True):
            client.writer.write(request)
            await until(lambda: bool(pool.proxy.path.slots.pooled["a-1"].line.running))
        await pool.waits("a")
        await pool.waits("b")
        early = {"queued", "connecting"}
        await until(lambda: {row.state for row in queue_now(pool.proxy.registry, time.monotonic()).requests} - early)
        told = queue_now(pool.proxy.registry, time.monotonic()).requests
        assert sorted((row.model, row.slot, row.state in early, row.for_load) for row in told) == [
            ("a", "a-1", False, False),
            ("a", "a-1", True, False),
            ("b", "b-1", True, True),
        ]
        release.set()


async def test_those_who_waited_are_told_as_in_flight_once_the_model_is_there(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a", is_open=False))
        release = hold(pool.servers["a"])
        client = await pool.client()
        client.writer.write(ask("a", body=STREAM))
        await until(lambda: bool(pool.told))
        pool.orders.order(SlotIs(slot=pool.row("a", generation=2)), None)
        await until(lambda: len(pool.told) == 2)
        assert pool.told[-1].slots == {"a-1": SlotDemand(in_flight=1, waiting=[])}
        release.set()
        assert (await client.answer())[0] == 200


async def test_a_full_line_for_a_cold_model_refuses_no_warm_request(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b", queue_depth=1, pool=PoolSection(load_depth=2)) as pool:
        pool.tell(pool.row("a"), pool.row("b", is_open=False, ready_in_s=20.0))
        clients = [await pool.client() for _ in range(3)]
        for number, client in enumerate(clients[:2], 1):
            client.writer.write(ask("b"))
            await pool.waits("b", number)
        status, fields, body = await clients[2].ask(ask("b"))
        assert (status, json.loads(body)["error"]["code"]) == (503, "model_cold")
        assert "too many requests wait for it" in json.loads(body)["error"]["message"]
        assert 15 <= int(fields[b"retry-after"]) <= 20
        assert await content(clients[2], "a") == (200, "a")


async def test_how_many_may_wait_for_a_load_follows_the_settings(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", pool=PoolSection(load_depth=1)) as pool:
        pool.tell(pool.row("a", is_open=False))
        first, second = await pool.client(), await pool.client()
        first.writer.write(ask("a"))
        await pool.waits("a")
        assert (await second.ask(ask("a")))[0] == 503
        settings = pool.proxy.path.settings
        pool.proxy.path.use_settings(msgspec.structs.replace(settings, pool=PoolSection(load_depth=2)))
        second.writer.write(ask("a"))
        await pool.waits("a", 2)


async def test_a_wait_that_cannot_hold_is_refused_at_once(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(
            pool.row("a", is_open=False, wait_s=30.0, ready_in_s=47.0),
            pool.row("b", is_open=False, never="the pinned model c holds the memory"),
        )
        client = await pool.client()
        status, fields, body = await client.ask(ask("a"))
        assert (status, json.loads(body)["error"]["code"]) == (503, "model_cold")
        assert 40 <= int(fields[b"retry-after"]) <= 47
        _, _, body = await client.ask(ask("b"))
        assert (
            "the model b is not loaded yet: the pinned model c holds the memory" in json.loads(body)["error"]["message"]
        )
        assert pool.told == []
        assert nothing_is_held(pool.proxy)


async def test_a_wait_for_a_cold_model_has_a_clock_of_its_own(tmp_path: Path) -> None:
    """Not `queue_wait_s`: a load takes longer than a place (decision 034)."""
    async with pooled(tmp_path, "b", queue_wait_s=0.05) as pool:
        pool.tell(pool.row("b", is_open=False, wait_s=0.4))
        client = await pool.client()
        status, _, body = await client.ask(ask("b"))
        assert (status, json.loads(body)["error"]["code"]) == (503, "model_cold")
        assert "it was not within 0.4 s" in json.loads(body)["error"]["message"]


async def test_a_slot_in_use_is_not_closed_if_it_has_to_be_idle(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        release = hold(pool.servers["a"])
        client = await pool.client()
        client.writer.write(ask("a", body=STREAM))
        await until(lambda: pool.proxy.path.slots.pooled["a-1"].line.running == 1)
        assert pool.close("a") == [SlotBusy(in_flight=1)]
        assert pool.close("a", generation=2) == [SlotBusy(in_flight=0)]
        release.set()
        assert (await client.answer())[0] == 200
        assert pool.close("a") == [SlotClosed()]
        client.writer.write(ask("a"))
        await pool.waits("a")


async def test_a_drained_slot_answers_what_it_has_and_keeps_the_rest_waiting(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        release = hold(pool.servers["a"])
        first, second = await pool.client(), await pool.client()
        first.writer.write(ask("a", body=STREAM))
        await until(lambda: pool.proxy.path.slots.pooled["a-1"].line.running == 1)
        answers = pool.close("a", drain_s=20.0)
        second.writer.write(ask("a"))
        await pool.waits("a")
        assert answers == []
        release.set()
        assert (await first.answer())[0] == 200
        await until(lambda: answers == [SlotClosed()])
        pool.servers["a"].script = None
        pool.tell(pool.row("a", generation=2))
        assert (await second.answer())[0] == 200


async def test_what_does_not_end_in_time_is_cut_with_an_error_of_its_dialect(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        hold(pool.servers["a"])
        client = await pool.client()
        client.writer.write(ask("a", body=STREAM))
        await until(lambda: pool.proxy.path.slots.pooled["a-1"].line.running == 1)
        await asyncio.wait_for(client.reader.readuntil(b'"content":"a"'), 10)
        answers = pool.close("a", drain_s=0.05)
        await until(lambda: answers == [SlotClosed(cut=1)])
        rest = await asyncio.wait_for(client.reader.read(), 10)
        assert b"the model a gives way to another one, and this did not end in time" in rest
        assert b"[DONE]" not in rest
        assert nothing_is_held(pool.proxy)
        assert pool.proxy.events[0].cut


async def test_an_order_for_an_earlier_server_has_no_effect(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a", generation=3))
        pool.orders.order(SlotIs(slot=pool.row("a", is_open=False, generation=2)), None)
        assert await content(await pool.client(), "a") == (200, "a")
        assert pool.close("a", generation=2) == [SlotBusy(in_flight=0)]


async def test_without_a_daemon_a_closed_slot_stays_closed_and_its_requests_end_with_an_error(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(slot_orders, "LOST_S", 0.2)
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b", is_open=False))
        waiting, other = await pool.client(), await pool.client()
        waiting.writer.write(ask("b"))
        await pool.waits("b")
        pool.is_daemon_there = False
        pool.orders.daemon_lost()
        status, _, body = await waiting.answer()
        assert (status, json.loads(body)["error"]["code"]) == (503, "model_cold")
        assert "Hive's daemon is not there to load it" in json.loads(body)["error"]["message"]
        assert (await other.ask(ask("b")))[0] == 503
        assert await content(other, "a") == (200, "a")
        pool.is_daemon_there = True
        pool.tell(pool.row("a"), pool.row("b", generation=2))
        assert await content(other, "b") == (200, "b")


async def test_a_daemon_that_is_back_is_told_of_what_waits(tmp_path: Path) -> None:
    async with pooled(tmp_path, "b") as pool:
        pool.tell(pool.row("b", is_open=False))
        pool.is_daemon_there = False
        client = await pool.client()
        client.writer.write(ask("b"))
        await pool.waits("b")
        await asyncio.sleep(3 * slot_orders.TELL_S)
        assert pool.told == []
        pool.is_daemon_there = True
        pool.tell(pool.row("b", is_open=False))
        await until(lambda: [list(told.slots) for told in pool.told] == [["b-1"]])


async def test_requests_of_a_slot_that_is_taken_out_are_decided_again(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b", is_open=False))
        client = await pool.client()
        client.writer.write(ask("b"))
        await pool.waits("b")
        pool.tell(pool.row("a"))
        status, _, body = await client.answer()
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
        assert await content(client, "a") == (200, "a")
        assert nothing_is_held(pool.proxy)


async def test_a_request_for_a_slot_that_went_while_its_agent_slept_is_decided_again(tmp_path: Path) -> None:
    """It asked in a line that was closed already, and the next request of its agent could not leave its own."""
    async with pooled(tmp_path, "a", "b", tier_low_concurrency=1) as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        release = hold(pool.servers["a"])
        first, second = await pool.client(), await pool.client()
        first.writer.write(ask("a", body=STREAM))
        await until(lambda: pool.proxy.path.slots.pooled["a-1"].line.running == 1)
        gate = pool.proxy.alice.gate
        gate.move(GateState.CLOSED, gate.generation + 1, "running")
        second.writer.write(ask("b"))
        await until(lambda: gate.parked == 1 and gate.in_flight == 2)
        await asyncio.sleep(0.05)  # its body has been read
        pool.tell(pool.row("a"))
        pool.tell(pool.row("a"))
        gate.open(gate.generation + 1)
        status, _, body = await second.answer()
        assert (status, json.loads(body)["error"]["code"]) == (404, "model_not_found")
        release.set()
        assert (await first.answer())[0] == 200
        assert gate.in_flight == 0
        assert nothing_is_held(pool.proxy)


async def test_those_who_wait_are_told_when_there_is_no_end_to_be_seen_any_more(tmp_path: Path) -> None:
    async with pooled(tmp_path, "b") as pool:
        pool.tell(pool.row("b", is_open=False, ready_in_s=10.0))
        client = await pool.client()
        client.writer.write(ask("b"))
        await pool.waits("b")
        pool.orders.order(SlotIs(slot=pool.row("b", is_open=False, never="its load failed three times")), None)
        status, _, body = await client.answer()
        assert (status, json.loads(body)["error"]["code"]) == (503, "model_cold")
        assert "its load failed three times" in json.loads(body)["error"]["message"]
        assert nothing_is_held(pool.proxy)


async def test_an_empty_load_is_answered_for_a_warm_model_and_waits_for_a_cold_one(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b", is_open=False))
        client = await pool.client()
        status, _, body = await client.ask(post(b"/api/generate", b'{"model":"a"}'))
        assert (status, json.loads(body)["done_reason"]) == (200, "load")
        client.writer.write(post(b"/api/generate", b'{"model":"b"}'))
        await pool.waits("b")
        pool.orders.order(SlotIs(slot=pool.row("b", generation=2)), None)
        status, _, body = await client.answer()
        assert (status, json.loads(body)["done_reason"]) == (200, "load")
        assert all(not server.requests for server in pool.servers.values())
        assert nothing_is_held(pool.proxy)


async def test_to_describe_a_cold_model_loads_nothing(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "o") as pool:
        pool.tell(pool.row("a"), pool.row("o", is_open=False))
        client = await pool.client()
        assert (await client.ask(post(b"/api/show", b'{"model":"o"}')))[0] == 200
        _, _, body = await client.ask(get(b"/api/ps"))
        assert [model["name"] for model in json.loads(body)["models"]] == ["a"]
        await asyncio.sleep(3 * slot_orders.TELL_S)
        assert pool.told == []


async def test_what_no_server_of_the_model_offers_is_refused_though_another_model_s_does(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "v") as pool:
        pool.tell(pool.row("v"))
        pool.proxy.path.use_backend(pool.row("a").backend, [ModelInfo(name="a")])
        client = await pool.client()
        status, _, body = await client.ask(post(b"/v1/score", b'{"model":"a","text_1":"x","text_2":"y"}'))
        assert (status, json.loads(body)["error"]["code"]) == (501, "not_supported")
        assert pool.servers["a"].requests == []


async def test_a_daemon_that_counts_anew_is_believed(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a", generation=7))
        pool.servers["a"], pool.servers["b"] = pool.servers["b"], pool.servers["a"]
        pool.tell(pool.row("a", generation=1))
        assert await content(await pool.client(), "a") == (200, "b")
        assert pool.close("a", generation=1) == [SlotClosed()]


async def test_news_of_a_slot_that_drains_do_not_end_its_drain(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a", generation=3))
        release = hold(pool.servers["a"])
        client = await pool.client()
        client.writer.write(ask("a", body=STREAM))
        await asyncio.wait_for(client.reader.readuntil(b'"content":"a"'), 10)
        answers = pool.close("a", generation=3, drain_s=20.0)
        for row in (pool.row("a", generation=2), pool.row("a", generation=3, is_open=False, ready_in_s=9.0)):
            pool.orders.order(SlotIs(slot=row), None)
        await asyncio.sleep(0.05)
        assert answers == []
        release.set()
        await until(lambda: answers == [SlotClosed()])
        await asyncio.wait_for(client.reader.readuntil(b"[DONE]"), 10)


async def test_a_request_that_was_not_sent_yet_waits_for_the_next_server(tmp_path: Path) -> None:
    """Its connection was being made when the server was said to be gone: it got 502."""
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a"))
        client = await pool.client()
        slot = pool.proxy.path.slots.pooled["a-1"]
        with full_backlog() as nowhere:
            row = pool.row("a", generation=2)
            unreachable = msgspec.structs.replace(row.backend, address=nowhere)
            pool.tell(msgspec.structs.replace(row, backend=unreachable))
            client.writer.write(ask("a"))
            await until(lambda: slot.pool is not None and slot.pool.connecting == 1)
            answers = pool.close("a", generation=2, drain_s=0.0)
            await until(lambda: answers == [SlotClosed(cut=0)])
            await pool.waits("a")
            pool.tell(pool.row("a", generation=3))
            assert (await client.answer())[0] == 200
        assert nothing_is_held(pool.proxy)


async def test_a_drain_cuts_what_is_still_at_an_earlier_address(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"))
        hold(pool.servers["a"])
        client = await pool.client()
        client.writer.write(ask("a", body=STREAM))
        await asyncio.wait_for(client.reader.readuntil(b'"content":"a"'), 10)
        pool.tell(pool.row("a", is_open=False))
        answers = pool.close("a", drain_s=0.05)
        await until(lambda: answers == [SlotClosed(cut=1)])
        assert b"did not end in time" in await asyncio.wait_for(client.reader.read(), 10)
        assert nothing_is_held(pool.proxy)


async def test_a_wait_for_a_load_ends_with_its_own_clock_also_where_a_place_may_be_waited_for_longer(
    tmp_path: Path,
) -> None:
    async with pooled(tmp_path, "b", queue_wait_s=30.0) as pool:
        pool.tell(pool.row("b", is_open=False, wait_s=0.2))
        status, _, body = await (await pool.client()).ask(ask("b"))
        assert (status, json.loads(body)["error"]["code"]) == (503, "model_cold")


async def test_places_are_each_server_s_own(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b", tier_low_concurrency=8) as pool:
        pool.tell(pool.row("a", places=1), pool.row("b", places=1))
        release = hold(pool.servers["a"])
        clients = [await pool.client() for _ in range(3)]
        for client in clients[:2]:
            client.writer.write(ask("a", body=STREAM))
        await pool.waits("a")
        assert await content(clients[2], "b") == (200, "b")
        release.set()
        assert [(await client.answer())[0] for client in clients[:2]] == [200, 200]


async def test_an_agent_s_limit_holds_over_all_servers(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b", tier_low_concurrency=1) as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        release = hold(pool.servers["a"])
        first, second = await pool.client(), await pool.client()
        first.writer.write(ask("a", body=STREAM))
        await until(lambda: pool.proxy.path.slots.pooled["a-1"].line.running == 1)
        second.writer.write(ask("b"))
        await pool.waits("b")
        release.set()
        assert (await first.answer())[0] == 200
        assert (await second.answer())[0] == 200  # the place that came free in one line is used in the other


async def test_a_prompt_is_read_ahead_at_the_slot_of_its_model_if_that_is_loaded(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b", is_open=False))
        prewarms = sending(pool.proxy)
        assert (await outcome(prewarms, model="a")).model == "a"
        assert [json.loads(body)["model"] for _, body in pool.servers["a"].requests] == ["a"]
        found = await outcome(prewarms, model="b")
        assert (found.code, "no model is loaded to read a prompt ahead" in found.message) == ("not_supported", True)
        assert (await outcome(prewarms, model="x")).code == "saturated"  # no active backend that might know it
        await asyncio.sleep(3 * slot_orders.TELL_S)
        assert pool.told == []
        assert nothing_is_held(pool.proxy)
        assert not any(slot.ahead for slot in pool.proxy.path.slots.all)


async def test_a_prompt_keeps_no_model_loaded_and_waits_for_no_load(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        pool.tell(pool.row("a", places=1))
        slot = pool.proxy.path.slots.pooled["a-1"]
        hold(pool.servers["a"])
        prewarms = sending(pool.proxy)
        sent, waits = asked(prewarms, model="a"), asked(prewarms, model="a")
        await until(lambda: slot.line.running + slot.line.waiting == 2)
        pool.orders.order(SlotIs(slot=pool.row("a", is_open=False)), None)
        for answered in (sent, waits):
            found = await asyncio.wait_for(answered, 10)
            assert isinstance(found, Failed)
            assert found.code == "not_supported"
        await until(lambda: slot.is_drained)
        await asyncio.sleep(3 * slot_orders.TELL_S)
        assert pool.told == []
        assert nothing_is_held(pool.proxy)


def hold(server: Backend) -> asyncio.Event:
    """The server sends the first event of a stream, and the last once the event is set."""
    release = asyncio.Event()

    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            await read_request(reader)
            writer.write(chunked(FIRST, end=False))
            await writer.drain()
            await release.wait()
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(LAST), LAST))
            await writer.drain()

    server.script = scene
    return release
