"""The queue before a cluster: as many places as its engine tells, and none where nothing of it runs."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from hive.domain import BackendInfo, BackendKind, Cluster, ModelInfo
from hive.proxy.under_way import AnswersUnderWay
from hive.settings.table import TenantRow
from tests.proxy.harness import (
    JSON_ANSWER,
    MODELS,
    Backend,
    Client,
    Proxy,
    answer,
    chunked,
    post,
    proxied,
    read_request,
)
from tests.waiting import until

CHAT = b'{"model":"m","messages":[{"role":"user","content":"%b"}]}'
WHY = "Ray Serve runs 0 of 2 replicas"


def tell(proxy: Proxy, backend: Backend, running: int, *, each: int = 4) -> None:
    """The daemon's word on a cluster of two replicas, of which so many run."""
    cluster = Cluster(engine="ray", wanted=2, running=running, slots_each=each, why_none="" if running else WHY)
    info = BackendInfo(
        kind=BackendKind.REMOTE, address=backend.address, up=True, places=running * each, cluster=cluster
    )
    proxy.path.use_backend(info, [ModelInfo(name=name, owned_by="t") for name in MODELS])


class Engine:
    """Two replicas that work on four requests each, and let the others wait first come, first served."""

    def __init__(self, backend: Backend) -> None:
        backend.script = self._serve
        self.came: list[bytes] = []
        """Tenants, in the order in which they were worked on."""
        self.at_work = self.waited = 0
        self._places = asyncio.Semaphore(8)
        self._next = asyncio.Semaphore(0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            _, body = await read_request(reader)
            self.waited += self._places.locked()
            async with self._places:
                self.at_work += 1
                self.came.append(msgspec.json.decode(body)["messages"][0]["content"].encode())
                await self._next.acquire()
                self.at_work -= 1
            writer.write(answer(JSON_ANSWER))
            await writer.drain()

    def end(self, count: int) -> None:
        """Ends so many of those at work."""
        for _ in range(count):
            self._next.release()


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_light_tenant_beside_a_flood_is_the_next_one_where_the_capacity_is_told(
    tmp_path: Path, is_told: bool
) -> None:
    """Of 20 requests of one tenant 8 are at work; another one's comes last. Untold it waits behind all of them."""
    tenants = {"flood": TenantRow(), "light": TenantRow()}
    async with proxied(tmp_path, tenants=tenants, tier_low_concurrency=30, queue_wait_s=60.0, window_requests=1000) as (
        proxy,
        backend,
    ):
        engine = Engine(backend)
        if is_told:
            tell(proxy, backend, 2)
        flood, light = proxy.another("flood", tenant="flood"), proxy.another("light", tenant="light")
        asked = []
        for _ in range(20):
            client = await Client.unix(flood)
            asked.append(asyncio.create_task(client.ask(post(b"/v1/chat/completions", CHAT % b"flood"))))
        await until(lambda: engine.at_work == 8 and (is_told or engine.waited == 12))
        client = await Client.unix(light)
        asked.append(asyncio.create_task(client.ask(post(b"/v1/chat/completions", CHAT % b"light"))))
        await until(lambda: proxy.path.slot.line.waiting == 13 if is_told else engine.waited == 13)
        engine.end(8)
        await until(lambda: len(engine.came) == 16)
        assert (b"light" in engine.came[8:16]) is is_told
        engine.end(13)
        assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}
        assert engine.waited == (0 if is_told else 13)


async def test_a_cluster_that_runs_nothing_holds_requests_and_refuses_them_with_its_reason(tmp_path: Path) -> None:
    async with proxied(tmp_path, queue_wait_s=0.3) as (proxy, backend):
        tell(proxy, backend, 0)
        client = await Client.unix(proxy.socket_path)
        status, fields, body = await client.ask(post(b"/v1/chat/completions", CHAT % b"hi"))
        told = msgspec.json.decode(body)["error"]
        assert (status, told["message"]) == (503, f"no place came free within 0.3 s: {WHY}")
        assert b"retry-after" in fields
        assert backend.connections == 0


