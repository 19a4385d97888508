"""Models on remote servers in the pool: a real server on this machine, and one that is far and is never asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from hive.backends.entries import entries_of
from hive.pooling.footprints import Footprints
from hive.pooling.pool_clients import PoolClients
from hive.pooling.pooling import ModelPool
from hive.pooling.remote_slots import RemoteSlots, address_of
from hive.pooling.slot_server import describe
from hive.pooling.slot_servers import OneOfTwo
from hive.settings.pool import ModelRow
from tests.pooling.pool_world import PoolWorld, leases_of, registry_of
from tests.pooling.pool_world import describe as played
from tests.waiting import until

FAR = "https://192.0.2.1/v1"
"""TEST-NET-1 (RFC 5737): nobody is there."""


class ListServer:
    """A server of OpenAI's dialect that lists one model."""

    def __init__(self) -> None:
        self.asked = 0
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        body = b'{"object":"list","data":[{"id":"claude"}]}'
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()

    def stop(self) -> None:
        assert self._server is not None
        self._server.close()


class RemoteWorld(PoolWorld):
    """A pool of one model with 60 MiB of 100, and a remote one."""

    def __init__(self, directory: Path, url: str, models: Mapping[str, int], **row: Any) -> None:
        self._remote = {"sonnet": ModelRow(backend="remote", url=url, **row)}
        super().__init__(directory, models, total_mb=100)

    def make(self, pins: Mapping[str, bool] | None = None) -> ModelPool:
        self.settings = msgspec.structs.replace(self.settings, models={**self.settings.models, **self._remote})
        self.entries = entries_of(self.settings)
        self.remotes = RemoteSlots(
            self.entries.values(),
            lambda: self.settings,
            on_moved=lambda process: self.pool.slot_moved(process),
            on_list=lambda: self.pool.files_changed(),
        )
        self.leases, self.deployments = leases_of(self), registry_of(self)
        given: Any = {
            "leases": self.leases,
            "helper": OneOfTwo(self.servers, self.remotes, self.remotes.ids),
            "proxy_link": self.proxy,
            "memory": self.memory,
            "audit_log": self.audit,
        }
        pool = ModelPool(
            self.entries,
            settings=lambda: self.settings,
            footprints=Footprints(self.database, lambda: self.settings, {}, self.remotes.facts_of),
            clients=PoolClients(lambda: self.settings),
            address_of=lambda entry: address_of(entry) if entry.is_remote else f"/nowhere/{entry.id}.sock",
            pins=pins or {},
            describe=self._describe,
            **given,
        )
        self.servers.on_moved = pool.slot_moved
        return pool

    async def _describe(self, entry: Any, address: str, settings: Any) -> Any:
        return await (describe if entry.is_remote else played)(entry, address, settings)

    def say(self, cloud: str) -> None:
        inference = msgspec.structs.replace(self.settings.inference, cloud=cloud)
        self.settings = msgspec.structs.replace(self.settings, inference=inference)
        self.remotes.guard_changed()


async def test_a_far_one_is_ready_at_once_without_a_byte_and_without_a_question(tmp_path: Path) -> None:
    """Its address answers nobody: a question to it would have made it wait."""
    world = RemoteWorld(tmp_path, FAR, {"alpha": 60}, file="claude-sonnet", parallel=3)
    try:
        await world.begin()
        await world.until("sonnet", "ready")
        row = world.proxy.last_row(world.id("sonnet"))
        assert (row.is_open, row.backend.address, row.backend.places) == (True, "https://192.0.2.1", 3)
        assert (row.at_server, row.models[0].name) == ("claude-sonnet", "sonnet")
        assert world.pool.find("sonnet").grants == ()
        world.ask("alpha")
        await world.until("alpha", "ready")
        assert world.state("sonnet") == "ready"
        view = next(slot for slot in world.orders.view()["slots"] if slot["model"] == "sonnet")
        assert (view["need_bytes"], view["pinned"], view["grants"]) == (0, True, [])
        assert world.orders.explain("sonnet", world.pool.find("sonnet").flow.band)["state"] == "ready"
    finally:
        await world.end()


async def test_it_is_no_victim_and_stays_while_models_change(tmp_path: Path) -> None:
    world = RemoteWorld(tmp_path, FAR, {"alpha": 60, "beta": 60})
    try:
        await world.begin()
        await world.until("sonnet", "ready")
        generation = world.pool.find("sonnet").generation
        for model in ("alpha", "beta", "alpha"):
            world.ask(model)
            await world.until(model, "ready")
            world.leave(model)
        assert (world.state("sonnet"), world.pool.find("sonnet").generation) == ("ready", generation)
        assert "sonnet" not in str([act for act in world.audit.acts if act[0] == "model.unloaded"])
    finally:
        await world.end()


async def test_under_never_it_is_closed_with_the_reason_and_opens_again(tmp_path: Path) -> None:
    world = RemoteWorld(tmp_path, FAR, {"alpha": 60})
    try:
        await world.begin()
        await world.until("sonnet", "ready")
        id = world.id("sonnet")
        world.say("never")
        await until(lambda: not world.proxy.is_open(id) and "cloud = never" in world.proxy.last_row(id).never)
        world.say("asked")
        await until(lambda: world.proxy.is_open(id))
    finally:
        await world.end()


async def test_one_on_this_machine_is_ready_as_long_as_it_answers(tmp_path: Path) -> None:
    server = ListServer()
    await server.start()
    world = RemoteWorld(tmp_path, f"http://127.0.0.1:{server.port}/v1", {"alpha": 60})
    try:
        await world.begin()
        await world.remotes.look()
        await world.until("sonnet", "ready")
        id = world.id("sonnet")
        server.stop()
        await world.remotes.look()
        await until(lambda: not world.proxy.is_open(id) and world.proxy.last_row(id).never)
        await server.start()
        await world.remotes.look()
        await until(lambda: world.proxy.is_open(id))
    finally:
        server.stop()
        await world.end()
