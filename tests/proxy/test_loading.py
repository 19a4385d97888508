"""Loading, unloading and fetching a model by Ollama's API: answered by Hive, and no server hears of it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import ollama
import pytest

from hive.bodies.body_workers import DeepReaders
from hive.domain import BackendInfo, BackendKind, ModelInfo
from hive.proxy.model_refresh import Looking
from hive.queue.slot_gate import Switching
from hive.settings.table import TenantRow
from tests.proxy.harness import MODEL_TOKEN, Client, Proxy, nothing_is_held, post, proxied
from tests.waiting import until

KINDS = [BackendKind.OLLAMA, BackendKind.LLAMA, BackendKind.VLLM, BackendKind.DEMO, BackendKind.REMOTE]
EMPTY: list[tuple[bytes, dict[str, Any], str]] = [
    (b"/api/generate", {}, "load"),
    (b"/api/generate", {"prompt": "", "stream": False}, "load"),
    (b"/api/generate", {"keep_alive": 0}, "unload"),
    (b"/api/chat", {"messages": []}, "load"),
    (b"/api/chat", {"messages": [], "keep_alive": "0s"}, "unload"),
]


async def ask(proxy: Proxy, target: bytes, body: dict[str, Any]) -> tuple[int, dict[bytes, bytes], bytes]:
    client = await Client.unix(proxy.socket_path)
    try:
        return await client.ask(post(target, json.dumps({"model": "m", **body}).encode()))
    finally:
        client.close()


@pytest.mark.parametrize("kind", KINDS)
async def test_an_empty_prompt_is_answered_and_nothing_is_sent(tmp_path: Path, kind: BackendKind) -> None:
    """They were 400, and `ollama run` asks one before all else. Sent on, the unload of one agent would evict the model
    that all others use."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, kind)
        for target, body, reason in EMPTY:
            status, fields, content = await ask(proxy, target, body)
            assert (status, fields[b"content-type"]) == (200, b"application/json; charset=utf-8")
            assert fields.get(b"x-hive-dropped") == (b"keep_alive" if "keep_alive" in body else None)
            told = json.loads(content)
            said = {"response": ""} if target == b"/api/generate" else {"message": {"role": "assistant", "content": ""}}
            assert told.pop("created_at").endswith("Z")
            assert told == {"model": "m", **said, "done": True, "done_reason": reason}
        assert backend.connections == 0
        assert proxy.events == [], "the model was not used"
        assert nothing_is_held(proxy)


async def test_ollamas_own_package_loads_unloads_and_pulls(tmp_path: Path) -> None:
    def talk() -> list[Any]:
        client = ollama.Client(f"http://127.0.0.1:{proxy.port}/a/{MODEL_TOKEN.decode()}")
        found: list[Any] = [client.generate("m").done_reason, client.generate("m", keep_alive=0).done_reason]
        found += [client.chat("m").done_reason, client.chat("m:latest", keep_alive="0").done_reason]
        found += [[part.done_reason for part in client.generate("m", stream=True)]]
        found += [client.pull("m").status, [part.status for part in client.pull("m", stream=True)]]
        try:
            client.pull("other")
        except ollama.ResponseError as error:
            found += [error.status_code, error.error]
        client._client.close()
        return found

    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        *told, status, error = await asyncio.to_thread(talk)
        assert told == ["load", "unload", "load", "unload", ["load"], "success", ["success"]]
        assert (status, error.startswith("model 'other' not found: agents fetch no models")) == (403, True)
        assert backend.connections == 0


@pytest.mark.parametrize("kind", KINDS)
async def test_a_pull_of_a_model_that_is_there_succeeds_in_both_shapes(tmp_path: Path, kind: BackendKind) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, kind)
        for named in ({"model": "m"}, {"name": "m:latest", "model": ""}, {"model": "M", "stream": True}):
            _, fields, content = await ask(proxy, b"/api/pull", {**named, "insecure": True})
            assert (fields[b"content-type"], content) == (b"application/x-ndjson", b'{"status":"success"}\n')
            assert fields[b"x-hive-dropped"] == b"insecure"
        _, fields, content = await ask(proxy, b"/api/pull", {"stream": False})
        assert (fields[b"content-type"], content) == (b"application/json; charset=utf-8", b'{"status":"success"}')
        for other in ("gpt-9", "", "hub.example/m"):
            status, _, content = await ask(proxy, b"/api/pull", {"model": other})
            assert (status, "agents fetch no models" in json.loads(content)["error"]) == (403, True)
        assert backend.connections == 0
        assert nothing_is_held(proxy)


@pytest.mark.parametrize(("target", "status"), [(b"/api/pull", 403), (b"/api/chat", 404), (b"/api/generate", 404)])
async def test_a_model_nobody_knows_is_looked_for_once_more(tmp_path: Path, target: bytes, status: int) -> None:
    """An operator's pull that has just ended is not in the list yet."""
    async with proxied(tmp_path) as (proxy, backend):

        async def look() -> None:
            proxy.use(backend, models=("m", "new"))

        proxy.path.looking = Looking(look)
        assert (await ask(proxy, target, {"model": "new"}))[0] == 200
        assert (await ask(proxy, target, {"model": "gone"}))[0] == status
        assert backend.connections == 0


