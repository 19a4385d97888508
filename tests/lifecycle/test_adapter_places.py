"""Adapters at servers that hold several, at a server that is played over a real socket as vLLM 0.32 was seen to be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from hive.adapters.directory import AdapterDirectory
from hive.adapters.record import AdapterRecord
from hive.backends.backend import BackendControl, open_backend
from hive.backends.vllm import load_adapter, unload_adapter
from hive.control.active_backend import Active
from hive.domain import BackendKind
from hive.errors import AdapterMismatch, BackendDown, NotSupported
from hive.lifecycle.adapter_places import AdapterPlace, SharedAdapters
from hive.link.proxy_link import ProxyGates
from hive.pooling.pooling import ModelPool
from tests.adapters.installed import install_weights
from tests.proxy.harness import read_request

ONE, TWO, THREE = (f"red@00000000000{number}" for number in (1, 2, 3))


UNSIGNED: dict[str, str] = {}
"""By digest: why it may not be loaded without a new order."""


def weights(tmp_path: Path, content: bytes) -> tuple[AdapterRecord, str]:
    """An installed adapter, and the path that a server is given."""
    directory = AdapterDirectory(tmp_path)
    record = install_weights(directory, "red", "tiny", content, is_gguf=False)
    return record, str(directory.path(record))


def write(path: str, content: bytes) -> None:
    """Changes what is installed there."""
    (file,) = Path(path).glob("*.safetensors")
    file.chmod(0o644)
    file.write_bytes(content)


class PlayedVllm:
    """Its adapters by name; it refuses the paths of `refused`, and at the first token those of `broken`. Without
    `has_routes` it was started without room for adapters; `is_up` False: it answers 500 to all."""

    def __init__(self) -> None:
        self.adapters: dict[str, str] = {}
        self.refused: set[str] = set()
        self.broken: set[str] = set()
        self.has_routes = self.is_up = True
        self.loads = 0

    address = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head, body = await read_request(reader)
        status, told = self._answer(head.split(b" ", 2)[1].decode(), msgspec.json.decode(body) if body else {})
        content = msgspec.json.encode(told)
        writer.write(
            b"HTTP/1.1 %d X\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % (status, len(content)) + content
        )
        await writer.drain()
        writer.close()

    def _answer(self, path: str, asked: dict[str, Any]) -> tuple[int, object]:
        name = asked.get("lora_name", asked.get("model", ""))
        if not self.is_up:
            return 500, {"error": {"message": "engine dead"}}
        if path == "/v1/models":
            rows = [{"id": "tiny", "owned_by": "vllm"}]
            return 200, {"data": [*rows, *({"id": each, "parent": "tiny"} for each in self.adapters)]}
        if path == "/v1/completions":
            is_broken = self.adapters.get(name) in self.broken
            return (400, {"error": {"message": "no such shape"}}) if is_broken else (200, {"choices": []})
        if not self.has_routes:
            return 404, {"detail": "Not Found"}
        if path == "/v1/unload_lora_adapter":
            return (200, "done") if self.adapters.pop(name, None) else (404, {"error": {"message": "not there"}})
        self.loads += 1
        if name in self.adapters:
            return 400, {"error": {"message": "already loaded"}}
        if asked["lora_path"] in self.refused:
            return 500, {"error": {"message": "Call to add_lora method failed: file not fully covered"}}
        self.adapters[name] = asked["lora_path"]
        return 200, "done"


@pytest.fixture
async def vllm() -> AsyncIterator[PlayedVllm]:
    played = PlayedVllm()
    server = await asyncio.start_server(played.serve, "127.0.0.1", 0)
    played.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    yield played
    server.close()


def control(vllm: PlayedVllm) -> BackendControl:
    return open_backend(BackendKind.VLLM, vllm.address)


def shared(tmp_path: Path) -> SharedAdapters:
    nobody: Any = None
    return SharedAdapters(
        cast("ModelPool", nobody),
        cast("Active", nobody),
        cast("ProxyGates", nobody),
        AdapterDirectory(tmp_path),
        lambda name, digest: UNSIGNED.get(digest, ""),
    )


def load(vllm: PlayedVllm, name: str, path: str) -> Any:
    return control(vllm).converse(lambda server: load_adapter(server, name, path))


async def test_a_load_is_done_once_the_name_has_answered_and_may_be_done_twice(vllm: PlayedVllm) -> None:
    await load(vllm, ONE, "/a")
    await load(vllm, ONE, "/a")
    assert vllm.adapters == {ONE: "/a"}
    await control(vllm).converse(lambda server: unload_adapter(server, ONE))
    await control(vllm).converse(lambda server: unload_adapter(server, ONE))
    assert vllm.adapters == {}


async def test_weights_that_it_refuses_at_the_load_or_at_the_first_token_are_told_in_its_words(
    vllm: PlayedVllm,
) -> None:
    vllm.refused, vllm.broken = {"/a"}, {"/b"}
    with pytest.raises(AdapterMismatch, match="not fully covered"):
        await load(vllm, ONE, "/a")
    with pytest.raises(AdapterMismatch, match="no such shape"):
        await load(vllm, TWO, "/b")
    assert vllm.adapters == {}, "no name is left that nothing answers to"


async def test_a_server_without_room_for_adapters_is_told_from_one_without_the_files(vllm: PlayedVllm) -> None:
    vllm.has_routes = False
    with pytest.raises(NotSupported) as refused:
        await load(vllm, ONE, "/a")
    assert "vllm_adapters" in refused.value.hint


async def test_a_new_server_is_given_what_it_is_to_have_and_loses_what_nobody_wants(
    vllm: PlayedVllm, tmp_path: Path
) -> None:
    (one, one_path), (two, two_path) = weights(tmp_path, b"1"), weights(tmp_path, b"2")
    vllm.adapters = {THREE: "/three", "mine": "/mine", "blue@000000000009": "/nine"}
    vllm.refused = {two_path}
    servers = shared(tmp_path)
    wanted = {ONE: one, TWO: two}
    await servers.fill("", control(vllm), wanted, frozenset({THREE}))
    assert vllm.adapters == {THREE: "/three", "mine": "/mine", ONE: one_path}, "what is no name of Hive's stays"
    assert [servers.has(AdapterPlace("", name)) for name in (ONE, TWO, THREE)] == [True, False, True]
    assert "not fully covered" in servers.errors[TWO]
    loads = vllm.loads
    vllm.refused = set()
    await servers.fill("", control(vllm), wanted, frozenset())
    assert vllm.loads == loads + 1, "only what it lacks is loaded"
    assert servers.errors == {}
    assert THREE not in vllm.adapters


async def test_a_server_that_does_not_answer_is_no_reason_to_give_an_adapter_up(
    vllm: PlayedVllm, tmp_path: Path
) -> None:
    servers, (one, _) = shared(tmp_path), weights(tmp_path, b"1")
    assert servers.has(AdapterPlace("", ONE)), "it may serve since before"
    assert not servers.has(AdapterPlace("a-slot", ONE))
    vllm.is_up = False
    with pytest.raises(BackendDown):
        await load(vllm, ONE, "/one")
    await servers.fill("", control(vllm), {ONE: one}, frozenset())
    assert (servers.has(AdapterPlace("", ONE)), servers.errors) == (False, {})
    vllm.is_up = True
    await servers.fill("", control(vllm), {ONE: one}, frozenset())
    assert servers.has(AdapterPlace("", ONE))


async def test_a_new_server_is_given_nothing_whose_files_were_changed_since_it_was_installed(
    vllm: PlayedVllm, tmp_path: Path
) -> None:
    servers, (one, path), (two, two_path) = shared(tmp_path), weights(tmp_path, b"1"), weights(tmp_path, b"2")
    write(path, b"3")
    await servers.fill("", control(vllm), {ONE: one, TWO: two}, frozenset())
    assert vllm.adapters == {TWO: two_path}
    assert "was changed since it was installed" in servers.errors[ONE]
    write(path, b"1")
    await servers.fill("", control(vllm), {ONE: one, TWO: two}, frozenset())
    assert vllm.adapters == {ONE: path, TWO: two_path}
    assert servers.errors == {}


async def test_a_new_server_is_not_given_what_no_signed_order_has_loaded(vllm: PlayedVllm, tmp_path: Path) -> None:
    servers, (one, path) = shared(tmp_path), weights(tmp_path, b"1")
    UNSIGNED[one.digest] = "ann had red loaded without a signature"
    try:
        await servers.fill("", control(vllm), {ONE: one}, frozenset())
        assert (vllm.adapters, servers.errors) == ({}, {ONE: UNSIGNED[one.digest]})
        vllm.adapters = {ONE: path}
        await servers.fill("", control(vllm), {ONE: one}, frozenset())
        assert vllm.adapters == {ONE: path}, "what is there already stays"
    finally:
        UNSIGNED.clear()
