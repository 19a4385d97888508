"""A system prompt that a real vLLM (CPU, tiny random model) has read before its agents ask, for each tenant anew."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import pytest

from tests.journeys.prompts import PROMPT, QUESTION, in_common, messages, prewarmed, reused, rows, wanted
from tests.journeys.stack import Stack, stack, until
from tests.vllm import MODEL, SEQUENCES, VllmServer

pytestmark = [pytest.mark.redis, pytest.mark.vllm, pytest.mark.timeout(600)]
BLOCK = 32
"""Tokens it keeps or drops together (`--block-size`, tests/vllm.py)."""
CONFIG = f"[inference]\nvllm_max_sequences = {SEQUENCES}\nvllm_scheduling_policy = priority\n"


@pytest.fixture(scope="module")
def hive(vllm_server: VllmServer) -> Iterator[Stack]:
    with stack(url=vllm_server.url, config=CONFIG) as hive:
        yield hive


def tokens_of(server: VllmServer, conversation: list[dict[str, str]]) -> list[int]:
    """The server's own reading of a conversation."""
    asked = {"model": MODEL, "messages": conversation, "add_generation_prompt": True}
    found: list[int] = httpx.post(f"{server.url}/tokenize", json=asked, trust_env=False).json()["tokens"]
    return found


def test_siblings_reuse_every_whole_block_of_it_and_another_tenant_only_its_own(
    vllm_server: VllmServer, hive: Stack
) -> None:
    whole = tokens_of(vllm_server, messages(PROMPT, "."))
    shared = in_common(whole, tokens_of(vllm_server, messages(PROMPT, QUESTION))) // BLOCK * BLOCK
    assert shared > 200
    for name in ("ann", "ben"):
        hive.post("/api/agents", {"name": name, **wanted(MODEL)})
    until(lambda: rows(hive)[0]["warm_since"], within_s=60, what="it is read")
    assert rows(hive)[0]["tokens"] == len(whole)
    assert reused(hive, "ben", MODEL) == shared
    silent = wanted(MODEL, tenant="silent", prewarm_on_start=False)
    hive.post("/api/agents", {"name": "dan", **silent})
    assert reused(hive, "dan", MODEL) == 0, "nobody has read it for this tenant"
    hive.post("/api/agents", {"name": "eve", **wanted(MODEL, tenant="other")})
    until(lambda: prewarmed(hive) == 2, within_s=60, what="it is read for the other tenant, too")
    assert reused(hive, "eve", MODEL) == shared
    print(f"of {len(whole)} tokens {shared} are kept, in blocks of {BLOCK}")
