"""The models behind a real daemon: the list and how old it is, pulls and removals as jobs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from hive.control.pull_order import PullOrder
from hive.domain import AgentSpec, BackendKind, Tier
from hive.errors import BadRequest, DependencyDown, NotFound, NotSupported, WrongState
from hive.link.messages import BackendChanged, Done
from hive.link.requests import AskModels
from hive.settings.table import Settings, TenantRow
from hive.store.audit import Filter
from tests.approvals import LOAD, UNLOAD
from tests.control.box import AWAKE, SLEEPER, Box
from tests.fakes.programs import Program, demo_backend, fake_ollama
from tests.waiting import until

TINY = b"GGUF\3\0\0\0" + b"\1" + b"\0" * 15 + b"\1" + b"\0" * 7 + b"t" + b"\1\0\0\0" + b"\2" + b"\0" * 23
"""A header with one tensor of two F32 weights."""


def seen(ollama: Program) -> Any:
    """Questions that the stand-in (fakes/fake_ollama.py) got."""
    return ollama.get("/fake/pulls").json()


def settings(**inference: object) -> Settings:
    changed = msgspec.structs.replace(AWAKE.inference, **inference)
    return msgspec.structs.replace(AWAKE, inference=changed, tenants={"acme": TenantRow(models="fast")})


@asynccontextmanager
async def ollama_box(
    box: Box, *flags: str, check_s: float = AWAKE.daemon.backend_check_s, **inference: object
) -> AsyncIterator[Program]:
    with fake_ollama(*flags) as ollama:
        wanted = settings(**inference)
        daemon = msgspec.structs.replace(wanted.daemon, backend_check_s=check_s)
        wanted = msgspec.structs.replace(wanted, daemon=daemon)
        await box.everything(wanted, backend=(BackendKind.OLLAMA, ollama.address))
        await until(lambda: box.inference()["running"])
        yield ollama


async def ended(box: Box, job: Any) -> Any:
    return await box.job(job["id"], wait_s=20)


async def test_the_list_says_who_is_given_what_and_is_stale_but_there_when_the_server_is_not(box: Box) -> None:
    flags = ("llama3.2:3b-q4_K_M", "qwen3:8b")
    async with ollama_box(box, *flags, aliases="fast = llama3.2:3b-q4_K_M", default_model="qwen3:8b") as ollama:
        for name, model in (("by-alias", "fast"), ("by-default", None), ("other", "none")):
            spec = AgentSpec(name=name, command=SLEEPER, model=model, tier=Tier.LOW, tenant="acme")
            await box.services.agents.apply(spec, "uid:0")
        listed = await box.services.models.listed()
        assert [(model["name"], model["aliases"], model["loaded"]) for model in listed["models"]] == [
            ("llama3.2:3b-q4_K_M", ["fast"], False),
            ("qwen3:8b", [], False),
        ]
        assert (listed["stale"], listed["up"], listed["backend"]) == ("", True, BackendKind.OLLAMA)
        shown = await box.services.models.view("fast")
        assert (shown["name"], [one["name"] for one in shown["agents"]]) == ("llama3.2:3b-q4_K_M", ["by-alias"])
        assert [one["name"] for one in (await box.services.models.view("qwen3:8b"))["agents"]] == []  # acme may not
        assert box.services.models.route("qwen3:8b", Tier.LOW, "acme")["model"] == ""
        assert box.services.models.route("fast", Tier.LOW, "acme")["model"] == "llama3.2:3b-q4_K_M"
        ollama.process.kill()
        with pytest.raises(DependencyDown):
            await box.services.models.refresh()
        stale = await box.services.models.listed()
        assert (len(stale["models"]), stale["seen_at"], stale["up"]) == (2, listed["seen_at"], False)
        assert "does not answer" in stale["stale"]
        with pytest.raises(NotFound, match="qwen"):
            await box.services.models.view("qwen")


async def test_however_many_ask_the_server_is_asked_once(box: Box) -> None:
    async with ollama_box(box, check_s=600) as ollama:
        before = seen(ollama)["listed"]
        await asyncio.gather(*(box.services.models.refresh() for _ in range(20)))
        assert seen(ollama)["listed"] == before + 1


async def test_a_proxy_that_meets_an_unknown_model_has_it_looked_for_but_not_again_at_once(box: Box) -> None:
    async with ollama_box(box, check_s=600) as ollama:
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(f"http://{ollama.address}/api/pull", json={"model": "new"})
        told = box.proxy.told
        before = len(told)
        assert isinstance(await box.proxy.client.link.ask_any(AskModels(), timeout_s=5), Done)
        backends = [message for message in told[before:] if isinstance(message, BackendChanged)]
        assert [model.name for model in backends[-1].models] == ["new:latest"]  # told before the answer came
        listed = seen(ollama)["listed"]
        for _ in range(5):
            assert isinstance(await box.proxy.client.link.ask_any(AskModels(), timeout_s=5), Done)
        assert seen(ollama)["listed"] == listed


async def test_ollama_pulls_and_removes_as_jobs(box: Box) -> None:
    async with ollama_box(box, "--layer-bytes", "1000") as ollama:
        job = await ended(box, await box.pull_model(PullOrder("llama3.2"), "uid:0"))
        assert (job["state"], job["about"], job["completed_bytes"], job["total_bytes"]) == (
            "done",
            "llama3.2",
            2000,
            2000,
        )
        assert [model["name"] for model in (await box.services.models.listed())["models"]] == ["llama3.2:latest"]
        failed = await ended(box, await box.pull_model(PullOrder("nonexistent"), "uid:0"))
        assert (failed["state"], failed["error"]["code"]) == ("failed", "not_found")
        with pytest.raises(BadRequest):
            await box.pull_model(PullOrder("llama3.2", force=True), "uid:0")
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(f"http://{ollama.address}/api/generate", json={"model": "llama3.2"})
        with pytest.raises(WrongState, match="memory"):
            await box.remove_model("llama3.2", force=False, actor="uid:0")
        await ended(box, await box.remove_model("llama3.2", force=True, actor="uid:0"))
        assert (await box.services.models.listed())["models"] == []
        kinds = [event["kind"] for event in await box.services.audit_log.past(50)]
        assert {"model.pulled", "model.removed"} <= set(kinds)


async def test_ollama_loads_and_unloads_as_jobs_and_what_is_so_already_is_no_act(box: Box) -> None:
    async with ollama_box(box, "tiny") as ollama:
        models = box.services.models

        async def done(job: Any) -> Any:
            return await ended(box, {"id": job.id})

        job = await done(await models.load("tiny", "uid:0", approval=LOAD))
        assert (job["kind"], job["state"], job["about"]) == ("model.load", "done", "tiny:latest")
        assert job["result"]["changed"] is True
        assert (await models.listed())["models"][0]["loaded"] is True
        assert (await done(await models.load("tiny:latest", "uid:0", approval=LOAD)))["result"]["changed"] is False
        assert (await done(await models.unload("tiny", "uid:0", approval=UNLOAD)))["result"]["changed"] is True
        assert (await models.listed())["models"][0]["loaded"] is False
        with pytest.raises(NotFound):
            await models.load("gpt-9", "uid:0", approval=LOAD)
        acts = [(row["act"], row["actor"]) for row in await box.audit(Filter(act="model.*loaded"))]
        assert sorted(acts) == [("model.loaded", "uid:0"), ("model.unloaded", "uid:0")]
        ollama.process.kill()
        await until(lambda: not box.inference()["running"])
        with pytest.raises(DependencyDown, match="no inference server answers"):
            await models.load("tiny", "uid:0", approval=LOAD)


async def test_a_server_that_loads_nothing_on_request_says_why(box: Box) -> None:
    with demo_backend() as demo:
        await box.everything(AWAKE, backend=(BackendKind.DEMO, demo.address))
        await until(lambda: box.inference()["running"])
        with pytest.raises(NotSupported, match="only canned text"):
            await box.services.models.load("hive-demo", "uid:0", approval=LOAD)


async def test_a_pull_is_joined_cancelled_and_ends_with_its_daemon(box: Box) -> None:
    async with ollama_box(box, "--delay", "0.05", "--pieces", "10000") as ollama:
        job = await box.pull_model(PullOrder("big"), "uid:0")
        assert (await box.pull_model(PullOrder("big"), "uid:0"))["id"] == job["id"]
        await until(lambda: [pull["state"] for pull in seen(ollama)["pulls"]] == ["running"])
        assert (await box.cancel_job(job["id"]))["state"] == "cancelled"
        with pytest.raises(WrongState):
            await box.cancel_job(job["id"])
        again = await box.pull_model(PullOrder("big"), "uid:0")
        await until(lambda: len(seen(ollama)["pulls"]) == 2)
        await box.stop_daemon()
        await until(lambda: [pull["state"] for pull in seen(ollama)["pulls"]] == ["gone", "gone"])
        await box.start_daemon(settings(), backend=(BackendKind.OLLAMA, ollama.address))
        left = await box.job(again["id"], wait_s=0)
        assert (left["state"], left["error"]["message"]) == ("failed", "Hive ended before it did")


async def test_files_are_brought_and_removed_where_the_servers_read_them(box: Box, tmp_path: Path) -> None:
    source, models = tmp_path / "tiny.gguf", tmp_path / "models"
    source.write_bytes(TINY + b"\0" * (-len(TINY) % 32 + 8))
    conf = {"models_dir": str(models), "llama_model": str(models / "main.gguf")}
    await box.everything(settings(**conf))
    for order, error in (
        (PullOrder("llama3.2"), NotSupported),
        (PullOrder(str(tmp_path / "none.gguf")), NotFound),
        (PullOrder(str(source), name="../out"), BadRequest),
    ):
        with pytest.raises(error):
            await box.pull_model(order, "uid:0")
    for name in ("", "main"):
        job = await ended(box, await box.pull_model(PullOrder(str(source), name=name), "uid:0"))
        assert job["state"] == "done", job["error"]
    assert f"inference.llama_model = {models}/main.gguf" in job["result"]["next"]
    with pytest.raises(WrongState, match="already"):
        await box.pull_model(PullOrder(str(source)), "uid:0")
    with pytest.raises(WrongState, match="llama_model"):
        await box.remove_model("main", force=False, actor="uid:0")
    with pytest.raises(NotFound):
        await box.remove_model("../models/main", force=True, actor="uid:0")
    listed = await box.services.models.listed()
    assert (listed["files"], listed["directory"]) == (
        dict.fromkeys(("main", "tiny"), source.stat().st_size),
        str(models),
    )
    for name in ("main", "tiny.gguf"):
        job = await ended(box, await box.remove_model(name, force=name == "main", actor="uid:0"))
        assert (job["state"], job["result"]["freed_bytes"]) == ("done", source.stat().st_size)
    assert list(models.iterdir()) == []


async def test_a_model_that_becomes_a_stub_is_known_at_the_next_look(box: Box) -> None:
    """The list was read every 300 s: for so long a name that was given to a stub of the cloud counted as near."""
    async with ollama_box(box, "work-helper", "tiny", "--stub", "first") as ollama:
        listed = {model["name"]: model for model in (await box.services.models.listed())["models"]}
        assert listed["work-helper:latest"]["leaves"] == ""
        assert listed["first:latest"]["leaves"] == "Ollama sends it to https://cloud.invalid:443, as gpt-oss:120b"
        assert listed["first:latest"]["tiers"] == []
        found = box.services.models.route("first", Tier.LOW)
        assert (found["model"], "would leave this box" in found["why"]) == ("", True)
        async with httpx.AsyncClient(trust_env=False) as client:
            await client.post(f"http://{ollama.address}/fake/stub", json={"model": "work-helper"})
        await until(lambda: any(m.name == "work-helper:latest" and m.remote_host for m in _told(box)))
        assert box.services.models.route("work-helper", Tier.LOW)["model"] == ""


def _told(box: Box) -> list[Any]:
    """The models that the proxy was told of last."""
    found = [message.models for message in box.proxy.told if isinstance(message, BackendChanged)]
    return found[-1] if found else []


async def test_an_agent_is_given_a_model_that_runs_here(box: Box) -> None:
    """Without a model of its own it was given the first of the list: Ollama's newest, a stub or not."""
    async with ollama_box(box, "tiny", "--stub", "first"):
        await box.services.agents.apply(AgentSpec(name="alice", command=SLEEPER), "uid:0")
        assert box.daemon is not None
        [life] = list(box.daemon.roster)
        assert [model.name for model in box.daemon.effects.models] == ["first:latest", "tiny:latest"]
        assert box.daemon.effects._model_of(life.agent) == "tiny:latest"


async def test_an_ollama_that_is_replaced_between_two_looks_is_known_at_the_next_one(box: Box) -> None:
    """It stayed known by its old version and models for minutes: nothing was seen of it being away."""
    async with ollama_box(box, "tiny", check_s=600) as old:
        assert box.daemon is not None
        watch = box.daemon._active._watch
        assert watch is not None
        port = old.address.rpartition(":")[2]
        await watch.check()
        old.process.kill()
        old.process.wait()
        with fake_ollama("--port", port, "--version", "0.32.15", "other"):
            await watch.check()
            shown = box.inference()
            assert (shown["version"], [model["name"] for model in shown["models"]]) == ("0.32.15", ["other:latest"])
