"""Errors of a backend that are in no dialect, as each dialect's clients get them; and what a refused request costs."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import anthropic
import msgspec
import openai
import pytest

from hive.budgets import BudgetKind
from hive.domain import BackendInfo, BackendKind, ModelInfo
from tests.proxy.harness import (
    JSON_ANSWER,
    Client,
    Proxy,
    answer,
    chunked,
    nothing_is_held,
    post,
    proxied,
    read_request,
)
from tests.proxy.test_budgets import PlayedDaemon, budgeted
from tests.proxy.test_slots import ask
from tests.proxy.test_tasks import TASK, laddered
from tests.proxy.test_tasks import told as ladder_told
from tests.tls_front import KEY, front, key_file
from tests.waiting import until

CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
ASKED: dict[bytes, dict[str, Any]] = {
    b"/v1/chat/completions": CHAT,
    b"/v1/responses": {"model": "m", "input": "x"},
    b"/api/chat": CHAT,
    b"/v1/messages": {**CHAT, "max_tokens": 5},
}
NGINX = (
    b"<html>\r\n<head><title>502 Bad Gateway</title></head>\r\n<body>\r\n<center><h1>502 Bad Gateway</h1></center>\r\n"
    b"<hr><center>nginx/1.26.3</center>\r\n</body>\r\n</html>\r\n"
)
RAY_BUSY = b"Request dropped due to backpressure (num_queued_requests=5, max_queued_requests=5)."
TRACEBACK = (
    b'Traceback (most recent call last):\n  File "/opt/ray/serve.py", line 3\n\x1b[36mRayActorError\x1b[39m: dead\n'
)
GATEWAY, SERVER, TOO_BIG = b"502 Bad Gateway", b"500 Internal Server Error", b"413 Request Entity Too Large"
FAILED, BUSY, REFUSED = "backend_failed", "saturated", "backend_refused"


def told(target: bytes, body: bytes) -> tuple[str, str]:
    """(message, code) in the form of that dialect; Ollama's has no code. It has to be marked as Hive's."""
    found = json.loads(body)
    if target == b"/api/chat":
        assert found["src"] == "hive"
        return found["error"], ""
    if target == b"/v1/messages":
        assert found["type"] == "error"
    error = found["error"]
    assert error["src"] == "hive"
    return error["message"], error["code"]


@pytest.mark.parametrize("kind", [BackendKind.REMOTE, BackendKind.VLLM, BackendKind.LLAMA])
@pytest.mark.parametrize("stream", [False, True], ids=["at once", "stream"])
@pytest.mark.parametrize("target", ASKED)
async def test_a_lost_replicas_text_is_hives_502_in_the_clients_dialect(
    tmp_path: Path, target: bytes, stream: bool, kind: BackendKind
) -> None:
    """Ray Serve answers `500 text/plain` where a replica was killed; it went to agents as it was."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, kind)
        backend.reply = answer(b"Internal Server Error", content_type=b"text/plain", status=SERVER)
        client = await Client.unix(proxy.socket_path)
        for _ in range(2):  # its connection is kept
            status, fields, body = await client.ask(
                post(target, json.dumps({**ASKED[target], "stream": stream}).encode())
            )
            message, code = told(target, body)
            assert (status, message) == (502, "the backend failed (500): Internal Server Error")
            assert code in (FAILED, "")
            assert fields[b"content-type"] == b"application/json"
            assert b"x-should-retry" not in fields, "a client may try again"
        assert [(event.status, event.cut) for event in proxy.events] == [(502, False)] * 2, "it has the whole error"
        assert {(event.tokens_in, event.tokens_out) for event in proxy.events} == {(None, None)}, "it may have worked"
        assert proxy.path.slot.line.running == 0


@pytest.mark.parametrize(
    ("status", "said", "expected", "message", "code"),
    [
        (GATEWAY, NGINX, 502, "the backend failed (502): 502 Bad Gateway", FAILED),
        (b"504 Gateway Time-out", b"", 502, "the backend failed (504) and did not say why", FAILED),
        (SERVER, TRACEBACK, 502, "the backend failed (500): RayActorError: dead", FAILED),
        (SERVER, b'{"message":"boom"}', 502, "the backend failed (500): boom", FAILED),
        (SERVER, b"\xff\x00\x1b[2J", 502, "the backend failed (500): \ufffd", FAILED),
        (SERVER, b"x" * 999, 502, f"the backend failed (500): {'x' * 199}…", FAILED),
        (b"408 Request Timeout", b"too slow", 502, "the backend failed (408): too slow", FAILED),
        (
            b"503 Service Unavailable",
            RAY_BUSY,
            503,
            f"the backend takes no request now (503): {RAY_BUSY.decode()}",
            BUSY,
        ),
        (
            b"429 Too Many",
            b"slow down",
            429,
            "the backend takes no request now (429): slow down",
            "rate_limit_exceeded",
        ),
        (TOO_BIG, b"<h1>413 Too Large</h1>", 413, "the backend refused it (413): 413 Too Large", REFUSED),
        (b"404 Not Found", b'{"detail":"Not Found"}', 404, "the backend refused it (404): Not Found", REFUSED),
    ],
    ids=[
        "nginx",
        "nothing",
        "traceback",
        "a gateway's JSON",
        "binary",
        "long",
        "408",
        "Ray is full",
        "429",
        "413",
        "404",
    ],
)
async def test_what_it_said_is_told_in_short_and_cleaned(
    tmp_path: Path, status: bytes, said: bytes, expected: int, message: str, code: str
) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(said, content_type=b"text/html", status=status)
        client = await Client.unix(proxy.socket_path)
        got, fields, body = await client.ask(post(b"/v1/chat/completions", json.dumps(CHAT).encode()))
        assert (got, *told(b"/v1/chat/completions", body)) == (expected, message, code)
        assert (fields.get(b"x-should-retry") == b"false") is (code == REFUSED)
        is_free = expected in (503, 429) or code == REFUSED or status.startswith(b"408")
        assert proxy.events[-1].tokens_in == (0 if is_free else None)


