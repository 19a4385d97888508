"""The real llama-server (llama.cpp), asked directly: what the rest of Hive relies on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from hive.backends import model_files
from hive.backends.backend import open_backend
from hive.backends.models_dir import BESIDE, ModelsDir
from hive.backends.recognise import find, recognise
from hive.domain import BackendKind
from tests.llama import MODEL, LlamaServer, serve

pytestmark = pytest.mark.llama

HELLO: Any = [{"role": "user", "content": "hello there"}]


async def test_it_is_recognised_without_a_prompt(llama_server: LlamaServer) -> None:
    before = tokens_asked(llama_server)
    info = await recognise(llama_server.address)
    assert info is not None
    assert (info.kind, info.address, info.up) == (BackendKind.LLAMA, llama_server.address, True)
    assert info.version.startswith("b")
    assert tokens_asked(llama_server) == before


def tokens_asked(server: LlamaServer) -> float:
    """All prompt tokens it has seen, by its own counter."""
    shown = httpx.get(f"{server.url}/metrics", trust_env=False).text
    lines = [line for line in shown.splitlines() if line.startswith("llamacpp:prompt_tokens_total ")]
    return float(lines[0].split()[1])


async def test_it_is_recognised_on_a_unix_socket(llama_server_on_socket: LlamaServer) -> None:
    info = await find(["/nonexistent.sock", llama_server_on_socket.address])
    assert info is not None
    assert (info.kind, info.address) == (BackendKind.LLAMA, llama_server_on_socket.address)


async def test_it_tells_health_version_and_models(llama_server: LlamaServer) -> None:
    backend = open_backend(BackendKind.LLAMA, llama_server.address)
    assert await backend.health() is True
    assert (await backend.version()).startswith("b")
    [model] = await backend.models()
    assert (model.name, model.owned_by) == (MODEL, "llamacpp")
    assert model.size_bytes is not None
    assert model.size_bytes > 600_000


async def test_as_a_router_it_is_recognised_and_lists_what_it_could_load(tmp_path: Path) -> None:
    with serve(tmp_path, as_router=True) as router:
        info = await recognise(router.address)
        models = await open_backend(BackendKind.LLAMA, router.address).models()
    assert info is not None
    assert info.kind is BackendKind.LLAMA
    assert [(model.name, model.size_bytes) for model in models] == [("tiny", None)]


def test_the_openai_package_streams_and_counts(llama_server: LlamaServer) -> None:
    with openai.OpenAI(base_url=f"{llama_server.url}/v1", api_key="none", max_retries=0) as client:
        wanted: Any = {"model": MODEL, "messages": HELLO, "max_tokens": 7, "temperature": 0}
        ignoring: Any = {"ignore_eos": True}
        whole = client.chat.completions.create(**wanted, extra_body=ignoring)
        options: Any = {"include_usage": True}
        stream = list(
            client.chat.completions.create(**wanted, extra_body=ignoring, stream=True, stream_options=options)
        )
    assert whole.usage is not None
    assert stream[-1].usage is not None
    assert whole.usage.completion_tokens == stream[-1].usage.completion_tokens == 7
    assert whole.usage.prompt_tokens == stream[-1].usage.prompt_tokens
    text = "".join(choice.delta.content or "" for chunk in stream for choice in chunk.choices)
    assert text == whole.choices[0].message.content


def test_its_first_chunk_holds_two_events_and_its_last_event_the_timings(llama_server: LlamaServer) -> None:
    """Facts that the fake backend imitates and the proxy's metering relies on."""
    body = {"messages": HELLO, "max_tokens": 3, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{llama_server.url}/v1/chat/completions", json=body, trust_env=False) as answer:
        chunks = list(answer.iter_raw())
    events = [line for line in b"".join(chunks).split(b"\n\n") if line]
    assert events.pop() == b"data: [DONE]"
    first, *_, last = (json.loads(event.removeprefix(b"data: ")) for event in events)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": None}
    assert chunks[0].count(b"data: ") >= 2
    assert "usage" not in last
    assert last["timings"]["predicted_n"] == 3


async def test_a_router_tells_what_is_loaded_and_finds_a_file_that_was_put_there_whole(tmp_path: Path) -> None:
    with serve(tmp_path, as_router=True) as router:
        backend, models = open_backend(BackendKind.LLAMA, router.address), tmp_path / "models"
        assert await backend.loaded() == frozenset()
        half = models / BESIDE / "ab12"
        half.mkdir(parents=True)
        shutil.copy(models / "tiny.gguf", half / "half.gguf")  # as it lies while it is copied
        directory = ModelsDir(models)
        found = model_files.find(models / "tiny.gguf")
        directory.place(found, "second.gguf", link=False, force=False, progress=lambda _: None)
        assert [model.name for model in await backend.models()] == [MODEL]
        await backend.look_for_files()
        assert [model.name for model in await backend.models()] == ["second", MODEL]
        async with httpx.AsyncClient(base_url=router.url, trust_env=False, timeout=30) as client:
            asked = {"model": "second", "messages": HELLO, "max_tokens": 2}
            assert (await client.post("/v1/chat/completions", json=asked)).status_code == 200
        assert await backend.loaded() == frozenset({"second"})
        removed = directory.holds("second")
        assert removed is not None
        directory.remove(removed)
        await backend.look_for_files()
        assert [model.name for model in await backend.models()] == [MODEL]
