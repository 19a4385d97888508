"""Requests under way and settings, seen and steered from outside: a whole Hive over a backend that takes its time."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hive.errors import BadRequest, NotFound
from tests.fakes.programs import fake_backend
from tests.journeys.stack import Stack, stack, until

CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 400, "stream": True}


@pytest.fixture(scope="module")
def hive() -> Iterator[Stack]:
    with (
        fake_backend("vllm", "--token-delay", "0.05", "--tokens", "400") as backend,
        stack(url=backend.address) as found,
    ):
        found.put_config({"proxy.backend_concurrency": 1, "proxy.queue_wait_s": 60})
        yield found


class Asker(threading.Thread):
    """One streamed request in a thread: what its client got of it."""

    def __init__(self, hive: Stack) -> None:
        super().__init__(daemon=True)
        access = hive.get("/api/system/access")
        self._url = access["openai_base_url"] + "/chat/completions"
        self._head = {"Authorization": f"Bearer {access['token']}"}
        self.status = 0
        self.body = b""
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=CHAT, headers=self._head, timeout=60, trust_env=False) as answer:
                self.status = answer.status_code
                for piece in answer.iter_raw():
                    self.body += piece
        except httpx.HTTPError as error:
            self.failure = error


def under_way(hive: Stack, state: str) -> dict[str, Any]:
    """The one request in this state, as soon as there is one."""

    def look() -> Any:
        return [request for request in hive.get("/api/queue")["requests"] if request["state"] == state]

    found: list[dict[str, Any]] = until(look, within_s=10, what=f"a request {state}")
    assert len(found) == 1
    return found[0]


def hive_queue(hive: Stack, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hive", "queue", *words, "--socket", str(hive.client().path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_who_runs_and_who_waits_is_listed_and_each_is_ended_by_its_id(hive: Stack) -> None:
    first = Asker(hive)
    running = under_way(hive, "streaming")
    second = Asker(hive)
    waiting = under_way(hive, "queued")
    queue = hive.get("/api/queue")
    assert (queue["running"], queue["waiting"], queue["slots"]) == (1, 1, 1)
    assert [(tenant["running"], tenant["waiting"]) for tenant in queue["tenants"]] == [(1, 1)]
    assert {running["model"], waiting["model"]} == {"tiny"}
    assert waiting["queue_ms"] > 0
    assert hive.get(f"/api/requests/{running['id']}")["state"] == "streaming"

    listed = hive_queue(hive)
    assert listed.stdout.startswith("1 of 1 running, 1 waiting")
    assert running["id"] in listed.stdout
    ended = hive_queue(hive, "cancel", waiting["id"])
    assert (ended.returncode, ended.stdout) == (0, f"{waiting['id']} is ended\n")
    second.join(10)
    assert (second.status, json.loads(second.body)["error"]["code"]) == (403, "cancelled")
    assert first.is_alive()

    hive.client().delete(f"/api/requests/{running['id']}")
    first.join(10)
    assert first.status == 200
    assert b"[DONE]" not in first.body
    assert "ended this request" in first.body.decode() or first.failure is not None

    def cost() -> Any:
        found = hive.get(f"/api/requests/{running['id']}")
        return found if found["state"] == "ended" else None

    told = until(cost, within_s=10, what="its usage")
    assert (told["cut"], told["backend"], told["name"]) == (True, "vllm", None)
    shown = hive_queue(hive, "show", running["id"])
    assert "did not get a whole answer" in shown.stdout


def test_a_request_that_is_not_under_way_cannot_be_ended(hive: Stack) -> None:
    with pytest.raises(NotFound, match="it has ended, or was never begun"):
        hive.client().delete("/api/requests/nonsense-1")
    with pytest.raises(NotFound, match="there is no request"):
        hive.get("/api/requests/nonsense-1")
    assert hive_queue(hive, "cancel", "nonsense-1").returncode == 3


def value(hive: Stack, name: str) -> tuple[Any, str]:
    found = [one for one in hive.get("/api/config")["settings"] if one["name"] == name]
    return found[0]["value"], found[0]["source"]


def places(hive: Stack) -> Any:
    return hive.get("/api/queue")["slots"]


@pytest.mark.wide
def test_a_setting_changes_while_hive_runs_and_outlives_daemon_and_proxy(hive: Stack) -> None:
    try:
        hive.put_config({"proxy.backend_concurrency": 3, "sleep.deep_after_s": "12"})
        assert value(hive, "proxy.backend_concurrency") == (3, "runtime")
        assert value(hive, "sleep.deep_after_s") == (12.0, "runtime")
        until(lambda: places(hive) == 3, within_s=5, what="the proxy to use it")
        for victim in ("proxy", "daemon"):
            hive.restart(victim)
            until(lambda: places(hive) == 3, within_s=60, what="the same again")
        assert value(hive, "proxy.backend_concurrency") == (3, "runtime")
        hive.put_config({"proxy.backend_concurrency": None})
        assert value(hive, "proxy.backend_concurrency") == (0, "default")
        until(lambda: places(hive) != 3, within_s=5, what="the proxy to use the default")
    finally:
        hive.put_config({"proxy.backend_concurrency": 1, "sleep.deep_after_s": None})


@pytest.mark.wide
def test_of_several_changes_a_wrong_one_keeps_all_from_happening(hive: Stack) -> None:
    before = hive.get("/api/config")
    with pytest.raises(BadRequest) as caught:
        hive.put_config({"proxy.queue_depth": 3, "proxy.window_s": -1, "proxy.port": 1, "proxy.queue_dept": 1})
    assert "proxy.window_s: expected a number above 0, found -1" in caught.value.message
    assert "proxy.port is read at a start" in caught.value.message
    assert "no setting 'proxy.queue_dept'" in caught.value.message
    assert hive.get("/api/config") == before
