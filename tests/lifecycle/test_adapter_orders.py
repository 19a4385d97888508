"""Orders about adapters, over real files, keys, jobs and a real database; the servers are played."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from hive.adapters.record import AdapterRecord
from hive.audit.audit_log import AuditLog
from hive.audit.jobs import Jobs
from hive.domain import DeploymentState, JobState, ModelInfo
from hive.errors import (
    AdapterNotFound,
    BackendDown,
    BadRequest,
    HiveError,
    ModelBusy,
    NotFound,
    NotSupported,
    SignatureUnverifiable,
    WrongState,
)
from hive.lifecycle.adapter_orders import AdapterOrders, AdapterWish
from hive.lifecycle.adapter_registry import AdapterRegistry
from hive.lifecycle.adapters import READY, LoadedAdapter
from hive.models.catalog import Catalog
from hive.models.routing import preferences
from hive.settings.adapters import AdaptersSection
from hive.store import deployments
from hive.store.database import Database
from hive.store.jobs import StoredJob
from hive.tasks import spawn
from tests.adapters import lora_files
from tests.adapters.lora_files import BASE, new_key, peft_adapter, sign
from tests.approvals import BRING, LOAD_ADAPTER, REMOVE_ADAPTER, TRUST, UNLOAD_ADAPTER
from tests.pooling.pool_world import PlayedAudit
from tests.waiting import until

ANN = "uid:7"


class PlayedEngines:
    """Servers that load at once, or once `goes_on` is set. `fails`: what the next load raises; `takes`: whether they
    take adapters."""

    def __init__(self, world: AdapterWorld) -> None:
        self._world = world
        self._rows: dict[str, LoadedAdapter] = {}
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.fails: HiveError | None = None
        self.takes = True
        self.loads: list[str] = []

    def check_place(self, record: AdapterRecord) -> None:
        if not self.takes:
            raise NotSupported("Ollama takes no adapter")

    async def load(self, name: str, digest: str = "", *, cause: str) -> AdapterRecord:
        record = self._world.files.adapters.find(name, digest)
        self.loads.append(record.engine_name)
        await self.goes_on.wait()
        if self.fails is not None:
            raise self.fails
        before = self._rows.get(name)
        self._rows[name] = LoadedAdapter(
            name=name,
            digest=record.digest,
            previous="" if before is None else before.digest,
            base=record.base,
            where=record.base,
            charged_bytes=None,
            since=1.0,
            by=cause,
            state=READY,
        )
        return record

    async def unload(self, name: str) -> None:
        del self._rows[name]

    async def unload_key(self, key_id: str) -> list[str]:
        signed = {record.digest for record in self._world.files.adapters.records() if record.key_id == key_id}
        names = [row.name for row in self._rows.values() if row.digest in signed]
        for name in names:
            del self._rows[name]
        return names

    def loaded(self) -> list[LoadedAdapter]:
        return list(self._rows.values())

    async def look_again(self) -> None:
        pass

    async def restored(self) -> None:
        pass


class PlayedModels:
    """The models there are: a base, another one, and an adapter on it that its server has by itself."""

    def __init__(self) -> None:
        names = [ModelInfo(name=BASE), ModelInfo(name="other"), ModelInfo(name="own-lora", parent=BASE)]
        self.catalog = Catalog(names, preferences(aliases=f"short = {BASE}"))

    async def file_of(self, name: str) -> Path | None:
        return None


class AdapterWorld:
    """A daemon's worth of services. `again` is the next daemon on the same disk."""

    def __init__(self, directory: Path) -> None:
        self.files = lora_files.Box(directory)
        self.section = AdaptersSection(dir=str(self.files.beneath))
        self.database = Database.open(directory / "hive.db")
        self.engines = PlayedEngines(self)
        self.again()

    def again(self) -> None:
        self.audit = PlayedAudit()
        self.jobs = Jobs(self.database, cast("AuditLog", self.audit))
        rows = self.database.read_now(lambda conn: deployments.living(conn, deployments.ADAPTER))
        given: Any = {
            "served": self.engines,
            "models": PlayedModels(),
            "pool": SimpleNamespace(slots={}),
            "audit_log": self.audit,
        }
        self.orders = AdapterOrders(
            directory=self.files.adapters,
            keys=lambda: self.files.keys,
            settings=lambda: self.section,
            registry=AdapterRegistry(rows, database=self.database, has_rule=lambda _: False),
            jobs=self.jobs,
            database=self.database,
            **given,
        )

    async def ended(self, job: StoredJob) -> StoredJob:
        return job if job.ended else await self.jobs.get(job.id, wait_s=20)

    async def pulled(self, path: str = "legal", name: str = "", base: str = BASE) -> StoredJob:
        return await self.ended(await self.orders.pull(AdapterWish(path, base, name), ANN, approval=BRING))

    async def loaded(self, name: str = "legal", digest: str = "") -> StoredJob:
        return await self.ended(await self.orders.load(name, ANN, approval=LOAD_ADAPTER, digest=digest))

    async def unloaded(self, name: str = "legal") -> StoredJob:
        return await self.ended(await self.orders.unload(name, ANN, approval=UNLOAD_ADAPTER))

    def acts(self) -> list[str]:
        return [act for act, _ in self.audit.acts if act.startswith("adapter.")]

    def row_state(self, name: str = "legal") -> tuple[str, str]:
        row = self.orders.registry.row(name)
        return ("", "") if row is None else (str(row.state), row.last_error)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[AdapterWorld]:
    made = AdapterWorld(tmp_path)
    made.files.signed("legal")
    yield made
    made.orders.close()
    made.engines.goes_on.set()
    made.database.close()


