"""Flushes of an Ollama, by unloading and loading: a stand-in that keeps and unloads models as Ollama does; and of a
Hive with nothing that keeps prompts."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from hive.errors import NotSupported
from tests.fakes.programs import Program, fake_ollama
from tests.journeys.stack import Stack, stack, until

pytestmark = pytest.mark.redis
MODEL_MB = 60
POOL = "[pool]\nreserve_mb = 0\ncpu_mb = 200\n[model alpha]\nbackend = ollama\n"


@pytest.fixture(scope="module")
def server() -> Iterator[Program]:
    words = ("--words", "2", "--word-s", "0.1")
    with fake_ollama("--layer-bytes", str(MODEL_MB << 19), *words, "alpha", "other") as server:
        yield server


@pytest.fixture(scope="module")
def hive(server: Program) -> Iterator[Stack]:
    config = f"[inference]\nport = {server.address.rpartition(':')[2]}\n{POOL}"
    with stack(url=server.url, config=config) as hive:
        yield hive


def loads(server: Program) -> list[str]:
    found: list[str] = server.get("/fake/loads").json()["loads"]
    return found


def chat(hive: Stack, model: str) -> None:
    access = hive.get("/api/system/access")
    body = {"model": model, "messages": [{"role": "user", "content": "Hello"}]}
    asked = httpx.post(
        f"{access['openai_base_url']}/chat/completions",
        json=body,
        headers={"authorization": f"Bearer {access['token']}"},
        timeout=60,
        trust_env=False,
    )
    assert asked.status_code == 200, asked.text


@pytest.mark.parametrize(
    ("scope", "again"),
    [
        ({"scope": "model", "model": "other:latest"}, {"other:latest"}),
        ({"scope": "model", "model": "alpha"}, {"alpha:latest"}),
        ({"scope": "tenant", "tenant": "default"}, {"alpha:latest", "other:latest"}),
        ({"scope": "all"}, {"alpha:latest", "other:latest"}),
    ],
)
def test_the_models_are_loaded_anew(hive: Stack, server: Program, scope: dict[str, str], again: set[str]) -> None:
    for model in ("alpha", "other"):
        chat(hive, model)
    before = len(loads(server))
    told: Any = hive.post("/api/cache/flush", scope)
    job = hive.get(f"/api/jobs/{told['id']}", wait_s=60)
    assert (job["state"], told["entries_removed"]) == ("done", None)
    until(lambda: set(loads(server)[before:]) == again, within_s=20, what="they are loaded again")
    for model in ("alpha", "other"):
        chat(hive, model)
    assert len(loads(server)) == before + len(again), "and each once"


def unloads(server: Program, model: str) -> int:
    asked = server.get("/fake/asked").json()["asked"]
    return sum(one["model"] == model and one["keep_alive"] == 0 for one in asked)


@pytest.mark.parametrize("model", ["other:latest", "alpha"])
def test_beside_requests_the_model_is_unloaded_once_and_none_of_them_fails(
    hive: Stack, server: Program, model: str
) -> None:
    """It was ordered to go 43 times, and loaded 12 times in 6 s, by the flush and by requests in turn."""
    chat(hive, model)
    tagged = model if ":" in model else f"{model}:latest"
    loaded, unloaded = loads(server).count(tagged), unloads(server, tagged) + unloads(server, model) * (tagged != model)
    is_over, answered = threading.Event(), []

    def ask() -> None:
        while not is_over.is_set():
            chat(hive, model)
            answered.append(1)

    with ThreadPoolExecutor(4) as pool:
        asking = [pool.submit(ask) for _ in range(4)]
        try:
            until(lambda: len(answered) >= 8, within_s=30, what="requests are under way")
            told: Any = hive.post("/api/cache/flush", {"scope": "model", "model": model})
            assert hive.get(f"/api/jobs/{told['id']}", wait_s=60)["state"] == "done"
            before = len(answered)
            until(lambda: len(answered) >= before + 8, within_s=30, what="requests go on after it")
        finally:
            is_over.set()
        for one in asking:
            one.result()
    assert loads(server).count(tagged) == loaded + 1
    after = unloads(server, tagged) + unloads(server, model) * (tagged != model)
    assert after == unloaded + 1


@pytest.mark.wide
def test_the_demo_backend_keeps_nothing_that_could_be_flushed(tmp_path: Path) -> None:
    with stack() as hive:
        with pytest.raises(NotSupported):
            hive.post("/api/cache/flush", {"scope": "all"})
        command = [sys.executable, "-m", "hive", "cache", "flush", "--all", "--json", "--state-dir", str(hive.state)]
        failed = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
        assert (failed.returncode, json.loads(failed.stderr)["code"]) == (4, "not_supported")
        rows = hive.get("/api/audit", act="order.flush_cache")["rows"]
        assert {row["outcome"] for row in rows} == {"not_supported"}
