"""The cloud guard on the data path. The far server is a real one behind an address that is told to be far: the pool of
connections dials 127.0.0.1 all the same, so that what reaches it can be counted.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import BackendInfo, BackendKind, CloudUse, ModelInfo
from hive.link.pool import SlotRow
from hive.models import whereabouts
from hive.models.cloud_guard import may_leave, permit_of
from hive.proxy.slot_orders import SlotOrders
from hive.settings.table import TenantRow
from hive.settings.tasks import TaskRow
from tests.proxy.harness import (
    CHAT,
    STREAM,
    Backend,
    Client,
    Proxy,
    answer,
    chunked,
    get,
    nothing_is_held,
    post,
    proxied,
    read_request,
)
from tests.waiting import until

CHAT_AT = b"/v1/chat/completions"
FAR = "far.test"


@asynccontextmanager
async def far_and_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, cloud: str = "asked", aliases: str = ""
) -> AsyncIterator[tuple[Proxy, Backend, Backend]]:
    """A slot `near` here and a slot `sonnet` that is far; no active backend."""
    async with proxied(tmp_path) as (proxy, near):
        far = Backend()
        await far.start()
        monkeypatch.setattr(
            "hive.routing.slot.is_elsewhere", lambda at: at == far.address or whereabouts.is_elsewhere(at)
        )
        proxy.path.use_backend(None, [])
        set_cloud(proxy, cloud, aliases=aliases)
        SlotOrders(proxy.path, lambda _: None).heard([row("near", near), row("sonnet", far, BackendKind.REMOTE)])
        try:
            yield proxy, near, far
        finally:
            await far.stop()


def row(model: str, server: Backend, kind: BackendKind = BackendKind.LLAMA) -> SlotRow:
    backend = BackendInfo(kind=kind, address=server.address, up=True)
    return SlotRow(id=f"{model}-1", generation=1, is_open=True, backend=backend, models=[ModelInfo(name=model)])


def set_cloud(proxy: Proxy, word: str, **inference: Any) -> None:
    section = msgspec.structs.replace(proxy.path.settings.inference, cloud=word, **inference)
    proxy.path.use_settings(msgspec.structs.replace(proxy.path.settings, inference=section))


def ask(model: str, fields: bytes = b"", body: bytes = CHAT) -> bytes:
    return post(CHAT_AT, body.replace(b'"m"', b'"%b"' % model.encode()), fields=fields)


async def asked(proxy: Proxy, model: str, fields: bytes = b"") -> tuple[int, str]:
    client = await Client.unix(proxy.socket_path)
    status, _, body = await client.ask(ask(model, fields))
    told = json.loads(body)
    return status, "" if status == 200 else told["error"]["code"]


REFUSED = (403, "cloud_not_permitted")


async def test_what_leaves_is_recorded_where_nothing_else_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With token_tracking off it had no row, and the event that says what left the box is made of rows."""
    async with far_and_near(tmp_path, monkeypatch) as (proxy, _, _):
        set_cloud(proxy, "asked", token_tracking=False)
        assert await asked(proxy, "near") == (200, "")
        assert await asked(proxy, "sonnet") == (200, "")
        assert [(event.model, event.far) for event in proxy.events] == [("sonnet", True)]


