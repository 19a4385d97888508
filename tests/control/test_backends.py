"""The daemon's watch over the backend: what it says of its limits, and what its own queue contradicts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import msgspec
import pytest

from hive.control.backends import BackendWatch
from hive.control.views import inference_view
from hive.domain import BackendKind
from hive.settings.table import InferenceSection, Settings
from tests.listening import listening
from tests.llama import MODEL, LlamaServer

Answers = dict[str, bytes]
PROPS = b'{"build_info":"b1","total_slots":4}'
MODELS = b'{"data":[{"id":"tiny"}]}'


@asynccontextmanager
async def serving(path: Path, answers: Answers) -> AsyncIterator[str]:
    """A backend on a socket that answers what is in `answers`, which a test may change, and 501 to all else."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        target = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        body = answers.get(target)
        status = b"501 Not Implemented" if body is None else b"200 OK"
        head = b"HTTP/1.1 %b\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % (status, len(body or b""))
        writer.write(head + (body or b""))

    async with listening(answer, path) as address:
        yield address


def watching(kind: BackendKind, address: str, settings: Settings | None = None) -> tuple[BackendWatch, list[bool]]:
    told: list[bool] = []
    return BackendWatch(kind, address, settings=lambda: settings or Settings(), on_checked=told.append), told


async def test_a_change_of_the_places_is_told_and_a_silent_backend_keeps_them(short_path: Path) -> None:
    answers = {"/health": b"", "/props": PROPS, "/v1/models": MODELS}
    async with serving(short_path / "b.sock", answers) as address:
        watch, told = watching(BackendKind.LLAMA, address)
        assert watch.info is not None
        before = watch.info.places
        await watch.check()
        assert before is None
        assert watch.info is not None
        assert (watch.info.places, watch.info.places_from, watch.info.warning) == (4, "/props total_slots", "")
        await watch.check()
        answers["/props"] = PROPS.replace(b"4", b"8")
        await watch.check()
        assert watch.info.places == 8
        del answers["/props"]
        await watch.check()
        assert watch.info.places == 8
    assert told == [True, False, True, False]


async def test_a_llama_server_that_is_replaced_between_two_looks_is_known_at_the_next_one(short_path: Path) -> None:
    """With a small model it is back within a second; its old name and version stood for minutes."""
    answers = {"/health": b"", "/props": PROPS, "/v1/models": MODELS}
    async with serving(short_path / "b.sock", answers) as address:
        watch, told = watching(BackendKind.LLAMA, address)
        await watch.check()
        await watch.check()
        answers |= {"/props": PROPS.replace(b"b1", b"b2"), "/v1/models": MODELS.replace(b"tiny", b"other")}
        await watch.check()
        assert watch.info is not None
        assert (watch.info.version, [model.name for model in watch.models]) == ("b2", ["other"])
        assert told == [True, False, True]


async def test_vllms_own_queue_contradicts_and_the_warning_is_told_once(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    waiting = b'vllm:num_requests_running{engine="0"} 64.0\nvllm:num_requests_waiting{engine="0"} %d.0\n'
    answers = {"/health": b"", "/version": b'{"version":"0.32.0"}', "/v1/models": MODELS, "/metrics": waiting % 3}
    defaults = Settings()
    settings = msgspec.structs.replace(
        defaults, inference=msgspec.structs.replace(defaults.inference, vllm_scheduling_policy="priority")
    )
    async with serving(short_path / "b.sock", answers) as address:
        watch, told = watching(BackendKind.VLLM, address, settings)
        await watch.check()
        assert watch.info is not None
        assert (watch.info.places, watch.info.priority, watch.info.warning) == (64, True, "")
        await watch.check()
        await watch.check()
        assert watch.info.warning.startswith("the backend queues 3 requests itself although Hive sends at most 64")
        assert caplog.messages.count(f"backend_queues address={address} waiting=3 slots=64") == 1
    assert told == [True, True, False]
    shown = inference_view(watch.info, watch.models, settings, None)
    assert (shown["slots"], shown["slots_from"]) == (64, "vllm_max_sequences in hive.conf")
    assert (shown["priority"], shown["prefix_cache"]) == (True, "separated by tenant (salt)")
    assert shown["warning"] == watch.info.warning


async def test_what_a_server_says_of_itself_is_told_with_it(short_path: Path) -> None:
    answers = {"/v1/models": MODELS}
    async with serving(short_path / "b.sock", answers) as address:
        watch, told = watching(BackendKind.REMOTE, address)
        await watch.check()
        assert watch.info is not None
        assert (watch.info.up, watch.info.capabilities.fields, told) == (True, (), [True])
        shown = inference_view(watch.info, watch.models, Settings(), None)
        assert shown["capabilities"]["fields"] == []
        assert shown["slots"] is None
        del answers["/v1/models"]
        await watch.check()
        assert (watch.up, told) == (False, [True, True])


def test_without_a_backend_there_is_nothing_to_show() -> None:
    shown = inference_view(None, [], Settings(), None)
    assert (shown["backend"], shown["slots"], shown["warning"], shown["prefix_cache"]) == (None, None, "", "")


@pytest.mark.llama
async def test_a_real_llama_server_tells_its_slots_and_is_seen_to_queue(llama_server: LlamaServer) -> None:
    """Six streams on four slots, past Hive: two wait in the server's own queue."""
    watch, _ = watching(BackendKind.LLAMA, llama_server.address)
    await watch.check()
    assert watch.info is not None
    assert (watch.info.places, watch.info.places_from, watch.info.warning) == (4, "/props total_slots", "")
    body = {
        "model": MODEL,
        "prompt": "hello",
        "max_tokens": 3900,
        "stream": True,
        "ignore_eos": True,
        "logprobs": 5,  # each token costs more, so that the streams outlast two checks
    }
    async with (
        httpx.AsyncClient(base_url=llama_server.url, timeout=60, trust_env=False) as client,
        asyncio.TaskGroup() as group,
    ):
        asked = [group.create_task(client.post("/v1/completions", json=body)) for _ in range(8)]
        while not watch.info.warning and not all(task.done() for task in asked):
            await watch.check()
        assert watch.info.warning
        for task in asked:
            task.cancel()
    assert "itself although Hive sends at most 4 at once" in watch.info.warning


async def test_a_far_server_is_asked_nothing_where_nothing_may_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a far server was asked")

    monkeypatch.setattr("hive.control.backends.open_backend", refuse)
    monkeypatch.setattr("hive.control.backends.look", refuse)
    settings = Settings(inference=InferenceSection(cloud="never", backend_url="https://api.example.invalid/v1"))
    told: list[bool] = []
    watch = BackendWatch(None, "https://api.example.invalid", settings=lambda: settings, on_checked=told.append)
    await watch.check()
    assert (watch.up, told) == (False, [])
