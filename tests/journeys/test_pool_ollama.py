"""Models of one Ollama in a pool: loaded and let go by Hive alone, in less memory than all take. The Ollama is a
stand-in that keeps and unloads models as Ollama does (fakes/ollama_runners.py): no registry has one to be installed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import openai
import pytest

from tests.fakes.programs import Program, fake_ollama
from tests.journeys.stack import Stack, stack, until

pytestmark = pytest.mark.redis
MIB = 1 << 20
MODEL_MB = 60
FOR_EVER = "2318"
"""The year in which what was loaded for ever in 2026 would leave, by Ollama's reckoning."""
MESSAGES: Any = [{"role": "user", "content": "Hello, how are you today?"}]
LAYER = str(MODEL_MB * MIB // 2)
POOL = "[pool]\nreserve_mb = 0\ncpu_mb = 100\npatience_normal_s = 0.5\naudience_s = 1\n"
ROWS = "[model alpha]\nbackend = ollama\n[model chat]\nbackend = ollama\nfile = beta:q4_0\n"


def config(port: str, *, more: str = "") -> str:
    return f"[inference]\nport = {port}\n{POOL}{ROWS}{more}"


@pytest.fixture
def server() -> Iterator[Program]:
    with fake_ollama("--layer-bytes", LAYER, "alpha", "beta:q4_0", "other") as server:
        yield server


@pytest.fixture
def hive(server: Program) -> Iterator[Stack]:
    """Two models of one Ollama, room for one; the Ollama is the server in use as well."""
    with stack(url=server.url, config=config(server.address.rpartition(":")[2])) as hive:
        hive.create("alice", "idler.py")
        yield hive


@pytest.fixture
def client(hive: Stack) -> Iterator[ollama.Client]:
    client = ollama.Client(host=hive.get("/api/agents/alice/tokens")["ollama_host"])
    yield client
    client._client.close()


def slots(hive: Stack) -> dict[str, Any]:
    return {slot["model"]: slot for slot in hive.get("/api/pool")["slots"]}


def running(server: Program) -> dict[str, str]:
    """The models in the Ollama's memory, and until which year."""
    year = {row["model"]: row["expires_at"][:4] for row in server.get("/api/ps").json()["models"]}
    return {model: FOR_EVER if int(at) >= int(FOR_EVER) else at for model, at in year.items()}


def asked(server: Program) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = server.get("/fake/asked").json()["asked"]
    return found


def until_state(hive: Stack, model: str, state: str) -> None:
    until(lambda: slots(hive)[model]["state"] == state, within_s=20, what=f"{model} is {state}")


def test_two_models_of_one_ollama_take_turns_in_the_memory_of_one(
    hive: Stack, server: Program, client: ollama.Client
) -> None:
    for model, there in (("alpha", "alpha:latest"), ("chat", "beta:q4_0"), ("alpha", "alpha:latest")):
        told = client.chat(model=model, messages=MESSAGES)
        assert (told.model, told.eval_count) == (model, 1)
        assert running(server) == {there: FOR_EVER}  # the other one has left, and this one stays for ever
        chunks = list(client.chat(model=model, messages=MESSAGES, stream=True))
        assert {chunk.model for chunk in chunks} == {model}
    assert server.get("/fake/loads").json()["loads"] == ["alpha:latest", "beta:q4_0", "alpha:latest"]
    found = slots(hive)
    assert [(slot["state"], slot["need_from"], slot["need_bytes"]) for slot in found.values()] == [
        ("ready", "learnt", MODEL_MB * MIB),
        ("cold", "learnt", MODEL_MB * MIB),
    ]
    grant = until(
        lambda: next((one for one in slots(hive)["alpha"]["grants"] if one["measured_bytes"]), None),
        within_s=60,
        what="it is measured",
    )
    assert (grant["charged_bytes"], grant["measured_bytes"]) == (MODEL_MB * MIB, MODEL_MB * MIB)
    assert {one["keep_alive"] for one in asked(server)} == {-1, 0}  # 0: Hive's own, when one leaves


def test_agents_neither_unload_nor_bound_a_model_in_any_dialect(
    hive: Stack, server: Program, client: ollama.Client
) -> None:
    access = hive.get("/api/agents/alice/tokens")
    client.chat(model="alpha", messages=MESSAGES, keep_alive="1s")
    client.generate(model="alpha", prompt="", keep_alive=0)
    client.generate(model="alpha", prompt="Hello", keep_alive=0)
    client.embed(model="alpha", input="Hello", keep_alive=0)
    with openai.OpenAI(base_url=access["openai_base_url"], api_key=access["model"], max_retries=0) as of_openai:
        answer = of_openai.chat.completions.create(model="alpha", messages=MESSAGES, extra_body={"keep_alive": 0})
    assert answer.model == "alpha"
    assert running(server) == {"alpha:latest": FOR_EVER}
    assert [one["keep_alive"] for one in asked(server)] == [-1, -1, -1, -1, None]  # the first one: Hive's load
    assert slots(hive)["alpha"]["state"] == "ready"


@pytest.mark.wide
def test_a_model_asked_for_by_ollamas_own_name_waits_for_the_pool_as_well(
    hive: Stack, server: Program, client: ollama.Client
) -> None:
    client.chat(model="alpha", messages=MESSAGES)
    told = client.chat(model="beta:q4_0", messages=MESSAGES)
    assert told.model == "beta:q4_0"
    assert (running(server), slots(hive)["chat"]["state"]) == ({"beta:q4_0": FOR_EVER}, "ready")
    listed = [str(model.model) for model in client.list().models]
    assert sorted(listed) == sorted(set(listed))
    assert {"alpha", "chat", "other:latest"} <= set(listed)


@pytest.mark.wide
def test_what_ollama_drops_by_itself_is_cold_and_nobodys_fault(
    hive: Stack, server: Program, client: ollama.Client
) -> None:
    client.chat(model="alpha", messages=MESSAGES)
    post(server, "/fake/drop", model="alpha")
    until_state(hive, "alpha", "cold")
    slot = slots(hive)["alpha"]
    assert (slot["failures"], slot["retry_in_s"], slot["last_error"], slot["grants"]) == (0, None, "", [])
    assert client.chat(model="alpha", messages=MESSAGES).eval_count == 1
    assert "server_crashed" not in hive.log


@pytest.mark.wide
def test_a_model_that_somebody_loads_past_hive_is_booked_and_kept(hive: Stack, server: Program) -> None:
    post(server, "/api/generate", model="alpha", keep_alive="10s", stream=False)
    until_state(hive, "alpha", "ready")
    until(lambda: running(server) == {"alpha:latest": FOR_EVER}, within_s=10, what="it is kept")
    (account,) = hive.get("/api/pool")["accounts"]
    assert account["charged_bytes"] >= MODEL_MB * MIB
    hive.post("/api/models/alpha/unload")
    until_state(hive, "alpha", "cold")
    assert running(server) == {}


@pytest.mark.wide
def test_an_ollama_that_is_killed_is_waited_for_and_serves_again(server: Program) -> None:
    port = server.address.rpartition(":")[2]
    with stack(url=server.url, config=config(port)) as hive:
        hive.create("alice", "idler.py")
        client = ollama.Client(host=hive.get("/api/agents/alice/tokens")["ollama_host"])
        client.chat(model="alpha", messages=MESSAGES)
        server.process.kill()
        server.process.wait()
        until_state(hive, "alpha", "cold")
        until(
            lambda: slots(hive)["alpha"]["why"] == f"no Ollama answers at 127.0.0.1:{port}",
            within_s=10,
            what="it is said that no Ollama answers",
        )
        with pytest.raises(ollama.ResponseError) as refused:
            client.chat(model="alpha", messages=MESSAGES)
        assert (refused.value.status_code, "no Ollama answers" in refused.value.error) == (503, True)
        with fake_ollama("--port", port, "--layer-bytes", LAYER, "alpha", "beta:q4_0"):
            until(lambda: not slots(hive)["alpha"]["why"].startswith("no Ollama"), within_s=20, what="it is back")
            assert client.chat(model="alpha", messages=MESSAGES).eval_count == 1
            slot = slots(hive)["alpha"]
            assert (slot["state"], slot["failures"], slot["last_error"]) == ("ready", 0, "")
        client._client.close()


@pytest.mark.wide
def test_the_next_daemon_takes_over_what_is_loaded(hive: Stack, server: Program, client: ollama.Client) -> None:
    client.chat(model="alpha", messages=MESSAGES)
    hive.restart("daemon")
    until_state(hive, "alpha", "ready")
    assert client.chat(model="alpha", messages=MESSAGES).eval_count == 1
    assert server.get("/fake/loads").json()["loads"] == ["alpha:latest"]
    client.chat(model="chat", messages=MESSAGES)
    assert running(server) == {"beta:q4_0": FOR_EVER}


def post(server: Program, path: str, **body: Any) -> None:
    httpx.post(server.url + path, json=body, trust_env=False).raise_for_status()
