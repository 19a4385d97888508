"""A task's ladder on the data path: over real sockets, with the daemon's words spoken by the test.

Beside what it shall do, every mistake of other gateways has a test here (facts of 2026-08): a fallback that skips
access, a loop, a step in the middle of a stream, any error that triggers one, an alias that is not resolved.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.bodies.body_workers import DeepReaders
from hive.budgets import TokenLimits
from hive.domain import BackendInfo, BackendKind, Band, ModelInfo
from hive.errors import NotFound
from hive.link.tasks import AskTasks, TaskRoute
from hive.link.usage import SpentRow
from hive.proxy.budgets import NOT_KNOWN
from hive.proxy.task_routes import task_routes
from hive.settings.table import InferenceSection, TenantRow
from hive.settings.tasks import TaskRow
from tests.proxy.harness import (
    CHAT,
    JSON_ANSWER,
    STREAM,
    Client,
    answer,
    chunked,
    get,
    nothing_is_held,
    post,
    read_request,
)
from tests.proxy.test_budgets import PlayedDaemon
from tests.proxy.test_slots import CHAT_AT, FIRST, LAST, Pool, ask, pooled
from tests.waiting import until

TASK = "task:plan"
LLAMA_TOO_LONG = (
    b'{"error":{"code":400,"message":"the request exceeds the available context size, try increasing it",'
    b'"type":"exceed_context_size_error","n_prompt_tokens":9000,"n_ctx":4096}}'
)


@asynccontextmanager
async def laddered(
    tmp_path: Path,
    *models: str,
    aliases: str = "",
    ladder: str = "",
    task: dict[str, Any] | None = None,
    cloud: str = "asked",
    **more: Any,
) -> AsyncIterator[Pool]:
    """A pool with a server for each model, and `[task plan]` with all of them as its ladder."""
    async with pooled(tmp_path, *models, **more) as pool:
        tasks = {"plan": TaskRow(models=ladder or "|".join(models), **(task or {}))}
        told = msgspec.structs.replace(
            pool.proxy.settings, tasks=tasks, inference=InferenceSection(aliases=aliases, cloud=cloud)
        )
        pool.proxy.path.use_settings(told)
        for model, server in pool.servers.items():
            named = JSON_ANSWER.replace(b'"model":"m"', b'"model":"%b"' % model.encode())
            server.reply = answer(named.replace(b'"hi"', b'"%b"' % model.encode()))
        yield pool


class Told(msgspec.Struct):
    """An answer, with what its head says of the ladder."""

    status: int
    model: str
    rung: str
    why: str
    body: Any


async def told(client: Client, request: bytes) -> Told:
    status, fields, body = await client.ask(request)
    said = {name: fields.get(b"x-hive-" + name.encode(), b"").decode() for name in ("model", "rung", "why")}
    return Told(status, said["model"], said["rung"], said["why"], json.loads(body))


def asked(pool: Pool, models: str) -> list[int]:
    """The number of requests that each server had."""
    return [len(pool.servers[model].requests) for model in models]


def refusing(status: bytes, body: bytes = b'{"error":{"message":"no","code":1}}') -> bytes:
    return answer(body, status=status)


# --- which rung ------------------------------------------------------------------------------------------------------


async def test_the_first_rung_answers_where_it_is_ready_and_every_head_tells_it(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        client = await pool.client()
        said = await told(client, ask(TASK))
        assert (said.status, said.model, said.rung, said.why) == (200, "a", "0", "a is ready")
        assert said.body["model"] == TASK, "the name that was asked for, as of an alias"
        assert said.body["choices"][0]["message"]["content"] == "a"
        assert json.loads(pool.servers["a"].requests[0][1])["model"] == "a"
        (event,) = pool.proxy.events
        assert (event.asked, event.model, event.rung, event.far, event.status) == (TASK, "a", 0, False, 200)
        assert nothing_is_held(pool.proxy)


async def test_a_request_for_a_model_has_no_word_of_ladders(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        _, fields, _ = await (await pool.client()).ask(ask("a"))
        assert not [name for name in fields if name in (b"x-hive-model", b"x-hive-rung", b"x-hive-why")]
        assert pool.proxy.events[0].rung is None


async def test_while_the_first_is_cold_the_next_answers_and_the_first_is_asked_for(tmp_path: Path) -> None:
    """Without that wish nobody would ever load the first one, and the task would never come back to it."""
    async with laddered(tmp_path, "a", "b", task={"hold_s": 0.0}) as pool:
        pool.tell(pool.row("a", is_open=False, ready_in_s=47.0), pool.row("b"))
        client = await pool.client()
        said = await told(client, ask(TASK))
        assert (said.status, said.model, said.rung) == (200, "b", "1")
        assert said.why == "a is cold, expected in 47 s; b is ready"
        await until(lambda: pool.told)
        (wish,) = pool.told[0].slots["a-1"].waiting
        assert (wish.band, wish.tenant, wish.agent) == (Band.LOW, "default", "a1")
        assert 50 < wish.left_s <= 60
        pool.tell(pool.row("a"), pool.row("b"))
        said = await told(client, ask(TASK))
        assert (said.model, said.rung) == ("a", "0")
        assert [event.rung for event in pool.proxy.events] == [1, 0]
        assert b'hive_proxy_task_steps_total{from="0",task="plan",to="1",why="cold"} 1.0' in b"".join(
            pool.proxy.path.metrics.exposition()
        )
        await until(lambda: nothing_is_held(pool.proxy))


async def test_an_agent_stays_on_its_rung_for_a_while(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b", task={"hold_s": 30.0}) as pool:
        pool.tell(pool.row("a", is_open=False), pool.row("b"))
        client = await pool.client()
        assert (await told(client, ask(TASK))).model == "b"
        pool.tell(pool.row("a"), pool.row("b"))
        said = await told(client, ask(TASK))
        assert (said.model, said.why[:44]) == ("b", "b is ready, and its agent stays there for an")
        other = await Client.unix(pool.proxy.another("ben"))
        assert (await told(other, ask(TASK))).model == "a", "of other agents nothing is held"
        pool.tell(pool.row("a"), pool.row("b", is_open=False))
        assert (await told(client, ask(TASK))).model == "a", "it is no reason to wait for a load"


async def test_a_pinned_first_model_is_waited_for(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b", task={"pin_primary": True}) as pool:
        pool.tell(pool.row("a", is_open=False, ready_in_s=9.0), pool.row("b"))
        client = await pool.client()
        waiting = asyncio.ensure_future(told(client, ask(TASK)))
        await pool.waits("a")
        pool.tell(pool.row("a"), pool.row("b"))
        said = await waiting
        assert (said.model, said.why) == ("a", "a is cold, expected in 9 s, and waited for")
        assert asked(pool, "ab") == [1, 0]


async def test_a_budget_that_cannot_hold_is_refused_now_and_one_that_is_over_when_it_is(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b", task={"pin_primary": True, "budget_s": 0.3}) as pool:
        pool.tell(pool.row("a", is_open=False, ready_in_s=47.0), pool.row("b"))
        client = await pool.client()
        status, fields, body = await client.ask(ask(TASK))
        assert (status, json.loads(body)["error"]["code"]) == (503, "model_cold")
        assert 40 <= int(fields[b"retry-after"]) <= 47
        assert b"a is cold, expected in 47 s, and 0 s are left" in body
        pool.tell(pool.row("a", is_open=False), pool.row("b"))  # nobody can say when
        begun = time.monotonic()
        said = await told(client, ask(TASK))
        assert (said.status, said.body["error"]["code"]) == (503, "model_cold")
        assert "the request took longer than the 0.3 s of the task plan" in said.body["error"]["message"]
        assert time.monotonic() - begun >= 0.3
        assert asked(pool, "ab") == [0, 0]
        await until(lambda: nothing_is_held(pool.proxy))


async def test_a_wait_that_turns_out_too_long_for_the_budget_ends_when_that_is_known(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b", task={"pin_primary": True, "budget_s": 20.0}) as pool:
        pool.tell(pool.row("a", is_open=False), pool.row("b"))
        client = await pool.client()
        waiting = asyncio.ensure_future(told(client, ask(TASK)))
        await pool.waits("a")
        pool.tell(pool.row("a", is_open=False, ready_in_s=29.0), pool.row("b"))
        said = await waiting
        assert (said.status, said.body["error"]["code"]) == (503, "model_cold")


async def test_a_budget_holds_for_the_answer_too(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b", task={"budget_s": 0.3}) as pool:
        pool.tell(pool.row("a"), pool.row("b"))

        async def silent(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            await read_request(reader)
            await reader.read()  # the proxy hangs up

        pool.servers["a"].script = silent
        said = await told(await pool.client(), ask(TASK))
        assert (said.status, asked(pool, "b")) == (504, [0])


async def test_of_cold_rungs_the_first_that_is_expected_in_time_is_waited_for(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b", task={"budget_s": 20.0}) as pool:
        pool.tell(pool.row("a", is_open=False, load_s=47.0), pool.row("b", is_open=False, load_s=5.0))
        waiting = asyncio.ensure_future(told(await pool.client(), ask(TASK)))
        await pool.waits("b")
        pool.tell(pool.row("a", is_open=False, load_s=47.0), pool.row("b"))
        said = await waiting
        assert (said.model, said.rung) == ("b", "1")
        assert said.why == "a is cold, expected in 47 s; b is cold, expected in 5 s, and waited for"


@pytest.mark.parametrize(
    ("causes", "status", "model", "why"),
    [("full", 200, "b", "a is full; b is ready"), ("cold,down,context", 503, "a", "a is full")],
)
async def test_a_full_line_is_stepped_past_where_the_task_says_so(
    tmp_path: Path, causes: str, status: int, model: str, why: str
) -> None:
    async with laddered(tmp_path, "a", "b", task={"step_down_on": causes}, queue_depth=1) as pool:
        pool.tell(pool.row("a", places=1), pool.row("b"))
        held = asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            while True:
                await read_request(reader)
                await held.wait()
                writer.write(answer(JSON_ANSWER))

        pool.servers["a"].script = slow
        clients = [await pool.client() for _ in range(2)] + [await Client.unix(pool.proxy.another("ben"))]
        busy = [asyncio.ensure_future(client.ask(ask("a"))) for client in clients[:2]]
        await pool.waits("a")
        said = await told(clients[2], ask(TASK))
        assert (said.status, said.model, said.why) == (status, model, why)
        held.set()
        assert [(await one)[0] for one in busy] == [200, 200]


# --- the steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [b"502 Bad Gateway", b"503 Service Unavailable", b"429 Too Many Requests"])
async def test_an_error_that_is_no_answer_is_stepped_past(tmp_path: Path, status: bytes) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        pool.servers["a"].reply = refusing(status)
        said = await told(await pool.client(), ask(TASK))
        assert (said.status, said.model, said.rung) == (200, "b", "1")
        assert said.why == f"a: answered {status[:3].decode()}; b is ready"
        assert [event.model for event in pool.proxy.events] == ["b"], "one request, one row"
        assert nothing_is_held(pool.proxy)


@pytest.mark.parametrize("status", [b"400 Bad Request", b"401 Unauthorized", b"403 Forbidden", b"404 Not Found"])
async def test_no_error_that_is_an_answer_is_stepped_past(tmp_path: Path, status: bytes) -> None:
    """OpenRouter tries the next one at any error; a refusal of content is an answer of a model's, too."""
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        pool.servers["a"].reply = refusing(status, b'{"error":{"message":"content_filter","code":"content_filter"}}')
        said = await told(await pool.client(), ask(TASK))
        assert (said.status, said.rung, said.body["error"]["code"]) == (int(status[:3]), "0", "content_filter")
        assert asked(pool, "ab") == [1, 0]


