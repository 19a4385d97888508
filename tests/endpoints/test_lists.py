"""Lists of models in each dialect: no more than the server tells, and the fields that clients cannot do without."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import msgspec
import ollama
import openai
import pytest

from hive.domain import BackendInfo, BackendKind, FoundCapabilities, ModelInfo
from tests.proxy.harness import MODEL_TOKEN, Client, get, post, proxied

META: dict[str, int | float | str | bool] = {
    "n_params": 1_235_814_432,
    "n_ctx": 8192,
    "n_embd": 2048,
    "ftype": "Q4_K - Medium",
}
LLAMA = ModelInfo(
    name="tiny:latest",
    size_bytes=770_000_000,
    owned_by="llamacpp",
    created=1_800_000_000,
    parameters=1_235_814_432,
    context_length=8192,
    capabilities=("completion", "tools"),
    template="{{ messages }}",
    meta=META,
)
VLLM = ModelInfo(name="meta/e5", owned_by="vllm", created=1_800_000_000, context_length=512)
EMBEDS = FoundCapabilities(endpoints=("/v1/embeddings", "/v1/models", "/v1/score"), found="/openapi.json")
"""Of vLLM 0.32 with an embedding model, which has scores too."""
RANKS = FoundCapabilities(endpoints=("/v1/rerank", "/v1/score"), found="/openapi.json")


async def test_ollamas_client_finds_in_the_lists_what_it_reads(tmp_path: Path) -> None:
    """`digest`, `details`, and before vLLM `size` were missing: `llm-ollama` crashed on the list. `/api/ps` had no
    `expires_at` and no `size_vram`; `/api/show` said `completion` of every model, and nothing else."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.path.use_backend(BackendInfo(kind=BackendKind.LLAMA, address=backend.address, up=True), [LLAMA])

        def told() -> tuple[ollama.ListResponse, ollama.ProcessResponse, ollama.ShowResponse]:
            client = ollama.Client(host=f"http://127.0.0.1:{proxy.port}/a/{MODEL_TOKEN.decode()}")
            try:
                return client.list(), client.ps(), client.show("TINY")
            finally:
                client._client.close()

        listed, running, shown = await asyncio.to_thread(told)
        (row,), (loaded,) = listed.models, running.models
        assert row.digest is not None
        assert row.details is not None
        assert (len(row.digest), row.digest == loaded.digest, row.size) == (64, True, 770_000_000)
        details = (row.details.format, row.details.parameter_size, row.details.quantization_level)
        assert details == ("gguf", "1.2B", "Q4_K_M")
        assert loaded.expires_at is not None
        assert (loaded.expires_at.year, loaded.size_vram, loaded.context_length) == (2318, 0, 8192)
        assert (shown.capabilities, shown.template) == (["completion", "tools"], "{{ messages }}")
        assert shown.modelinfo is not None
        kind = shown.modelinfo["general.architecture"]
        assert (shown.modelinfo[f"{kind}.context_length"], shown.modelinfo[f"{kind}.embedding_length"]) == (8192, 2048)
        assert backend.requests == []


async def test_a_server_that_only_embeds_has_embedders(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        info = BackendInfo(kind=BackendKind.VLLM, address=backend.address, up=True, capabilities=EMBEDS)
        proxy.path.use_backend(info, [VLLM])
        client = await Client.unix(proxy.socket_path)
        told = json.loads((await client.ask(post(b"/api/show", b'{"model":"meta/e5"}')))[2])
        assert told["capabilities"] == ["embedding"]
        (row,) = json.loads((await client.ask(get(b"/api/tags")))[2])["models"]
        assert (row["size"], len(row["digest"]), row["details"]["families"]) == (0, 64, None)
        proxy.path.use_backend(msgspec.structs.replace(info, capabilities=RANKS), [VLLM])
        told = json.loads((await client.ask(post(b"/api/show", b'{"model":"meta/e5"}')))[2])
        assert told["capabilities"] == ["reranking"]


async def test_openais_list_keeps_what_the_server_tells(tmp_path: Path) -> None:
    """`max_model_len` and `meta` were lost."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.path.use_backend(BackendInfo(kind=BackendKind.LLAMA, address=backend.address, up=True), [LLAMA, VLLM])
        client = await Client.unix(proxy.socket_path)
        rows = json.loads((await client.ask(get(b"/v1/models")))[2])["data"]
        assert [(row["owned_by"], row["max_model_len"], row.get("meta")) for row in rows] == [
            ("llamacpp", 8192, META),
            ("vllm", 512, None),
        ]


async def test_a_model_that_was_made_at_no_time_is_listed(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        models = [ModelInfo(name="a", created=1_800_000_000_000), ModelInfo(name="b", created=10**30)]
        proxy.path.use_backend(BackendInfo(kind=BackendKind.REMOTE, address=backend.address, up=True), models)
        client = await Client.unix(proxy.socket_path)
        for target, key in ((b"/v1/models", "data"), (b"/api/tags", "models"), (b"/api/ps", "models")):
            status, _, body = await client.ask(get(target))
            assert (status, len(json.loads(body)[key])) == (200, 2)


@pytest.mark.parametrize("name", ["tiny", "TINY", "tiny:latest", "Tiny:Latest"])
async def test_a_model_is_found_under_the_name_it_is_asked_by(tmp_path: Path, name: str) -> None:
    """`GET /v1/models/tiny` and `TINY` were 404, while a chat with either name was answered."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.path.use_backend(BackendInfo(kind=BackendKind.OLLAMA, address=backend.address, up=True), [LLAMA, VLLM])

        def found() -> str:
            url = f"http://127.0.0.1:{proxy.port}/v1"
            with openai.OpenAI(base_url=url, api_key=MODEL_TOKEN.decode(), max_retries=0) as client:
                assert client.models.retrieve("meta/e5").id == "meta/e5"
                return client.models.retrieve(name).id

        assert await asyncio.to_thread(found) == name
