"""Flushes of a real llama-server, of the pool and in use: what is reused before and after, and what goes wrong."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest

from hive.errors import BadRequest, HiveError, NotFound
from tests.journeys.pool_stack import llama_models, llama_rows, pool_config
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL, LlamaServer, serve

pytestmark = [pytest.mark.redis, pytest.mark.engines, pytest.mark.llama, pytest.mark.timeout(300)]
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8
DONE = "data: [DONE]"
OURS = "alpha"
"""A model of the pool, whose server Hive starts."""


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    folder = tmp_path_factory.mktemp("llama")
    with serve(folder, more=("--slots", "--slot-save-path", str(folder), "--cache-ram", "0")) as server:
        yield server


@pytest.fixture(scope="module")
def hive(llama: LlamaServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    models = llama_models(tmp_path_factory.mktemp("models"), [OURS])
    config = pool_config(400) + llama_rows(models) + "[daemon]\nbackend_check_s = 0.2\n"
    with stack(url=llama.url, config=config) as hive:
        yield hive


class Asker:
    """An operator that asks for a tenant."""

    def __init__(self, hive: Stack, tenant: str = "default", **headers: str) -> None:
        access = hive.get("/api/system/access")
        self.url = access["openai_base_url"].removesuffix("/v1")
        self.headers = {"authorization": f"Bearer {access['token']}", "x-tenant-id": tenant, **headers}

    def cached(self, model: str, prompt: str = PROMPT) -> int:
        """Tokens of this prompt that were reused."""
        body = {"model": model, "prompt": prompt, "max_tokens": 1}
        told = httpx.post(
            f"{self.url}/v1/completions", json=body, headers=self.headers, timeout=60, trust_env=False
        ).json()
        return int(told["usage"]["prompt_tokens_details"]["cached_tokens"])

    def stream(self, model: str, tokens: int, begun: threading.Event | None = None) -> str:
        """The reason for which a stream of so many tokens ended."""
        body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True}
        last = ""
        with (
            contextlib.suppress(httpx.RemoteProtocolError),  # it was cut: the last line says why
            httpx.stream(
                "POST", f"{self.url}/v1/completions", json=body, headers=self.headers, timeout=120, trust_env=False
            ) as answer,
        ):
            for line in answer.iter_lines():
                if begun is not None and line:
                    begun.set()
                last = line or last
        return last


@contextlib.contextmanager
def standing_still(hive: Stack, model: str) -> Iterator[int]:
    """Its server, which ends no answer meanwhile."""
    (pid,) = [pid for pid in hive.servers() if model in psutil.Process(pid).cmdline()]
    os.kill(pid, signal.SIGSTOP)
    yield pid
    with contextlib.suppress(ProcessLookupError):  # it was killed
        os.kill(pid, signal.SIGCONT)


def flushed(hive: Stack, **scope: str) -> Any:
    return hive.post("/api/cache/flush", scope)


def ended(hive: Stack, job: str) -> Any:
    return hive.get(f"/api/jobs/{job}", wait_s=60)


@pytest.mark.parametrize("model", [OURS, MODEL])
def test_nothing_is_reused_after_a_flush(hive: Stack, model: str) -> None:
    asker = Asker(hive)
    asker.cached(model)
    assert asker.cached(model) > 50
    for scope in ({"scope": "model", "model": model}, {"scope": "tenant", "tenant": "default"}, {"scope": "all"}):
        told = flushed(hive, **scope)
        assert told["flushed"]
        is_ours_alone = scope.get("model") == OURS
        assert [("--cache-ram" in one, OURS in one) for one in told["left_out"]] == [(True, False)] * (
            not is_ours_alone
        )
        assert told["entries_removed"] >= 1
        assert asker.cached(model) == 0
        assert asker.cached(model) > 50, "what came after the flush is kept again"


def test_a_busy_slot_is_erased_when_its_request_ends(hive: Stack) -> None:
    asker, begun, other = Asker(hive), threading.Event(), "Once upon a time there was a flush. " * 8
    asker.cached(OURS, other)
    assert asker.cached(OURS, other) > 50
    with ThreadPoolExecutor(2) as threads:
        streaming = threads.submit(asker.stream, OURS, 5000, begun)
        assert begun.wait(60)
        with standing_still(hive, OURS):
            flushing = threads.submit(flushed, hive, scope="tenant", tenant="default")
            until(lambda: hive.get("/api/cache")["flushing"], within_s=10, what="the flush is under way")
        assert asker.cached(OURS, other) == 0, "the idle ones are erased at once"
        assert not streaming.done()
        assert streaming.result() == DONE
        told = flushing.result()
    job = ended(hive, told["id"])
    assert (job["state"], job["result"]["flushed"]) == ("done", True)
    assert asker.cached(OURS) == 0
    assert asker.cached(OURS) > 50


def test_a_flush_of_a_tenant_loses_none_of_twenty_streams_of_others(hive: Stack) -> None:
    others = Asker(hive, "others")
    with ThreadPoolExecutor(20) as threads:
        streams = [threads.submit(others.stream, OURS, 400) for _ in range(20)]
        until(lambda: hive.get("/api/queue")["running"], within_s=20, what="some of them run")
        told = flushed(hive, scope="tenant", tenant="default")
        assert [one.result() for one in streams] == [DONE] * 20
    assert ended(hive, told["id"])["state"] == "done"


def test_two_flushes_at_once_are_both_done(hive: Stack) -> None:
    asker = Asker(hive)
    asker.cached(OURS)
    with ThreadPoolExecutor(8) as threads:
        told = list(threads.map(lambda _: flushed(hive, scope="all"), range(8)))
    assert [one["flushed"] for one in told] == [True] * 8
    assert asker.cached(OURS) == 0


def test_a_flush_that_the_daemon_does_not_survive_was_never_done(hive: Stack) -> None:
    asker, begun = Asker(hive), threading.Event()
    with ThreadPoolExecutor(2) as threads:
        streaming = threads.submit(asker.stream, OURS, 12_000, begun)
        assert begun.wait(60)
        flushing = threads.submit(flushed, hive, scope="all")
        [job] = until(lambda: hive.get("/api/cache")["flushing"], within_s=10, what="the flush is under way")
        killed = hive.kill("daemon")
        with pytest.raises(HiveError):
            flushing.result()
        assert streaming.result() == DONE, "it goes on while the daemon is away"
    hive.wait_for_next("daemon", killed)
    told = hive.get(f"/api/jobs/{job}")
    assert (told["state"], told["result"]) == ("failed", None)
    assert flushed(hive, scope="all")["flushed"]
    assert asker.cached(OURS) == 0


def test_the_cache_of_a_server_that_is_killed_meanwhile_went_with_it(hive: Stack) -> None:
    asker, begun = Asker(hive), threading.Event()
    with ThreadPoolExecutor(2) as threads:
        streaming = threads.submit(asker.stream, OURS, 15_000, begun)
        assert begun.wait(60)
        with standing_still(hive, OURS) as pid:
            flushing = threads.submit(flushed, hive, scope="model", model=OURS)
            until(lambda: hive.get("/api/cache")["flushing"], within_s=10, what="the flush is under way")
            os.kill(pid, signal.SIGKILL)
        assert streaming.result() != DONE
        told = flushing.result()
    assert ended(hive, told["id"])["state"] == "done"
    assert asker.cached(OURS) == 0


def test_a_daemon_that_has_just_started_flushes_the_servers_of_the_one_before(hive: Stack) -> None:
    """Until it had taken the pool's servers over it held them for cold, and so for empty."""
    hive.restart("proxy")  # a new one has not been asked for several tenants, which a llama-server cannot keep apart
    asker = Asker(hive)
    asker.cached(OURS)
    assert asker.cached(OURS) > 50
    hive.kill("daemon")
    told = until(lambda: flushed(hive, scope="model", model=OURS), within_s=60, what="the next daemon flushes")
    assert ended(hive, told["id"])["state"] == "done"
    assert asker.cached(OURS) == 0


