"""A remote model of the pool on the data path: its own key, its name there, and a server that is gone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from hive.domain import BackendInfo, BackendKind, ModelInfo
from hive.link.pool import SlotRow
from hive.proxy.slot_orders import SlotOrders
from hive.settings.pool import ModelRow, slot_id
from tests.proxy.harness import CHAT, Backend, Client, Proxy, nothing_is_held, post, proxied
from tests.tls_front import key_file

OWN, OTHER = "sk-own", "sk-of-the-active-backend"


@asynccontextmanager
async def remote(tmp_path: Path) -> AsyncIterator[tuple[Proxy, Backend]]:
    """A remote model `sonnet`, `claude-4` there, whose server is on this machine; the active backend has a key too."""
    async with proxied(tmp_path) as (proxy, server):
        keys = {name: tmp_path / name for name in (OWN, OTHER)}
        for name, folder in keys.items():
            folder.mkdir()
            key_file(folder, name)
        url = f"http://{server.address}/v1"
        row = ModelRow(backend="remote", url=url, file="claude-4", api_key_file=str(key_file(keys[OWN], OWN)))
        settings = proxy.path.settings
        inference = msgspec.structs.replace(settings.inference, backend_api_key_file=str(key_file(keys[OTHER], OTHER)))
        proxy.path.use_settings(msgspec.structs.replace(settings, inference=inference, models={"sonnet": row}))
        proxy.path.use_backend(None, [])
        backend = BackendInfo(kind=BackendKind.REMOTE, address=server.address, up=True)
        told = SlotRow(
            id=slot_id("sonnet"), generation=1, is_open=True, backend=backend, models=[ModelInfo(name="sonnet")],
            at_server="claude-4",
        )  # fmt: skip
        SlotOrders(proxy.path, lambda _: None).heard([told])
        yield proxy, server


def ask() -> bytes:
    return post(b"/v1/chat/completions", CHAT.replace(b'"m"', b'"sonnet"'))


async def test_it_is_asked_with_its_own_key_by_its_name_there(tmp_path: Path) -> None:
    async with remote(tmp_path) as (proxy, server):
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(ask()))[0] == 200
        ((head, body),) = server.requests
        assert f"authorization: Bearer {OWN}\r\n".encode() in head
        assert OTHER.encode() not in head
        assert json.loads(body)["model"] == "claude-4"
        assert [(event.model, event.far) for event in proxy.events] == [("sonnet", False)]


async def test_one_that_is_gone_is_told_at_once_and_not_knocked_at(tmp_path: Path) -> None:
    """A slot of this box waits for its next server; nobody here starts this one."""
    async with remote(tmp_path) as (proxy, server):
        await server.stop()
        client = await Client.unix(proxy.socket_path)
        status, _, body = await client.ask(ask())
        assert (status, json.loads(body)["error"]["code"]) == (502, "backend_unavailable")
        slot = proxy.path.slots.pooled[slot_id("sonnet")]
        assert not slot.gate.is_closed
        await asyncio.sleep(0)
        assert nothing_is_held(proxy)
