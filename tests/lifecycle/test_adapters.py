"""Adapters in the engines: over a real pool, directory and database; servers and proxy are played."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from hive.adapters.directory import AdapterDirectory
from hive.adapters.record import GGUF, SAFETENSORS, UNSIGNED, AdapterFile, AdapterRecord, digest_of
from hive.audit.audit_log import AuditLog
from hive.backends.entries import ModelEntry, adapter_entries
from hive.control.active_backend import Active
from hive.domain import BackendInfo, ModelInfo
from hive.errors import (
    AdapterMismatch,
    AdapterNotFound,
    AdapterNotLoaded,
    DependencyDown,
    ModelNotFound,
    NotFound,
    NotSupported,
    SignatureUnverifiable,
    StoreFull,
    WrongState,
)
from hive.lifecycle.adapters import FAILED, READY, Adapters
from hive.link.adapters import AdapterRoute
from hive.link.proxy_link import ProxyGates
from hive.pool.state import SlotState
from hive.settings.adapters import AdaptersSection
from hive.settings.pool import ModelRow, slot_id
from hive.store import adapters as store
from hive.store.adapters import StoredAdapter
from hive.tasks import spawn
from tests.adapters.installed import install_weights
from tests.pooling.pool_world import PlayedProxy, PoolWorld
from tests.waiting import until

BASE = "tiny"


class ProxyOfAdapters(PlayedProxy):
    """The proxy's end, with what it is told of adapters. `drains`: the old ones that were asked after."""

    def __init__(self) -> None:
        super().__init__()
        self.routes: list[list[AdapterRoute]] = []
        self.gone: list[str] = []
        self.drains: list[str] = []

    def slot_gone(self, id: str) -> None:
        self.gone.append(id)

    def adapters_are(self, routes: list[AdapterRoute]) -> None:
        self.routes.append(routes)

    async def drain_adapter(self, slot: str, at_server: str, *, drain_s: float) -> int:
        self.drains.append(at_server)
        return 0


class PlayedActive:
    """The inference server in use, as it was seen last."""

    def __init__(self) -> None:
        self.seen: tuple[BackendInfo | None, list[ModelInfo]] = (None, [])
        self.up = False
        self.control = None
        self.on_read: Callable[..., Any] | None = None

    def uses(self, kind: str, *models: str) -> None:
        self.seen = BackendInfo(kind=kind, address="h:1", up=True), [ModelInfo(name=name) for name in models]
        self.up = True


class AdapterWorld:
    """A pool with one model, adapters on it, and a daemon's service of them."""

    def __init__(self, folder: Path, *, total_mb: int = 1000, **settings: Any) -> None:
        self.pools = PoolWorld(folder, {BASE: 100}, total_mb=total_mb)
        self.pools.proxy = self.proxy = ProxyOfAdapters()
        self.pools.pool = self.pools.make()
        self.pools.settings = msgspec.structs.replace(self.pools.settings, adapters=AdaptersSection(**settings))
        self.directory = AdapterDirectory(folder / "adapters")
        self.active = PlayedActive()
        self.refused: set[str] = set()
        """Names that may not be loaded now."""
        self.adapters = self.make([])
        self._running: asyncio.Task[None] | None = None

    def make(self, rows: list[StoredAdapter]) -> Adapters:
        return Adapters(
            self.directory,
            rows,
            pool=self.pools.pool,
            active=cast("Active", self.active),
            proxy_link=cast("ProxyGates", self.proxy),
            database=self.pools.database,
            audit_log=cast("AuditLog", self.pools.audit),
            settings=lambda: self.pools.settings,
            check=self._check,
            why_not_approved=lambda *_: "",
        )

    def _check(self, record: AdapterRecord) -> None:
        if record.name in self.refused:
            raise SignatureUnverifiable("its key is revoked")

    async def begin(self) -> None:
        await self.pools.begin()
        self._running = spawn(self.adapters.run(), name="adapters")
        await self.adapters.restored()

    async def again(self) -> None:
        """Another daemon takes over: servers and proxy stay as they are."""
        assert self._running is not None
        self._running.cancel()
        await self.pools.kill()
        rows = self.pools.database.read_now(store.loaded)
        known = {row.name: row.digest for row in rows}
        installed = [record for record in self.directory.records() if known.get(record.name) == record.digest]
        found = [(record, self.directory.path(record)) for record in installed]
        base = {id: entry for id, entry in self.pools.entries.items() if entry.adapter is None}
        self.pools.entries = base | adapter_entries(base, found)
        self.pools.pool = self.pools.make()
        self.adapters = self.make(rows)
        await self.begin()

    async def end(self) -> None:
        if self._running is not None:
            self._running.cancel()
        await self.pools.kill()
        self.pools.database.close()

    def install(self, name: str, weights: bytes = b"one", *, is_gguf: bool = True, key: str = "") -> AdapterRecord:
        return install_weights(self.directory, name, BASE, weights, is_gguf=is_gguf, key=key)

    @property
    def route(self) -> AdapterRoute:
        """The only one that was told last."""
        (route,) = self.proxy.routes[-1]
        return route

    def slot_names(self) -> list[str]:
        return sorted(slot.model for slot in self.pools.pool.slots.values())


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AdapterWorld]:
    made = AdapterWorld(tmp_path)
    await made.begin()
    yield made
    await made.end()


