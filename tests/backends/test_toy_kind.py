"""A kind of inference server of this file's own, in one object: recognised, routed to, salted and translated for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.backends import kinds, openai_answers
from hive.backends.backend import open_backend
from hive.backends.concurrency import choose_places
from hive.backends.conversation import Answers, AskedServer, Conversation, json_of, shape, text_in
from hive.backends.launch import SERVICES, STARTED, launch
from hive.backends.recognise import identify, recognise
from hive.backends.spec import Asking, BackendSpec, Fields, Requests
from hive.domain import BackendInfo, Dialect, ModelInfo
from hive.link.messages import BackendChanged as BackendMessage
from hive.models.capabilities import Over
from hive.models.salts import salt
from hive.settings.table import InferenceSection, Settings
from tests.listening import listening
from tests.proxy.harness import JSON_ANSWER, Client, Proxy, answer, post, proxied, read_request

# --- the kind ----------------------------------------------------------------------------------------------------


class _Toys(msgspec.Struct):
    toys: list[str]


def recognise_toy(answers: Answers) -> str | None:
    return text_in(json_of(answers, "/toy"), "toy_version") or None


def version(server: AskedServer) -> Conversation[str]:
    return str((yield from shape(server, "/toy", dict[str, Any]))["toy_version"])


def models(server: AskedServer) -> Conversation[list[ModelInfo]]:
    return [ModelInfo(name=name) for name in (yield from shape(server, "/toys", _Toys)).toys]


def cache_fields(endpoint: str, group: str, tag: str, apart: bool, flushed: tuple[str, ...]) -> Fields:
    return (
        (("toy_salt", msgspec.json.encode(salt(group, tag, *flushed))),) if endpoint == "/v1/chat/completions" else ()
    )


def places(told: int | None, inference: InferenceSection) -> tuple[int | None, str]:
    return 3, "a toy has three"


TOY = BackendSpec(
    kind="toy",
    label="toy server",
    dialects=frozenset({Dialect.OPENAI}),
    adds=frozenset({"/v1/rerank"}),
    questions=("/toy",),
    recognise=recognise_toy,
    asking=Asking(health_path="/toy", version=version, models=models, why_not_load="a toy has what it has"),
    one_token=openai_answers.completion,
    tokens_in=openai_answers.tokens_in,
    requests=Requests(
        cache_fields=cache_fields,
        passed_over={"/v1/chat/completions": (Over("n", "a toy says one thing", refused=True, idle=(1,)),)},
    ),
    places=places,
    prefix_cache="separated by tenant (toy_salt)",
    can_separate=True,
)


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kinds.SPECS, "toy", TOY)


# --- a server of that kind ---------------------------------------------------------------------------------------

SCORES = b'{"results":[{"index":0,"relevance_score":0.5}],"model":"m","usage":{"prompt_tokens":9,"total_tokens":9}}'
TOLD = {"/toy": {"toy_version": "7"}, "/toys": {"toys": ["bear:q4_0", "bear:q8_0"]}}


class ToyServer:
    def __init__(self) -> None:
        self.address = ""
        self.asked: list[tuple[str, Any]] = []
        """Path and body of every POST."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head, body = await read_request(reader)
            method, path = head.decode().split(" ")[:2]
            if method == "POST":
                self.asked.append((path, json.loads(body)))
                writer.write(answer(SCORES if path == "/v1/rerank" else JSON_ANSWER))
            elif path in TOLD:
                writer.write(answer(json.dumps(TOLD[path]).encode()))
            else:
                writer.write(answer(b"{}", status=b"404 Not Found"))
            await writer.drain()


@asynccontextmanager
async def toy_server() -> AsyncIterator[ToyServer]:
    server = ToyServer()
    async with listening(server.serve) as server.address:
        yield server


@asynccontextmanager
async def in_use(tmp_path: Path) -> AsyncIterator[tuple[Proxy, ToyServer, Client]]:
    """The data path before a toy server that was recognised and asked for its models, and an agent's connection."""
    async with toy_server() as server, proxied(tmp_path) as (proxy, _):
        info = await recognise(server.address)
        assert info is not None
        routing = msgspec.structs.replace(proxy.path.settings.inference, quantization_routing=True)
        proxy.path.use_settings(msgspec.structs.replace(proxy.path.settings, inference=routing))
        proxy.path.use_backend(info, await open_backend(info.kind, info.address).models())
        yield proxy, server, await Client.unix(proxy.socket_path)