async def test_the_time_to_come_again_is_the_backends(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        client = await Client.unix(proxy.socket_path)
        busy = answer(b"busy", content_type=b"text/plain", status=b"503 Service Unavailable")
        for sent, got in ((b"retry-after: 7\r\n", b"7"), (b"retry-after: 999999\r\n", b"120"), (b"", b"1")):
            backend.reply = busy.replace(b"content-type", sent + b"content-type")
            _, fields, _ = await client.ask(post(b"/v1/chat/completions", json.dumps(CHAT).encode()))
            assert fields[b"retry-after"] == got


@pytest.mark.parametrize(
    "said",
    [
        b'{"error":{"message":"no","type":"x","code":500}}',
        b'{"error":"no"}',
        b'{"object":"error","message":"no","code":500}',
        b'{"type":"error","error":{"type":"api_error","message":"no"}}',
    ],
)
async def test_an_error_in_a_dialect_passes_as_it_came(tmp_path: Path, said: bytes) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(said, status=SERVER)
        client = await Client.unix(proxy.socket_path)
        assert (await client.ask(post(b"/v1/chat/completions", json.dumps(CHAT).encode())))[::2] == (500, said)


@pytest.mark.parametrize("target", [b"/v1/chat/completions", b"/api/chat"])
async def test_behind_a_sign_of_life_it_is_the_last_event(tmp_path: Path, target: bytes) -> None:
    """The stream has begun with 200 by then."""
    async with proxied(tmp_path) as (proxy, backend):
        seen, alive = bytearray(), asyncio.Event()

        async def script(reader: Any, writer: Any) -> None:
            await read_request(reader)
            await alive.wait()
            writer.write(answer(NGINX, content_type=b"text/html", status=GATEWAY))
            await writer.drain()

        backend.script = script
        client = await Client.unix(proxy.socket_path)
        fields = b"x-hive-heartbeat: 1\r\nconnection: close\r\n"
        client.writer.write(post(target, json.dumps({**CHAT, "stream": True}).encode(), fields=fields))
        while more := await client.reader.read(65536):
            seen.extend(more)
            if b": waiting" in seen or b'"done":false' in seen:
                alive.set()
        assert bytes(seen).count(b"the backend failed (502): 502 Bad Gateway") == 1
        assert b'"src":"hive"' in seen
        assert b"<html>" not in seen
        assert not bytes(seen).endswith(b"0\r\n\r\n"), "it must not look whole"
        assert proxy.events[-1].cut


# --- what a refused request costs ---------------------------------------------------------------------------------


async def asked(proxy: Proxy, *, stream: bool) -> int:
    client = await Client.unix(proxy.socket_path)
    body = json.dumps({**CHAT, "stream": stream}).encode()
    return (await client.ask(post(b"/v1/chat/completions", body)))[0]


HUBS_429 = b'{"error":{"message":"Tenant edge exceeded 5 requests in 60 s","code":"rate_limit_exceeded","src":"hive"}}'


@pytest.mark.parametrize("stream", [False, True], ids=["at once", "stream"])
@pytest.mark.parametrize(
    ("status", "said"),
    [
        (b"429 Too Many Requests", HUBS_429),
        (b"503 Service Unavailable", b'{"error":{"message":"no place came free","code":"saturated","src":"hive"}}'),
        (b"503 Service Unavailable", RAY_BUSY),
        (b"529 Overloaded", b'{"type":"error","error":{"type":"overloaded_error","message":"busy"}}'),
    ],
    ids=["a hub's 429", "a hub's 503", "Ray's 503", "529"],
)
async def test_a_request_that_the_server_refused_costs_nothing(
    tmp_path: Path, status: bytes, said: bytes, stream: bool
) -> None:
    """It counted as unknown, so usage, budgets and the share of its tenant were reckoned by a guess."""
    async with proxied(tmp_path) as (proxy, backend):
        backend.reply = answer(said, status=status)
        line = proxy.path.slot.line
        for _ in range(3):
            assert await asked(proxy, stream=stream) in (429, 503, 529)
        assert [(event.tokens_in, event.tokens_out) for event in proxy.events] == [(0, 0)] * 3
        assert line.running == 0


@pytest.mark.parametrize(("code", "tokens"), [(503, 0), (429, 0), (500, None)])
async def test_a_refusal_in_a_stream_before_its_first_token_costs_nothing_either(
    tmp_path: Path, code: int, tokens: int | None
) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        said = json.dumps({"error": {"message": "no", "code": code}}).encode()
        backend.reply = chunked(b"data: " + said + b"\n\n", b"data: [DONE]\n\n")
        await asked(proxy, stream=True)
        assert proxy.events[-1].tokens_in == tokens


async def test_a_503_behind_tokens_costs_them(tmp_path: Path) -> None:
    async with proxied(tmp_path) as (proxy, backend):
        piece = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
        said = b'data: {"error":{"message":"no","code":503}}\n\n'
        backend.reply = chunked(piece, piece, said)
        await asked(proxy, stream=True)
        event = proxy.events[-1]
        assert (event.tokens_out, event.estimated, event.cut) == (3, True, True)


async def test_refused_requests_spend_no_budget(tmp_path: Path) -> None:
    async with budgeted(tmp_path, PlayedDaemon(), tokens_per_day=1000) as (proxy, backend):
        backend.reply = answer(RAY_BUSY, content_type=b"text/plain", status=b"503 Service Unavailable")
        for _ in range(20):  # of the expected cost of each, 7 would have been too many
            assert await asked(proxy, stream=False) == 503
        (account,) = proxy.path.budgets.book.accounts
        assert (account.used(BudgetKind.DAY), account.pending) == (0, 0.0)


# --- a task's ladder ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "said", "cause"), [(SERVER, b"Internal Server Error", "down"), (GATEWAY, NGINX, "down")]
)
async def test_a_lost_replica_is_a_step_down_the_ladder(tmp_path: Path, status: bytes, said: bytes, cause: str) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        pool.servers["a"].reply = answer(said, content_type=b"text/plain", status=status)
        client = await pool.client()
        found = await ladder_told(client, ask(TASK))
        assert (found.status, found.model, found.rung) == (200, "b", "1")
        assert [event.model for event in pool.proxy.events] == ["b"]
        steps = b'hive_proxy_task_steps_total{from="0",task="plan",to="1",why="%b"} 1.0' % cause.encode()
        assert steps in b"".join(pool.proxy.path.metrics.exposition())
        await until(lambda: nothing_is_held(pool.proxy))