async def test_a_load_makes_a_slot_of_its_own_and_then_tells_the_name(world: AdapterWorld) -> None:
    record = world.install("red")
    assert await world.adapters.load("red", cause="ann") == record
    slot = world.pools.pool.slots[slot_id(record.engine_name)]
    assert (slot.state, slot.entry.row.vram_mb, slot.entry.row.pin) == (SlotState.READY, 103, False)
    assert world.route == AdapterRoute(name="red", base=BASE, at_server=record.engine_name, slot=slot.id)
    row = world.proxy.last_row(slot.id)
    assert (row.adapter, row.at_server, row.models[0].name, row.models[0].parent) == (
        "red",
        record.engine_name,
        "red",
        BASE,
    )
    (loaded,) = world.adapters.loaded()
    assert (loaded.name, loaded.state, loaded.where, loaded.by) == ("red", READY, record.engine_name, "ann")
    assert loaded.charged_bytes


async def test_other_weights_take_the_name_in_one_step_and_the_old_ones_drain(world: AdapterWorld) -> None:
    old, new = world.install("red"), world.install("red", b"two")
    await world.adapters.load("red", old.digest, cause="ann")
    at = len(world.proxy.routes)
    world.proxy.in_flight[slot_id(old.engine_name)] = 1
    await world.adapters.load("red", cause="ann")
    assert [route.at_server for routes in world.proxy.routes[at:] for route in routes] == [new.engine_name]
    assert slot_id(old.engine_name) in world.pools.pool.slots, "a request is there"
    assert world.adapters.loaded()[0].previous == old.digest
    world.proxy.in_flight.clear()
    await until(lambda: slot_id(old.engine_name) not in world.pools.pool.slots)
    assert world.proxy.gone == [slot_id(old.engine_name)]
    assert world.slot_names() == sorted([BASE, new.engine_name])


async def test_weights_that_the_engine_refuses_leave_nothing_and_change_nothing(world: AdapterWorld) -> None:
    old, new = world.install("red"), world.install("red", b"two")
    await world.adapters.load("red", old.digest, cause="ann")
    world.pools.servers.comes_up[slot_id(new.engine_name)] = "ended"
    world.pools.servers.last[slot_id(new.engine_name)] = ["wrong shape"]
    with pytest.raises(DependencyDown, match="wrong shape"):
        await world.adapters.load("red", new.digest, cause="ann")
    assert world.route.at_server == old.engine_name
    await until(lambda: world.slot_names() == sorted([BASE, old.engine_name]))
    assert world.pools.database.read_now(store.loaded)[0].digest == old.digest


