"""Ends of a request for a task that are no fault of its rung: nothing of them is a step to the next one."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path

import pytest

from hive.errors import Saturated
from hive.proxy.forward import Exchange
from hive.proxy.model_refresh import Looking
from hive.proxy.task_table import PRUNED_AT
from tests.proxy.harness import nothing_is_held, post, read_request
from tests.proxy.test_slots import Pool, ask
from tests.proxy.test_tasks import TASK, Told, asked, laddered, told
from tests.waiting import until


def _silent(pool: Pool, model: str) -> list[bytes]:
    """A server that takes requests and never answers; what it took."""
    taken: list[bytes] = []

    async def script(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        taken.append((await read_request(reader))[0])
        await reader.read()

    pool.servers[model].script = script
    return taken


async def _asleep(pool: Pool) -> asyncio.Task[Told]:
    """The agent is asleep, and a request for the task waits for its wake."""
    gate = pool.proxy.alice.gate
    client = await pool.client()
    assert gate.close(2, time.monotonic()) is None
    gate.asleep(2)
    waiting = asyncio.ensure_future(told(client, ask(TASK)))
    await until(lambda: gate.parked == 1)
    return waiting


async def test_an_agent_that_is_not_woken_is_refused_and_no_rung_answers_for_it(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        waiting = await _asleep(pool)
        pool.proxy.alice.gate.refuse(2, "stopped")
        said = await waiting
        assert (said.status, said.body["error"]["code"]) == (503, "not_awake")
        assert asked(pool, "ab") == [0, 0]
        assert nothing_is_held(pool.proxy)


async def test_the_time_of_the_task_is_over_while_the_agent_is_woken(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b", task={"budget_s": 0.3}) as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        said = await asyncio.wait_for(await _asleep(pool), 10)
        assert "longer than the 0.3 s" in said.body["error"]["message"]
        assert asked(pool, "ab") == [0, 0]


async def test_when_the_time_of_the_task_is_over_no_other_rung_is_asked(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b", task={"budget_s": 0.5}) as pool:
        taken = _silent(pool, "b")
        pool.tell(pool.row("a", is_open=False), pool.row("b", is_open=False))
        waiting = asyncio.ensure_future(told(await pool.client(), ask(TASK)))
        await pool.waits("a")
        pool.tell(pool.row("a", is_open=False), pool.row("b"))
        assert (await waiting).status == 503
        assert not taken


async def test_a_proxy_that_goes_sends_nothing_to_another_rung(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        first, second = _silent(pool, "a"), _silent(pool, "b")
        client = await pool.client()
        waiting = asyncio.ensure_future(told(client, ask(TASK)))
        await until(lambda: len(first) == 1)
        pool.proxy.path.draining = True
        (connection,) = pool.proxy.connections
        assert isinstance(connection.exchange, Exchange)
        connection.exchange.refuse(Saturated("Hive's proxy is restarting", retry_after_s=1))
        assert (await waiting).status == 503
        assert not second


async def test_what_is_refused_now_asks_for_no_list_of_models(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b", task={"budget_s": 10}) as pool:
        looked: list[int] = []

        async def look() -> None:
            looked.append(1)

        pool.proxy.path.looking = Looking(look)
        pool.tell(pool.row("a", is_open=False, ready_in_s=47.0), pool.row("b", is_open=False, ready_in_s=47.0))
        said = await told(await pool.client(), ask(TASK))
        assert (said.status, said.body["error"]["code"]) == (503, "model_cold")
        assert not looked


async def test_a_model_of_a_task_is_loaded_by_the_empty_request_of_ollamas_clients(tmp_path: Path) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        pool.tell(pool.row("a"), pool.row("b"))
        client = await pool.client()
        status, _, body = await client.ask(post(b"/api/generate", json.dumps({"model": TASK}).encode()))
        assert (status, json.loads(body)["done"]) == (200, True)


@pytest.mark.parametrize("held", [PRUNED_AT, 2 * PRUNED_AT])
async def test_many_agents_are_remembered_all_and_those_whose_time_is_over_are_not(tmp_path: Path, held: int) -> None:
    async with laddered(tmp_path, "a", "b") as pool:
        table = pool.proxy.path.tasks
        task, now = table.of(TASK), time.monotonic()
        assert task is not None
        table.gave("early", task, 1, now - task.hold_s - 1)
        for number in range(held + 10):
            table.gave(f"agent{number}", task, 0, now)
        assert table.held_by("early", task) == (None, 0.0)
        assert table.held_by(f"agent{held + 5}", task)[0] == 0
