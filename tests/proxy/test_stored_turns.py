"""Requests to `/v1/responses` with storage on: what the backend is sent, what is kept, and what is held meanwhile."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.link.responses import KeepResponse
from hive.proxy.registry import OPERATOR
from tests.proxy.harness import JSON_ANSWER, Client, Proxy, answer, chunked, post
from tests.proxy.keeping import Daemon, keep, keeping
from tests.waiting import until

TARGET = b"/v1/responses"
STREAM = (
    b'data: {"id":"c","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":'
    b'{"role":"assistant","content":"hi"},"finish_reason":null}]}\n\n',
    b'data: {"id":"c","object":"chat.completion.chunk","created":0,"model":"m","choices":[{"index":0,"delta":{},'
    b'"finish_reason":"stop"}]}\n\n',
    b"data: [DONE]\n\n",
)


async def ask(proxy: Proxy, path: Path | None = None, **body: Any) -> tuple[int, Any]:
    client = await Client.unix(path or proxy.socket_path)
    status, _, found = await client.ask(post(TARGET, json.dumps({"model": "m", **body}).encode()))
    client.close()
    return status, json.loads(found) if found[:1] == b"{" else found


def sent(daemon: Daemon, number: int = -1) -> dict[str, Any]:
    assert daemon.backend is not None
    found: dict[str, Any] = json.loads(daemon.backend.requests[number][1])
    return found


def kept(daemon: Daemon) -> list[KeepResponse]:
    return [message for message in daemon.heard if isinstance(message, KeepResponse)]


async def test_the_backend_is_sent_the_whole_conversation_and_never_hears_of_storage(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        status, first = await ask(proxy, input="one", instructions="Be short.")
        assert (status, first["store"]) == (200, True)
        status, second = await ask(proxy, input="two", previous_response_id=first["id"], store=True)
        assert (status, second["previous_response_id"]) == (200, first["id"])
        status, third = await ask(proxy, input="three", previous_response_id=second["id"], store=False)
        assert (status, third["store"], third["previous_response_id"]) == (200, False, second["id"])
        told = [(message["role"], message["content"]) for message in sent(daemon)["messages"]]
        assert [role for role, _ in told] == ["user", "assistant", "user", "assistant", "user"], "no old instructions"
        assert [word in json.dumps(told) for word in ("one", "two", "three", "hi")] == [True] * 4
        assert {"store", "previous_response_id"}.isdisjoint(sent(daemon))
        await until(lambda: len(kept(daemon)) == 2)
        assert [(one.id, one.previous_id) for one in kept(daemon)] == [(first["id"], None), (second["id"], first["id"])]
        assert json.loads(kept(daemon)[1].response) == second
        assert "one" not in kept(daemon)[1].asked.decode(), "each turn alone"


async def test_a_stream_is_kept_before_its_client_can_know_that_it_is_whole(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        assert daemon.backend is not None
        daemon.backend.reply = chunked(*STREAM)
        status, said = await ask(proxy, input="one", stream=True)
        assert status == 200
        events = [json.loads(line[6:]) for line in said.split(b"\n") if line.startswith(b"data: ")]
        assert (events[-1]["type"], events[0]["response"]["store"]) == ("response.completed", True)
        final = events[-1]["response"]
        daemon.backend.reply = answer(JSON_ANSWER)
        status, _ = await ask(proxy, input="two", previous_response_id=final["id"])
        assert status == 200
        assert json.loads(kept(daemon)[0].response) == final


async def test_what_broke_off_is_not_kept(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        assert daemon.backend is not None
        daemon.backend.reply = chunked(*STREAM[:1], end=False) + b""

        async def dying(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(chunked(*STREAM[:1], end=False))
            await writer.drain()

        daemon.backend.script = dying
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(TARGET, b'{"model":"m","input":"one","stream":true}'))
        await client.reader.read()
        daemon.backend.script = None
        daemon.backend.reply = answer(b'{"error":{"message":"no"}}', status=b"500 Internal Server Error")
        assert (await ask(proxy, input="one"))[0] == 500
        daemon.backend.reply = answer(JSON_ANSWER)
        await ask(proxy, input="two", store=False)
        assert kept(daemon) == []


async def test_with_storage_off_nothing_is_asked_and_it_is_said(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        proxy.path.use_settings(
            msgspec.structs.replace(
                proxy.path.settings, proxy=msgspec.structs.replace(proxy.path.settings.proxy, responses_kept_mb=0)
            )
        )
        status, told = await ask(proxy, input="one", previous_response_id="resp_1")
        assert (status, "proxy.responses_kept_mb" in told["error"]["message"]) == (400, True)
        stored: tuple[dict[str, Any], ...] = ({}, {"store": True}, {"store": False})
        for more in stored:
            status, told = await ask(proxy, input="one", **more)
            assert (status, told["store"]) == (200, False)
        assert daemon.heard == []


async def test_what_is_not_there_is_400_in_the_originals_words(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        keep(proxy)
        bob = proxy.another("bob")
        for whose, name in ((bob, "resp_1"), (None, "resp_0")):
            status, told = await ask(proxy, whose, input="one", previous_response_id=name)
            assert status == 400
            assert told["error"]["message"] == f"Previous response with id '{name}' not found."
            assert told["error"]["code"] == "previous_response_not_found"
        status, told = await ask(proxy, bob, input=[{"type": "item_reference", "id": "msg_1"}])
        assert (status, told["error"]["message"]) == (404, "Item with id 'msg_1' not found.")
        assert daemon.backend is not None
        assert daemon.backend.requests == []
        await until(lambda: proxy.alice.gate.in_flight == 0)
        assert proxy.path.budget.used == 0


async def test_a_named_item_goes_upstream_as_it_was(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        keep(proxy)
        named = [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "msg_1"}]
        status, _ = await ask(proxy, input=[*named, {"role": "user", "content": "b"}])
        assert status == 200
        assert [message["role"] for message in sent(daemon)["messages"]] == ["user", "assistant", "user"]
        status, told = await ask(proxy, input=[{"type": "item_reference", "id": "msg_1"}] * 1001)
        assert status == 200, "one item, however often it is named"
        many = [{"type": "item_reference", "id": f"msg_{n}"} for n in range(1001)]
        status, told = await ask(proxy, input=many)
        assert (status, "more than 1000 references" in told["error"]["message"]) == (400, True)


async def test_a_body_of_references_to_a_long_item_is_refused_before_it_is_made(tmp_path: Path) -> None:
    async with keeping(tmp_path, body_max_bytes=200_000) as (proxy, _):
        asked = json.dumps([{"id": "long", "role": "user", "content": "x" * 50_000}]).encode()
        assert proxy.path.stored is not None
        response = b'{"id":"resp_1","output":[]}'
        assert proxy.path.stored.keep("a1", "resp_1", previous_id="", asked=asked, response=response)
        status, _ = await ask(proxy, input=[{"type": "item_reference", "id": "long"}] * 3)
        assert status == 200
        status, told = await ask(proxy, input=[{"type": "item_reference", "id": "long"}] * 1000)
        assert (status, "longer than 199" in told["error"]["message"]) == (400, True)


async def test_a_daemon_that_is_away_keeps_nobody_who_names_nothing(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        keep(proxy)
        await until(lambda: kept(daemon))
        daemon.stop()
        await until(lambda: not daemon.client.connected)
        status, told = await ask(proxy, input="one")
        assert (status, told["store"]) == (200, False), "it cannot be kept, and says so"
        status, told = await ask(proxy, input="one", previous_response_id="resp_1")
        assert (status, "daemon is away" in told["error"]["message"]) == (503, True)


async def test_the_history_counts_for_what_an_agent_holds_and_for_the_longest_body(tmp_path: Path) -> None:
    """A body of a hundred bytes may else be one of many megabytes for each of an agent's connections."""
    async with keeping(tmp_path, body_max_bytes=100_000, body_budget_bytes=800_000) as (proxy, daemon):
        assert daemon.backend is not None
        keep(proxy, text="x" * 60_000)
        keep(proxy, "resp_2", previous="resp_1", text="x" * 60_000)
        status, told = await ask(proxy, input="one", previous_response_id="resp_2")
        assert (status, "the conversation is longer than" in told["error"]["message"]) == (400, True)
        holding = asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            await holding.wait()

        daemon.backend.script = slow
        asking = asyncio.ensure_future(ask(proxy, input="one", previous_response_id="resp_1"))
        await until(lambda: proxy.alice.bodies.used > 60_000)
        status, told = await ask(proxy, input="one", previous_response_id="resp_1")
        assert (status, "request bodies held at once" in told["error"]["message"]) == (503, True)
        holding.set()
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)


