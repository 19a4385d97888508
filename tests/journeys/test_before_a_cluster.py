"""A whole Hive before a server like Ray Serve that is lost, comes back as another kind, and gives way to a Hive."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from hive.domain import BackendKind
from hive.errors import DependencyDown
from tests.journeys.stack import Stack, stack, until
from tests.journeys.test_cache_flush import Asker, flushed
from tests.ports import free_port

pytestmark = pytest.mark.redis
CHAT = "/v1/chat/completions"
ANSWER = {
    "id": "c",
    "object": "chat.completion",
    "created": 0,
    "model": "m",
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hi"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 7, "completion_tokens": 3, "total_tokens": 10},
}
SCHEMA: dict[str, Any] = {"properties": {"model": {}, "cache_salt": {}, "priority": {}}}
DESCRIBED = {"paths": {CHAT: {"post": {"requestBody": {"content": {"application/json": {"schema": SCHEMA}}}}}}}
RAY = {
    "/v1/models": {"object": "list", "data": [{"id": "m", "owned_by": "somebody"}]},
    "/openapi.json": DESCRIBED,
    "/-/routes": {"/": "llm"},
}
VLLM = {
    "/v1/models": {"object": "list", "data": [{"id": "m", "owned_by": "vllm"}]},
    "/openapi.json": DESCRIBED,
    "/version": {"version": "0.32.0"},
    "/health": {},
}


class Engine:
    """A server at one port, which is killed and started as what a test wants. `salts`: of the chats it got."""

    def __init__(self) -> None:
        self.port = free_port()
        self.salts: list[str | None] = []
        self.answers: dict[str, Any] = {}
        self.is_broken = False
        self._server: http.server.ThreadingHTTPServer | None = None

    def start(self, answers: dict[str, Any]) -> None:
        self.answers = answers
        engine = self

        class Answers(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                found = engine.answers.get(self.path)
                self._say(404 if found is None else 200, found if found is not None else {"detail": "Not Found"})

            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
                engine.salts.append(asked.get("cache_salt"))
                if engine.is_broken:
                    self._say(500, "Internal Server Error", "text/plain")
                else:
                    self._say(200, ANSWER)

            def _say(self, status: int, said: Any, kind: str = "application/json") -> None:
                body = said.encode() if isinstance(said, str) else json.dumps(said).encode()
                self.send_response(status)
                self.send_header("content-type", kind)
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", self.port), Answers)
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    engine = Engine()
    engine.start(RAY)
    yield engine
    engine.stop()


@pytest.fixture(scope="module")
def hive(engine: Engine) -> Iterator[Stack]:
    with stack(
        url=f"http://127.0.0.1:{engine.port}", config="backend_cluster = none\n[tenant ours]\nweight = 1\n"
    ) as hive:
        yield hive


def ask(hive: Stack, tenant: str) -> httpx.Response:
    asker = Asker(hive, tenant)
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
    return httpx.post(f"{asker.url}{CHAT}", json=body, headers=asker.headers, timeout=60, trust_env=False)


def salt_of(hive: Stack, engine: Engine, tenant: str) -> str:
    assert ask(hive, tenant).status_code == 200
    found = engine.salts[-1]
    assert found is not None
    return found


def shown(hive: Stack) -> dict[str, Any]:
    return dict(hive.get("/api/system/inference"))


def test_tenants_are_kept_apart_at_a_server_that_describes_a_salt_and_a_flush_reaches_it(
    hive: Stack, engine: Engine
) -> None:
    told = shown(hive)
    assert (told["backend"], told["version"]) == (BackendKind.REMOTE, "Ray Serve")
    assert told["prefix_cache"] == "separated by tenant (salt), as it describes itself"
    assert told["capabilities"]["salted"] == [CHAT]
    ours, other = salt_of(hive, engine, "ours"), salt_of(hive, engine, "other")
    assert salt_of(hive, engine, "ours") == ours != other
    assert flushed(hive, scope="tenant", tenant="ours")["flushed"]
    (model,) = hive.get("/api/cache")["models"]
    assert (model["flushed_by"], model["why_not"]) == ("salt", "")
    until(lambda: salt_of(hive, engine, "ours") != ours, within_s=5, what="another salt")
    assert salt_of(hive, engine, "other") == other


def test_a_lost_replica_is_hives_502_and_costs_what_is_not_known(hive: Stack, engine: Engine) -> None:
    engine.is_broken = True
    answer = ask(hive, "ours")
    engine.is_broken = False
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["src"]) == (502, "backend_failed", "hive")
    assert error["message"] == "the backend failed (500): Internal Server Error"


def test_one_that_comes_back_as_vllm_is_vllm_for_daemon_and_proxy(hive: Stack, engine: Engine) -> None:
    before = salt_of(hive, engine, "other")
    engine.stop()
    with pytest.raises(DependencyDown, match="is silent"):
        hive.post("/api/models/refresh")
    until(lambda: not shown(hive)["running"], within_s=10, what="down")
    engine.start(VLLM)
    hive.post("/api/models/refresh")
    told = until(lambda: shown(hive)["running"] and shown(hive), within_s=20, what="up")
    assert (told["backend"], told["version"]) == (BackendKind.VLLM, "0.32.0")
    assert told["prefix_cache"] == "separated by tenant (salt)"
    assert salt_of(hive, engine, "other") == before


def test_a_real_hive_is_refused_as_a_backend_of_another(hive: Stack, tmp_path: Path) -> None:
    url = Asker(hive).url
    command = [sys.executable, "-m", "hive", "up", "--state-dir", str(tmp_path / "s"), "--backend", url]
    ended = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env={**os.environ, "NO_COLOR": "1"}
    )
    assert ended.returncode != 0
    said = " ".join((ended.stdout + ended.stderr).split())
    assert "is another Hive, and a Hive is no backend of a Hive: its queue, limits and bill would take all" in said
    assert "name the inference server that it stands before; `hive backend status` there shows its address" in said
    assert not (tmp_path / "s" / "socket").exists()
