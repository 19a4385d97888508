"""Prompts that a real llama-server keeps in its slots: told, and erased; with one model and as a router."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from hive.backends.backend import BackendControl, open_backend
from hive.backends.spec import KeptPrompt
from hive.domain import BackendKind
from hive.errors import BackendTimeout, NotSupported
from tests.listening import listening
from tests.llama import MODEL, LlamaServer, serve

PROMPT = "once upon a time " * 8


async def cached(server: LlamaServer, slot: int = 0) -> int:
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 1, "id_slot": slot}
    async with httpx.AsyncClient(trust_env=False) as client:
        answer = await client.post(f"{server.url}/v1/completions", json=body, timeout=30)
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.wide
@pytest.mark.llama
@pytest.mark.parametrize("as_router", [False, True], ids=["one model", "router"])
async def test_a_slot_is_told_and_erased(tmp_path: Path, as_router: bool) -> None:
    more = ("--slots", "--slot-save-path", str(tmp_path), "--cache-ram", "0")
    with serve(tmp_path, as_router=as_router, more=more) as server:
        control = open_backend(BackendKind.LLAMA, server.address)
        await cached(server)
        assert await cached(server) > 50
        kept = await control.kept(MODEL)
        assert [(one.slot, one.is_busy, (one.tokens or 0) > 50) for one in kept] == [
            (0, False, True),
            *((slot, False, False) for slot in (1, 2, 3)),
        ]
        assert await control.erase(MODEL, 0) == kept[0].tokens
        assert not any(one.tokens for one in await control.kept(MODEL))
        assert await cached(server) == 0
        if not as_router:
            await check_a_busy_one_is_left_alone(server, control)


async def check_a_busy_one_is_left_alone(server: LlamaServer, control: BackendControl) -> None:
    """All four are busy: one alone may be through within the second that an erasing waits."""
    body = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3000, "ignore_eos": True}
    async with httpx.AsyncClient(trust_env=False) as client:
        asking = [
            asyncio.ensure_future(
                client.post(f"{server.url}/v1/completions", json=body | {"id_slot": slot}, timeout=60)
            )
            for slot in range(4)
        ]
        for _ in range(1000):
            busy = [one.slot for one in await control.kept(MODEL) if one.is_busy]
            if len(busy) == 4:
                break
        assert busy == [0, 1, 2, 3]
        with pytest.raises(BackendTimeout):
            await control.erase(MODEL, 0)
        for answer in await asyncio.gather(*asking):
            assert answer.json()["usage"]["completion_tokens"] == 3000


async def test_what_an_older_one_does_not_tell_of_a_slot_is_unknown_and_not_nothing() -> None:
    async def scene(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = b'[{"id":0,"is_processing":false,"id_task":3},{"id":1,"is_processing":true,"id_task":4}]'
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))

    async with listening(scene) as address:
        kept = await open_backend(BackendKind.LLAMA, address).kept(MODEL)
    assert kept == [KeptPrompt(0, False, 3, None, None, None), KeptPrompt(1, True, 4, None, None, None)]


@pytest.mark.llama
async def test_one_that_keeps_prompts_in_ram_as_hive_starts_it_refuses_to_erase(llama_server: LlamaServer) -> None:
    control = open_backend(BackendKind.LLAMA, llama_server.address)
    with pytest.raises(NotSupported, match="erases nothing"):
        await control.erase(MODEL, 0)


async def test_other_kinds_have_no_slots() -> None:
    control = open_backend(BackendKind.VLLM, "127.0.0.1:1")
    for asked in (control.kept("m"), control.erase("m", 0)):
        with pytest.raises(NotSupported):
            await asked
