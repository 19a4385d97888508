"""A system prompt that a real llama-server has read before its agents ask: what they reuse of it, to the token."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.journeys.prompts import PROMPT, QUESTION, in_common, messages, prewarmed, reused, rows, wanted
from tests.journeys.stack import Stack, stack, until
from tests.llama import MODEL, LlamaServer, serve

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaServer]:
    """One that nobody else asked anything."""
    with serve(tmp_path_factory.mktemp("llama")) as server:
        yield server


@pytest.fixture(scope="module")
def hive(llama: LlamaServer) -> Iterator[Stack]:
    with stack(url=llama.url, config="[daemon]\nbackend_check_s = 0.2\n") as hive:
        yield hive


def tokens_of(server: LlamaServer, messages: list[dict[str, str]]) -> list[int]:
    """The server's own reading of a conversation."""
    with httpx.Client(base_url=server.url, trust_env=False) as client:
        text = client.post("/apply-template", json={"messages": messages}).json()["prompt"]
        asked = {"content": text, "add_special": True, "parse_special": True}
        found: list[int] = client.post("/tokenize", json=asked).json()["tokens"]
        return found


def test_twenty_siblings_have_it_read_once_and_reuse_every_token_of_it(llama: LlamaServer, hive: Stack) -> None:
    whole = tokens_of(llama, messages(PROMPT, "."))
    shared = in_common(whole, tokens_of(llama, messages(PROMPT, QUESTION)))
    assert shared > 200 > len(whole) - shared, "all of the prompt, and hardly anything else"
    names = [f"s{number}" for number in range(20)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: hive.post("/api/agents", {"name": name, **wanted(MODEL)}), names))
    until(lambda: rows(hive)[0]["warm_since"], within_s=20, what="it is read")
    assert reused(hive, "s7", MODEL) == shared
    hive.post("/api/agents/s3/restart")
    until(lambda: rows(hive)[0]["tokens_reused"] == shared, within_s=10, what="what was reused is counted")
    [row] = rows(hive)
    assert (len(row["agents"]), row["tokens"]) == (20, len(whole))
    until(lambda: prewarmed(hive) == 1, within_s=10, what="one request of Hive's own")
    command = [sys.executable, "-m", "hive", "model", "prompts", "--state-dir", str(hive.state), "--json"]
    told = json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)
    assert told["prompts"][0]["hash"] == row["hash"]
    assert "helpful assistant" not in json.dumps(told)


def test_beside_another_tenants_nothing_is_read_ahead_where_nothing_is_kept(hive: Stack) -> None:
    prompt, before = "Another shop. " + PROMPT, prewarmed(hive)
    mine = wanted(MODEL, "Mine. " + PROMPT, prewarm_on_start=False)
    hive.post("/api/agents", {"name": "mine", **mine})
    hive.post("/api/agents", {"name": "eve", **wanted(MODEL, prompt, tenant="other")})
    until(lambda: any("2 groups" in row["why"] for row in rows(hive)), within_s=10, what="why it is not read")
    assert [reused(hive, "eve", MODEL, prompt) for _ in range(2)] == [0, 0]
    assert reused(hive, "mine", MODEL) == 0, "llama-server can only be told not to look"
    assert prewarmed(hive) == before
    hive.client().delete("/api/agents/eve")


@pytest.mark.wide
def test_a_server_that_began_anew_reads_it_again_and_one_that_is_down_keeps_nobody_from_starting(
    llama: LlamaServer, hive: Stack
) -> None:
    prompt = "A third shop. " + PROMPT
    hive.post("/api/agents", {"name": "bob", **wanted(MODEL, prompt)})
    until(lambda: prewarmed(hive) == 2, within_s=20, what="it is read, as the siblings' was")
    command = llama.process.args
    assert isinstance(command, list)
    llama.process.kill()
    llama.process.wait()
    until(lambda: not hive.health()["backend"]["up"], within_s=10, what="it is seen to be down")
    hive.post("/api/agents/bob/restart")
    assert hive.get("/api/agents/bob")["status"] == "running"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as again:
        try:
            until(lambda: prewarmed(hive) == 4, within_s=30, what="each is read again, once")
            assert reused(hive, "bob", MODEL, prompt) > 200
        finally:
            again.kill()