def code_of(job: StoredJob) -> str:
    assert job.error is not None
    return str(job.error["code"])


async def test_an_adapter_is_brought_loaded_unloaded_and_removed(world: AdapterWorld) -> None:
    job = await world.pulled()
    assert job.state is JobState.DONE, job.error
    record = world.files.adapters.find("legal")
    assert job.result is not None
    assert (job.result["model"], job.result["digest"], job.result["key_id"]) == (
        "legal",
        record.digest,
        world.files.key.public.id,
    )
    assert (await world.orders.view("legal"))["state"] == "installed"
    done = await world.loaded()
    assert (done.state, done.result and done.result["changed"]) == (JobState.DONE, True)
    view = await world.orders.view("legal")
    assert view["served"] is not None
    assert (view["state"], view["served"]["digest"], view["deployed_by"]) == ("loaded", record.digest, ANN)
    assert [file["path"] for file in view["files"]] == ["adapter_config.json", "adapter_model.safetensors"]
    assert [row["kind"] for row in world.orders.registry.views()] == ["adapter"]
    with pytest.raises(WrongState, match="is loaded"):
        await world.orders.remove("legal", ANN, approval=REMOVE_ADAPTER)
    assert (await world.unloaded()).state is JobState.DONE
    assert world.row_state() == ("", "")
    assert (await world.unloaded()).result == {"model": "legal", "changed": False}
    removed = await world.orders.remove("legal", ANN, approval=REMOVE_ADAPTER)
    assert removed["digests"] == [record.digest]
    assert (await world.orders.listed())["adapters"] == []
    assert world.acts() == ["adapter.installed", "adapter.loaded", "adapter.unloaded", "adapter.removed"]


