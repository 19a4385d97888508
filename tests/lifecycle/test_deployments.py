"""The registry at the inference server in use: orders to it, switches, and what the next daemon finds there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from hive.audit.approval import Approval
from hive.domain import BackendKind, DeploymentState
from hive.errors import NotFound
from hive.settings.registry import RegistrySection
from tests.approvals import LOAD, UNLOAD
from tests.control.box import AWAKE, Box
from tests.control.services_box import LLAMA, VLLM, ServicesBox, with_llama
from tests.fakes.programs import Program, demo_backend, fake_ollama
from tests.governance.signing import KEYS
from tests.waiting import until

QUICK = msgspec.structs.replace(AWAKE, daemon=msgspec.structs.replace(AWAKE.daemon, backend_check_s=0.2))
RESTORES = msgspec.structs.replace(QUICK, registry=RegistrySection(restore=True))


@pytest.fixture
async def hive(tmp_path: Path) -> AsyncIterator[ServicesBox]:
    """Everything, with llama-server in use."""
    async with with_llama(tmp_path) as box:
        yield box


def rows(box: Box) -> dict[str, tuple[str, str]]:
    return {row["id"]: (row["state"], row["deployed_by"]) for row in box.services.deployments.views()}


async def test_a_switch_puts_the_models_of_the_new_server_on_record_and_ends_those_of_the_old(
    hive: ServicesBox,
) -> None:
    assert rows(hive) == {}  # the daemon started llama by itself: that was nobody's order
    assert (await hive.ended(await hive.begin(VLLM)))["state"] == "done"
    ((id, told),) = rows(hive).items()
    assert id.startswith("m-")
    assert id.endswith("@vllm")
    assert told == ("loaded", "uid:0")
    hive.units.broken[LLAMA] = "token"
    assert (await hive.ended(await hive.begin(LLAMA)))["state"] == "failed"
    assert rows(hive) == {id: ("loaded", "uid:0")}  # it is back
    del hive.units.broken[LLAMA]
    assert (await hive.ended(await hive.begin(LLAMA)))["state"] == "done"
    assert [id.endswith("@llama") for id in rows(hive)] == [True]


async def test_a_switch_that_its_daemon_did_not_end_is_on_record_by_the_next_one(hive: ServicesBox) -> None:
    job = await hive.begin(VLLM)
    await hive.stop_daemon()
    await hive.start_daemon()
    assert (await hive.ended(job))["state"] == "done"
    await until(lambda: [id.endswith("@vllm") for id in rows(hive)] == [True])
    await hive.stop_daemon()
    await hive.start_daemon()
    await until(lambda: list(rows(hive).values()) == [("loaded", "uid:0")])


def governed(box: Box) -> Path:
    """The file of a rule: a load of a model needs the word of one."""
    rules = box.paths.state.parent / "governance.toml"
    keys = "".join(f'{name} = "{key.public.text}"\n' for name, key in KEYS.items())
    rules.write_text(f'[signers]\n{keys}[rules.model-load]\nthreshold = 1\nof = ["ann", "ben"]\n')
    rules.chmod(0o644)
    return rules


async def test_the_signature_of_a_switch_is_none_for_a_load(hive: ServicesBox) -> None:
    """It was taken for one: what a switch brought was loaded again without anybody's word for that."""
    job = await hive.services.switcher.begin(VLLM, "uid:0", approval=Approval("backend-switch", "ann, ben"))
    assert (await hive.ended(job.id))["state"] == "done"
    (row,) = hive.services.deployments.rows()
    assert (row.backend, row.signature) == (VLLM, "")


async def load(box: Box, model: str) -> None:
    job = await box.services.models.load(model, "token:ci", approval=LOAD)
    assert (await box.job(job.id, wait_s=20))["state"] == "done"


def has_loaded(ollama: Program) -> bool:
    """Whether something is in its memory."""
    return bool(httpx.get(f"{ollama.url}/api/ps", trust_env=False).json()["models"])