async def test_asked_sends_a_request_to_a_far_server_only_where_it_names_its_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alias whose first target is not there any more stands for the next one: that is a fallback, whatever its
    name."""
    async with far_and_near(tmp_path, monkeypatch, aliases="fast = gone | sonnet, far = sonnet") as (proxy, near, far):
        assert await asked(proxy, "sonnet") == (200, "")
        assert await asked(proxy, "far") == (200, "")
        assert await asked(proxy, "near") == (200, "")
        assert await asked(proxy, "fast") == REFUSED
        assert (len(near.requests), len(far.requests), far.connections) == (1, 2, 1)
        assert proxy.path.cloud_guard.left == {"default": 2}
        assert [event.far for event in proxy.events] == [True, True, False]
        set_cloud(proxy, "fallback")
        assert await asked(proxy, "fast") == (200, "")
        assert nothing_is_held(proxy)


@pytest.mark.parametrize("word", ["asked", "fallback"])
async def test_who_is_narrower_than_the_box_stays_and_nobody_is_wider(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word: str
) -> None:
    async with far_and_near(tmp_path, monkeypatch, cloud=word) as (proxy, _, far):
        assert await asked(proxy, "sonnet", b"x-hive-local-only: 1\r\n") == REFUSED
        assert await asked(proxy, "sonnet", b"x-hive-local-only: 0\r\n") == (200, "")
        proxy.registry.learn(msgspec.structs.replace(proxy.row, cloud=CloudUse.NEVER))
        assert await asked(proxy, "sonnet") == REFUSED
        proxy.registry.learn(msgspec.structs.replace(proxy.row, cloud=CloudUse.FALLBACK))
        set_cloud(proxy, "never")
        assert await asked(proxy, "sonnet") == REFUSED
        assert len(far.requests) == 1


async def test_a_tenants_word_narrows_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with far_and_near(tmp_path, monkeypatch, cloud="fallback") as (proxy, _, far):
        tenants = {"default": TenantRow(cloud="never")}
        proxy.path.use_settings(msgspec.structs.replace(proxy.path.settings, tenants=tenants))
        assert await asked(proxy, "sonnet") == REFUSED
        assert far.connections == 0


async def test_what_is_under_way_when_the_guard_is_narrowed_ends_by_itself_and_what_waits_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with far_and_near(tmp_path, monkeypatch) as (proxy, _, far):
        begun = await held(far)
        slot = proxy.path.slots.pooled["sonnet-1"]
        backend = slot.backend
        assert backend is not None
        slot.use(msgspec.structs.replace(backend, places=1), slot.models)
        slot.give_places()
        first, second = await Client.unix(proxy.socket_path), await Client.unix(proxy.socket_path)
        first.writer.write(ask("sonnet", body=STREAM))
        await until(lambda: len(far.requests) == 1)
        second.writer.write(ask("sonnet"))
        await until(lambda: slot.line.waiting == 1)
        set_cloud(proxy, "never")
        begun.set()
        assert (await first.answer())[0] == 200
        status, _, body = await second.answer()
        assert (status, json.loads(body)["error"]["code"]) == REFUSED
        assert len(far.requests) == 1
        assert nothing_is_held(proxy)


async def held(server: Backend) -> asyncio.Event:
    """Lets the server's streams end once the returned event is set."""
    event = asyncio.Event()
    first = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
    last = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'

    async def script(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server.requests.append(await read_request(reader))
        writer.write(chunked(first, end=False))
        await event.wait()
        writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(last), last))
        await writer.drain()

    server.script = script
    return event


async def test_a_model_that_a_near_ollama_sends_on_is_far(tmp_path: Path) -> None:
    """Its address is here, and the prompt leaves all the same; an operator has named it for the tenant."""
    async with proxied(tmp_path, tenants={"default": TenantRow(models="stub, tiny")}) as (proxy, server):
        listed = [ModelInfo(name="tiny:latest"), ModelInfo(name="stub:latest", remote_host="https://h")]
        proxy.path.use_backend(BackendInfo(kind=BackendKind.OLLAMA, address=server.address, up=True), listed)
        assert await asked(proxy, "stub") == (200, "")
        set_cloud(proxy, "never")
        assert await asked(proxy, "stub") == REFUSED
        assert await asked(proxy, "tiny") == (200, "")
        assert len(server.requests) == 2


