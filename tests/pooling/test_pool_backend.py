"""The services of `hive backend` in the books of the pool. Helper, proxy and memory are played (pool_world.py);
switches are in tests/control/test_switching_with_models.py."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hive.domain import BackendKind
from hive.errors import BackendTimeout, WrongState
from hive.link.helper import BackendIs
from hive.pool.state import MIB
from hive.pooling.pool_backend import PoolBackends
from hive.settings.table import InferenceSection
from tests.pooling.pool_world import PoolWorld
from tests.waiting import until

LLAMA, VLLM, OLLAMA = BackendKind.LLAMA, BackendKind.VLLM, BackendKind.OLLAMA


@pytest.fixture
async def box(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PoolWorld]:
    """One model of 60 MiB on 100, loaded and idle."""
    monkeypatch.setattr("hive.pooling.pool_backend.LOOK_S", 0.02)
    monkeypatch.setattr("hive.pooling.pooling.LOOK_S", 0.05)
    made = PoolWorld(tmp_path, {"a": 60}, total_mb=100)
    await made.begin()
    made.ask("a")
    await made.until("a", "ready")
    made.use("a", 0)
    yield made
    await made.end()


def runs(box: PoolWorld, kind: BackendKind, mb: int) -> None:
    """The service of this kind runs, and takes so much."""
    box.servers.services[kind] = BackendIs(unit=f"{kind}.service", state="active", pid=7, pids=[7])
    box.memory.takes_mb[f"backend:{kind}"] = mb


def charged_mb(box: PoolWorld, kind: BackendKind) -> int:
    """MiB that are booked for a service; -1 if it is in no books."""
    slots = [slot for slot in box.pool.backends.known if slot.kind == kind]
    return sum(grant.charged_bytes for slot in slots for grant in slot.grants) // MIB if slots else -1


def needs(monkeypatch: pytest.MonkeyPatch, mb: int) -> None:
    async def need(self: PoolBackends, kind: str) -> int:
        return mb * MIB

    monkeypatch.setattr(PoolBackends, "_need", need)


async def test_a_service_that_fits_starts_beside_the_models(box: PoolWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(monkeypatch, 30)
    await box.pool.backends.want(LLAMA)
    await box.pool.backends.granted(LLAMA, within_s=5)
    assert (charged_mb(box, LLAMA), box.state("a")) == (30, "ready")


async def test_a_model_that_is_idle_leaves_for_a_service_and_one_that_is_used_again_does_not(
    box: PoolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim of a service was not dropped: the decider was asked the same for ever."""
    needs(monkeypatch, 70)
    box.proxy.in_flight[box.id("a")] = 2  # came after the last word of the proxy
    await box.pool.backends.want(LLAMA)
    await until(lambda: box.proxy.closed)
    await box.until("a", "ready")
    with pytest.raises(BackendTimeout):
        await box.pool.backends.granted(LLAMA, within_s=0.1)
    box.use("a", 0)
    await box.pool.backends.granted(LLAMA, within_s=5)
    assert (charged_mb(box, LLAMA), box.state("a")) == (70, "cold")


async def test_nothing_moves_until_a_service_answers_that_takes_what_it_finds(box: PoolWorld) -> None:
    await box.pool.backends.want(VLLM)
    await box.pool.backends.granted(VLLM, within_s=5)
    assert charged_mb(box, VLLM) == 100
    runs(box, VLLM, 40)
    box.ask("a")
    await asyncio.sleep(0.2)
    assert box.state("a") == "cold"
    box.pool.backends.serves(VLLM)
    await box.until("a", "ready")
    assert charged_mb(box, VLLM) == 40


async def test_one_whose_memory_nobody_tells_keeps_what_it_was_given(
    box: PoolWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.pooling.pool_backend.UNMEASURED_S", 0.1)
    await box.pool.backends.want(VLLM)
    await box.pool.backends.granted(VLLM, within_s=5)
    box.pool.backends.serves(VLLM)
    await until(lambda: box.pool.backends.known[0].state == "ready")
    assert charged_mb(box, VLLM) == 100
    box.ask("a")
    await until(lambda: box.pool.find("a").never)
    assert "the vllm of `hive backend`" in box.proxy.last_row(box.id("a")).never


async def test_an_idle_ollama_takes_nothing_from_the_models(box: PoolWorld) -> None:
    await box.pool.backends.want(OLLAMA)
    await box.pool.backends.granted(OLLAMA, within_s=5)
    box.pool.backends.serves(OLLAMA)
    assert (charged_mb(box, OLLAMA), box.state("a")) == (0, "ready")
    runs(box, OLLAMA, 25)  # it loads a model by itself
    await until(lambda: charged_mb(box, OLLAMA) == 25)


async def test_what_a_service_was_seen_to_take_is_its_need_the_next_time(box: PoolWorld) -> None:
    runs(box, VLLM, 30)
    assert await box.pool.backends.took_over(VLLM)
    await until(lambda: charged_mb(box, VLLM) == 30)
    del box.servers.services[VLLM]
    stopped = box.pool.backends.stopped(VLLM)
    assert stopped is not None
    await box.pool.steps.until_back(stopped)
    box.pool.backends.gone(VLLM)
    await box.pool.backends.want(VLLM)
    await box.pool.backends.granted(VLLM, within_s=5)
    assert (charged_mb(box, VLLM), box.state("a")) == (30, "ready")


async def test_a_service_that_does_not_run_is_not_taken_over(box: PoolWorld) -> None:
    assert not await box.pool.backends.took_over(LLAMA)
    assert charged_mb(box, LLAMA) == -1


async def test_a_switch_for_which_pins_leave_no_room_says_so(box: PoolWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    needs(monkeypatch, 70)
    box.pool.find("a").pinned_at = 0.0
    await box.pool.backends.clear_for(LLAMA, others_leave=True)
    with pytest.raises(WrongState, match="does not fit beside what is pinned: a"):
        await box.pool.backends.granted(LLAMA, within_s=5)
    box.pool.backends.end_order()
    box.pool.backends.gone(LLAMA)
    assert box.state("a") == "ready"


async def test_the_need_of_a_llama_server_is_read_from_its_file(box: PoolWorld, tmp_path: Path) -> None:
    backends: Any = box.pool.backends
    inference = InferenceSection(llama_model=str(tmp_path / "a.gguf"), llama_context=512)
    backends._settings = lambda: type("S", (), {"inference": inference, "pool": box.settings.pool, "models": {}})()
    needed = await backends._need(LLAMA)
    assert 0 < needed < 100 * MIB
    missing = InferenceSection(llama_model=str(tmp_path / "none.gguf"))
    backends._settings = lambda: type("S", (), {"inference": missing, "pool": box.settings.pool, "models": {}})()
    assert await backends._need(LLAMA) == 0
    assert await backends._need(VLLM) is None