async def forget_model(ollama: Program, model: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        await client.post(f"{ollama.url}/api/generate", json={"model": model, "keep_alive": 0})


@pytest.mark.parametrize("by", ["", "ann"])
async def test_under_a_rule_only_what_a_signed_load_brought_is_restored(box: Box, by: str) -> None:
    with fake_ollama("tiny") as ollama:
        backend = (BackendKind.OLLAMA, ollama.address)
        await box.everything(QUICK, backend=backend)
        await until(lambda: box.inference()["running"])
        await load(box, "tiny")
        registry, model = box.services.deployments, box.services.models.catalog.find("tiny")
        if by:
            loaded = DeploymentState.LOADED
            change = registry.at_server(model, "ollama", actor="uid:0", signature=by, state=loaded)
        else:
            change = registry.switched("ollama", [model], actor="uid:0", path="")
        await registry.write(change)
        await box.stop_daemon()
        await forget_model(ollama, "tiny")
        await box.start_daemon(RESTORES, backend=backend, rules=governed(box))
        if by:
            await until(lambda: has_loaded(ollama))
            await until(lambda: at_ollama(box) == ("tiny:latest", "loaded", "uid:0"))
            return
        await until(lambda: at_ollama(box) == ("tiny:latest", "absent", "uid:0"))
        assert box.services.deployments.views()[0]["last_error"] == "uid:0 had it loaded without a signature"
        assert await box.services.active.loaded() == frozenset()


def at_ollama(box: Box) -> Any:
    (row,) = box.services.deployments.views()
    return row["name"], row["state"], row["deployed_by"]


async def test_a_load_at_an_ollama_is_on_record_and_restored_only_where_that_is_wanted(box: Box) -> None:
    with fake_ollama("tiny") as ollama:
        backend = (BackendKind.OLLAMA, ollama.address)
        await box.everything(QUICK, backend=backend)
        await until(lambda: box.inference()["running"])
        with pytest.raises(NotFound):
            await box.services.models.load("gpt-9", "token:ci", approval=LOAD)
        assert rows(box) == {}
        await load(box, "tiny")
        assert at_ollama(box) == ("tiny:latest", "loaded", "token:ci")
        assert box.services.deployments.rows()[0].digest == box.services.models.catalog.find("tiny").digest
        await box.stop_daemon()
        await box.start_daemon(QUICK, backend=backend)
        await until(lambda: box.services.active.up)
        assert at_ollama(box) == ("tiny:latest", "loaded", "token:ci")
        await box.stop_daemon()
        await forget_model(ollama, "tiny")
        await box.start_daemon(QUICK, backend=backend)
        await until(lambda: at_ollama(box) == ("tiny:latest", "absent", "token:ci"))
        await box.stop_daemon()
        await box.start_daemon(RESTORES, backend=backend)
        await until(lambda: at_ollama(box) == ("tiny:latest", "loaded", "token:ci"))
        assert await box.services.active.loaded() == frozenset({"tiny:latest"})
        job = await box.services.models.unload("tiny", "uid:0", approval=UNLOAD)
        assert (await box.job(job.id, wait_s=20))["state"] == "done"
        assert rows(box) == {}


async def test_of_a_server_that_is_in_use_no_more_a_row_is_absent_and_can_be_ended(box: Box) -> None:
    with fake_ollama("tiny") as ollama, demo_backend() as demo:
        await box.everything(QUICK, backend=(BackendKind.OLLAMA, ollama.address))
        await until(lambda: box.inference()["running"])
        await load(box, "tiny")
        await box.stop_daemon()
        await box.start_daemon(RESTORES, backend=(BackendKind.DEMO, demo.address))
        await until(lambda: at_ollama(box) == ("tiny:latest", "absent", "token:ci"))
        assert box.services.deployments.views()[0]["last_error"] == "the inference server in use is demo"
        job = await box.services.models.unload("tiny:latest", "uid:0", approval=UNLOAD)
        assert (await box.job(job.id, wait_s=20))["state"] == "done"
        assert rows(box) == {}
