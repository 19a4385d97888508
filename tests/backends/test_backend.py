"""Each kind of backend by its control answers, against servers that speak as the real ones do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hive.backends.backend import open_backend
from hive.domain import BackendKind, Dialect, ModelInfo
from hive.errors import BackendDown
from tests.fakes.programs import demo_backend, fake_backend

FAKES = [
    (BackendKind.OLLAMA, "0.32.15", {Dialect.OLLAMA, Dialect.OPENAI, Dialect.ANTHROPIC}),
    (BackendKind.VLLM, "0.32.0", {Dialect.OPENAI, Dialect.ANTHROPIC}),
    (BackendKind.LLAMA, "b1-0c1e570", {Dialect.OPENAI, Dialect.ANTHROPIC}),
]


@pytest.mark.parametrize(("kind", "version", "dialects"), FAKES)
async def test_a_backend_tells_its_health_version_and_dialects(
    kind: BackendKind, version: str, dialects: set[Dialect]
) -> None:
    with fake_backend(kind) as server:
        backend = open_backend(kind, server.address)
        assert await backend.health() is True
        assert await backend.version() == version
        assert backend.dialects == dialects
        assert (backend.kind, backend.address) == (kind, server.address)
        assert server.stats()["begun"] == 0  # no prompt was sent


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (
            BackendKind.OLLAMA,
            {
                "size_bytes": 656640,
                "created": 1777899409,
                "quantization": "F32",
                "digest": "ab" * 32,
            },
        ),
        (BackendKind.VLLM, {"size_bytes": None, "owned_by": "vllm", "created": 1795154964}),
        (
            BackendKind.LLAMA,
            {
                "size_bytes": 656640,
                "owned_by": "llamacpp",
                "created": 1795154964,
                "context_length": 4096,
                "capabilities": ("completion",),
                "meta": {"n_ctx": 4096, "size": 656640},
            },
        ),
    ],
)
async def test_models_come_in_the_backends_own_order_and_names(kind: BackendKind, expected: dict[str, Any]) -> None:
    with fake_backend(kind, "--models", "zeta:1b,meta/alpha x") as server:
        models = await open_backend(kind, server.address).models()
    owners = {"zeta:1b": "library", "meta/alpha x": "meta"}
    assert models == [ModelInfo(**{"owned_by": owner, **expected}, name=name) for name, owner in owners.items()]


async def test_a_backend_on_a_unix_socket_answers_too(tmp_path: Path) -> None:
    with fake_backend("vllm", socket=tmp_path / "v.sock") as server:
        assert [model.name for model in await open_backend(BackendKind.VLLM, server.address).models()] == ["tiny"]


async def test_a_llama_server_that_loads_is_not_healthy() -> None:
    with fake_backend("llama", "--busy") as server:
        backend = open_backend(BackendKind.LLAMA, server.address)
        assert await backend.health() is False
        with pytest.raises(BackendDown, match="status 503"):
            await backend.version()


async def test_the_demo_backend_is_opened_as_ollama_that_says_demo() -> None:
    with demo_backend() as server:
        backend = open_backend(BackendKind.DEMO, server.address)
        assert backend.kind is BackendKind.DEMO
        assert await backend.health() is True
        assert [(model.name, model.owned_by) for model in await backend.models()] == [("hive-demo", "hive")]
        assert "hive-demo" in await backend.version()


@pytest.mark.parametrize("kind", BackendKind)
async def test_a_backend_that_is_gone_is_down_and_not_an_error_of_ours(kind: BackendKind, tmp_path: Path) -> None:
    backend = open_backend(kind, str(tmp_path / "gone.sock"))
    assert await backend.health() is False
    with pytest.raises(BackendDown):
        await backend.models()
    with pytest.raises(BackendDown):
        await backend.version()


async def test_a_backend_of_another_kind_is_down() -> None:
    with fake_backend("vllm") as server, pytest.raises(BackendDown):
        await open_backend(BackendKind.OLLAMA, server.address).models()