CHAT = {"model": "bear:q4_0", "messages": [{"role": "user", "content": "hi"}]}


def asks(path: bytes, **fields: Any) -> bytes:
    return post(path, json.dumps({**CHAT, **fields}).encode())


# --- recognise ---------------------------------------------------------------------------------------------------


async def test_it_is_recognised_and_asked() -> None:
    async with toy_server() as server:
        info = await recognise(server.address)
        backend = open_backend("toy", server.address)
        asked = await backend.health(), await backend.version(), [model.name for model in await backend.models()]
    assert info == BackendInfo(
        kind="toy", address=server.address, label=f"toy server at {server.address}", version="7", up=True
    )
    assert asked == (True, "7", ["bear:q4_0", "bear:q8_0"])


def test_nobody_recognises_it_who_does_not_know_the_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(kinds.SPECS, "toy")
    assert identify({}) is None
    with pytest.raises(KeyError):
        kinds.spec_of("toy")


def test_it_goes_over_the_link_and_back() -> None:
    told = BackendMessage(backend=BackendInfo(kind="toy", address="127.0.0.1:1"), models=[])
    assert msgspec.json.decode(msgspec.json.encode(told), type=BackendMessage) == told


# --- route -------------------------------------------------------------------------------------------------------


async def test_requests_are_routed_to_its_models(tmp_path: Path) -> None:
    async with in_use(tmp_path) as (_, server, client):
        status, _, _ = await client.ask(asks(b"/v1/chat/completions", model="bear"))
        refused, _, body = await client.ask(asks(b"/v1/chat/completions", model="doll"))
    assert (status, refused) == (200, 404)
    assert b"doll" in body
    assert [(path, body["model"]) for path, body in server.asked] == [("/v1/chat/completions", "bear:q4_0")]


async def test_it_is_asked_for_what_it_adds_and_for_nothing_that_others_add(tmp_path: Path) -> None:
    async with in_use(tmp_path) as (_, server, client):
        scored = post(b"/v1/rerank", b'{"model":"bear:q4_0","query":"a","documents":["b"]}')
        status, _, _ = await client.ask(scored)
        refused, _, body = await client.ask(post(b"/v1/score", b'{"model":"bear:q4_0","text_1":"a","text_2":"b"}'))
    assert (status, refused) == (200, 501)
    assert b"vllm does" in body
    assert [path for path, _ in server.asked] == ["/v1/rerank"]


async def test_what_it_would_pass_over_is_refused(tmp_path: Path) -> None:
    async with in_use(tmp_path) as (_, server, client):
        status, _, body = await client.ask(asks(b"/v1/chat/completions", n=2))
    assert (status, server.asked) == (501, [])
    assert b"a toy says one thing" in body


# --- salt --------------------------------------------------------------------------------------------------------


async def test_prompts_of_tenants_are_kept_apart_by_its_own_field(tmp_path: Path) -> None:
    async with in_use(tmp_path) as (proxy, server, client):
        await client.ask(asks(b"/v1/chat/completions"))
        other = await Client.unix(proxy.another("bob", tenant="acme"))
        await other.ask(asks(b"/v1/chat/completions"))
    salts = [body["toy_salt"] for _, body in server.asked]
    assert salts == [salt("tenant default", ""), salt("tenant acme", "")]


# --- translate ---------------------------------------------------------------------------------------------------


async def test_other_dialects_are_translated_for_it(tmp_path: Path) -> None:
    async with in_use(tmp_path) as (_, server, client):
        _, _, by_ollama = await client.ask(asks(b"/api/chat", stream=False))
        _, _, by_anthropic = await client.ask(asks(b"/v1/messages", max_tokens=9))
    assert json.loads(by_ollama)["message"]["content"] == "hi"
    assert json.loads(by_anthropic)["content"][0]["text"] == "hi"
    assert [path for path, _ in server.asked] == ["/v1/chat/completions"] * 2


# --- and what stays explicit -------------------------------------------------------------------------------------


def test_its_places_are_its_own_word() -> None:
    assert choose_places("toy", None, Settings()) == (3, "a toy has three")


def test_a_registered_kind_is_no_service_and_is_not_started() -> None:
    """The list of what root starts is fixed: it does not grow by registration."""
    assert "toy" not in (*SERVICES, *STARTED)
    with pytest.raises(ValueError, match="no program that settings describe"):
        launch("toy", InferenceSection(), {})
