"""Switches of services where there is a pool of models: a real daemon, database and proxy process; systemd, the
helper's slots and the GPU are played. Each model of the pool is a server on a unix socket in this process."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from hive.backends.switch import Switch, SwitchStep
from hive.control import views
from hive.control.switching import Switcher
from hive.domain import BackendKind
from hive.link.helper import BackendIs
from hive.link.slots import SlotGrant, SlotProcess
from hive.pool.state import MIB
from hive.pooling.pool_views import view_of
from hive.pooling.pooling import ModelPool
from hive.settings.pool import ModelRow, PoolSection, slot_id
from hive.settings.table import Settings
from tests.approvals import PIN, UNLOAD
from tests.control.services_box import LLAMA, QUICK, VLLM, Server, ServicesBox
from tests.pooling.pool_world import GPU, PlayedMemory, PlayedServers, describe, tiny_model
from tests.waiting import until

TOTAL_MB = 100
SMALL, LARGE = "small", "large"
SIZES = {SMALL: 20, LARGE: 40}
PINNED = "held"


class PooledServers(PlayedServers):
    """The helper's slots, each a server at its socket, and the services as the helper shows them."""

    def __init__(self, box: PooledServicesBox) -> None:
        super().__init__()
        self._box = box
        self._servers: dict[str, Server] = {}

    async def slot_start(self, id: str, grant: SlotGrant) -> SlotProcess:
        if id not in self._servers:
            socket = self._box.paths.slot_socket(id)
            socket.parent.mkdir(parents=True, exist_ok=True)
            socket.unlink(missing_ok=True)
            self._servers[id] = Server(id.rpartition("-")[0], generates=True)
            await self._servers[id].start(str(socket))
        return await super().slot_start(id, grant)

    async def slot_stop(self, id: str, *, grace_s: float) -> None:
        if id in self._servers:
            self._servers.pop(id).stop()
        await super().slot_stop(id, grace_s=grace_s)

    async def look_at_backend(self, kind: str) -> BackendIs:
        is_there = kind in self._box.units.running
        number = list(BackendKind).index(BackendKind(kind)) + 1
        state = "active" if is_there else "inactive"
        return BackendIs(unit=f"{kind}.service", state=state, pid=number * is_there, pids=[number] * is_there)

    def stop(self) -> None:
        for server in self._servers.values():
            server.stop()


