"""The counters of a prefix cache: of the real llama-server, and of servers that tell none."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from hive.backends import vllm
from hive.backends.backend import open_backend
from hive.backends.counters import PrefixCache
from hive.domain import BackendKind
from tests.fakes.programs import fake_backend
from tests.llama import LlamaServer


@pytest.mark.llama
async def test_a_prompt_that_is_asked_again_is_counted_as_hit(llama_server: LlamaServer) -> None:
    backend = open_backend(BackendKind.LLAMA, llama_server.address)
    prompt = "counted twice: " + "once upon a time " * 8
    before = await backend.prefix_cache()
    cached = [_cached(llama_server, prompt) for _ in range(2)]
    after = await backend.prefix_cache()
    assert before is not None
    assert after is not None
    assert after.hit - before.hit == cached[0] + cached[1]
    assert after.queried - before.queried > cached[1] > 0


def _cached(server: LlamaServer, prompt: str) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "id_slot": 0}
    usage = httpx.post(f"{server.url}/v1/completions", json=body, trust_env=False).json()["usage"]
    return int(usage["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("kind", [BackendKind.OLLAMA, BackendKind.DEMO, BackendKind.VLLM])
async def test_who_tells_no_counters_or_does_not_answer_has_none(kind: BackendKind, tmp_path: Path) -> None:
    assert await open_backend(kind, str(tmp_path / "gone.sock")).prefix_cache() is None


async def test_metrics_without_the_counters_tell_none() -> None:
    with fake_backend("llama") as server:
        assert await open_backend(BackendKind.LLAMA, server.address).prefix_cache() is None


def test_the_counters_of_several_engines_are_one_sum() -> None:
    lines = [
        b'vllm:prefix_cache_%s_total{engine="%d",model_name="tiny"} %d.0' % (what, engine, count)
        for what, counts in ((b"queries", (700, 1300)), (b"hits", (640, 0)))
        for engine, count in enumerate(counts)
    ]
    assert vllm.cached_in(b"\n".join(lines)) == PrefixCache(queried=2000, hit=640)
    assert vllm.cached_in(lines[0]) is None


async def test_the_share_of_the_cache_in_use_is_the_servers_own_figure_or_unknown(tmp_path: Path) -> None:
    with fake_backend("llama") as server:
        assert await open_backend(BackendKind.LLAMA, server.address).kv_usage() is None
    for kind in BackendKind:
        assert await open_backend(kind, str(tmp_path / "gone.sock")).kv_usage() is None


@pytest.mark.llama
async def test_a_llama_server_of_today_does_not_tell_how_much_of_its_cache_is_in_use(llama_server: LlamaServer) -> None:
    """The day it does, docs/runner.md is to say so."""
    assert await open_backend(BackendKind.LLAMA, llama_server.address).kv_usage() is None
