"""Flushes of a real vLLM (CPU, tiny random model) by new salts: what it reuses before and after, through kill -9."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.journeys.stack import Stack, stack, until
from tests.journeys.test_cache_flush import DONE, Asker, flushed
from tests.vllm import MODEL, VllmServer

pytestmark = [pytest.mark.redis, pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def hive(vllm_server: VllmServer) -> Iterator[Stack]:
    config = "[tenant ours]\ncache_group = us\n[tenant also-ours]\ncache_group = us\n"
    with stack(url=vllm_server.url, config=config) as hive:
        for name, tenant in (("ann", "default"), ("ben", "other")):  # more than one group
            hive.post("/api/agents", {"name": name, "command": ["/bin/sleep", "1000"], "tenant": tenant})
        yield hive


def warm(asker: Asker) -> int:
    asker.cached(MODEL)
    kept = asker.cached(MODEL)
    assert kept > 50
    return kept


def test_a_flush_of_one_tenant_leaves_what_others_have(hive: Stack) -> None:
    ours, also, other = (Asker(hive, name) for name in ("ours", "also-ours", "other"))
    kept = warm(ours)
    assert also.cached(MODEL) == kept, "they are one group"
    assert warm(other) == kept
    told = flushed(hive, scope="tenant", tenant="ours")
    assert (told["flushed"], told["entries_removed"], told["memory_freed_mb"]) == (True, None, None)
    assert also.cached(MODEL) == 0
    assert ours.cached(MODEL) == kept, "what came after the flush is kept again, for the group"
    assert other.cached(MODEL) == kept


def test_a_flush_of_a_tag_leaves_what_has_another_tag_or_none(hive: Stack) -> None:
    plain, one, two = Asker(hive, "other"), *(Asker(hive, "other", **{"x-cache-tag": tag}) for tag in ("one", "two"))
    kept = warm(one)
    assert warm(plain) == warm(two) == kept
    assert flushed(hive, scope="tag", tag="one")["flushed"]
    assert one.cached(MODEL) == 0
    assert plain.cached(MODEL) == two.cached(MODEL) == kept


@pytest.mark.parametrize("scope", [{"scope": "all"}, {"scope": "model", "model": MODEL}])
def test_a_flush_survives_that_daemon_and_proxy_are_killed(hive: Stack, scope: dict[str, str]) -> None:
    warm(Asker(hive, "other"))
    assert flushed(hive, **scope)["flushed"]
    hive.restart("proxy", "daemon")
    asker = Asker(hive, "other")
    until(
        lambda: httpx.get(f"{asker.url}/v1/models", headers=asker.headers, trust_env=False).json()["data"],
        within_s=60,
        what="the models are known",
    )
    assert asker.cached(MODEL) == 0
    assert asker.cached(MODEL) > 50


def test_anthropics_messages_find_nothing_that_was_flushed(hive: Stack) -> None:
    asker = Asker(hive, "other")
    body = {
        "model": MODEL,
        "max_tokens": 1,
        "messages": [{"role": "user", "content": "The quick brown fox jumps over the lazy dog. " * 8}],
    }

    def reused() -> int:
        answer = httpx.post(
            f"{asker.url}/v1/messages", json=body, headers=asker.headers, timeout=60, trust_env=False
        ).json()
        return int(answer["usage"].get("cache_read_input_tokens") or 0)

    reused()
    assert reused() > 50
    assert flushed(hive, scope="tenant", tenant="other")["flushed"]
    assert reused() == 0
    assert reused() > 50


def test_it_works_while_streams_run_and_ends_none(hive: Stack) -> None:
    asker, begun = Asker(hive, "other"), threading.Event()
    warm(asker)
    with ThreadPoolExecutor(8) as threads:
        streams = [threads.submit(asker.stream, MODEL, 400, begun) for _ in range(8)]
        assert begun.wait(60)
        assert flushed(hive, scope="tenant", tenant="other")["flushed"]
        assert not all(one.done() for one in streams)
        assert [one.result() for one in streams] == [DONE] * 8


def test_the_hit_rate_is_told(hive: Stack) -> None:
    warm(Asker(hive, "other"))
    [row] = until(
        lambda: [one for one in hive.get("/api/cache")["models"] if one["hit_rate"]], within_s=10, what="it is counted"
    )
    assert row["model"] == MODEL
    assert row["hit_rate"] == round(row["tokens_reused"] / row["tokens"], 4)
    told = list(hive.client().lines("/metrics"))
    assert any(line.startswith(b'hive_cache_hit_rate{model="%b"} 0.' % MODEL.encode()) for line in told), told
    assert any(line.startswith(b'hive_cache_flushes_total{scope="tenant"} ') for line in told), told