async def test_a_tenants_agent_loads_and_pulls_no_other_models_than_its_own(tmp_path: Path) -> None:
    async with proxied(tmp_path, tenants={"default": TenantRow(models="other")}) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        for target in (b"/api/generate", b"/api/chat", b"/api/pull"):
            assert (await ask(proxy, target, {"keep_alive": 0}))[0] == 403
        assert backend.connections == 0


@pytest.mark.parametrize("target", [b"/api/generate", b"/api/pull"])
async def test_without_a_backend_nothing_is_loaded(tmp_path: Path, target: bytes) -> None:
    async with proxied(tmp_path) as (proxy, _):
        proxy.path.use_backend(None, [])
        assert (await ask(proxy, target, {}))[0] == 503
        assert nothing_is_held(proxy)


async def test_a_load_that_waits_is_answered_in_one_piece_also_where_signs_of_life_are_asked_for(
    tmp_path: Path,
) -> None:
    """They would begin a stream, and its answer is none."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        proxy.path.slot.close(Switching(1e18, "llama"))
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/api/chat", b'{"model":"m","stream":true}', fields=b"x-hive-heartbeat: 1\r\n"))
        await until(lambda: proxy.registry.queue.waiting == 1)
        await asyncio.sleep(1.3)
        assert proxy.path.slot.backend is not None
        proxy.path.open_backend(proxy.path.slot.backend, proxy.path.slot.models)
        status, fields, content = await client.answer()
        assert (status, fields[b"content-length"]) == (200, b"%d" % len(content))
        assert json.loads(content)["done_reason"] == "load"
        client.close()


async def test_a_model_is_shown_in_one_piece_after_a_switch_whatever_stream_says(tmp_path: Path) -> None:
    """The signs of life had begun a stream, and Hive's own answer came as a second head within it."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        proxy.path.slot.close(Switching(1e18, "llama"))
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/api/show", b'{"model":"m","stream":true}', fields=b"x-hive-heartbeat: 1\r\n"))
        await until(lambda: proxy.registry.queue.waiting == 1)
        await asyncio.sleep(1.3)
        info = BackendInfo(kind=BackendKind.LLAMA, address=backend.address, up=True)
        proxy.path.open_backend(info, [ModelInfo(name="m")])
        status, fields, content = await client.answer()
        assert (status, fields.get(b"content-length")) == (200, b"%d" % len(content))
        assert "capabilities" in json.loads(content)
        client.close()


async def test_a_load_waits_out_a_switch_and_is_judged_by_the_new_list(tmp_path: Path) -> None:
    """Its turn comes as a chat's does, and goes on to the one that waits behind it."""
    async with proxied(tmp_path, backend_concurrency=1) as (proxy, backend):
        proxy.use(backend, BackendKind.OLLAMA)
        proxy.path.slot.close(Switching(1e18, "llama"))
        hello = [{"role": "user", "content": "hello"}]
        bodies: list[dict[str, Any]] = [{"model": "gone"}, {"model": "new"}, {"model": "new", "messages": hello}]
        asked = []
        for place, body in enumerate(bodies, 1):
            asked.append(asyncio.create_task(ask(proxy, b"/api/chat", {**body, "stream": False})))
            await until(lambda: proxy.registry.queue.waiting == place)  # noqa: B023
        info = BackendInfo(kind=BackendKind.LLAMA, address=backend.address, up=True)
        proxy.path.open_backend(info, [ModelInfo(name="new")])
        gone, load, chat = await asyncio.gather(*asked)
        assert (gone[0], load[0], chat[0]) == (404, 200, 200)
        assert json.loads(load[2])["done_reason"] == "load"
        assert int(load[1][b"x-queue-wait-ms"]) >= 0
        assert [head.split(b" ")[1] for head, _ in backend.requests] == [b"/v1/chat/completions"]
        await until(lambda: nothing_is_held(proxy))


async def test_an_empty_prompt_that_is_read_in_a_worker_is_the_same(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.path.readers = readers = DeepReaders()
        readers.start()
        try:
            body = {"prompt": "", "keep_alive": 0, "system": "x" * 300_000}
            status, fields, content = await ask(proxy, b"/api/generate", body)
            assert (status, json.loads(content)["done_reason"]) == (200, "unload")
            assert fields[b"x-hive-dropped"] == b"keep_alive"
            assert backend.connections == 0
        finally:
            readers.close()


async def test_loads_are_charged_to_the_window_like_other_requests(tmp_path: Path) -> None:
    async with proxied(tmp_path, window_requests=2) as (proxy, _):
        statuses = [(await ask(proxy, target, {}))[0] for target in (b"/api/generate", b"/api/pull", b"/api/chat")]
        assert statuses == [200, 200, 429]