async def test_a_full_disk_leaves_the_name_as_it_was(world: AdapterWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = world.install("red"), world.install("red", b"two")
    await world.adapters.load("red", old.digest, cause="ann")

    async def full(work: object) -> None:
        raise StoreFull("the disk is full")

    monkeypatch.setattr(world.pools.database, "write", full)
    with pytest.raises(StoreFull):
        await world.adapters.load("red", new.digest, cause="ann")
    assert world.route.at_server == old.engine_name
    await until(lambda: world.slot_names() == sorted([BASE, old.engine_name]))


async def test_without_room_for_a_second_copy_of_the_base_it_says_so(tmp_path: Path) -> None:
    world = AdapterWorld(tmp_path, total_mb=102)
    await world.begin()
    world.install("red")
    with pytest.raises(WrongState, match="cannot be loaded"):
        await world.adapters.load("red", cause="ann")
    await until(lambda: world.slot_names() == [BASE])
    assert world.adapters.loaded() == []
    await world.end()


async def test_an_unloaded_one_is_gone_with_its_slot_and_its_row(world: AdapterWorld) -> None:
    world.install("red")
    await world.adapters.load("red", cause="ann")
    await world.adapters.unload("red")
    assert world.slot_names() == [BASE]
    assert world.pools.database.read_now(store.loaded) == []
    assert world.route == AdapterRoute(name="red", base=BASE)
    with pytest.raises(AdapterNotLoaded):
        await world.adapters.unload("red")


async def test_what_a_key_has_verified_goes_with_it(world: AdapterWorld) -> None:
    world.install("red", key="k1")
    world.install("blue", b"two", key="k2")
    for name in ("red", "blue"):
        await world.adapters.load(name, cause="ann")
    assert await world.adapters.unload_key("k1") == ["red"]
    assert [loaded.name for loaded in world.adapters.loaded()] == ["blue"]


async def test_another_daemon_serves_on_what_is_on_record_and_ends_what_is_not(world: AdapterWorld) -> None:
    red, blue = world.install("red"), world.install("blue", b"two")
    await world.adapters.load("red", cause="ann")
    await world.adapters.load("blue", cause="ann")
    started = list(world.pools.servers.started)
    await world.pools.database.write(lambda conn: store.remove(conn, "blue", blue.digest))
    await world.again()
    assert world.slot_names() == sorted([BASE, red.engine_name])
    assert [loaded.state for loaded in world.adapters.loaded()] == [READY]
    await until(lambda: slot_id(blue.engine_name) in world.pools.servers.stopped)
    assert world.pools.servers.started == started, "nothing was started anew"


async def test_what_may_not_be_loaded_any_more_is_taken_off_at_the_start(world: AdapterWorld) -> None:
    red = world.install("red")
    world.install("blue", b"two")
    await world.adapters.load("red", cause="ann")
    await world.adapters.load("blue", cause="ann")
    world.refused = {"blue"}
    world.directory.remove(red)
    await world.again()
    assert world.adapters.loaded() == []
    assert world.pools.database.read_now(store.loaded) == []
    assert not any(route.at_server for route in world.proxy.routes[-1])
    await until(lambda: world.slot_names() == [BASE])


@pytest.mark.parametrize(("fallback", "instead"), [("refuse", ""), ("base", BASE)])
async def test_one_whose_server_cannot_be_started_any_more_is_as_one_that_is_not_loaded(
    tmp_path: Path, fallback: str, instead: str
) -> None:
    world = AdapterWorld(tmp_path, fallback=fallback)
    await world.begin()
    record = world.install("red")
    await world.adapters.load("red", cause="ann")
    slot = world.pools.pool.slots[slot_id(record.engine_name)]
    slot.state = SlotState.FAILED
    slot.ended_at = asyncio.get_running_loop().time() + 1000
    world.pools.pool.wake()
    await until(lambda: world.route == AdapterRoute(name="red", base=BASE, instead=instead))
    assert world.adapters.loaded()[0].state == FAILED
    await world.end()


async def test_the_one_before_takes_the_place_of_one_that_failed(tmp_path: Path) -> None:
    world = AdapterWorld(tmp_path, fallback="previous")
    await world.begin()
    old, new = world.install("red"), world.install("red", b"two")
    await world.adapters.load("red", old.digest, cause="ann")
    await world.adapters.load("red", new.digest, cause="ann")
    await until(lambda: slot_id(old.engine_name) not in world.pools.pool.slots)
    slot = world.pools.pool.slots[slot_id(new.engine_name)]
    slot.state = SlotState.FAILED
    slot.ended_at = asyncio.get_running_loop().time() + 1000
    world.pools.pool.wake()
    await until(lambda: world.route.at_server == old.engine_name)
    assert world.adapters.loaded()[0].previous == "", "not back and forth for ever"
    await world.end()


async def test_what_takes_no_adapter_says_what_would(world: AdapterWorld) -> None:
    on_base, elsewhere = world.install("red"), msgspec.structs.replace(world.install("blue"), base="far")
    safe = world.install("green", is_gguf=False)
    world.adapters.check_place(on_base)
    with pytest.raises(AdapterMismatch, match="GGUF"):
        world.adapters.check_place(safe)
    with pytest.raises(ModelNotFound):
        world.adapters.check_place(elsewhere)
    for kind, hint in (("llama", "[model far]"), ("ollama", "vLLM"), ("remote", "vLLM")):
        world.active.uses(kind, "far")
        with pytest.raises(NotSupported) as refused:
            world.adapters.check_place(elsewhere)
        assert refused.value.status == 501
        assert hint in refused.value.hint
    world.active.uses("vllm", "far")
    with pytest.raises(AdapterMismatch, match="safetensors"):
        world.adapters.check_place(elsewhere)
    world.adapters.check_place(msgspec.structs.replace(elsewhere, format=SAFETENSORS))


async def test_a_name_that_is_something_else_s_is_refused(world: AdapterWorld) -> None:
    record = world.install("red")
    for name in (BASE, "Tiny"):
        with pytest.raises(WrongState, match="a model already"):
            world.adapters.check_place(msgspec.structs.replace(record, name=name))
    inference = msgspec.structs.replace(world.pools.settings.inference, aliases=f"red = {BASE}")
    world.pools.settings = msgspec.structs.replace(world.pools.settings, inference=inference)
    with pytest.raises(WrongState, match="an alias already"):
        await world.adapters.load("red", cause="ann")


async def test_two_loads_of_a_name_end_one_after_the_other(world: AdapterWorld) -> None:
    old, new = world.install("red"), world.install("red", b"two")
    await asyncio.gather(*(world.adapters.load("red", record.digest, cause="ann") for record in (old, new, old)))
    await until(lambda: world.slot_names() == sorted([BASE, old.engine_name]))
    assert world.route.at_server == old.engine_name


async def test_an_order_for_a_model_that_is_an_adapter_says_so(world: AdapterWorld) -> None:
    world.install("red")
    await world.adapters.load("red", cause="ann")
    with pytest.raises(NotFound, match="red is an adapter") as refused:
        world.pools.pool.find("red")
    assert refused.value.hint == "hive adapter show red"


async def test_what_is_not_installed_is_not_found(world: AdapterWorld) -> None:
    with pytest.raises(AdapterNotFound):
        await world.adapters.load("red", cause="ann")


def test_an_adapter_drafts_nothing_and_is_pinned_by_nobody(tmp_path: Path) -> None:
    row = ModelRow(file="/m.gguf", pin=True, speculative="draft", draft="d", vram_mb=100)
    base = ModelEntry(
        id=slot_id(BASE), name=BASE, kind="llama", path=Path("/m.gguf"), row=row, draft=Path("/d.gguf"), origin="[m]"
    )
    file = AdapterFile("a.gguf", 1, "00")
    record = AdapterRecord(
        name="red",
        digest=digest_of([file]),
        base=BASE,
        format=GGUF,
        rank=8,
        bytes=1,
        files=(file,),
        signature=UNSIGNED,
        installed_at=0.0,
    )
    (entry,) = adapter_entries({base.id: base}, [(record, tmp_path / "a.gguf")]).values()
    assert (entry.row.pin, entry.row.speculative, entry.draft, entry.row.vram_mb) == (False, "none", None, 101)
    assert adapter_entries({}, [(record, tmp_path)]) == {}


def test_two_adapters_whose_servers_cannot_be_told_apart_have_none(tmp_path: Path) -> None:
    """Of two digests that begin alike the one that was read last had the server of both."""
    base = ModelEntry(id=slot_id(BASE), name=BASE, kind="llama", path=Path("/m"), row=ModelRow(file="/m"), origin="m")
    first, second, other = (
        AdapterRecord(
            name="red",
            digest=digest,
            base=BASE,
            format=GGUF,
            rank=1,
            bytes=1,
            files=(),
            signature=UNSIGNED,
            installed_at=0.0,
        )
        for digest in ("a" * 63 + "1", "a" * 63 + "2", "b" * 64)
    )
    entries = {base.id: base}
    both = adapter_entries(entries, [(first, tmp_path), (second, tmp_path), (other, tmp_path)])
    assert [entry.name for entry in both.values()] == [other.engine_name]
    assert len(adapter_entries(entries, [(first, tmp_path)])) == 1


async def test_a_load_waits_until_it_is_known_what_an_earlier_daemon_left(tmp_path: Path) -> None:
    """One that began before held its name, for which the look at what was left waited, for which its server waited."""
    world = AdapterWorld(tmp_path)
    await world.pools.begin()
    world.install("red")
    loading = spawn(world.adapters.load("red", cause="ann"), name="load")
    await asyncio.sleep(0.05)
    assert (loading.done(), world.slot_names()) == (False, [BASE])
    running = spawn(world.adapters.run(), name="adapters")
    assert (await loading).name == "red"
    running.cancel()
    await world.end()


async def test_an_adapter_whose_name_is_a_model_s_now_answers_to_it_no_more(world: AdapterWorld) -> None:
    world.install("red")
    world.install("blue", b"two")
    await world.adapters.load("red", cause="ann")
    await world.adapters.look_again()
    world.active.uses("ollama", "RED", "blue:latest")
    await until(lambda: world.proxy.routes[-1] == [])
    assert [(loaded.state, loaded.why) for loaded in world.adapters.loaded()] == [
        (FAILED, "red is the name of a model now")
    ]
    assert world.adapters.offered() == {}
    world.active.uses("ollama", "tiny2")
    await until(lambda: [route.name for route in world.proxy.routes[-1]] == ["blue", "red"])


async def test_a_name_that_differs_from_a_loaded_one_by_its_case_is_refused(world: AdapterWorld) -> None:
    world.install("red")
    world.install("Red", b"two")
    await world.adapters.load("red", cause="ann")
    with pytest.raises(WrongState, match="another adapter"):
        await world.adapters.load("Red", cause="ann")
    assert [route.name for route in world.proxy.routes[-1]] == ["red"]
