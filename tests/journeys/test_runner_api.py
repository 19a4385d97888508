"""The runner API over every kind of server: the specification's poller and its bodies, word for word, against a real
llama-server, a real vLLM and the stand-in of Ollama. The client does not know which of them is there."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from hive.governance.operation import Operation
from tests import llama
from tests.fakes.programs import fake_ollama
from tests.governance.signing import KEYS, signed
from tests.journeys.pool_stack import SERVER_MB, llama_models, pool_config, vllm_row
from tests.journeys.runner_client import FLUSH, HEADERS, LOAD, UNLOAD, RunnerClient
from tests.journeys.stack import Stack, stack, until
from tests.ports import free_port

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama]
BIG, SMALL = LOAD["modelId"], LOAD["evictModel"]
VARIANT = f"{BIG}:awq-4bit"
OTHER = "mistralai/Mistral-7B-Instruct-v0.3"
CHAT = {"messages": [{"role": "user", "content": "Hello, how are you today?"}], "max_tokens": 4}
TENANT = "[tenant community-x]\n"
PATHS = ("/v1/capabilities", "/v1/models/load", "/v1/models/unload", "/v1/cache/flush", "/health", "/metrics")
PROGRAM = """#!/bin/sh
case "$*" in
  *slow.gguf*) sleep 2;;
  *broken.gguf*) echo "it cannot be loaded: broken" >&2; exit 3;;
