"""A query string is for Hive alone: what it knows of it works, the rest is ignored, and none of it goes upstream."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import anthropic
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hive.domain import BackendInfo, BackendKind, ModelInfo
from hive.endpoints.pages import Page, cut, page_of
from hive.errors import BadRequest
from tests.proxy.harness import CHAT, MODEL_TOKEN, Backend, Client, Proxy, get, post, proxied

NAMES = ["a", "b", "meta/llama-3 x", "d", "e"]
MODELS = [ModelInfo(name=name, created=1_800_000_000) for name in NAMES]


def list_models(proxy: Proxy, backend: Backend) -> None:
    proxy.path.use_backend(BackendInfo(kind=BackendKind.VLLM, address=backend.address, up=True), MODELS)


@given(st.lists(st.integers(), unique=True, max_size=12), st.integers(1, 5))
def test_pages_forwards_and_backwards_are_the_whole_list_once(numbers: list[int], limit: int) -> None:
    names = [str(number) for number in numbers]
    forwards: list[str] = []
    part = cut(names, Page(limit))
    forwards += names[part.first : part.last]
    while part.has_more:
        part = cut(names, Page(limit, after_id=forwards[-1]))
        forwards += names[part.first : part.last]
    assert forwards == names
    if not names:
        return
    backwards = names[-1:]
    has_more = True
    while has_more:
        part = cut(names, Page(limit, before_id=backwards[0]))
        backwards = names[part.first : part.last] + backwards
        has_more = part.has_more
    assert backwards == names


@pytest.mark.parametrize("query", [b"limit=0", b"limit=-1", b"limit=x", b"limit=1001", b"limit=99999", b"limit=1.5"])
def test_a_limit_that_is_none_is_refused_in_words(query: bytes) -> None:
    with pytest.raises(BadRequest, match="limit is a whole number from 1 to 1000"):
        page_of(b"/v1/models?" + query)


def test_a_query_of_very_many_parameters_is_refused() -> None:
    with pytest.raises(BadRequest, match="more than 64 parameters"):
        page_of(b"/v1/models?" + b"&".join(b"x=1" for _ in range(65)))


async def test_anthropics_client_pages_through_the_list(tmp_path: Path) -> None:
    """`anthropic.models.list(limit=20)` was 403: any query string on `/v1/models` was."""
    async with proxied(tmp_path) as (proxy, backend):
        list_models(proxy, backend)
        url, token = f"http://127.0.0.1:{proxy.port}", MODEL_TOKEN.decode()

        def listed() -> tuple[list[str], list[str], bool, str]:
            with anthropic.Anthropic(base_url=url, api_key=token, max_retries=0) as client:
                paged = [model.id for model in client.models.list(limit=2)]
                page = client.models.list(limit=2, before_id="e")
                first = client.models.list(limit=20).data[0]
                assert (first.display_name, first.type) == ("a", "model")
                return paged, [model.id for model in page.data], bool(page.has_more), first.created_at.isoformat()

        expected = (NAMES, ["meta/llama-3 x", "d"], True, "2027-01-15T08:00:00+00:00")
        assert await asyncio.to_thread(listed) == expected

        def by_openai() -> list[str]:
            with openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0) as client:
                return [model.id for model in client.models.list(extra_query={"order": "asc"})]

        assert await asyncio.to_thread(by_openai) == NAMES
        assert backend.requests == []


async def test_an_empty_page_says_so(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        list_models(proxy, backend)
        client = await Client.unix(proxy.socket_path)
        status, _, body = await client.ask(get(b"/v1/models?limit=3&after_id=e"))
        told = json.loads(body)
        assert (status, told["data"], told["has_more"], told["first_id"]) == (200, [], False, None)
        status, _, body = await client.ask(get(b"/v1/models/d?limit=3"))
        assert (status, json.loads(body)["id"]) == (200, "d")


@pytest.mark.parametrize(
    ("kind", "target", "line"),
    [
        (BackendKind.VLLM, b"/v1/chat/completions?api-version=2026-01-01", b"POST /v1/chat/completions HTTP/1.1"),
        (BackendKind.VLLM, b"/v1/chat/completions?", b"POST /v1/chat/completions HTTP/1.1"),
        (BackendKind.VLLM, b"/v1/messages?x=/../slots&beta=true", b"POST /v1/messages?beta=true HTTP/1.1"),
        (BackendKind.OLLAMA, b"/api/chat?next=/api/pull", b"POST /api/chat HTTP/1.1"),
    ],
)
async def test_of_a_query_no_byte_goes_upstream(tmp_path: Path, kind: BackendKind, target: bytes, line: bytes) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, kind)
        client = await Client.unix(proxy.socket_path)
        await client.ask(post(target, CHAT))
        assert [head.split(b"\r\n")[0] for head, _ in backend.requests] == [line]
