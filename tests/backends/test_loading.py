"""Models loaded and unloaded on request: by a real llama-server, alone and as a router."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from hive.backends.backend import open_backend
from hive.domain import BackendKind
from hive.errors import NotFound, NotSupported
from tests.llama import MODEL, LlamaServer, serve


@pytest.fixture(scope="module")
def router(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    with serve(tmp_path_factory.mktemp("router"), as_router=True) as server:
        yield server


def status(router: LlamaServer) -> str:
    listed = httpx.get(f"{router.url}/models", trust_env=False).json()["data"]
    (found,) = [model["status"]["value"] for model in listed if model["id"] == MODEL]
    return str(found)


@pytest.mark.llama
async def test_a_router_loads_and_unloads_and_both_may_be_asked_twice(router: LlamaServer) -> None:
    backend = open_backend(BackendKind.LLAMA, router.address)
    assert status(router) == "unloaded"
    for _ in range(2):
        await backend.load(MODEL)
        assert status(router) == "loaded"
    for _ in range(2):
        await backend.unload(MODEL)
        for _ in range(100):  # it answers first and ends its process then
            if status(router) == "unloaded":
                break
            await asyncio.sleep(0.1)
        assert status(router) == "unloaded"
    with pytest.raises(NotFound):
        await backend.load("nobody")


@pytest.mark.llama
async def test_a_llama_server_of_one_model_says_that_it_is_one(llama_server: LlamaServer) -> None:
    with pytest.raises(NotSupported, match="serves the one model it was started with"):
        await open_backend(BackendKind.LLAMA, llama_server.address).unload(MODEL)


class Ollama:
    """The stand-in of Ollama's store (fakes/fake_ollama.py)."""

    def __init__(self, address: str) -> None:
        self.address = address

    def left(self) -> object:
        """The models for which it sent something to another host."""
        return httpx.get(f"http://{self.address}/fake/left", trust_env=False).json()["left"]


@pytest.fixture
def ollama() -> Iterator[Ollama]:
    """It has `tiny`, and `work-helper` is a stub of its cloud."""
    fake = Path(__file__).parents[1] / "fakes" / "fake_ollama.py"
    command = [sys.executable, str(fake), "tiny", "--stub", "work-helper"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        yield Ollama(json.loads(process.stdout.readline())["address"])
        process.kill()


async def test_an_ollama_is_asked_to_load_nothing_that_it_would_send_on(ollama: Ollama) -> None:
    """The question has no prompt, and would reach the host of the stub all the same."""
    backend = open_backend(BackendKind.OLLAMA, ollama.address)
    await backend.load("tiny")
    assert await backend.loaded() == frozenset({"tiny:latest"})
    for ask in (backend.load, backend.unload):
        with pytest.raises(NotSupported, match="would leave this box"):
            await ask("work-helper")
    with pytest.raises(NotFound):
        await backend.load("nobody")
    assert ollama.left() == []