async def test_an_input_that_may_not_be_kept_is_answered_and_not_kept(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        proxy.path.use_settings(
            msgspec.structs.replace(
                proxy.path.settings, proxy=msgspec.structs.replace(proxy.path.settings.proxy, responses_kept_mb=1)
            )
        )
        status, told = await ask(proxy, input="x" * 1_100_000)
        assert (status, told["store"], daemon.heard) == (200, False, [])


async def test_what_waits_to_be_kept_counts_too_and_is_not_kept_where_there_is_no_room(tmp_path: Path) -> None:
    """The input is held until the answer is there, beside the body that goes upstream."""
    async with keeping(tmp_path, body_max_bytes=100_000, body_budget_bytes=800_000) as (proxy, daemon):
        assert daemon.backend is not None
        status, told = await ask(proxy, input="x" * 30_000)
        assert (status, told["store"]) == (200, True)
        status, told = await ask(proxy, input="x" * 60_000, store=True)
        assert (status, told["store"]) == (200, False)
        await until(lambda: len(kept(daemon)) == 1)
        await until(lambda: proxy.path.budget.used == 0)


@pytest.mark.parametrize(
    "body",
    [
        {"input": "a", "previous_response_id": 7},
        {"input": "a", "store": "yes"},
        {"input": 7},
        {"input": [7]},
        {},
    ],
)
async def test_what_cannot_be_read_is_400(body: dict[str, Any], tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        status, told = await ask(proxy, **body)
        assert (status, told["error"]["src"]) == (400, "hive")
        assert daemon.heard == []


async def test_an_operators_requests_are_not_kept(tmp_path: Path) -> None:
    """They belong to no agent: none could be asked for them, or be removed with them."""
    async with keeping(tmp_path) as (proxy, daemon):
        client = await Client.tcp(proxy.port)
        status, _, body = await client.ask(post(TARGET, b'{"model":"m","input":"one"}', token=b"internal"))
        assert (status, json.loads(body)["store"]) == (200, False)
        assert proxy.registry.operator.row.id == OPERATOR
        assert daemon.heard == []


async def test_a_client_that_leaves_while_its_history_is_asked_for_leaves_nothing(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        keep(proxy)
        await until(lambda: kept(daemon))
        daemon.go.clear()
        client = await Client.unix(proxy.socket_path)
        client.writer.write(post(TARGET, b'{"model":"m","input":"one","previous_response_id":"resp_1"}'))
        await until(lambda: len(daemon.heard) == 2)
        client.close()
        await until(lambda: proxy.alice.gate.in_flight == 0)
        await until(lambda: repr(proxy.path.stored) == "<StoredResponses 0 agents ask, 0 dropped>")  # its task, ended
        assert proxy.path.budget.used == 0
        assert daemon.backend is not None
        assert daemon.backend.requests == []