async def test_the_same_load_twice_is_one_job_and_another_one_has_to_wait(world: AdapterWorld) -> None:
    await world.pulled()
    peft_adapter(world.files.beneath / "newer", fill=2)
    sign(world.files.beneath / "newer", world.files.key)
    await world.pulled("newer", name="legal")
    newest, older = world.files.adapters.records()
    world.engines.goes_on.clear()
    first = await world.orders.load("legal", ANN, approval=LOAD_ADAPTER)
    second = await world.orders.load("legal", ANN, approval=LOAD_ADAPTER, digest=newest.digest[:6])
    assert (first.id, first.plan["digest"]) == (second.id, newest.digest)
    for busy in (
        world.orders.load("legal", ANN, approval=LOAD_ADAPTER, digest=older.digest),
        world.orders.unload("legal", ANN, approval=UNLOAD_ADAPTER),
        world.orders.remove("legal", ANN, approval=REMOVE_ADAPTER, digest=older.digest),
    ):
        with pytest.raises(ModelBusy, match=f"job {first.id} is about legal already"):
            await busy
    assert (await world.orders.load_status("legal"))["state"] == "loading"
    with pytest.raises(WrongState, match="on its way"):
        await world.orders.cancel(first.id)
    world.engines.goes_on.set()
    await world.ended(first)
    again = await world.loaded()
    assert again.result is not None
    assert (again.id != first.id, again.result["changed"]) == (True, False)
    assert world.engines.loads == [newest.engine_name]
    removed = await world.orders.remove("legal", ANN, approval=REMOVE_ADAPTER, digest=older.digest[:12])
    assert removed["digests"] == [older.digest], "a build that is not served can go"


async def test_a_load_that_fails_leaves_what_was_served_and_what_is_on_record(world: AdapterWorld) -> None:
    await world.pulled()
    await world.loaded()
    first = world.files.adapters.find("legal")
    peft_adapter(world.files.beneath / "worse", fill=3)
    sign(world.files.beneath / "worse", world.files.key)
    await world.pulled("worse", name="legal")
    world.engines.fails = BackendDown("500: garbage")
    job = await world.loaded()
    assert (job.state, code_of(job)) == (JobState.FAILED, "backend_unavailable")
    view, status = await world.orders.view("legal"), await world.orders.load_status("legal")
    assert view["served"] is not None
    assert (view["state"], view["served"]["digest"], view["last_error"]) == ("loaded", first.digest, "")
    assert status["error"] is not None
    assert (status["state"], status["serving"], status["error"]["message"]) == ("failed", first.digest, "500: garbage")
    row = world.orders.registry.row("legal")
    assert row is not None
    assert (row.digest, row.state) == (first.digest, DeploymentState.LOADED)


async def test_the_first_load_that_fails_is_on_record_as_failed(world: AdapterWorld) -> None:
    await world.pulled()
    world.engines.fails = BackendDown("no")
    await world.loaded()
    assert world.row_state() == ("failed", "no")
    assert (await world.orders.view("legal"))["state"] == "failed"
    told = world.orders.metrics()
    assert dict(told["adapter_loads"]) == {("loaded",): 0, ("failed",): 1, ("refused",): 0}
    assert (await world.unloaded()).result == {"model": "legal", "changed": False}
    assert world.row_state() == ("", "")


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("unsigned", "signature_unverifiable"),
        ("unknown key", "signature_unverifiable"),
        ("revoked key", "signature_unverifiable"),
        ("tampered", "signature_mismatch"),
        ("pickle", "adapter_unsafe"),
        ("another base", "adapter_mismatch"),
        ("rank", "adapter_mismatch"),
        ("missing", "not_found"),
        ("outside", "adapter_unsafe"),
    ],
)
async def test_what_may_not_come_is_told_and_leaves_nothing(world: AdapterWorld, kind: str, code: str) -> None:
    files, path = world.files, "bad"
    made = files.beneath / path
    if kind == "unsigned":
        peft_adapter(made)
    elif kind == "unknown key":
        sign(peft_adapter(made), new_key())
    elif kind == "rank":
        sign(peft_adapter(made, rank=128), files.key)
    elif kind == "another base":
        sign(peft_adapter(made, base="quite-another-7b"), files.key)
    elif kind == "pickle":
        made.mkdir()
        (made / "adapter_model.bin").write_bytes(b"\x80\x04.")
        (made / "adapter_config.json").write_text("{}")
        sign(made, files.key)
    elif kind not in ("missing", "outside"):
        sign(peft_adapter(made), files.key)
    if kind == "tampered":
        (made / "adapter_config.json").write_text((made / "adapter_config.json").read_text() + " ")
    elif kind == "revoked key":
        files.keys.revoke(files.key.public.id)
    elif kind == "outside":
        path = "../keys"
    job = await world.pulled(path, name="bad")
    assert job.state is JobState.FAILED
    assert code_of(job) == code, job.error
    assert files.there() == []
    assert world.acts() == ([] if code == "not_found" else ["adapter.refused"])
    with pytest.raises(AdapterNotFound):
        await world.orders.view("bad")