async def test_each_rung_is_asked_once_and_the_last_error_is_told(tmp_path: Path) -> None:
    """Others go round their list until a counter stops them."""
    async with laddered(tmp_path, "a", "b", "c") as pool:
        pool.tell(*(pool.row(model) for model in "abc"))
        for model in "abc":
            pool.servers[model].reply = refusing(b"503 Busy", b'{"error":{"message":"%b"}}' % model.encode())
        said = await told(await pool.client(), ask(TASK))
        assert (said.status, said.model, said.rung) == (503, "c", "2")
        assert said.body["error"]["message"] == "c", "its own words"
        assert asked(pool, "abc") == [1, 1, 1]
        await until(lambda: nothing_is_held(pool.proxy))


async def test_a_server_that_is_gone_is_stepped_past(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        await pool.servers["a"].stop()
        pool.tell(pool.row("a"), pool.row("b"))
        client = await pool.client()
        said = await told(client, ask(TASK))
        assert (said.status, said.model) == (200, "b")
        assert pool.proxy.path.slots.pooled["a-1"].gate.is_lost, "the daemon hears of it as ever"
        await until(lambda: nothing_is_held(pool.proxy))


async def test_a_server_that_dies_before_its_answer_is_stepped_past(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))

        async def dies(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            writer.close()

        pool.servers["a"].script = dies
        said = await told(await pool.client(), ask(TASK))
        assert (said.status, said.model) == (200, "b")
        await until(lambda: nothing_is_held(pool.proxy))


async def test_no_step_is_made_once_a_byte_of_the_answer_has_gone_out(tmp_path: Path) -> None:
    """LiteLLM goes on in the middle of a stream, with the beginning put into a prompt."""
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        pool.servers["a"].script = broken_after(chunked(FIRST, end=False))
        client = await pool.client()
        client.writer.write(ask(TASK, body=STREAM))
        head = await asyncio.wait_for(client.reader.readuntil(b"\r\n\r\n"), 5)
        assert b"x-hive-model: a\r\n" in head
        rest = await asyncio.wait_for(client.reader.read(), 5)
        assert b'"content":"a"' in rest
        assert b"stream_incomplete" in rest
        assert not rest.endswith(b"0\r\n\r\n")
        assert asked(pool, "b") == [0]
        await until(lambda: nothing_is_held(pool.proxy))


def broken_after(data: bytes) -> Any:
    async def breaks(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(data)
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.close()

    return breaks


async def test_a_stream_that_breaks_before_its_first_byte_is_stepped_past(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        pool.servers["a"].script = broken_after(chunked(end=False))
        pool.servers["b"].reply = chunked(FIRST, LAST)
        client = await pool.client()
        status, fields, body = await client.ask(ask(TASK, body=STREAM))
        assert (status, fields[b"x-hive-model"]) == (200, b"b")
        assert body.endswith(b"data: [DONE]\n\n")


async def test_a_client_that_has_gone_makes_no_step(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        came = asyncio.Event()

        async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            came.set()
            await reader.read()  # the proxy hangs up
            writer.write(refusing(b"503 Busy"))

        pool.servers["a"].script = late
        client = await pool.client()
        client.writer.write(ask(TASK))
        await asyncio.wait_for(came.wait(), 5)
        client.close()
        await until(lambda: nothing_is_held(pool.proxy))
        assert asked(pool, "b") == [0]


async def test_a_step_charges_no_window_again(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b", "c", task={"hold_s": 0.0}, window_requests=2, window_s=60.0) as pool:
        pool.tell(*(pool.row(model) for model in "abc"))
        for model in "ab":
            pool.servers[model].reply = refusing(b"503 Busy")
        client = await pool.client()
        assert [(await told(client, ask(TASK))).status for _ in range(3)] == [200, 200, 429]
        assert asked(pool, "abc") == [2, 2, 2]


async def test_a_rung_of_another_kind_gets_the_body_made_for_it(tmp_path: Path) -> None:
    """The client's own body is kept until its answer begins, however long it is."""
    long = CHAT.replace(b'"hello"', b'"%b"' % (b"word " * 300_000))
    async with laddered(tmp_path, "a", "v", "o", task={"hold_s": 0.0}) as pool:
        pool.proxy.path.readers = DeepReaders()
        pool.proxy.path.readers.start()
        pool.tell(*(pool.row(model) for model in "avo"))
        for model in "av":
            pool.servers[model].reply = refusing(b"503 Busy")
        pool.servers["o"].reply = answer(b'{"model":"o","message":{"role":"assistant","content":"o"},"done":true}')
        try:
            for body in (CHAT, long):
                said = await told(await pool.client(), ask(TASK, b"/api/chat", body[:-1] + b',"stream":false}'))
                assert (said.status, said.model, said.body["model"]) == (200, "o", TASK)
        finally:
            pool.proxy.path.readers.close()
        for number in (0, 1):
            sent = {model: pool.servers[model].requests[number] for model in "avo"}
            paths = [sent[model][0].split()[1] for model in "avo"]
            assert paths == [b"/v1/chat/completions", b"/v1/chat/completions", b"/api/chat"]
            assert "cache_prompt" not in json.loads(sent["v"][1])
            texts = {json.loads(sent[model][1])["messages"][0]["content"] for model in "avo"}
            assert len(texts) == 1
        await until(lambda: nothing_is_held(pool.proxy))


@pytest.mark.parametrize(
    ("target", "body"),
    [
        (b"/v1/completions", {"prompt": "x"}),
        (b"/v1/messages", {"messages": [{"role": "user", "content": "x"}], "max_tokens": 5}),
        (b"/v1/responses", {"input": "x"}),
        (b"/api/chat", {"messages": [{"role": "user", "content": "x"}], "stream": False}),
        (b"/api/generate", {"prompt": "x", "stream": False}),
        (b"/v1/embeddings", {"input": "x"}),
        (b"/api/embed", {"input": "x"}),
    ],
)
async def test_every_dialect_asks_for_a_task(tmp_path: Path, target: bytes, body: dict[str, Any]) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        pool.servers["a"].reply = refusing(b"503 Busy")
        embeds = b'{"object":"list","data":[{"object":"embedding","index":0,"embedding":[1.0]}],"model":"b","usage":{"prompt_tokens":1,"total_tokens":1}}'  # noqa: E501
        text = b'{"id":"c","object":"text_completion","created":0,"model":"b","choices":[{"index":0,"text":"x","finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1,"total_tokens":2}}'  # noqa: E501
        if b"embed" in target:
            pool.servers["b"].reply = answer(embeds)
        elif target == b"/v1/completions":
            pool.servers["b"].reply = answer(text)
        elif target == b"/v1/messages":
            pool.servers["b"].reply = answer(
                b'{"id":"m","type":"message","role":"assistant","model":"b","content":[{"type":"text","text":"x"}],'
                b'"stop_reason":"end_turn","stop_sequence":null,"usage":{"input_tokens":1,"output_tokens":1}}'
            )
        status, fields, said = await (await pool.client()).ask(
            post(target, json.dumps({"model": TASK, **body}).encode())
        )
        assert (status, fields[b"x-hive-model"], fields[b"x-hive-rung"]) == (200, b"b", b"1"), said
        assert [event.asked for event in pool.proxy.events] == [TASK]


# --- what every rung has to pass -------------------------------------------------------------------------------------


async def test_a_rung_that_the_tenant_may_not_use_is_never_reached(tmp_path: Path) -> None:
    """At LiteLLM who made the first one fail on purpose got to any other (#39998)."""
    async with laddered(tmp_path, "a", "secret", "c", tenants={"default": TenantRow(models="a, c")}) as pool:
        pool.tell(*(pool.row(model) for model in ("a", "secret", "c")))
        client = await pool.client()
        pool.servers["a"].reply = refusing(b"503 Busy")
        said = await told(client, ask(TASK))
        assert (said.status, said.model, said.rung) == (200, "c", "2")
        assert said.why == "a: answered 503; rung 1: not for this caller; c is ready"
        assert asked(pool, "a") == [1]
        assert not pool.servers["secret"].requests
        assert (await told(client, ask("secret"))).status == 403


async def test_who_may_use_no_rung_is_refused_as_for_the_model(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b", tenants={"default": TenantRow(models="x")}) as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        said = await told(await pool.client(), ask(TASK))
        assert (said.status, said.body["error"]["code"]) == (403, "forbidden")
        assert '"a"' not in said.body["error"]["message"]
        assert asked(pool, "ab") == [0, 0]


async def test_aliases_lead_to_a_task_and_from_a_rung_to_its_model(tmp_path: Path) -> None:
    """LiteLLM took the name of a fallback as it stands (#17200)."""
    aliases = "gpt-4 = task:plan, claude-sonnet-4-5 = task:plan, fast = missing | b"
    async with laddered(tmp_path, "a", "b", aliases=aliases, ladder="a | fast") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        pool.servers["a"].reply = refusing(b"503 Busy")
        client = await pool.client()
        for name in ("gpt-4", "GPT-4", "claude-sonnet-4-5-20250929", "Task:PLAN"):
            said = await told(client, ask(name))
            assert (said.status, said.model, said.body["model"]) == (200, "b", name)
        assert {event.model for event in pool.proxy.events} == {"b"}


@pytest.mark.parametrize(
    ("models", "cloud", "fields", "ladder", "leaves"),
    [
        ("", "fallback", b"", "a | far", False),
        ("a, far", "asked", b"", "a | far", False),
        ("a, far", "fallback", b"", "a | far", True),
        ("a, far", "fallback", b"x-hive-local-only: 1\r\n", "a | far", False),
        ("a, far", "asked", b"", "far | a", True),
        ("a, far", "never", b"", "far | a", False),
    ],
)
async def test_a_far_rung_needs_the_permits_of_the_model_and_of_the_guard(
    tmp_path: Path, models: str, cloud: str, fields: bytes, ladder: str, leaves: bool
) -> None:
    """Position in a list is no permit to leave the box; the first one was asked for."""
    stub = ModelInfo(name="far", remote_host="https://cloud.invalid", capabilities=("completion",))
    tenants = {"default": TenantRow(models=models)}
    async with laddered(tmp_path, "a", "far", ladder=ladder, tenants=tenants) as pool:
        settings = pool.proxy.path.settings
        inference = msgspec.structs.replace(settings.inference, cloud=cloud)
        pool.proxy.path.use_settings(msgspec.structs.replace(settings, inference=inference))
        if ladder.startswith("a"):
            pool.servers["a"].reply = refusing(b"503 Busy")
        pool.tell(pool.row("a"))
        ollama = BackendInfo(kind=BackendKind.OLLAMA, address=pool.servers["far"].address, up=True)
        pool.proxy.path.use_backend(ollama, [stub])
        (route,) = task_routes(pool.proxy.path, AskTasks(agent="a1"), time.monotonic()).tasks
        rung = next(one for one in route.rungs if one.model == "far")
        assert bool(rung.served) == (leaves or bool(fields)), "the route tells it, but for the request's own word"
        said = await told(await pool.client(), post(CHAT_AT, CHAT.replace(b'"m"', b'"task:plan"'), fields=fields))
        assert len(pool.servers["far"].requests) == leaves
        assert [event.far for event in pool.proxy.events] == [leaves]
        assert said.status == (200 if leaves or ladder.startswith("far") else 503)


async def test_a_spent_budget_is_spent_on_every_rung(tmp_path: Path) -> None:
    """At LiteLLM a free local model with a paid fallback was unlimited spending (#41344); nobody counts twice here."""
    async with laddered(tmp_path, "a", "b") as pool:
        budgets = pool.proxy.path.budgets
        budgets.ask = PlayedDaemon(SpentRow(0, 0, 0)).answer
        pool.proxy.registry.learn(msgspec.structs.replace(pool.proxy.row, limits=TokenLimits(tokens_per_day=600)))
        budgets.heard()
        await asyncio.sleep(0.01)
        pool.tell(pool.row("a"), pool.row("b"))
        pool.servers["a"].reply = refusing(b"503 Busy")
        client = await pool.client()
        said = await told(client, ask(TASK))
        assert (said.status, said.model) == (200, "b")
        (account,) = budgets.book.accounts
        assert account.pending == 0, "of the first rung nothing is left"
        budgets.ask = PlayedDaemon(SpentRow(600, 600, 0)).answer
        budgets.heard()
        await asyncio.sleep(0.05)
        said = await told(client, ask(TASK))
        assert (said.status, said.body["error"]["code"]) == (429, "budget_exceeded")
        assert asked(pool, "ab") == [1, 1], "no server is asked any more"
        await until(lambda: nothing_is_held(pool.proxy))


async def test_a_prompt_that_does_not_fit_goes_on_to_a_larger_context_only(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b", "c", "d", task={"hold_s": 0.0}) as pool:
        sizes = {"a": 4096, "b": 4096, "c": None, "d": 8192}
        rows = [
            msgspec.structs.replace(pool.row(model), models=[ModelInfo(name=model, context_length=sizes[model])])
            for model in "abcd"
        ]
        pool.tell(*rows)
        pool.servers["a"].reply = refusing(b"400 Bad Request", LLAMA_TOO_LONG)
        client = await pool.client()
        said = await told(client, ask(TASK))
        assert (said.status, said.model, said.rung) == (200, "d", "3")
        assert asked(pool, "abcd") == [1, 0, 0, 1]
        pool.servers["d"].reply = refusing(b"400 Bad Request", LLAMA_TOO_LONG)
        said = await told(client, ask("task:plan"))
        assert (said.status, said.body["error"]["type"]) == (400, "exceed_context_size_error"), "its own words"
        assert asked(pool, "abcd") == [2, 0, 0, 2]


async def test_a_prompt_that_surely_does_not_fit_is_not_sent_to_the_small_one(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        rows = [
            msgspec.structs.replace(pool.row(model), models=[ModelInfo(name=model, context_length=size)])
            for model, size in (("a", 512), ("b", 100_000))
        ]
        pool.tell(*rows)
        said = await told(await pool.client(), ask(TASK, body=CHAT.replace(b"hello", b"word " * 2000)))
        assert (said.model, said.why) == ("b", "a holds 512 tokens and the prompt is longer; b is ready")
        assert asked(pool, "a") == [0]


async def test_a_picture_goes_to_the_rung_that_sees(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        rows = [
            msgspec.structs.replace(pool.row(model), models=[ModelInfo(name=model, capabilities=able)])
            for model, able in (("a", ("completion",)), ("b", ("completion", "vision")))
        ]
        pool.tell(*rows)
        picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBORw0KGgo="}}
        body = {"model": TASK, "messages": [{"role": "user", "content": [{"type": "text", "text": "?"}, picture]}]}
        said = await told(await pool.client(), post(CHAT_AT, json.dumps(body).encode()))
        assert (said.status, said.model, said.why) == (200, "b", "a has no vision; b is ready")


async def test_a_schema_that_a_server_would_pass_over_goes_to_one_that_holds_it(tmp_path: Path) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
    body = {"model": TASK, "messages": [{"role": "user", "content": "x"}], "response_format": schema}
    async with laddered(tmp_path, "d", "a") as pool:
        demo = msgspec.structs.replace(pool.row("d"), backend=BackendInfo(kind=BackendKind.DEMO, address="", up=True))
        address = pool.servers["d"].address
        demo = msgspec.structs.replace(demo, backend=msgspec.structs.replace(demo.backend, address=address))
        pool.tell(demo, pool.row("a"))
        client = await pool.client()
        status = (await told(client, post(CHAT_AT, json.dumps({**body, "model": "d"}).encode()))).status
        said = await told(client, post(CHAT_AT, json.dumps(body).encode()))
        assert (said.status, said.model) == (200, "a" if status == 501 else "d")


async def test_a_rung_that_is_not_there_is_passed_over_and_a_task_without_any_is_not_found(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("b"))
        said = await told(await pool.client(), ask(TASK))
        assert (said.status, said.model, said.why) == (200, "b", "rung 0: there is no such model; b is ready")
        pool.tell(pool.row("b"))
        pool.proxy.path.forget_slot("b-1")
        pool.proxy.use(pool.servers["a"], models=("x",))
        said = await told(await pool.client(), ask(TASK))
        assert (said.status, said.body["error"]["code"]) == (404, "model_not_found")


# --- what is told without asking a model -----------------------------------------------------------------------------


async def test_a_route_is_what_a_request_would_get_and_nothing_is_asked(tmp_path: Path) -> None:
    """The decider that acts also tells: what a list of its own would say may be another thing."""
    tenants = {"default": TenantRow(models="a, fast, c")}
    async with laddered(
        tmp_path, "a", "b", "c", ladder="a | fast | b | c", aliases="fast = c", tenants=tenants
    ) as pool:
        pool.tell(pool.row("a", is_open=False, load_s=47.0), pool.row("b"), pool.row("c"))
        (route,) = task_routes(pool.proxy.path, AskTasks(agent="a1"), time.monotonic()).tasks
        told_of = [(rung.served, rung.state, rung.expected_s, bool(rung.refused)) for rung in route.rungs]
        assert told_of == [
            ("a", "cold", 47.0, False),
            ("c", "ready", 0.0, False),
            ("", "", None, True),
            ("c", "ready", 0.0, False),
        ]
        assert route.rungs[2].refused == 'tenant default may not use the model "b"'
        assert (route.rung, route.waits, route.why) == (1, False, "a is cold, expected in 47 s; fast is ready")
        assert asked(pool, "abc") == [0, 0, 0]
        assert not pool.told, "nothing is loaded for it"
        (route,) = task_routes(pool.proxy.path, AskTasks(), time.monotonic()).tasks
        assert route.rung == 1, "an operator has the tenant default, where it speaks for no other"
        said = await told(await pool.client(), ask(TASK))
        assert (said.model, said.rung) == ("c", "1")
        with pytest.raises(NotFound):
            task_routes(pool.proxy.path, AskTasks(agent="nobody"), 0.0)
        assert task_routes(pool.proxy.path, AskTasks(task="other"), 0.0).tasks == []


async def test_a_route_says_which_rungs_a_budget_refuses(tmp_path: Path) -> None:
    """A route took a rung whose budget was spent, and a request for it was refused."""
    async with laddered(tmp_path, "a", "b") as pool:
        path = pool.proxy.path

        def route() -> TaskRoute:
            return task_routes(path, AskTasks(agent="a1"), time.monotonic()).tasks[0]

        far = msgspec.structs.replace(pool.row("a"), backend=BackendInfo(kind="remote", address="https://192.0.2.1"))
        pool.tell(far, pool.row("b"))
        assert (route().rung, route().rungs[0].far) == (0, True)
        limits = TokenLimits(tokens_per_day=600, cloud_tokens_per_day=50)
        pool.proxy.registry.learn(msgspec.structs.replace(pool.proxy.row, limits=limits))
        path.budgets.look()
        assert [rung.refused for rung in route().rungs] == [NOT_KNOWN, NOT_KNOWN]
        path.budgets.ask = PlayedDaemon(SpentRow(50, 50, 50)).answer
        path.budgets.heard()
        await asyncio.sleep(0.05)
        first, second = route().rungs
        assert "has spent its 50 tokens of this day for requests that leave the box" in first.refused
        assert (first.state, second.refused, route().rung) == ("", "", 1)
        (account,) = path.budgets.book.accounts
        assert account.pending == 0, "a question costs nothing"
        path.budgets.ask = PlayedDaemon(SpentRow(600, 600, 50)).answer
        path.budgets.heard()
        await asyncio.sleep(0.05)
        assert all("600 tokens of this day" in rung.refused for rung in route().rungs if rung.model == "b")
        assert (route().rung, route().waits) == (None, False)
        assert asked(pool, "ab") == [0, 0]


# --- what lists show -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("models", "is_shown"), [("", True), ("b", True), ("x", False)])
async def test_lists_show_a_task_to_who_may_use_one_rung(tmp_path: Path, models: str, is_shown: bool) -> None:
    aliases = "gpt-4 = task:plan"
    async with laddered(
        tmp_path, "a", "b", "x", ladder="a|b", aliases=aliases, tenants={"default": TenantRow(models=models)}
    ) as pool:
        pool.tell(*(pool.row(model) for model in "abx"))
        client = await pool.client()
        for target, key, name in ((b"/v1/models", "data", "id"), (b"/api/tags", "models", "name")):
            _, _, body = await client.ask(get(target))
            names = [row[name] for row in json.loads(body)[key]]
            assert (TASK in names, "gpt-4" in names) == (is_shown, is_shown)
        assert (await client.ask(get(b"/v1/models/task:plan")))[0] == (200 if is_shown else 404)
        _, _, body = await client.ask(get(b"/api/ps"))
        assert TASK not in [row["name"] for row in json.loads(body)["models"]], "a task runs nowhere"


async def test_an_ollama_s_own_list_shows_tasks_too(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", ladder="tiny | x", tenants={"default": TenantRow(models="tiny")}) as pool:
        ollama = pool.servers["a"]
        ollama.reply = answer(b'{"models":[{"name":"tiny:latest","model":"tiny:latest","size":7},{"name":"big"}]}')
        pool.proxy.path.use_backend(
            BackendInfo(kind=BackendKind.OLLAMA, address=ollama.address, up=True), [ModelInfo(name="tiny:latest")]
        )
        _, _, body = await (await pool.client()).ask(get(b"/api/tags"))
        assert [row["name"] for row in json.loads(body)["models"]] == ["tiny:latest", TASK]
        ollama.reply = answer(JSON_ANSWER)
        said = await told(await pool.client(), ask(TASK))
        assert (said.status, said.model) == (200, "tiny:latest")