esac
exec {program} "$@"
"""


def runner_socket(hive: Stack) -> Path:
    return Path(hive.health()["runtime_dir"]) / "runner.sock"


@contextlib.contextmanager
def client_of(hive: Stack, *, role: str = "operator", every_s: float = 0.2) -> Iterator[RunnerClient]:
    token = hive.post("/api/tokens", {"name": f"safebox-{time.monotonic_ns()}", "role": role})["token"]
    with RunnerClient(token, socket=runner_socket(hive), every_s=every_s) as client:
        yield client


def row(name: str, path: Path, *, mb: int = SERVER_MB) -> str:
    return f"[model {name}]\nfile = {path}\ncontext = 65536\nparallel = 2\nvram_mb = {mb}\n"


@contextlib.contextmanager
def on_llama(folder: Path) -> Iterator[Stack]:
    models = llama_models(folder, ("big", "small"))
    rows = row(VARIANT, models["big"]) + row(SMALL, models["small"])
    with stack(config=pool_config(SERVER_MB + 20) + rows + TENANT) as hive:
        yield hive


@contextlib.contextmanager
def on_vllm(folder: Path) -> Iterator[Stack]:
    """The large one at a vLLM, which needs the room of the small one."""
    more, vllm = vllm_row(folder)
    program = folder / "vllm"
    program.write_text(program.read_text().replace("export ", "export VLLM_ALLOW_LONG_MAX_MODEL_LEN=1 ", 1))
    models = llama_models(folder, ("small",))
    rows = vllm.replace("[model delta]", f"[model {VARIANT}]") + "context = 32768\n" + row(SMALL, models["small"])
    with stack(config=pool_config(1520, more=more) + rows + TENANT) as hive:
        yield hive


@contextlib.contextmanager
def on_ollama(_: Path) -> Iterator[Stack]:
    with fake_ollama("--layer-bytes", str(30 << 20), "--context", "32768", "big:q4_0", "small") as server:
        port = server.address.rpartition(":")[2]
        rows = (
            f"[model {VARIANT}]\nbackend = ollama\nfile = big:q4_0\n[model {SMALL}]\nbackend = ollama\nfile = small\n"
        )
        config = f"[inference]\nport = {port}\n[pool]\nreserve_mb = 0\ncpu_mb = 100\naudience_s = 1\n{rows}{TENANT}"
        with stack(url=server.url, config=config) as hive:
            yield hive


@pytest.mark.parametrize(
    "kind",
    [on_llama, on_ollama, pytest.param(on_vllm, marks=[pytest.mark.vllm, pytest.mark.timeout(600)])],
    ids=["llama", "ollama", "vllm"],
)
def test_a_client_of_the_specification_drives_it_and_does_not_know_what_is_there(
    kind: Callable[[Path], contextlib.AbstractContextManager[Stack]], tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    every_s = 5.0 if kind is on_vllm else 0.2  # a vLLM takes tens of seconds, as the specification reckons
    with kind(tmp_path) as hive, client_of(hive, every_s=every_s) as client:
        told = client.get("/v1/capabilities")
        assert {"runnerType", "runnerId", "models", "resources", "queue", "capabilities", "health"} == set(told)
        assert {VARIANT, SMALL} <= set(told["models"]["available"])
        loaded = client.execute_model_load({"modelId": SMALL})
        assert (loaded["modelId"], loaded["verified"]) == (SMALL, True)
        assert loaded["gpuMemoryUsedMB"] > 0

        response = client.post("/v1/models/load", LOAD)
        assert response.status_code == 202
        task = response.json()
        assert (task["status"], task["progress"], task["taskId"][:5]) == ("loading", 0.0, "load-")
        result = client.poll_model_load_task(task["taskId"])
        assert (result["modelId"], result["verified"]) == (BIG, True)
        told = client.get("/v1/capabilities")
        names = {model["id"] for model in told["models"]["loaded"]}
        assert (VARIANT in names, SMALL in names) == (True, False)
        split, metrics = told["resources"], client.http.get("/metrics").text
        is_vllm, is_ollama = kind is on_vllm, kind is on_ollama
        assert ("weightsSizeMB" in split) is not is_ollama, "its own files are none that Hive reads"
        assert (split.get("kvCacheSizeMB", 0) > 0) is (kind is on_llama)
        assert ("kvCacheUtilization" in split, "\nvllm_kv_cache_usage{" in metrics) == (is_vllm, is_vllm)
        assert 0 <= split.get("kvCacheUtilization", 0.0) <= 1
        assert ("\nvllm_gpu_memory_weights{" in metrics) is not is_ollama
        assert client.get(f"/v1/models/load/{task['taskId']}")["loadTimeMs"] > 0

        answer = client.post("/v1/chat/completions", {"model": VARIANT, **CHAT}, **HEADERS)
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-cache-hit"] in ("true", "false")
        for name in ("x-cache-tokens-reused", "x-queue-wait-ms", "x-gpu-time-ms"):
            assert answer.headers[name].isdigit(), name
        flushed = client.post("/v1/cache/flush", FLUSH)
        assert (flushed.status_code, flushed.json()["flushed"]) == (200, True), flushed.text

        client.execute_model_load({"modelId": SMALL})
        gone = client.post("/v1/models/unload", UNLOAD)
        assert gone.status_code == 200, gone.text
        assert (gone.json()["modelId"], gone.json()["kvCacheFlushed"]) == (SMALL, True)
        assert gone.json()["gpuMemoryFreedMB"] > 0
        health = client.get("/health")
        assert health["status"] in ("healthy", "degraded")
        assert {"uptime", "modelsLoaded", "queueDepth"} <= set(health)
        counted = f'vllm_requests_total{{model="{VARIANT}",status="success",tenant="community-x"}} 1.0'
        until(lambda: counted in client.http.get("/metrics").text, within_s=10, what="the request is counted")


# what goes wrong ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def faulty_config(folder: Path) -> str:
    """Four models, room for two; one comes slowly, one never, and one is too large for any room."""
    names = ("alpha", "beta", "slow", "broken", "huge")
    models = llama_models(folder, names)
    program = folder / "llama-server"
    program.write_text(PROGRAM.format(program=llama.program()))
    program.chmod(0o755)
    rows = "".join(row(name, models[name], mb=4000 if name == "huge" else SERVER_MB) for name in names)
    config = pool_config(2 * SERVER_MB + 20).replace(f"llama_program = {llama.program()}", f"llama_program = {program}")
    return config + rows + TENANT


@pytest.fixture(scope="module")
def hive(folder: Path) -> Iterator[Stack]:
    config = faulty_config(folder).replace("[pool]\n", "[pool]\ndrain_s = 2\n")
    with stack(config=config + f"[runner]\nport = {free_port()}\nid = safebox-model-llm-1\n") as hive:
        yield hive


@pytest.fixture
def client(hive: Stack) -> Iterator[RunnerClient]:
    with client_of(hive) as client:
        yield client
        for model in ("alpha", "beta", "slow"):
            client.post("/v1/models/unload", {"modelId": model, "force": True})


def slots(hive: Stack) -> dict[str, Any]:
    return {slot["model"]: slot for slot in hive.get("/api/pool")["slots"]}


def error_of(response: httpx.Response) -> tuple[int, str]:
    assert set(response.json()) == {"error"}
    assert response.json()["error"]["message"]
    return response.status_code, response.json()["error"]["code"]


def refused(client: RunnerClient, path: str, **body: Any) -> tuple[int, str]:
    return error_of(client.post(path, body))


def loaded(client: RunnerClient, model: str) -> None:
    assert client.execute_model_load({"modelId": model})["modelId"] == model


@pytest.mark.parametrize("path", PATHS)
def test_without_a_good_token_nothing_is_told(hive: Stack, path: str) -> None:
    for token in ("", "hive_" + "x" * 43):
        with RunnerClient(token, socket=runner_socket(hive)) as nobody:
            assert error_of(nobody.http.get(path)) == (401, "unauthorized")
            chat = nobody.post("/v1/chat/completions", {"model": "alpha", **CHAT})
            assert error_of(chat) == (401, "unauthorized")


def tcp_port(hive: Stack) -> int:
    line = next(line for line in hive.log.splitlines() if "proxy_ready" in line)
    return int(line.partition("runner_port=")[2].split()[0])


def test_bodies_of_strangers_at_the_tcp_port_do_not_hold_up_who_has_a_token(hive: Stack) -> None:
    """They were read whole and sent to the daemon, before anybody looked at their token."""
    url = f"http://127.0.0.1:{tcp_port(hive)}"
    content = b'{"modelId":"' + b"x" * (1 << 20) + b'"}'

    def ask(_: int) -> int:
        with RunnerClient("hive_wrong", url=url) as nobody:
            return nobody.http.post("/v1/models/load", content=content[: 1 << 20]).status_code

    with ThreadPoolExecutor(8) as threads, client_of(hive) as client:
        asked = [threads.submit(ask, number) for number in range(64)]
        assert client.get("/v1/capabilities")["runnerId"] == "safebox-model-llm-1"
        assert {one.result() for one in asked} == {401}
    assert "api_refused" not in hive.log, "the daemon has not seen them"


def test_a_viewer_sees_and_orders_nothing(hive: Stack) -> None:
    with client_of(hive, role="viewer") as viewer:
        assert viewer.get("/v1/capabilities")["runnerId"] == "safebox-model-llm-1"
        for path in ("/v1/models/load", "/v1/models/unload"):
            assert refused(viewer, path, modelId="alpha") == (403, "not_permitted")
        assert error_of(viewer.post("/v1/chat/completions", {"model": "alpha", **CHAT})) == (403, "not_permitted")


def test_a_revoked_token_is_none_from_then_on(hive: Stack) -> None:
    token = hive.post("/api/tokens", {"name": "gone", "role": "operator"})["token"]
    with RunnerClient(token, socket=runner_socket(hive)) as client:
        assert client.http.get("/v1/models").status_code == 200
        hive.client()._ask("DELETE", "/api/tokens/gone", None, {}, 10)
        until(lambda: client.http.get("/v1/models").status_code == 401, within_s=5, what="the proxy has heard of it")
        assert client.http.get("/v1/capabilities").status_code == 401


@pytest.mark.parametrize("path", [*PATHS, "/v1/models/load/load-1"])
def test_an_agent_is_refused_at_its_own_listener(hive: Stack, path: str) -> None:
    if not any(agent["name"] == "alice" for agent in hive.get("/api/agents")["agents"]):
        hive.create("alice", "idler.py")
    access = hive.get("/api/agents/alice/tokens")
    with httpx.Client(headers={"Authorization": f"Bearer {access['model']}"}, trust_env=False) as agent:
        for method in ("GET", "POST"):
            answer = agent.request(method, access["openai_base_url"].removesuffix("/v1") + path)
            assert answer.status_code == 403, (method, path, answer.text)


def test_it_is_on_tcp_too_where_a_port_is_set(hive: Stack) -> None:
    port = tcp_port(hive)
    token = hive.post("/api/tokens", {"name": "tcp", "role": "operator"})["token"]
    with RunnerClient(token, url=f"http://127.0.0.1:{port}") as client:
        assert client.get("/v1/capabilities")["runnerId"] == "safebox-model-llm-1"
        origin = hive.get("/api/audit", act="order.runner_unload")["rows"]
        assert refused(client, "/v1/models/unload", modelId="nobody") == (404, "model_not_found")
        rows = hive.get("/api/audit", act="order.runner_unload")["rows"]
        assert len(rows) == len(origin) + 1
        assert (rows[0]["actor"], rows[0]["origin"]) == ("token:tcp", "runner:127.0.0.1")


def test_capabilities_are_five_seconds_old_at_most_and_say_so(client: RunnerClient) -> None:
    answer = client.http.get("/v1/capabilities")
    seconds = int(answer.headers["cache-control"].partition("max-age=")[2])
    assert 0 <= seconds <= 5
    assert client.get("/v1/capabilities") == answer.json()


def test_each_wrong_load_is_refused_before_anything_moves(hive: Stack, client: RunnerClient) -> None:
    loaded(client, "beta")
    before = {name: slot["state"] for name, slot in slots(hive).items()}
    load = "/v1/models/load"
    unknown = client.post(load, {"modelId": "nobody"})
    assert error_of(unknown) == (404, "model_not_found")
    assert "hive model pull" in unknown.json()["error"]["hint"]
    assert refused(client, load, modelId="/etc/passwd") == (404, "model_not_found")
    assert refused(client, load, modelId="../../etc/passwd") == (404, "model_not_found")
    assert refused(client, load, modelId="alpha", quantization="awq-4bit") == (400, "bad_request")
    assert refused(client, load, modelId="alpha", maxContextLength=32769) == (400, "bad_request")
    assert refused(client, load, modelId="alpha", evictModel="nobody") == (404, "model_not_found")
    assert refused(client, load, modelId="alpha", nonsense=1) == (400, "bad_request")
    assert refused(client, load) == (400, "bad_request")
    small = client.post(load, {"modelId": "alpha", "gpuMemoryBudgetMB": 3})
    assert error_of(small) == (409, "insufficient_memory")
    assert small.json()["error"]["freeMB"] == 3
    assert small.json()["error"]["neededMB"] > 3
    huge = client.post(load, {"modelId": "huge", "evictModel": "beta"})
    assert error_of(huge) == (409, "insufficient_memory")
    assert huge.json()["error"]["neededMB"] == 4000
    assert error_of(client.post(load, {"modelId": "huge"})) == (409, "insufficient_memory")
    assert {name: slot["state"] for name, slot in slots(hive).items()} == before


def test_a_model_that_is_loading_is_busy(client: RunnerClient) -> None:
    task = client.post("/v1/models/load", {"modelId": "slow"}).json()
    assert refused(client, "/v1/models/load", modelId="slow") == (409, "model_busy")
    assert refused(client, "/v1/models/unload", modelId="slow") == (409, "model_busy")
    seen: list[dict[str, Any]] = []
    client.poll_model_load_task(task["taskId"], seen.append)
    shares = [status["progress"] for status in seen if status["status"] == "loading" and "progress" in status]
    assert shares == sorted(shares)
    assert all(0 <= share < 1 for share in shares)
    assert client.post("/v1/models/load", {"modelId": "slow"}).json()["status"] == "completed"


def test_a_pinned_model_neither_leaves_nor_makes_room(hive: Stack, client: RunnerClient) -> None:
    loaded(client, "beta")
    hive.post("/api/models/beta/pin")
    assert refused(client, "/v1/models/load", modelId="alpha", evictModel="beta") == (409, "model_busy")
    assert refused(client, "/v1/models/unload", modelId="beta") == (409, "model_busy")
    hive.post("/api/models/beta/unpin")


def test_a_model_with_requests_stays_unless_it_is_forced(client: RunnerClient) -> None:
    loaded(client, "alpha")
    with ThreadPoolExecutor() as threads:
        body = {"model": "alpha", **CHAT, "max_tokens": 30_000, "stream": True}
        asked = threads.submit(client.post, "/v1/chat/completions", body)
        until(lambda: client.get("/health") and _in_flight(client), within_s=10, what="the request is there")
        assert refused(client, "/v1/models/unload", modelId="alpha") == (409, "model_busy")
        assert client.http.get("/v1/models").status_code == 200
        gone = client.post("/v1/models/unload", {"modelId": "alpha", "force": True})
        assert gone.status_code == 200, gone.text
        with contextlib.suppress(httpx.TransportError):
            asked.result()


def _in_flight(client: RunnerClient) -> bool:
    return "hive_queue_running 1.0" in client.http.get("/metrics").text


def test_evict_model_comes_back_where_the_load_fails(hive: Stack, client: RunnerClient) -> None:
    loaded(client, "alpha")
    loaded(client, "beta")
    task = client.post("/v1/models/load", {"modelId": "broken", "evictModel": "beta"}).json()
    with pytest.raises(RuntimeError, match="it cannot be loaded: broken"):
        client.poll_model_load_task(task["taskId"])
    until(lambda: slots(hive)["beta"]["state"] == "ready", within_s=20, what="beta is back")
    assert slots(hive)["alpha"]["state"] == "ready"
    failed = client.get(f"/v1/models/load/{task['taskId']}")
    assert (failed["status"], failed["modelId"]) == ("failed", "broken")
    assert "gpuMemoryUsedMB" not in failed


def test_nobody_else_is_given_what_was_evicted_until_the_load_is_over(hive: Stack, client: RunnerClient) -> None:
    loaded(client, "alpha")
    loaded(client, "beta")
    hive.post("/api/models/alpha/pin")
    task = client.post("/v1/models/load", {"modelId": "slow", "evictModel": "beta"}).json()
    with ThreadPoolExecutor() as threads:
        waiting = threads.submit(client.post, "/v1/chat/completions", {"model": "beta", **CHAT})
        states = set()
        while client.get(f"/v1/models/load/{task['taskId']}")["status"] == "loading":
            states.add((slots(hive)["beta"]["state"], slots(hive)["slow"]["state"]))
        assert ("loading", "loading") not in states
        assert client.get(f"/v1/models/load/{task['taskId']}")["status"] == "completed"
        assert waiting.result().status_code == 200  # its turn comes after that
    hive.post("/api/models/alpha/unpin")


def test_a_flush_wants_what_its_scope_is_about(client: RunnerClient) -> None:
    flush = "/v1/cache/flush"
    assert refused(client, flush, scope="tenant") == (400, "bad_request")
    assert refused(client, flush, scope="everything") == (400, "bad_request")
    assert refused(client, flush, scope="model", modelId="nobody") == (404, "model_not_found")
    loaded(client, "alpha")
    everything = client.post(flush, {"scope": "all"})
    assert everything.json().get("flushed") is True, everything.text


def test_a_task_that_never_was_is_not_found(client: RunnerClient) -> None:
    for path in ("/v1/models/load/load-000000000000", "/v1/models/load/nonsense", "/v1/models/load/load-..%2F"):
        assert client.http.get(path).status_code == 404


def test_a_body_beyond_a_megabyte_and_one_that_is_no_json_are_refused(client: RunnerClient) -> None:
    load = "/v1/models/load"
    assert error_of(client.post(load, {"modelId": "x" * (1 << 20)})) == (413, "too_large")
    assert error_of(client.http.post(load, content=b"[" * 100_000)) == (400, "bad_request")
    assert error_of(client.http.post(load, content=b"modelId=alpha", headers={"Content-Type": "text/plain"}))[0] == 415
    twice = b'{"modelId": "alpha", "modelId": "beta"}'
    assert error_of(client.http.post(load, content=twice)) == (400, "bad_request")
    assert error_of(client.http.get("/v1/capabilities?x=1")) == (400, "bad_request")


def test_raw_nonsense_at_the_listener_is_answered_as_everywhere(hive: Stack) -> None:
    for said in (
        b"NONSENSE\r\n\r\n",
        b"POST /v1/models/load HTTP/1.1\r\nhost: h\r\ncontent-length: 9999999999\r\n\r\n",
    ):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(60)
            sock.connect(str(runner_socket(hive)))
            sock.sendall(said)
            assert sock.recv(4096).startswith(b"HTTP/1.1 4")


# the word of signers ------------------------------------------------------------------------------------------------


def signed_body(hive: Stack, params: dict[str, Any], *names: str) -> dict[str, Any]:
    """The params with the token of these signers beside them."""
    now, box = int(time.time()), hive.get("/api/governance")["box"]
    made = Operation("model-load", box, params, now, now + 300, secrets.token_hex(16))
    return {**params, "verifiedOpToken": signed(made.as_json(), *names).as_token()}


@pytest.fixture
def governed(hive: Stack) -> Iterator[None]:
    """A load of a model needs the word of two."""
    rules = hive.state.parent / "governance.toml"
    keys = "".join(f'{name} = "{key.public.text}"\n' for name, key in KEYS.items())
    rules.write_text(f'[signers]\n{keys}[rules.model-load]\nthreshold = 2\nof = ["ann", "ben"]\n')
    rules.chmod(0o644)
    yield
    rules.unlink()


@pytest.mark.usefixtures("governed")
def test_a_load_needs_the_word_of_its_signers_for_each_member_of_its_body(hive: Stack, client: RunnerClient) -> None:
    load, params = "/v1/models/load", {"modelId": "alpha", "maxContextLength": 32768, "gpuMemoryBudgetMB": 40000}
    assert error_of(client.post(load, params)) == (403, "op_token_required")
    assert error_of(client.post(load, signed_body(hive, params, "ann", "ann"))) == (403, "op_token_threshold")
    body = signed_body(hive, params, "ann", "ben")
    for other in ({"modelId": "beta"}, {"gpuMemoryBudgetMB": 40001}, {"evictModel": "beta"}):
        assert error_of(client.post(load, {**body, **other})) == (409, "op_token_mismatch")
    assert slots(hive)["alpha"]["state"] == "cold"
    task = client.post(load, body)
    assert task.status_code == 202, task.text
    client.poll_model_load_task(task.json()["taskId"])
    assert error_of(client.post(load, body)) == (409, "op_token_replayed")
    (model,) = [one for one in _fresh(client)["models"]["loaded"] if one["id"] == "alpha"]
    assert model["deployedBy"].startswith("token:safebox-")


def _fresh(client: RunnerClient) -> Any:
    """The capabilities, once what was told before is too old."""
    told = client.http.get("/v1/capabilities")
    time.sleep(1 + int(told.headers["cache-control"].partition("max-age=")[2]))
    return client.get("/v1/capabilities")


# kill -9 in the middle of a load ------------------------------------------------------------------------------------


def server_pid(hive: Stack, model: str) -> int:
    """The process that is to become the model's server, of this Hive."""
    assert hive.process is not None
    for process in psutil.Process(hive.process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            if any(word.endswith(f"/{model}.gguf") for word in words) and words[0] in ("/bin/sh", "sh"):
                return int(process.pid)
    raise LookupError(model)


@pytest.mark.parametrize("victim", ["daemon", "sandbox", "server"])
def test_a_load_ends_truthfully_whoever_is_killed_in_it(folder: Path, victim: str) -> None:
    with stack(config=faulty_config(folder)) as hive, client_of(hive) as client:
        loaded(client, "alpha")
        loaded(client, "beta")
        task = client.post("/v1/models/load", {"modelId": "slow", "evictModel": "beta"}).json()["taskId"]
        until(lambda: slots(hive)["slow"]["state"] == "loading", within_s=20, what="slow is being loaded")
        if victim == "server":
            os.kill(until(lambda: server_pid(hive, "slow"), within_s=10, what="its server"), signal.SIGKILL)
        else:
            hive.kill(victim)

        def ended() -> Any:
            answer = client.http.get(f"/v1/models/load/{task}")
            assert answer.status_code in (200, 503), answer.text
            return answer.status_code == 200 and answer.json()["status"] != "loading" and answer.json()

        told = until(ended, within_s=60, what="the task has ended")
        now = slots(hive)
        if told["status"] == "completed":
            assert now["slow"]["state"] == "ready"
        else:
            assert told["error"]
            until(lambda: slots(hive)["beta"]["state"] == "ready", within_s=30, what="beta is back")
        until(lambda: slots(hive)["alpha"]["state"] == "ready", within_s=30, what="alpha was not touched")
        assert client.get(f"/v1/models/load/{task}") == told  # for ever


def test_while_the_daemon_is_away_it_is_503_with_a_time_to_come_again(hive: Stack, client: RunnerClient) -> None:
    hive.kill("daemon")
    answer = client.http.get("/v1/capabilities")
    assert answer.status_code in (200, 503)
    if answer.status_code == 503:
        assert error_of(answer)[1] == "not_ready"
        assert int(answer.headers["retry-after"]) > 0
    until(lambda: client.http.get("/v1/capabilities").status_code == 200, within_s=30, what="it is back")