class PooledServicesBox(ServicesBox):
    """A box with services and models of llama-server's kind on one GPU of `TOTAL_MB`. `takes_mb`: of a service."""

    def __init__(self, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(directory)
        self.servers = PooledServers(self)
        self.memory = PlayedMemory(self.servers, TOTAL_MB)
        self.takes(LLAMA, 30)
        self.takes(VLLM, 60)
        rows = {}
        for seed, (name, mb) in enumerate(SIZES.items()):
            shutil.copy(tiny_model(seed), directory / f"{name}.gguf")
            rows[name] = ModelRow(file=str(directory / f"{name}.gguf"), vram_mb=mb)
        pool = PoolSection(patience_normal_s=0.05, free_s=0.3, drain_s=0.4, audience_s=0.0, load_wait_s=20)
        self.settings = msgspec.structs.replace(QUICK, models=rows, pool=pool)
        given: dict[str, Any] = {"helper": self.servers, "memory": self.memory, "describe": describe}
        monkeypatch.setattr("hive.daemon.ModelPool", partial(self._pool, given))

    def _pool(self, given: dict[str, Any], *args: Any, **kwargs: Any) -> ModelPool:
        pool = ModelPool(*args, **kwargs | given)
        self.servers.on_moved = pool.slot_moved
        return pool

    def takes(self, kind: BackendKind, mb: int) -> None:
        self.memory.takes_mb[f"backend:{kind}"] = mb

    async def start_daemon(self, settings: Settings | None = None, **options: Any) -> None:
        await super().start_daemon(settings or self.settings, **options)

    @property
    def pool(self) -> ModelPool:
        return self.services.pool.pool

    def charged_mb(self) -> dict[str, int]:
        """The books: MiB by slot, whatever is charged."""
        facts = self.pool.facts(0.0)
        return {s.model: sum(g.charged_bytes for g in s.grants) // MIB for s in facts.slots if s.grants}

    def is_ready(self, model: str) -> bool:
        return self.pool.find(model).state == "ready"

    async def ask_model(self, model: str) -> httpx.Response:
        """A request of the operator's for a model of the pool, through the proxy."""
        access = views.access_view(self.services.proxy_link.known_port, self.services.internal_token)
        head = {"authorization": f"Bearer {access['token']}"}
        async with httpx.AsyncClient(base_url=access["openai_base_url"], headers=head, trust_env=False) as client:
            return await client.post("/chat/completions", json={"model": model, "messages": []}, timeout=30)

    async def served_by(self, model: str) -> str:
        answer = await self.ask_model(model)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["message"]["content"])


@contextlib.asynccontextmanager
async def opened(directory: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PooledServicesBox]:
    """A box with its directories; nothing of it is left at the end."""
    monkeypatch.setattr("hive.pooling.pool_backend.LOOK_S", 0.05)
    box = PooledServicesBox(directory, monkeypatch)
    box.paths.state.mkdir()
    box.paths.runtime.mkdir()
    try:
        yield box
    finally:
        await box.end()
        box.servers.stop()
        for server in box.units.running.values():
            server.stop()


@pytest.fixture
async def hive(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[PooledServicesBox]:
    """llama is chosen and runs; both models are loaded beside it: 30, 20 and 40 of 100 MiB."""
    async with opened(short_path, monkeypatch) as box:
        await box.record(LLAMA)
        await box.start_helper()
        await box.start_daemon()
        await box.start_real_proxy()
        await until(lambda: box.inference()["running"])
        await until(lambda: box.charged_mb() == {"the llama of `hive backend`": 30})
        assert (await box.served_by(SMALL), await box.served_by(LARGE)) == (SMALL, LARGE)
        yield box


async def test_a_service_is_booked_as_what_it_takes_and_is_not_foreign(hive: PooledServicesBox) -> None:
    assert hive.charged_mb() == {SMALL: 20, LARGE: 40, "the llama of `hive backend`": 30}
    (account,) = view_of(hive.pool, why_off="")["accounts"]
    assert (account["charged_bytes"], account["foreign_bytes"]) == (90 * MIB, 0)
    hive.takes(LLAMA, 35)  # it grows
    await until(lambda: hive.charged_mb()["the llama of `hive backend`"] == 35)


async def test_models_of_other_kinds_leave_for_a_switch_and_come_back_when_asked_for(hive: PooledServicesBox) -> None:
    job = await hive.ended(await hive.begin(VLLM))
    assert (job["state"], job["result"]["backend"]) == ("done", "vllm")
    assert hive.servers.stopped == [slot_id(SMALL), slot_id(LARGE)]
    assert await hive.who_answers() == "vllm"
    await until(lambda: hive.charged_mb() == {"the vllm of `hive backend`": 60})
    assert await hive.served_by(LARGE) == LARGE  # it fits beside it
    assert await hive.served_by(SMALL) == SMALL  # for which the other one leaves: the service never does
    assert hive.charged_mb() == {SMALL: 20, "the vllm of `hive backend`": 60}


async def test_nothing_is_loaded_while_a_switch_goes_on(
    hive: PooledServicesBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, reached, real = asyncio.Event(), asyncio.Event(), Switcher._do

    async def do(self: Switcher, switch: Switch) -> None:
        if switch.step is SwitchStep.START:
            reached.set()
            await go_on.wait()
        await real(self, switch)

    monkeypatch.setattr(Switcher, "_do", do)
    started = len(hive.servers.started)
    job = await hive.begin(VLLM)
    await asyncio.wait_for(reached.wait(), 20)
    assert hive.charged_mb() == {"the vllm of `hive backend`": TOTAL_MB}  # nothing tells what vLLM will take
    waiting = asyncio.ensure_future(hive.ask_model(SMALL))
    await until(lambda: hive.pool.find(SMALL).demands)
    await asyncio.sleep(0.3)
    assert len(hive.servers.started) == started
    go_on.set()
    assert (await hive.ended(job))["state"] == "done"
    assert (await waiting).json()["choices"][0]["message"]["content"] == SMALL


async def test_a_service_that_fails_is_rolled_back_and_the_models_are_loaded_as_they_were(
    hive: PooledServicesBox,
) -> None:
    hive.units.broken[VLLM] = "token"
    job = await hive.ended(await hive.begin(VLLM))
    assert (job["state"], job["error"]["code"]) == ("failed", "rolled_back")
    assert job["error"]["message"].endswith("looked at 3 times, every 0.05 s; llama is active again")
    await until(lambda: hive.is_ready(SMALL) and hive.is_ready(LARGE))
    assert hive.charged_mb() == {SMALL: 20, LARGE: 40, "the llama of `hive backend`": 30}
    assert await hive.who_answers() == "llama"


async def test_a_pin_of_the_same_kind_that_leaves_no_room_is_named_and_all_is_as_before(
    hive: PooledServicesBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The models are of llama-server's kind, and so is what is switched to: only what is not pinned leaves."""
    assert (await hive.ended(await hive.begin(VLLM)))["state"] == "done"
    hive.takes(VLLM, 30)
    assert await hive.served_by(LARGE) == LARGE
    await hive.services.pool.pin(LARGE, "uid:0", approval=PIN)

    async def need(self: object, kind: str) -> int:
        return (70 if kind == LLAMA else 60) * MIB

    monkeypatch.setattr("hive.pooling.pool_backend.PoolBackends._need", need)
    job = await hive.ended(await hive.begin(LLAMA))
    assert (job["state"], job["error"]["code"]) == ("failed", "rolled_back")
    assert "there is no room for it: the llama of `hive backend` does not fit beside what is pinned" in str(
        job["error"]
    )
    assert await hive.who_answers() == "vllm"
    assert await hive.served_by(LARGE) == LARGE


async def test_what_is_in_flight_at_a_model_has_the_time_to_drain(
    hive: PooledServicesBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, go_on = [], asyncio.Event()
    real = Server._serve

    async def serve(self: Server, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.kind == SMALL:
            await go_on.wait()
        await real(self, reader, writer)

    monkeypatch.setattr(Server, "_serve", serve)
    await hive.services.pool.unload(SMALL, "uid:0", approval=UNLOAD)
    await until(lambda: hive.pool.find(SMALL).state == "cold")
    asking = asyncio.ensure_future(hive.ask_model(SMALL))
    await until(lambda: hive.pool.find(SMALL).flow.in_flight)
    job = await hive.begin(VLLM)
    await until(lambda: hive.pool.find(SMALL).state == "draining")
    answered.append(slot_id(SMALL) in hive.servers.stopped[1:])
    go_on.set()
    assert (await asking).status_code == 200
    assert (await hive.ended(job))["state"] == "done"
    assert answered == [False]


MOMENTS = [(step, back) for back in (False, True) for step in SwitchStep if not (back and step is SwitchStep.RECORD)]


@pytest.mark.breadth(4)
@pytest.mark.parametrize(("step", "back"), MOMENTS, ids=[f"{'back ' * back}{step}" for step, back in MOMENTS])
async def test_a_daemon_killed_at_any_step_leaves_books_that_are_what_runs(
    hive: PooledServicesBox, monkeypatch: pytest.MonkeyPatch, step: SwitchStep, back: bool
) -> None:
    if back:
        hive.units.broken[VLLM] = "token"
    reached, real = asyncio.Event(), Switcher._do

    async def do(self: Switcher, switch: Switch) -> None:
        if (switch.step, switch.back) == (step, back):
            reached.set()
            await asyncio.Event().wait()
        await real(self, switch)

    with monkeypatch.context() as patch:
        patch.setattr(Switcher, "_do", do)
        job = await hive.begin(VLLM)
        if not (back and step is SwitchStep.CLOSE):  # the way back begins behind it
            await asyncio.wait_for(reached.wait(), 20)
        await hive.stop_daemon()
    await hive.start_daemon()
    found = await hive.ended(job)
    assert found["state"] == ("failed" if back else "done")
    chosen, mb = (LLAMA, 30) if back else (VLLM, 60)
    assert set(hive.units.running) == {chosen}
    await until(lambda: hive.charged_mb().get(f"the {chosen} of `hive backend`") == mb)
    assert await hive.who_answers() == chosen
    assert await hive.served_by(LARGE) == LARGE
    await until(lambda: set(hive.servers.processes) == {s.id for s in hive.pool.slots.values() if s.state == "ready"})


async def test_a_cancelled_switch_gives_the_models_back(
    hive: PooledServicesBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, real = asyncio.Event(), Switcher._do

    async def do(self: Switcher, switch: Switch) -> None:
        if switch.step is SwitchStep.START and not switch.back:
            reached.set()
            await asyncio.Event().wait()
        await real(self, switch)

    monkeypatch.setattr(Switcher, "_do", do)
    job = await hive.begin(VLLM)
    await asyncio.wait_for(reached.wait(), 20)
    assert (await hive.cancel_job(job))["state"] == "cancelled"
    await until(lambda: hive.is_ready(SMALL) and hive.is_ready(LARGE))
    assert await hive.who_answers() == "llama"


async def test_at_the_start_a_service_waits_until_there_is_room_for_it(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Servers of an earlier daemon hold the memory: one that is not pinned leaves, nothing is overbooked."""
    async with opened(short_path, monkeypatch) as box:
        await box.record(VLLM)
        for name in (SMALL, LARGE):
            await box.servers.slot_start(slot_id(name), SlotGrant(accounts={GPU: SIZES[name]}, generation=3))
            box.servers.serve(slot_id(name))
        await box.start_helper()
        await box.start_daemon()
        await box.start_real_proxy()
        await until(lambda: box.units.calls == ["start vllm"])
        assert sorted(box.servers.stopped) == sorted([slot_id(SMALL), slot_id(LARGE)])
        await until(lambda: box.charged_mb() == {"the vllm of `hive backend`": 60})


async def test_a_switch_that_is_ordered_while_the_first_service_is_started_ends_that_one(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was booked as being started for ever, and no model left: the switch failed after its whole time."""
    async with opened(short_path, monkeypatch) as box:
        box.units.found = LLAMA
        box.units.may_start.clear()
        await box.servers.slot_start(slot_id(SMALL), SlotGrant(accounts={GPU: SIZES[SMALL]}, generation=3))
        box.servers.serve(slot_id(SMALL))
        await box.start_helper()
        await box.start_daemon()
        await box.start_real_proxy()
        await until(lambda: box.units.calls == ["start llama"])
        job = await box.begin(VLLM)
        await until(lambda: "stop llama" in box.units.calls)
        box.units.may_start.set()
        assert (await box.ended(job))["state"] == "done"
        assert [*box.units.running] == [VLLM]
        await until(lambda: box.charged_mb() == {"the vllm of `hive backend`": 60})