@pytest.mark.parametrize("box", CloudUse)
@pytest.mark.parametrize("tenant", ["", *CloudUse])
@pytest.mark.parametrize("agent", [None, *CloudUse])
def test_no_word_widens_another_one(box: CloudUse, tenant: str, agent: CloudUse | None) -> None:
    for is_fallback in (False, True):
        permit = permit_of(box, tenant, agent, is_local_only=False)
        for word in filter(None, (box, tenant, agent)):
            assert may_leave(permit, is_fallback=is_fallback) <= may_leave(CloudUse(word), is_fallback=is_fallback)
        assert not may_leave(permit_of(box, tenant, agent, is_local_only=True), is_fallback=is_fallback)


@pytest.mark.parametrize("path", [b"/api/tags", b"/api/version", b"/api/ps", b"/"])
async def test_a_local_ollama_answers_for_itself_whatever_the_guard_says(tmp_path: Path, path: bytes) -> None:
    """A request that names no model stays on the box, though an Ollama has models elsewhere."""
    async with proxied(tmp_path) as (proxy, server):
        server.reply = answer(b'{"models":[{"name":"tiny:latest","model":"tiny:latest"}]}')
        ollama = BackendInfo(kind=BackendKind.OLLAMA, address=server.address, up=True)
        proxy.path.use_backend(ollama, [ModelInfo(name="tiny:latest")])
        set_cloud(proxy, "never")
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(get(path)))[0] == 200
        assert proxy.path.cloud_guard.left == {}


@pytest.mark.parametrize("words", [(b"0", b"1"), (b"1", b"0"), (b"",)])
async def test_one_field_that_says_local_only_is_enough(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[bytes, ...]
) -> None:
    fields = b"".join(b"x-hive-local-only: %b\r\n" % word for word in words)
    async with far_and_near(tmp_path, monkeypatch) as (proxy, _, far):
        assert await asked(proxy, "sonnet", fields) == REFUSED
        assert not far.requests


async def test_a_request_that_left_is_told_as_far_whatever_becomes_of_its_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with far_and_near(tmp_path, monkeypatch) as (proxy, _, far):
        begun = await held(far)
        client = await Client.unix(proxy.socket_path)
        client.writer.write(ask("sonnet", body=STREAM))
        await until(lambda: len(far.requests) == 1)
        proxy.path.forget_slot("sonnet-1")
        begun.set()
        await client.answer()
        assert [event.far for event in proxy.events] == [True]


async def test_a_prompt_that_left_in_vain_is_told_as_far_though_the_next_rung_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with far_and_near(tmp_path, monkeypatch) as (proxy, _, far):
        tasks = {"plan": TaskRow(models="sonnet | near")}
        proxy.path.use_settings(msgspec.structs.replace(proxy.path.settings, tasks=tasks))
        far.reply = answer(b'{"error":{"message":"no"}}', status=b"503 Busy")
        assert (await asked(proxy, "task:plan"))[0] == 200
        assert [(event.model, event.far) for event in proxy.events] == [("near", True)]


async def test_a_later_target_of_an_alias_is_a_fallback_also_as_the_first_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits in the line while the guard is narrowed."""
    aliases = "fast = gone | sonnet"
    async with far_and_near(tmp_path, monkeypatch, cloud="fallback", aliases=aliases) as (proxy, _, far):
        tasks = {"plan": TaskRow(models="fast")}
        proxy.path.use_settings(msgspec.structs.replace(proxy.path.settings, tasks=tasks))
        begun = await held(far)
        slot = proxy.path.slots.pooled["sonnet-1"]
        assert slot.backend is not None
        slot.use(msgspec.structs.replace(slot.backend, places=1), slot.models)
        slot.give_places()
        first, second = [await Client.unix(proxy.socket_path) for _ in range(2)]
        first.writer.write(ask("sonnet", body=STREAM))
        await until(lambda: len(far.requests) == 1)
        second.writer.write(ask("task:plan"))
        await until(lambda: slot.line.waiting == 1)
        set_cloud(proxy, "asked", aliases=aliases)
        far.script = None
        begun.set()
        await first.answer()
        assert (await second.answer())[0] == 403
        assert len(far.requests) == 1