async def test_nothing_is_brought_where_adapters_are_off_or_the_order_is_wrong(world: AdapterWorld) -> None:
    async def refused(error: type[HiveError], *wish: str) -> str:
        with pytest.raises(error) as told:
            await world.orders.pull(AdapterWish(*wish), ANN, approval=BRING)
        return told.value.message

    await refused(NotFound, "legal", "nobody")
    assert "adapter on" in await refused(BadRequest, "legal", "own-lora")
    assert "is what a model is called" in await refused(BadRequest, "legal", BASE, "other")
    await refused(BadRequest, "legal", BASE, "keys")
    await refused(BadRequest, "legal", BASE, "a@b")
    world.section = AdaptersSection()
    assert "adapters are off" in await refused(WrongState, "legal", BASE)
    assert (await world.orders.listed())["enabled"] is False


async def test_a_revoked_keys_adapter_is_unloaded_at_once_and_loaded_no_more(world: AdapterWorld) -> None:
    await world.pulled()
    await world.loaded()
    key_id = world.files.key.public.id
    assert await world.orders.revoke(key_id[:12], ANN) == {"id": key_id, "unloaded": ["legal"]}
    assert world.engines.loaded() == []
    state, why = world.row_state()
    assert (state, key_id in why) == ("absent", True)
    with pytest.raises(SignatureUnverifiable):
        await world.orders.load("legal", ANN, approval=LOAD_ADAPTER)
    world.section = msgspec.structs.replace(world.section, signatures="off")
    with pytest.raises(SignatureUnverifiable):
        await world.orders.load("legal", ANN, approval=LOAD_ADAPTER)
    (key,) = (await world.orders.keys())["keys"]
    assert (key["revoked"], len(key["adapters"])) == (True, 1)
    assert world.acts()[-3:] == ["adapter.revoked", "adapter.refused", "adapter.refused"]
    assert await world.orders.revoke(key_id, ANN) == {"id": key_id, "unloaded": []}