async def test_a_cluster_that_cannot_be_reached_at_all_is_a_refusal_to_be_tried_again(tmp_path: Path) -> None:
    """A single server that is down is 502."""
    async with proxied(tmp_path) as (proxy, backend):
        tell(proxy, backend, 2)
        there = proxy.path.slot.backend
        assert there is not None
        nowhere = msgspec.structs.replace(there, address=str(tmp_path / "nowhere"))
        for info, expected in ((nowhere, 503), (msgspec.structs.replace(nowhere, cluster=None), 502)):
            proxy.path.use_backend(info, [ModelInfo(name=name, owned_by="t") for name in MODELS])
            client = await Client.unix(proxy.socket_path)
            status, fields, body = await client.ask(post(b"/v1/chat/completions", CHAT % b"hi"))
            assert status == expected
            assert (b"retry-after" in fields) is (expected == 503)
            assert ("the cluster is away: " in msgspec.json.decode(body)["error"]["message"]) is (expected == 503)


async def test_requests_that_wait_for_a_cluster_go_on_as_soon_as_something_of_it_runs(tmp_path: Path) -> None:
    async with proxied(tmp_path, queue_wait_s=60.0) as (proxy, backend):
        tell(proxy, backend, 0)
        client = await Client.unix(proxy.socket_path)
        asked = asyncio.create_task(client.ask(post(b"/v1/chat/completions", CHAT % b"hi")))
        await until(lambda: proxy.path.slot.line.waiting == 1)
        assert backend.connections == 0
        tell(proxy, backend, 1)
        assert (await asked)[0] == 200


async def test_requests_under_way_end_as_they_began_when_places_are_taken_away(tmp_path: Path) -> None:
    async with proxied(tmp_path, tier_low_concurrency=10, queue_wait_s=60.0) as (proxy, backend):
        engine = Engine(backend)
        tell(proxy, backend, 2)
        asked = []
        for _ in range(10):
            client = await Client.unix(proxy.socket_path)
            asked.append(asyncio.create_task(client.ask(post(b"/v1/chat/completions", CHAT % b"hi"))))
        await until(lambda: engine.at_work == 8)
        tell(proxy, backend, 1)
        engine.end(4)
        await until(lambda: sum(task.done() for task in asked) == 4)
        assert (engine.at_work, len(engine.came)) == (4, 8)  # those that waited go on below four
        engine.end(1)
        await until(lambda: len(engine.came) == 9)
        engine.end(5)
        assert {status for status, _, _ in await asyncio.gather(*asked)} == {200}


async def test_answers_go_on_as_long_as_their_events_come(tmp_path: Path) -> None:
    """They keep a place where an engine says that nothing runs (`AskTokensCome`)."""
    event = b'data: {"choices":[{"index":0,"delta":{"content":"x"}}]}\n\n'
    more = asyncio.Event()

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(chunked(event, end=False))
        await more.wait()
        writer.write(b"%x\r\n%b\r\n" % (len(event), event))
        await reader.read()

    async with proxied(tmp_path) as (proxy, backend):
        answers, slot, far = AnswersUnderWay(), proxy.path.slot, 1e9
        assert not answers.move(proxy.registry, slot, far)
        backend.script = stream
        client = await Client.unix(proxy.socket_path)
        body = CHAT.replace(b"}]}", b'}],"stream":true}') % b"hi"
        asked = asyncio.create_task(client.ask(post(b"/v1/chat/completions", body)))
        await until(lambda: slot.moved_at > 0)
        assert answers.move(proxy.registry, slot, far)  # however long ago: it has never been asked
        assert not answers.move(proxy.registry, slot, far + 1)
        more.set()
        await until(lambda: answers.move(proxy.registry, slot, far + 2))
        assert not answers.move(proxy.registry, slot, far + 3)
        client.close()
        asked.cancel()
