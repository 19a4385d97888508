"""Adapters on a real vLLM (CPU, tiny random model): loaded while it serves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest

from hive.errors import HiveError
from tests import vllm
from tests.journeys.adapter_stack import (
    MadeAdapter,
    Versions,
    WordAsker,
    answered,
    asking,
    ended,
    install,
    knows,
    load,
    made_for_vllm,
    unload,
)
from tests.journeys.stack import Stack, stack, until
from tests.vllm import MODEL, VllmServer

pytestmark = [pytest.mark.redis, pytest.mark.vllm, pytest.mark.timeout(900)]
NAMES = ("red", "green", "blue", "grey")
ADAPTERS, REQUESTS = 20, 1000


@pytest.fixture(scope="module")
def model() -> Path:
    venv = vllm.environment()
    assert venv is not None, "there is a server"
    return vllm.model_for(venv, Path())


@pytest.fixture
def hive(vllm_server: VllmServer, tmp_path: Path) -> Iterator[Stack]:
    config = f"[adapters]\ndir = {tmp_path}\nsignatures = off\n"
    with stack(url=vllm_server.url, config=config) as hive:
        hive.create("alice", "idler.py")
        yield hive
        for name in [one["name"] for one in hive.get("/api/adapters")["adapters"] if one["served"]]:
            unload(hive, name)


@pytest.fixture
def alice(hive: Stack) -> Iterator[WordAsker]:
    with closing(WordAsker(hive, "alice")) as asker:
        yield asker


def cut(made: MadeAdapter) -> MadeAdapter:
    """The same with a file that ends too soon."""
    weights = made.path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-2000])
    return made


def at_server(server: VllmServer) -> set[str]:
    """The adapters by the names that vLLM has of them."""
    listed = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
    return {one["id"] for one in listed if one["parent"]}


def test_an_adapter_is_loaded_while_it_serves_and_answers_to_its_name(
    hive: Stack, alice: WordAsker, model: Path, tmp_path: Path, vllm_server: VllmServer
) -> None:
    made = made_for_vllm(model, tmp_path, 1)
    until(lambda: knows(hive, MODEL), within_s=60, what="it is known")
    pulled = ended(hive, hive.post("/api/adapters", {"path": made.path.name, "base": MODEL, "name": "red"}))
    assert pulled["state"] == "done", pulled
    assert alice.ask("red").status == 404
    done = load(hive, "red")
    assert done["state"] == "done", done
    answer = alice.ask("red")
    assert answer.text.split() == [made.word] * 3
    (there,) = at_server(vllm_server)
    assert answer.told == there
    models = alice.models()
    assert models["red"]["parent"] == MODEL
    assert there not in models
    assert alice.ask(there).status == 404, "the digest's name is Hive's alone"
    assert alice.ask(MODEL).text.split() != [made.word] * 3
    assert unload(hive, "red")["state"] == "done"
    assert at_server(vllm_server) == set()
    assert alice.ask("red").status == 404


def test_twenty_adapters_come_and_go_under_a_thousand_requests_at_vllm_and_none_fails(
    hive: Stack, model: Path, tmp_path: Path, vllm_server: VllmServer
) -> None:
    versions, askers = Versions(), []
    for number in range(6):
        hive.create(f"agent-{number}", "idler.py")
        askers.append(WordAsker(hive, f"agent-{number}"))
    made = [made_for_vllm(model, tmp_path, number) for number in range(len(NAMES) + ADAPTERS)]
    for name, first in zip(NAMES, made, strict=False):
        versions.ordered(name, first.word)
        done = load(hive, name, install(hive, first, name, MODEL))
        assert done["state"] == "done", done
    with asking(askers, NAMES, at_least=REQUESTS) as answers:
        for number, next_one in enumerate(made[len(NAMES) :]):
            name = NAMES[number % len(NAMES)]
            digest = install(hive, next_one, name, MODEL)
            versions.ordered(name, next_one.word)
            done = load(hive, name, digest)
            assert done["state"] == "done", done
            versions.loaded(name)
    for asker in askers:
        asker.close()
    assert [answer for answer in answers() if not versions.right(answer)] == []
    assert len(answers()) >= REQUESTS
    until(lambda: len(at_server(vllm_server)) == len(NAMES), within_s=60, what="the old ones are gone")


def test_a_cut_file_is_refused_by_the_engine_and_the_name_means_what_it_meant(
    hive: Stack, alice: WordAsker, model: Path, tmp_path: Path
) -> None:
    made, garbage = made_for_vllm(model, tmp_path, 1), cut(made_for_vllm(model, tmp_path, 2))
    load(hive, "red", install(hive, made, "red", MODEL))
    job = load(hive, "red", install(hive, garbage, "red", MODEL))
    assert job["state"] == "failed"
    assert "incomplete" in str(job["error"]), job
    assert alice.ask("red").text.split() == [made.word] * 3
    assert alice.ask(MODEL).status == 200


@pytest.mark.parametrize("who", [("daemon",), ("proxy",), ("daemon", "proxy")])
def test_whoever_is_killed_while_it_is_loaded_at_vllm_the_name_means_one_of_both(
    hive: Stack, alice: WordAsker, model: Path, tmp_path: Path, vllm_server: VllmServer, who: tuple[str, ...]
) -> None:
    old, new = made_for_vllm(model, tmp_path, 1), made_for_vllm(model, tmp_path, 2)
    load(hive, "red", install(hive, old, "red", MODEL))
    digest = install(hive, new, "red", MODEL)
    with suppress(HiveError, OSError):
        hive.post("/api/adapters/red/load", {"digest": digest})
    hive.restart(*who)
    with closing(WordAsker(hive, "alice")) as again:
        answer = until(lambda: answered(again, "red"), within_s=60, what="red answers")
        assert answer.text.split() in ([old.word] * 3, [new.word] * 3)
        assert load(hive, "red", digest)["state"] == "done"
        assert again.ask("red").text.split() == [new.word] * 3
        until(lambda: at_server(vllm_server) == {f"red@{digest[:12]}"}, within_s=60, what="nothing else is left")


def test_what_is_loaded_at_vllm_serves_on_while_the_daemon_is_killed(
    hive: Stack, alice: WordAsker, model: Path, tmp_path: Path
) -> None:
    made, versions = made_for_vllm(model, tmp_path, 1), Versions()
    load(hive, "red", install(hive, made, "red", MODEL))
    versions.ordered("red", made.word)
    with asking([alice], ["red"], at_least=50) as answers:
        hive.restart("daemon")
    assert [answer for answer in answers() if not versions.right(answer)] == []
