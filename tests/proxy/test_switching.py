"""The backend's gate: over real sockets, two backends and a switch between them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from hive.domain import BackendInfo, BackendKind, FoundCapabilities, ModelInfo
from hive.link.message import LinkMessage
from hive.link.messages import CloseBackend, DaemonTable, Drained, OpenBackend
from hive.proxy import switching
from hive.proxy.switching import SwitchingGate
from tests.proxy.harness import (
    CHAT,
    JSON_ANSWER,
    MODEL_TOKEN,
    STREAM,
    Backend,
    Client,
    Proxy,
    answer,
    chunked,
    get,
    nothing_is_held,
    post,
    proxied,
    read_request,
)
from tests.waiting import until

ASK = post(b"/v1/chat/completions", CHAT)
ASK_STREAM = post(b"/v1/chat/completions", STREAM)
OLLAMA_ASK = post(b"/api/chat", CHAT)
COUNT = post(b"/v1/messages/count_tokens", CHAT)
EMBED = post(b"/api/embed", b'{"model":"m","input":"x"}')
CHATS_ONLY = FoundCapabilities(endpoints=("/v1/chat/completions",), found="a test")
"""A server that cannot answer EMBED, and no other can in its stead."""
NOTHING_TOLD = FoundCapabilities()
EMBEDDED = b'{"data":[{"index":0,"embedding":[0.5]}],"model":"m","usage":{"prompt_tokens":3,"total_tokens":3}}'
NEW = JSON_ANSWER.replace(b'"hi"', b'"new"')
FIRST = b'data: {"id":"c","object":"chat.completion.chunk","choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
LAST = b'data: {"id":"c","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


class Box:
    """A proxy between two backends, and the daemon's words to it."""

    def __init__(self, proxy: Proxy, old: Backend, new: Backend) -> None:
        self.proxy, self.old, self.new = proxy, old, new
        self.switching = SwitchingGate(proxy.path)
        self.replies: list[LinkMessage] = []
        self.goes_on = asyncio.Event()
        """Until it is set the old backend holds back the end of its answers."""

    def close(self, *, drain_s: float = 30, wait_s: float = 30) -> None:
        order = CloseBackend(towards="vllm", drain_s=drain_s, wait_s=wait_s)
        self.switching.close(order, lambda message, descriptors=(): self.replies.append(message))

    def open(
        self,
        backend: Backend,
        kind: BackendKind = BackendKind.LLAMA,
        capabilities: FoundCapabilities = NOTHING_TOLD,
    ) -> None:
        info = BackendInfo(kind=kind, address=backend.address, up=True, capabilities=capabilities)
        self.switching.open(OpenBackend(backend=info, models=[ModelInfo(name="m2"), ModelInfo(name="m")]))

    async def drained(self) -> int:
        """The number of requests that were cut."""
        await until(lambda: bool(self.replies))
        message = self.replies.pop()
        assert isinstance(message, Drained)
        return message.cut

    async def client(self) -> Client:
        return await Client.unix(self.proxy.socket_path)

    async def at_old(self, request: bytes = ASK) -> Client:
        """A client with a request at the old backend, which has not answered (to the end) yet."""
        seen = len(self.old.requests)
        client = await self.client()
        client.writer.write(request)
        await until(lambda: len(self.old.requests) > seen)
        return client

    async def waiting(self, request: bytes = ASK) -> Client:
        """A client with a waiting request."""
        waits = self.proxy.registry.queue.waiting
        client = await self.client()
        client.writer.write(request)
        await until(lambda: self.proxy.registry.queue.waiting > waits)
        return client

    async def slowly(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answers as the old backend does."""
        while True:
            head, body = await read_request(reader)
            self.old.requests.append((head, body))
            is_stream = b'"stream":true' in body
            if is_stream:
                writer.write(chunked(FIRST, end=False))
            await self.goes_on.wait()
            writer.write(b"%x\r\n%b\r\n0\r\n\r\n" % (len(LAST), LAST) if is_stream else answer(JSON_ANSWER))
            await writer.drain()


@asynccontextmanager
async def two(tmp_path: Path, **settings: Any) -> AsyncIterator[Box]:
    new = Backend()
    new.reply = answer(NEW)
    await new.start()
    try:
        async with proxied(tmp_path, **settings) as (proxy, old):
            box = Box(proxy, old, new)
            old.script = box.slowly
            yield box
            box.goes_on.set()
    finally:
        await new.stop()


async def test_what_is_at_the_old_backend_finishes_and_what_is_asked_meanwhile_is_answered_by_the_new_one(
    tmp_path: Path,
) -> None:
    async with two(tmp_path) as box:
        stream = await box.at_old(ASK_STREAM)
        box.close()
        later = [await box.waiting() for _ in range(3)]
        assert (box.replies, len(box.new.requests)) == ([], 0)
        box.goes_on.set()
        status, _, body = await stream.answer()
        assert (status, body) == (200, FIRST + LAST)
        assert await box.drained() == 0
        box.open(box.new)
        for client in later:
            status, fields, body = await client.answer()
            assert (status, body) == (200, NEW)
            assert int(fields[b"x-queue-wait-ms"]) >= 0
        assert len(box.old.requests) == 1
        await until(lambda: nothing_is_held(box.proxy))


async def test_they_go_on_in_the_order_in_which_they_came(tmp_path: Path) -> None:
    async with two(tmp_path, tier_low_concurrency=1, backend_concurrency=1) as box:
        box.close()
        bodies = [b'{"model":"m","messages":[],"seed":%d}' % number for number in range(5)]
        clients = [await box.waiting(post(b"/v1/chat/completions", body)) for body in bodies]
        box.open(box.new)
        for client in clients:
            assert (await client.answer())[0] == 200
        assert [json.loads(body)["seed"] for _, body in box.new.requests] == [0, 1, 2, 3, 4]


async def test_what_does_not_end_in_time_is_cut_so_that_its_client_can_tell(tmp_path: Path) -> None:
    async with two(tmp_path) as box:
        stream, whole = await box.at_old(ASK_STREAM), await box.at_old()
        await stream.reader.readuntil(b"a")  # its answer has begun
        box.close(drain_s=0.05)
        assert await box.drained() == 2
        status, fields, body = await whole.answer()
        assert (status, fields[b"retry-after"]) == (503, b"5")
        assert json.loads(body)["error"]["code"] == "backend_switching"
        rest = await stream.reader.read()
        assert b"did not end in time" in rest
        assert b"[DONE]" not in rest
        assert not rest.endswith(b"0\r\n\r\n")
        await until(lambda: nothing_is_held(box.proxy))


async def test_idle_connections_do_not_keep_the_old_backend_from_ending(tmp_path: Path) -> None:
    async with two(tmp_path) as box:
        box.goes_on.set()
        client = await box.client()
        assert (await client.ask(ASK))[0] == 200
        assert box.old.closed == 0
        box.close()
        assert await box.drained() == 0
        await until(lambda: box.old.closed == box.old.connections)


async def test_who_stood_in_line_already_is_read_anew_for_the_new_backend(tmp_path: Path) -> None:
    """vLLM tells no usage in a stream unless it is asked to, llama-server always does."""
    async with two(tmp_path, tier_low_concurrency=1) as box:
        first = await box.at_old()
        second = await box.waiting(ASK_STREAM)
        box.close()
        box.goes_on.set()
        assert (await first.answer())[0] == 200
        assert await box.drained() == 0
        box.new.reply = chunked(FIRST, LAST)
        box.open(box.new, BackendKind.VLLM)
        assert (await second.answer())[2] == FIRST + LAST
        assert json.loads(box.new.requests[0][1])["stream_options"] == {"include_usage": True}


async def test_a_long_body_that_waits_is_kept_for_the_new_backend(tmp_path: Path) -> None:
    text = b"x" * 3_000_000
    async with two(tmp_path) as box:
        box.close()
        client = await box.waiting(post(b"/v1/chat/completions", CHAT.replace(b"hello", text)))
        box.open(box.new, BackendKind.VLLM)
        assert (await client.answer())[0] == 200
        assert text in box.new.requests[0][1]


async def test_an_endpoint_is_judged_by_the_backend_that_comes(tmp_path: Path) -> None:
    async with two(tmp_path) as box:
        told = BackendInfo(kind=BackendKind.LLAMA, address=box.old.address, up=True, capabilities=CHATS_ONLY)
        box.proxy.path.use_backend(told, [ModelInfo(name="m")])
        assert (await (await box.client()).ask(EMBED))[0] == 501
        box.close()
        client, again = await box.waiting(EMBED), await box.waiting(EMBED)
        box.new.reply = answer(EMBEDDED)
        box.open(box.new)
        assert (await client.answer())[0] == 200
        assert (await again.answer())[0] == 200


async def test_tokens_are_counted_or_estimated_by_whoever_answers_after_a_switch(tmp_path: Path) -> None:
    """Its body was read for the backend before, which counts by itself: what goes there is what is estimated."""
    async with two(tmp_path) as box:
        box.close()
        client = await box.waiting(COUNT)
        box.open(box.new, BackendKind.DEMO)
        status, fields, body = await client.answer()
        assert (status, fields[b"x-hive-estimated"], box.new.requests) == (200, b"true", [])
        assert json.loads(body) == {"input_tokens": json.loads(body)["input_tokens"], "estimated": True}


async def test_rolled_back_the_old_backend_answers_and_says_what_it_does_not_offer(tmp_path: Path) -> None:
    async with two(tmp_path) as box:
        box.goes_on.set()
        box.close()
        fits, does_not = await box.waiting(), await box.waiting(EMBED)
        box.open(box.old, BackendKind.LLAMA, CHATS_ONLY)
        assert (await fits.answer())[0] == 200
        assert (await does_not.answer())[0] == 501
        await until(lambda: nothing_is_held(box.proxy))


async def test_a_question_that_takes_no_place_waits_as_well_and_a_list_does_not(tmp_path: Path) -> None:
    async with two(tmp_path) as box:
        box.proxy.path.use_backend(BackendInfo(kind=BackendKind.OLLAMA, address=box.old.address), [])
        box.close()
        version = await box.waiting(get(b"/api/version"))
        assert (await (await box.client()).ask(get(b"/v1/models")))[0] == 200
        box.new.reply = answer(b'{"version":"9"}')
        box.open(box.new, BackendKind.OLLAMA)
        assert (await version.answer())[2] == b'{"version":"9"}'
        await until(lambda: nothing_is_held(box.proxy))


async def test_beyond_the_depth_of_the_line_it_is_503_with_the_reason(tmp_path: Path) -> None:
    async with two(tmp_path, queue_depth=2) as box:
        box.close()
        for _ in range(2):
            await box.waiting()
        status, fields, body = await (await box.client()).ask(ASK)
        error = json.loads(body)["error"]
        assert (status, error["code"], fields[b"retry-after"]) == (503, "backend_switching", b"5")
        assert "being switched to vllm, and too many requests wait" in error["message"]


async def test_who_waited_in_vain_is_told_so(tmp_path: Path) -> None:
    async with two(tmp_path, queue_wait_s=0.01) as box:
        box.close(wait_s=0.1)
        status, _, body = await (await box.client()).ask(ASK)
        assert (status, json.loads(body)["error"]["code"]) == (503, "backend_switching")
        await until(lambda: nothing_is_held(box.proxy))


async def test_the_wait_is_the_switchs_and_not_the_lines(tmp_path: Path) -> None:
    """Also for requests that were in the queue before, and if the daemon says that it takes longer."""
    async with two(tmp_path, queue_wait_s=0.1, tier_low_concurrency=1) as box:
        await box.at_old()
        client = await box.waiting()
        box.close(wait_s=0.15)
        box.close(wait_s=30)
        await asyncio.sleep(0.3)
        assert box.proxy.registry.queue.waiting == 1
        box.goes_on.set()
        assert await box.drained() == 0
        box.open(box.new)
        assert (await client.answer())[2] == NEW


async def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(tmp_path: Path) -> None:
    async with two(tmp_path) as box:
        box.close()
        (await box.waiting()).close()
        await until(lambda: nothing_is_held(box.proxy))


async def test_an_agent_that_waits_for_the_backend_is_not_put_to_sleep(tmp_path: Path) -> None:
    async with two(tmp_path) as box:
        box.close()
        await box.waiting()
        assert box.proxy.alice.gate.close(2, now=0.0) == "1 request is in flight"


async def test_an_agent_that_wakes_in_mid_switch_waits_on(tmp_path: Path) -> None:
    async with two(tmp_path) as box:
        gate = box.proxy.alice.gate
        assert gate.close(2, now=0.0) is None
        client = await box.client()
        client.writer.write(ASK)
        await until(lambda: gate.parked == 1)
        box.close()
        gate.open(3)
        await until(lambda: box.proxy.registry.queue.waiting == 1)
        box.open(box.new)
        assert (await client.answer())[2] == NEW


async def test_a_later_word_of_the_daemon_overtakes_the_drain(tmp_path: Path) -> None:
    async with two(tmp_path) as box:
        client = await box.at_old()
        box.close(drain_s=0.2)
        box.open(box.old)
        assert await box.drained() == 0
        await asyncio.sleep(0.3)
        box.goes_on.set()
        assert (await client.answer())[0] == 200


def table(box: Box, backend: Backend, **more: Any) -> DaemonTable:
    info = BackendInfo(kind=BackendKind.LLAMA, address=backend.address, up=True)
    return DaemonTable(agents=[], backend=info, models=[], marks={}, **more)


async def test_the_next_daemon_says_how_the_gate_stands(tmp_path: Path) -> None:
    async with two(tmp_path) as box:
        box.goes_on.set()
        box.switching.heard(table(box, box.old, switching_to="vllm", backend_wait_s=30))
        client = await box.waiting()
        box.switching.daemon_lost()
        assert box.proxy.path.slot.gate.is_closed
        box.switching.heard(table(box, box.new))
        assert (await client.answer())[2] == NEW
        box.switching.heard(table(box, box.old))
        assert (await client.ask(ASK))[2] == JSON_ANSWER


async def test_without_a_daemon_the_gate_opens_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switching, "ALONE_S", 0.05)
    async with two(tmp_path) as box:
        box.goes_on.set()
        box.close()
        assert await box.drained() == 0
        client = await box.waiting()
        box.switching.daemon_lost()
        assert (await client.answer())[2] == JSON_ANSWER


async def test_reading_the_settings_again_does_not_open_it(tmp_path: Path) -> None:
    async with two(tmp_path) as box:
        box.close()
        await box.waiting()
        box.proxy.path.use_settings(box.proxy.settings)
        box.proxy.use(box.new)
        await asyncio.sleep(0.05)
        assert (box.proxy.registry.queue.waiting, box.new.requests) == (1, [])


async def test_over_tcp_it_waits_as_well(tmp_path: Path) -> None:
    async with two(tmp_path) as box:
        box.close()
        client = await Client.tcp(box.proxy.port)
        client.writer.write(post(b"/a/%b/v1/chat/completions" % MODEL_TOKEN, CHAT))
        await until(lambda: box.proxy.registry.queue.waiting == 1)
        box.open(box.new)
        assert (await client.answer())[2] == NEW


async def test_a_token_in_the_path_stays_valid_over_a_switch_on_a_connection_that_is_kept(tmp_path: Path) -> None:
    """33 of the requests that waited for 16 switches were refused with 403: of a head that is known already the token
    was not taken off the path again, and the path with it is on no list of endpoints."""
    async with two(tmp_path) as box:
        box.goes_on.set()
        client = await Client.tcp(box.proxy.port)
        ask = post(b"/a/%b/v1/chat/completions" % MODEL_TOKEN, CHAT)
        client.writer.write(ask)
        assert (await client.answer())[0] == 200
        box.close()
        client.writer.write(ask)
        await until(lambda: box.proxy.registry.queue.waiting == 1)
        box.open(box.new)
        status, _, body = await client.answer()
        assert (status, body) == (200, NEW)


async def test_a_request_whose_body_comes_after_the_switch_is_judged_by_the_new_backend(tmp_path: Path) -> None:
    """Its endpoint was not judged at the closed gate, and then not at all: Ollama's went to a llama-server."""
    async with two(tmp_path) as box:
        box.close()
        client = await box.client()
        head, _, body = EMBED.partition(b"\r\n\r\n")
        client.writer.write(head + b"\r\n\r\n" + body[:3])
        await until(lambda: box.proxy.alice.gate.in_flight == 1)
        box.open(box.new, BackendKind.LLAMA, CHATS_ONLY)
        client.writer.write(body[3:])
        status, _, _ = await client.answer()
        assert (status, box.new.requests) == (501, [])
