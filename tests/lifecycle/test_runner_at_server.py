"""The runner API at an inference server in use that is not the pool's: the stand-in of Ollama, demo, a remote one."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import httpx
import msgspec
import pytest

from hive.domain import BackendKind
from hive.errors import ModelBusy, NotFound, NotSupported
from hive.lifecycle.runner import LoadWish, Ordered
from hive.shapes.runner import LoadTask
from tests import llama
from tests.approvals import LOAD, UNLOAD
from tests.control.box import AWAKE, Box
from tests.fakes.programs import Program, demo_backend, fake_ollama
from tests.waiting import until

QUICK = msgspec.structs.replace(AWAKE, daemon=msgspec.structs.replace(AWAKE.daemon, backend_check_s=0.2))
LOADS, UNLOADS = Ordered("token:ci", LOAD), Ordered("token:ci", UNLOAD)


async def in_use(box: Box, kind: BackendKind, address: str) -> None:
    await box.everything(QUICK, backend=(kind, address))
    await until(lambda: box.inference()["running"])
    await ready(box)


async def ready(box: Box) -> None:
    assert box.daemon is not None
    pool, link = box.daemon._pool, box.services.proxy_link
    await until(lambda: link.session is not None and pool.has_adopted)


async def came(box: Box, task: LoadTask) -> LoadTask:
    """The task, once it has ended."""
    await box.job(task["taskId"].removeprefix("load-"), wait_s=20)
    for _ in range(100):
        found = await box.services.runner.task(task["taskId"])
        if found["status"] != "loading":
            return found
        await asyncio.sleep(0.02)
    return found


def has_loaded(ollama: Program) -> bool:
    return bool(httpx.get(f"{ollama.url}/api/ps", trust_env=False).json()["models"])


async def test_an_ollama_in_use_loads_and_unloads_what_it_is_asked_for(box: Box) -> None:
    with fake_ollama("--load-s", "1", "tiny", "big") as ollama:
        await in_use(box, BackendKind.OLLAMA, ollama.address)
        runner = box.services.runner
        with pytest.raises(NotFound):
            await runner.load(LoadWish("nobody"), LOADS)
        task = await runner.load(LoadWish("tiny"), LOADS)
        assert (task["status"], task["modelId"]) == ("loading", "tiny")
        with pytest.raises(ModelBusy):  # it was `wrong_state`, which no client of the runner knows
            await runner.load(LoadWish("tiny"), LOADS)
        assert (await came(box, task))["status"] == "completed"
        assert [one["id"] for one in (await runner.capabilities())[0]["models"]["loaded"]] == ["tiny:latest"]
        again = await runner.load(LoadWish("big", evict="tiny"), LOADS)
        assert (await came(box, again))["status"] == "completed"
        assert await box.services.active.loaded() == frozenset({"big:latest"})
        gone = await runner.unload("big", UNLOADS)
        assert (gone["modelId"], gone["kvCacheFlushed"]) == ("big", True)
        assert gone["gpuMemoryFreedMB"] >= 0
        assert not has_loaded(ollama)


async def test_a_load_at_an_ollama_that_its_daemon_did_not_see_end_is_asked_of_the_server(box: Box) -> None:
    """It was given up, though the model was loaded."""
    with fake_ollama("--load-s", "1", "tiny") as ollama:
        await in_use(box, BackendKind.OLLAMA, ollama.address)
        task = await box.services.runner.load(LoadWish("tiny"), LOADS)
        await box.stop_daemon()
        await until(lambda: has_loaded(ollama))
        await box.start_daemon(QUICK, backend=(BackendKind.OLLAMA, ollama.address))
        await ready(box)
        assert (await came(box, task))["status"] == "completed"


async def test_a_load_that_ended_with_its_daemon_has_failed(box: Box) -> None:
    with fake_ollama("--load-s", "30", "tiny") as ollama:
        await in_use(box, BackendKind.OLLAMA, ollama.address)
        task = await box.services.runner.load(LoadWish("tiny"), LOADS)
        await box.stop_daemon()
        await box.start_daemon(QUICK, backend=(BackendKind.OLLAMA, ollama.address))
        await ready(box)
        found = await came(box, task)
        assert (found["status"], found["error"]) == ("failed", "Hive ended before the load did")


@pytest.mark.parametrize("kind", [BackendKind.DEMO, BackendKind.REMOTE])
async def test_demo_and_a_remote_server_load_nothing_on_request(box: Box, kind: BackendKind) -> None:
    with demo_backend() as demo:
        await in_use(box, kind, demo.address if kind is BackendKind.DEMO else demo.url)
        (model, *_) = box.services.models.catalog.models
        for asked in (
            box.services.runner.load(LoadWish(model.name), LOADS),
            box.services.runner.unload(model.name, UNLOADS),
        ):
            with pytest.raises(NotSupported):
                await asked


@pytest.mark.llama
async def test_a_llama_server_with_one_model_has_it_loaded_and_keeps_it(box: Box, tmp_path: Path) -> None:
    with llama.serve(tmp_path) as server:
        await in_use(box, BackendKind.LLAMA, server.address)
        task = await box.services.runner.load(LoadWish(llama.MODEL), LOADS)
        assert (await came(box, task))["status"] == "completed"
        with pytest.raises(NotSupported):
            await box.services.runner.unload(llama.MODEL, UNLOADS)
        assert await box.services.active.loaded() == frozenset({llama.MODEL})


@pytest.mark.llama
async def test_another_model_at_a_server_of_one_is_501_and_says_what_to_do(box: Box, tmp_path: Path) -> None:
    """It was 404, and one was told to bring a model that lies here."""
    with llama.serve(tmp_path) as server:
        await in_use(box, BackendKind.LLAMA, server.address)
        runner, models = box.services.runner, box.services.models
        root = Path((await models.listed())["directory"])
        await asyncio.to_thread(shutil.copytree, tmp_path / "models", root, dirs_exist_ok=True)
        await asyncio.to_thread((root / f"{llama.MODEL}.gguf").rename, root / "other.gguf")
        with pytest.raises(NotSupported, match="was started without it") as refused:
            await runner.load(LoadWish("other"), LOADS)
        assert "[model other] in hive.conf" in refused.value.hint
        assert "hive backend switch llama" in refused.value.hint
        for nobody in ("nobody", "../other", str(root / "other.gguf")):
            with pytest.raises(NotFound):
                await runner.load(LoadWish(nobody), LOADS)
        assert await box.services.active.loaded() == frozenset({llama.MODEL})


@pytest.mark.llama
async def test_a_router_in_use_loads_and_unloads_what_it_is_asked_for(box: Box, tmp_path: Path) -> None:
    with llama.serve(tmp_path, as_router=True) as server:
        await in_use(box, BackendKind.LLAMA, server.address)
        runner = box.services.runner
        assert await box.services.active.loaded() == frozenset()
        task = await runner.load(LoadWish(llama.MODEL), LOADS)
        assert (await came(box, task))["status"] == "completed"
        assert await box.services.active.loaded() == frozenset({llama.MODEL})
        assert (await runner.unload(llama.MODEL, UNLOADS))["modelId"] == llama.MODEL
        assert await box.services.active.loaded() == frozenset()