async def test_where_the_ladder_does_not_step_down_the_error_is_hives(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b", task={"step_down_on": "cold"}) as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        pool.servers["a"].reply = answer(b"Internal Server Error", content_type=b"text/plain", status=SERVER)
        found = await ladder_told(await pool.client(), ask(TASK))
        assert (found.status, found.body["error"]["code"]) == (502, FAILED)


# --- a real nginx, and the clients themselves ---------------------------------------------------------------------


async def test_the_page_of_a_real_nginx_before_nobody_is_told_in_short(tmp_path: Path) -> None:
    with front(tmp_path, "127.0.0.1:1") as nginx:
        async with proxied(tmp_path) as (proxy, _):
            inference = msgspec.structs.replace(
                proxy.settings.inference,
                backend_api_key_file=str(key_file(tmp_path, KEY)),
                backend_ca_file=str(nginx.ca),
            )
            proxy.path.use_settings(msgspec.structs.replace(proxy.settings, inference=inference))
            address = nginx.url.removesuffix("/v1")
            proxy.path.use_backend(
                BackendInfo(kind=BackendKind.REMOTE, address=address, up=True), [ModelInfo(name="m")]
            )
            client = await Client.unix(proxy.socket_path)
            for target in ASKED:
                status, _, body = await client.ask(post(target, json.dumps(ASKED[target]).encode()))
                assert status == 502
                assert told(target, body)[0] == "the backend failed (502): 502 Bad Gateway"


async def test_openais_and_anthropics_own_clients_raise_their_own_errors_and_try_again(tmp_path: Path) -> None:
    """A `500 text/plain` was an APIStatusError without a message; now both try again and then tell the words."""
    async with proxied(tmp_path) as (proxy, backend):
        proxy.use(backend, BackendKind.VLLM)
        backend.reply = answer(NGINX, content_type=b"text/html", status=GATEWAY)
        base = f"http://127.0.0.1:{proxy.port}"
        async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="hm_alice", max_retries=1) as client:
            with pytest.raises(openai.InternalServerError) as failed:
                await client.chat.completions.create(**CHAT)
            assert failed.value.code == FAILED
            assert len(backend.requests) == 2, "it tried again"
            backend.reply = answer(JSON_ANSWER)
            assert (await client.chat.completions.create(**CHAT)).choices[0].message.content == "hi"
        backend.reply = answer(NGINX, content_type=b"text/html", status=GATEWAY)
        async with anthropic.AsyncAnthropic(base_url=base, api_key="hm_alice", max_retries=0) as other:
            with pytest.raises(anthropic.InternalServerError) as told_so:
                await other.messages.create(**{**CHAT, "max_tokens": 5})
            assert "the backend failed (502): 502 Bad Gateway" in str(told_so.value)