async def test_a_key_that_is_put_aside_by_hand_is_noticed(world: AdapterWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hive.lifecycle.adapter_orders.LOOK_S", 0.01)
    await world.pulled()
    await world.loaded()
    running = spawn(world.orders.run(), name="orders")
    pem = world.files.keys.keys_dir / f"{world.files.key.public.id}.pem"
    os.rename(pem, pem.with_suffix(".revoked"))
    await until(lambda: not world.engines.loaded() and world.row_state()[0] == "absent")
    running.cancel()
    assert ("adapter.revoked", "hive") in world.audit.by


async def test_a_key_that_is_revoked_while_its_adapter_is_loaded_has_it_unloaded(world: AdapterWorld) -> None:
    await world.pulled()
    world.engines.goes_on.clear()
    job = await world.orders.load("legal", ANN, approval=LOAD_ADAPTER)
    assert (await world.orders.revoke(world.files.key.public.id, ANN))["unloaded"] == []
    world.engines.goes_on.set()
    assert code_of(await world.ended(job)) == "signature_unverifiable"
    assert world.engines.loaded() == []


async def test_a_key_is_trusted_by_the_id_it_has(world: AdapterWorld) -> None:
    key = new_key()
    pem = key.public.pem.decode()
    with pytest.raises(BadRequest, match="has the id"):
        await world.orders.trust("0" * 64, pem, ANN, approval=TRUST)
    with pytest.raises(BadRequest):
        await world.orders.trust(key.public.id, "no key", ANN, approval=TRUST)
    assert await world.orders.trust(key.public.id, pem, ANN, approval=TRUST) == key.public.id
    assert key.public.id in {one["id"] for one in (await world.orders.keys())["keys"]}
    assert world.acts() == ["adapter.trusted"]


async def test_a_server_that_takes_no_adapter_is_not_asked(world: AdapterWorld) -> None:
    await world.pulled()
    world.engines.takes = False
    with pytest.raises(NotSupported):
        await world.orders.load("legal", ANN, approval=LOAD_ADAPTER)
    assert (await world.jobs.recent(9))[0].kind == "adapter.pull", "no job was begun"


async def test_a_load_status_outlives_the_daemon(world: AdapterWorld) -> None:
    await world.pulled()
    with pytest.raises(NotFound, match="never ordered"):
        await world.orders.runner_status("legal")
    assert (await world.orders.load_status("legal"))["state"] == "none"
    job = await world.loaded()
    world.again()
    status = await world.orders.load_status("legal")
    assert (status["state"], status["job"], status["took_s"] is not None) == ("loaded", job.id, True)
    told = await world.orders.runner_status("legal")
    assert (told["status"], told["jobId"], told["adapterId"]) == ("completed", job.id, "legal")
    with pytest.raises(AdapterNotFound):
        await world.orders.load_status("nobody")


async def test_a_daemon_that_is_killed_in_a_load_leaves_a_truthful_record(world: AdapterWorld) -> None:
    await world.pulled()
    world.engines.goes_on.clear()
    job = await world.orders.load("legal", ANN, approval=LOAD_ADAPTER)
    world.orders.close()
    world.again()
    await world.jobs.give_up([await world.jobs.get(job.id)])
    running = spawn(world.orders.run(), name="orders")
    await until(lambda: world.row_state()[0] != "loading")
    running.cancel()
    assert world.row_state() == ("failed", "Hive ended before the load did")
    assert (await world.orders.load_status("legal"))["state"] == "failed"


async def test_a_name_that_requests_cannot_tell_from_another_adapters_is_refused(world: AdapterWorld) -> None:
    """`Legal` and `legal` were both loaded, and each request for either was answered by one of them."""
    await world.pulled()
    with pytest.raises(BadRequest, match="cannot tell Legal from the adapter legal"):
        await world.pulled(name="Legal")
    assert (await world.pulled()).state is JobState.DONE, "the very same name brings another build of it"


async def test_a_digest_is_no_part_of_a_name(world: AdapterWorld) -> None:
    """`legal@3f…` was loaded past the job about `legal`, told to be not loaded, and removed to no effect."""
    await world.pulled()
    await world.loaded()
    name = world.files.adapters.find("legal").engine_name
    for order in (
        world.orders.load(name, ANN, approval=LOAD_ADAPTER),
        world.orders.unload(name, ANN, approval=UNLOAD_ADAPTER),
        world.orders.remove(name, ANN, approval=REMOVE_ADAPTER),
    ):
        with pytest.raises(AdapterNotFound) as refused:
            await order
        assert "--digest" in refused.value.hint


async def test_nothing_is_loaded_whose_files_are_being_removed(
    world: AdapterWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load that began after the look whether it is loaded was of files that went meanwhile."""
    await world.pulled()
    begun, goes_on = asyncio.Event(), asyncio.Event()
    write = world.database.write

    async def slow_write(work: Any) -> Any:
        begun.set()
        await goes_on.wait()
        return await write(work)

    with monkeypatch.context() as patched:
        patched.setattr(world.database, "write", slow_write)
        removing = spawn(world.orders.remove("legal", ANN, approval=REMOVE_ADAPTER), name="removes")
        await begun.wait()
    for order in (world.loaded(), world.pulled()):
        with pytest.raises(ModelBusy, match="is being removed"):
            await order
    goes_on.set()
    assert len((await removing)["digests"]) == 1
    assert (await world.pulled()).state is JobState.DONE


async def test_a_revoked_key_says_nothing_of_the_build_of_another_one(world: AdapterWorld) -> None:
    """A build of another key that was loaded meanwhile was on record as revoked."""
    await world.pulled()
    await world.loaded()
    registry, digest = world.orders.registry, world.files.adapters.find("legal").digest
    await registry.write(registry.gone({"legal": "0" * 64}, "its key was revoked"))
    assert world.row_state() == ("loaded", "")
    await registry.write(registry.gone({"legal": digest}, "its key was revoked"))
    assert world.row_state() == ("absent", "its key was revoked")