def test_a_flush_during_a_load_holds_up_neither(hive: Stack) -> None:
    asker = Asker(hive)
    asker.cached(OURS)
    job = hive.post(f"/api/models/{OURS}/unload")
    assert ended(hive, job["id"])["state"] == "done"
    with ThreadPoolExecutor(4) as threads:
        asking = [threads.submit(asker.cached, OURS) for _ in range(3)]
        told = flushed(hive, scope="model", model=OURS)
        assert ended(hive, told["id"])["state"] == "done"
        assert min(one.result() for one in asking) == 0
    assert flushed(hive, scope="model", model=OURS)["flushed"]
    assert asker.cached(OURS) == 0


def test_the_proxy_is_waited_for(hive: Stack) -> None:
    asker = Asker(hive)
    asker.cached(OURS)
    killed = hive.kill("proxy")
    told = flushed(hive, scope="all")
    assert ended(hive, told["id"])["state"] == "done"
    hive.wait_for_next("proxy", killed)
    assert Asker(hive).cached(OURS) == 0


@pytest.mark.parametrize(
    ("scope", "error"),
    [
        ({"scope": "tenant", "tenant": "nobody-ever"}, NotFound),
        ({"scope": "model", "model": "nobody"}, NotFound),
        ({"scope": "tag", "tag": "x" * 65}, BadRequest),
        ({"scope": "tag"}, BadRequest),
        ({"scope": "tenant"}, BadRequest),
        ({"scope": "model"}, BadRequest),
        ({"scope": "model", "model": OURS, "tenant": "default"}, BadRequest),
        ({"scope": "all", "tag": "x"}, BadRequest),
        ({"scope": "everything"}, BadRequest),
        ({"scope": "tenant", "tenant": "../x"}, BadRequest),
        ({}, BadRequest),
    ],
)
def test_what_is_no_scope_flushes_nothing(hive: Stack, scope: dict[str, str], error: type[HiveError]) -> None:
    before = len(hive.get("/api/jobs", limit=1000)["jobs"])
    with pytest.raises(error):
        hive.post("/api/cache/flush", scope)
    assert len(hive.get("/api/jobs", limit=1000)["jobs"]) == before
