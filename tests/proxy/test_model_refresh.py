"""An unknown model is looked for before it is refused; aliases are listed as names that may be used."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from hive.domain import BackendKind, ModelInfo
from hive.errors import LinkLost
from hive.proxy import model_refresh
from hive.proxy.model_refresh import Looking
from hive.settings.table import TenantRow
from tests.proxy.harness import CHAT, JSON_ANSWER, Backend, Client, Proxy, answer, get, post, proxied
from tests.waiting import until

TARGET = b"/v1/chat/completions"
NEW = CHAT.replace(b'"m"', b'"new"')


class Daemon:
    """Answers when `go` is set, and tells first that there is `new`, if it `finds` it."""

    def __init__(self, proxy: Proxy, *, finds: bool = True) -> None:
        self.asked = 0
        self.go = asyncio.Event()
        self._proxy, self._finds = proxy, finds
        proxy.path.looking = Looking(self.ask)

    async def ask(self) -> None:
        self.asked += 1
        await self.go.wait()
        if self._finds:
            self._proxy.path.use_backend(
                self._proxy.path.slot.backend, [*self._proxy.path.slot.models, ModelInfo(name="new")]
            )


async def test_a_model_that_came_meanwhile_is_found_and_others_do_not_wait(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        daemon = Daemon(proxy)
        waiting = [await Client.unix(proxy.socket_path) for _ in range(3)]
        asking = [asyncio.ensure_future(client.ask(post(TARGET, NEW))) for client in waiting]
        await until(lambda: daemon.asked == 1)
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(TARGET, CHAT)))[0] == 200
        assert not any(task.done() for task in asking)
        daemon.go.set()
        assert [status for status, _, _ in await asyncio.gather(*asking)] == [200, 200, 200]
        assert (daemon.asked, len(backend.requests)) == (1, 4)


async def test_one_that_is_not_there_is_refused_and_the_next_is_not_looked_for(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        daemon = Daemon(proxy, finds=False)
        daemon.go.set()
        client = await Client.unix(proxy.socket_path)
        for _ in range(2):
            status, _, body = await client.ask(post(TARGET, NEW))
            assert (status, "not found" in json.loads(body)["error"]["message"]) == (404, True)
        assert (daemon.asked, backend.requests) == (1, [])


async def test_a_daemon_that_is_silent_or_gone_makes_it_the_404_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_refresh, "LOOK_S", 0.05)
    async with proxied(tmp_path) as (proxy, _):
        Daemon(proxy)
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(TARGET, NEW)))[0] == 404

        async def lost() -> None:
            raise LinkLost("the daemon is not connected")

        proxy.path.looking = Looking(lost)
        assert (await client.ask(post(TARGET, NEW)))[0] == 404


async def test_a_client_that_leaves_while_it_is_looked_for_leaves_nothing(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        daemon = Daemon(proxy)
        client = await Client.unix(proxy.socket_path)
        asking = asyncio.ensure_future(client.ask(post(TARGET, NEW)))
        await until(lambda: daemon.asked == 1)
        client.close()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: proxy.alice.gate.in_flight == 0)
        daemon.go.set()
        await until(lambda: repr(proxy.path.looking) == "<Looking idle>")
        assert backend.requests == []


async def test_a_model_that_vanished_is_the_backends_own_404_and_the_list_is_renewed(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        daemon = Daemon(proxy)
        backend.reply = answer(b'{"error":{"message":"model is gone"}}', status=b"404 Not Found")
        client = await Client.unix(proxy.socket_path)
        status, _, body = await client.ask(post(TARGET, CHAT))
        assert (status, json.loads(body)) == (404, {"error": {"message": "model is gone"}})
        await until(lambda: daemon.asked == 1)


def listing(proxy: Proxy, backend: Backend, kind: BackendKind, *, models: str = "") -> None:
    """`m` and `other` at a backend of this kind; `gpt-4` stands for `other`, `dead` for nothing, `m` is a model."""
    settings = proxy.path.settings
    aliases = msgspec.structs.replace(settings.inference, aliases="gpt-4 = other, dead = gone, m = other")
    tenants = {"default": TenantRow(models=models)}
    proxy.path.use_settings(msgspec.structs.replace(settings, inference=aliases, tenants=tenants))
    proxy.use(backend, kind, ("m", "other"))


def names(body: bytes, of: Callable[[dict[str, object]], object] = lambda row: row["id"]) -> list[object]:
    found = json.loads(body)
    return [of(row) for row in found.get("data", found.get("models"))]


async def test_aliases_are_listed_beside_the_models(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        listing(proxy, backend, BackendKind.VLLM)
        client = await Client.unix(proxy.socket_path)
        assert names((await client.ask(get(b"/v1/models")))[2]) == ["m", "other", "gpt-4"]
        assert json.loads((await client.ask(get(b"/v1/models/gpt-4")))[2])["id"] == "gpt-4"
        for target, expected in ((b"/api/tags", ["m", "other", "gpt-4"]), (b"/api/ps", ["m", "other"])):
            assert names((await client.ask(get(target)))[2], lambda row: row["name"]) == expected
        assert backend.requests == []


async def test_ollamas_own_list_gets_them_too_and_a_tenant_sees_its_own(tmp_path: Path) -> None:
    tags = b'{"models":[{"name":"m","model":"m","size":1e2},{"name":"other","model":"other","size":7}]}'
    async with proxied(tmp_path) as (proxy, backend):
        listing(proxy, backend, BackendKind.OLLAMA)
        backend.reply = answer(tags)
        client = await Client.unix(proxy.socket_path)
        status, _, body = await client.ask(get(b"/api/tags"))
        assert (status, body) == (200, tags[:-2] + b',{"name":"gpt-4","model":"gpt-4","size":7}]}')
        assert (await client.ask(get(b"/api/ps")))[2] == tags
        listing(proxy, backend, BackendKind.OLLAMA, models="gpt-4")
        assert names((await client.ask(get(b"/api/tags")))[2], lambda row: row["name"]) == ["gpt-4"]
        assert names((await client.ask(get(b"/v1/models")))[2]) == ["gpt-4"]
        backend.reply = answer(JSON_ANSWER)
        assert (await client.ask(post(TARGET, CHAT.replace(b'"m"', b'"gpt-4"'))))[0] == 200
        assert json.loads(backend.requests[-1][1])["model"] == "other"
