"""Requests with sound have the limits, the line and the ladder of all others; the runner is a stand-in."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from hive.proxy.under_way import queue_now
from hive.settings.table import TenantRow
from hive.settings.tasks import TaskRow
from tests.proxy.harness import answer, read_request
from tests.proxy.test_slots import Pool, ask, pooled
from tests.proxy.test_uploads import SOUND, form, part, sound, told
from tests.waiting import until


def hear(model: str) -> bytes:
    """curl's order: the file comes before the model's name."""
    return form(sound(), part(b"model", model.encode()))


@asynccontextmanager
async def ears(tmp_path: Path, *models: str, task: str = "", **settings: Any) -> AsyncIterator[Pool]:
    """A pool; models with a name in `w…` have a whisper server."""
    async with pooled(tmp_path, *models, **settings) as pool:
        path = pool.proxy.path
        path.uploads.use_directory(tmp_path)
        for model, server in pool.servers.items():
            if model.startswith("w"):
                server.reply = told(b'{"text":"%b"}' % model.encode())
        if task:
            path.use_settings(msgspec.structs.replace(pool.proxy.settings, tasks={"hear": TaskRow(models=task)}))
        yield pool


async def test_a_cold_first_ear_is_stepped_past_with_the_same_file(tmp_path: Path) -> None:
    async with ears(tmp_path, "wa", "wb", task="wa|wb") as pool:
        pool.tell(pool.row("wa", is_open=False, ready_in_s=20.0), pool.row("wb"))
        client = await pool.client()
        status, fields, body = await client.ask(hear("task:hear"))
        assert (status, body) == (200, b'{"text":"wb"}')
        assert (fields[b"x-hive-model"], fields[b"x-hive-rung"]) == (b"wb", b"1")
        event = pool.proxy.events[-1]
        assert (event.model, event.asked, event.rung, event.unit, event.amount) == (
            *("wb", "task:hear", 1),
            *("audio_s", 6.02),
        )
        assert SOUND in pool.servers["wb"].requests[0][1]
        client.close()


async def test_an_ear_that_fails_before_its_answer_is_stepped_past_with_the_same_file(tmp_path: Path) -> None:
    async with ears(tmp_path, "wa", "wb", task="wa|wb") as pool:
        pool.tell(pool.row("wa"), pool.row("wb"))
        pool.servers["wa"].reply = answer(b'{"error":{"code":"out_of_memory"}}', status=b"503 Service Unavailable")
        client = await pool.client()
        status, fields, body = await client.ask(hear("task:hear"))
        assert (status, body, fields[b"x-hive-rung"]) == (200, b'{"text":"wb"}', b"1")
        assert SOUND in pool.servers["wa"].requests[0][1]
        assert SOUND in pool.servers["wb"].requests[0][1]
        client.close()


async def test_a_model_of_text_in_a_task_of_ears_is_passed_over(tmp_path: Path) -> None:
    async with ears(tmp_path, "llama", "wa", task="llama|wa") as pool:
        pool.tell(pool.row("llama"), pool.row("wa"))
        client = await pool.client()
        assert (await client.ask(hear("task:hear")))[2] == b'{"text":"wa"}'
        status, fields, _ = await client.ask(ask("task:hear"))
        assert (status, fields[b"x-hive-model"]) == (200, b"llama")
        client.close()


async def test_a_tenant_hears_with_the_models_of_its_allowlist_alone(tmp_path: Path) -> None:
    async with ears(tmp_path, "wa", "wb", tenants={"default": TenantRow(models="wb")}) as pool:
        pool.tell(pool.row("wa"), pool.row("wb"))
        client = await pool.client()
        assert (await client.ask(hear("wa")))[0] in (403, 404)
        assert (await client.ask(hear("wb")))[0] == 200
        assert not pool.servers["wa"].requests
        client.close()


async def test_an_agent_that_hears_has_a_request_less_for_text(tmp_path: Path) -> None:
    """The tier's concurrency is one over all servers."""
    async with ears(tmp_path, "wa", "llama", tier_low_concurrency=1) as pool:
        pool.tell(pool.row("wa"), pool.row("llama"))
        go_on = asyncio.Event()

        async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await read_request(reader)
            await go_on.wait()
            writer.write(told())
            await writer.drain()

        pool.servers["wa"].script = slow
        hearing, asking = await pool.client(), await pool.client()
        heard = asyncio.ensure_future(hearing.ask(hear("wa")))
        line = pool.proxy.path.slots.pooled["wa-1"].line
        await until(lambda: line.running == 1)
        answered = asyncio.ensure_future(asking.ask(ask("llama")))
        await pool.waits("llama")
        rows = {row.model: row.state for row in queue_now(pool.proxy.registry, 0.0).requests}
        assert rows["llama"] == "queued"
        assert not pool.servers["llama"].requests
        go_on.set()
        assert [(await one)[0] for one in (heard, answered)] == [200, 200]
        hearing.close()
        asking.close()


async def test_a_request_with_sound_waits_for_its_model_and_is_a_demand_for_it(tmp_path: Path) -> None:
    async with ears(tmp_path, "wa") as pool:
        pool.tell(pool.row("wa", is_open=False))
        client = await pool.client()
        heard = asyncio.ensure_future(client.ask(hear("wa")))
        await pool.waits("wa")
        await until(lambda: any("wa-1" in message.slots for message in pool.told))
        (row,) = queue_now(pool.proxy.registry, 0.0).requests
        assert (row.model, row.endpoint, row.for_load) == ("wa", "/v1/audio/transcriptions", True)
        pool.tell(pool.row("wa", generation=2))
        assert (await heard)[0] == 200
        client.close()
