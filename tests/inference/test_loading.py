"""Models loaded and unloaded on request: by a real llama-server, alone and as a router."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import httpx
import pytest

from hive.domain import BackendKind
from hive.errors import NotFound, NotSupported
from hive.inference.backend import open_backend
from tests.llama import MODEL, LlamaServer, llama_server, serve

__all__ = ["llama_server"]


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
