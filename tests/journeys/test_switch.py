"""Switching between real inference servers under a whole Hive: what clients see of it, and what a crash leaves."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import llama
from tests.examples import stride
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL, LlamaServer
from tests.ports import free_port
from tests.vllm import VllmServer

QUICK = "[inference]\nswitch_health_tries = 3\nswitch_health_every_s = 0.2\nswitch_drain_s = 20\n"
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
LONG = {"model": MODEL, "prompt": "hello", "max_tokens": 3900, "stream": True, "ignore_eos": True, "logprobs": 5}
"""Takes some seconds: each token costs more with its probabilities."""


@contextmanager
def two_servers(base: Path) -> Iterator[tuple[LlamaServer, LlamaServer]]:
    for name in ("a", "b"):
        (base / name).mkdir()
    with llama.serve(base / "a") as one, llama.serve(base / "b") as other:
        yield one, other


class Standin(ThreadingHTTPServer):
    """Looks like a llama-server; `generates` says what it does when it is asked for a token: True, False, or an event
    it waits for."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", free_port()), _Handler)
        self.generates: bool | threading.Event = True
        self.asked = threading.Event()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


ANSWERS: dict[str, dict[str, Any]] = {
    "/health": {},
    "/props": {"build_info": "b1"},
    "/v1/models": {"data": [{"id": MODEL}]},
}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Standin

    def do_GET(self) -> None:
        self._say(200 if self.path in ANSWERS else 404, ANSWERS.get(self.path, {}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.server.asked.set()
        generates = self.server.generates
        if isinstance(generates, threading.Event):
            generates.wait(60)
        if generates:
            choices = [{"index": 0, "text": "x", "finish_reason": "length"}]
            self._say(200, {"object": "text_completion", "choices": choices, "usage": {"completion_tokens": 1}})
        else:
            self._say(500, {"error": {"message": "CUDA out of memory"}})

    def _say(self, status: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def standin() -> Iterator[Standin]:
    server = Standin()
    yield server
    server.shutdown()
    server.server_close()


def model(hive: Stack) -> httpx.Client:
    """An operator's client of the model, through the proxy."""
    access = hive.get("/api/system/access")
    head = {"authorization": f"Bearer {access['token']}"}
    return httpx.Client(base_url=access["openai_base_url"], headers=head, timeout=60, trust_env=False)


def answered(server: LlamaServer) -> float:
    """The number of tokens it has generated."""
    text = httpx.get(f"{server.url}/metrics", trust_env=False).text
    return float(
        next(line.split()[1] for line in text.splitlines() if line.startswith("llamacpp:tokens_predicted_total"))
    )


def switch(hive: Stack, to: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hive", "backend", "switch", to, "--state-dir", str(hive.state), *more]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def in_use(hive: Stack) -> str:
    return str(hive.get("/api/system/inference")["address"])


def ended_job(hive: Stack) -> dict[str, Any]:
    """The last job, once it has ended; the daemon may be away meanwhile."""
    ended: dict[str, Any] = until(
        lambda: next((job for job in hive.get("/api/jobs")["jobs"][:1] if job["state"] != "running"), None),
        within_s=60,
        what="an ended job",
    )
    return ended


@pytest.mark.wide
@pytest.mark.llama
def test_a_stream_finishes_over_the_switch_and_what_is_asked_meanwhile_is_answered_by_the_new_one(
    tmp_path: Path,
) -> None:
    with two_servers(tmp_path) as (one, other), stack(url=one.url, config=QUICK) as hive, model(hive) as client:
        with client.stream("POST", "/completions", json=LONG) as stream:
            pieces = stream.iter_bytes()
            next(pieces)
            job = hive.post("/api/system/inference", {"backend": other.url})
            until(lambda: "backend_closed" in hive.log, within_s=10, what="the gate to be closed")
            assert "requests for the model wait" in hive.health()["problems"][0]
            at_other, at_one = answered(other), answered(one)
            with ThreadPoolExecutor(8) as pool:
                waiting = [pool.submit(client.post, "/chat/completions", json=CHAT) for _ in range(8)]
                rest = b"".join(pieces)
                answers = [future.result() for future in waiting]
        assert rest.endswith(b"data: [DONE]\n\n")
        assert [answer.status_code for answer in answers] == [200] * 8
        assert answered(other) - at_other == 8 * 4
        assert answered(one) - at_one == 3900
        ended = ended_job(hive)
        assert (ended["id"], ended["state"], ended["result"]["cut"]) == (job["id"], "done", 0)
        assert in_use(hive) == other.address
        kinds = [event["kind"] for event in hive.client().events(tail=50)]
        assert {"job.begun", "job.step", "job.ended", "backend.switched"} <= set(kinds)


@pytest.mark.llama
def test_under_load_nobody_sees_an_error_while_it_goes_to_and_fro(tmp_path: Path) -> None:
    """8 clients ask one after the other, whole and streamed, over six switches; fewer without HIVE_EXAMPLES=all."""
    statuses: list[int] = []
    stop = threading.Event()

    def ask(client: httpx.Client, number: int) -> None:
        while not stop.is_set():
            answer = client.post("/chat/completions", json={**CHAT, "stream": number % 2 == 0, "max_tokens": 16})
            whole = answer.text.endswith("data: [DONE]\n\n") if number % 2 == 0 else bool(answer.json()["usage"])
            statuses.append(answer.status_code if whole else -1)

    with two_servers(tmp_path) as (one, other), stack(url=one.url, config=QUICK) as hive, model(hive) as client:
        with ThreadPoolExecutor(8) as pool:
            asking = [pool.submit(ask, client, number) for number in range(8)]
            try:
                for _ in range(0, 3, stride(3)):
                    assert switch(hive, other.url).returncode == 0
                    assert switch(hive, one.url).returncode == 0
            finally:
                stop.set()
            for future in asking:
                future.result()
        assert set(statuses) == {200}
        assert len(statuses) > 50
        used = hive.get("/api/usage")["totals"]
        until(lambda: hive.get("/api/usage")["totals"]["requests"] == len(statuses), within_s=10, what=f"usage: {used}")
        assert hive.get("/api/usage")["totals"]["cut"] == 0


@pytest.fixture(scope="module")
def begun_on_demo() -> Iterator[Stack]:
    with stack(config=QUICK) as hive:
        yield hive


@pytest.fixture
def on_demo(begun_on_demo: Stack, standin: Standin) -> Iterator[Stack]:
    """A Hive before its own demo backend: that of the other tests, switched back before the stand-in goes."""
    assert "demo.sock" in in_use(begun_on_demo)
    yield begun_on_demo
    assert switch(begun_on_demo, "demo").returncode == 0


def test_one_that_cannot_generate_is_not_switched_to(on_demo: Stack, standin: Standin) -> None:
    """It answers everything else, as vLLM does with a model its kernels cannot run."""
    standin.generates = False
    before = in_use(on_demo)
    said = switch(on_demo, standin.url)
    assert said.returncode == 6, said.stderr
    assert "it answers 500" in said.stderr
    assert "CUDA out of memory" in said.stderr
    assert f"demo at {before} is active as before" in said.stderr
    assert in_use(on_demo) == before
    assert on_demo.health()["status"] == "ok"
    assert switch(on_demo, "http://127.0.0.1:1").returncode == 5
    assert switch(on_demo, "nonsense kind").returncode == 2


def test_by_its_kind_and_back_to_the_demo(on_demo: Stack, standin: Standin) -> None:
    demo = in_use(on_demo)
    assert switch(on_demo, standin.url).returncode == 0
    said = switch(on_demo, "llama", "--json")
    assert json.loads(said.stdout)["result"]["changed"] is False
    assert switch(on_demo, "demo").returncode == 0
    assert in_use(on_demo) == demo
    assert switch(on_demo, "llama").returncode == 0
    listed = {row["backend"]: row for row in on_demo.get("/api/system/backends")["backends"]}
    assert (listed["llama"]["in_use"], listed["demo"]["in_use"], listed["demo"]["answers"]) == (True, False, True)


@pytest.mark.wide
def test_the_choice_outlives_the_daemon_and_not_the_hive(on_demo: Stack, standin: Standin) -> None:
    demo = in_use(on_demo)
    assert switch(on_demo, standin.url).returncode == 0
    on_demo.restart("daemon")
    until(lambda: in_use(on_demo) in standin.url, within_s=60, what="the chosen one")
    on_demo.stop()
    on_demo.start()
    assert in_use(on_demo) == demo


def test_a_daemon_killed_while_the_new_one_is_looked_at_finishes_the_switch(on_demo: Stack, standin: Standin) -> None:
    """And whoever waits for it in the terminal does not notice."""
    hive = on_demo
    standin.generates = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(switch, hive, standin.url)
        standin.asked.wait(60)
        hive.kill("daemon")
        standin.generates.set()
        said = waiting.result()
        assert said.returncode == 0, said.stderr
        assert in_use(hive) in standin.url
        assert ended_job(hive)["state"] == "done"


@pytest.mark.wide
@pytest.mark.llama
def test_a_daemon_killed_while_requests_finish_goes_on_and_no_request_fails(tmp_path: Path) -> None:
    """The next daemon looks at the new server before it closes the gate again: a request that meets the proxy between
    may still be answered by the old one, which runs."""
    with two_servers(tmp_path) as (one, other), stack(url=one.url, config=QUICK) as hive, model(hive) as client:
        with client.stream("POST", "/completions", json=LONG) as stream, ThreadPoolExecutor(1) as pool:
            pieces = stream.iter_bytes()
            next(pieces)
            hive.post("/api/system/inference", {"backend": other.url})
            until(lambda: "backend_closed" in hive.log, within_s=10, what="the gate to be closed")
            waiting = pool.submit(client.post, "/chat/completions", json=CHAT)
            hive.kill("daemon")
            assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
            assert waiting.result().status_code == 200
        assert ended_job(hive)["state"] == "done"
        assert in_use(hive) == other.address


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.llama
def test_killed_anywhere_it_ends_in_a_documented_state_and_no_request_fails(tmp_path: Path) -> None:
    """20 times kill -9 of the daemon at a random moment of a switch, with requests all the time."""
    random_ms = random.Random(5)
    stop = threading.Event()
    statuses: list[int] = []

    def ask(client: httpx.Client) -> None:
        while not stop.is_set():
            statuses.append(client.post("/chat/completions", json=CHAT).status_code)

    with two_servers(tmp_path) as (one, other), stack(url=one.url, config=QUICK) as hive, model(hive) as client:
        with ThreadPoolExecutor(2) as pool:
            asking = [pool.submit(ask, client) for _ in range(2)]
            try:
                for number in range(20):
                    to = other if in_use(hive) == one.address else one
                    job = hive.post("/api/system/inference", {"backend": to.url})
                    time.sleep(random_ms.uniform(0, 0.25))
                    hive.kill("daemon")
                    ended = ended_job(hive)
                    assert ended["id"] == job["id"]
                    now = in_use(hive)
                    assert now == (to.address if ended["state"] == "done" else one.address), (number, ended)
                    until(lambda: hive.health()["status"] == "ok", within_s=60, what=f"health: {hive.health()}")
            finally:
                stop.set()
            for future in asking:
                future.result()
        assert set(statuses) == {200}


@pytest.mark.timeout(600)
@pytest.mark.vllm
@pytest.mark.llama
def test_from_llama_server_to_vllm_and_back(tmp_path: Path, vllm_server: VllmServer) -> None:
    """A stream that waits over the switch is asked for its usage in vLLM's way: what Hive counts is what vLLM did."""
    with llama.serve(tmp_path) as one, stack(url=one.url, config=QUICK) as hive, model(hive) as client:
        with client.stream("POST", "/completions", json=LONG) as stream, ThreadPoolExecutor(1) as pool:
            pieces = stream.iter_bytes()
            next(pieces)
            hive.post("/api/system/inference", {"backend": vllm_server.url})
            until(lambda: "backend_closed" in hive.log, within_s=20, what="the gate to be closed")
            waiting = pool.submit(client.post, "/chat/completions", json={**CHAT, "stream": True})
            assert b"".join(pieces).endswith(b"data: [DONE]\n\n")
            assert waiting.result().text.endswith("data: [DONE]\n\n")
        assert ended_job(hive)["state"] == "done"
        assert hive.get("/api/system/inference")["backend"] == "vllm"
        assert switch(hive, one.url).returncode == 0
        assert client.post("/chat/completions", json=CHAT).status_code == 200
        until(lambda: hive.get("/api/usage")["totals"]["requests"] == 3, within_s=10, what="usage")
        totals = hive.get("/api/usage")["totals"]
        assert (totals["unknown"], totals["tokens_out"]) == (0, 3900 + 4 + 4)
