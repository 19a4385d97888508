"""Responses made in the background in a daemon: a real proxy, a real process of jobs, a real llama-server."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from hive.domain import JobState
from hive.lifecycle import background_responses, final_responses
from hive.lifecycle.job_output import JobOutputReader
from hive.settings.jobs import JobsSection
from hive.settings.table import Settings
from hive.store import jobs as store
from tests.control.box import Box
from tests.lifecycle.test_model_jobs import QUICK, metered, with_model
from tests.llama import MODEL, LlamaServer
from tests.waiting import until

pytestmark = pytest.mark.llama
SHORT: dict[str, Any] = {"model": MODEL, "input": "Say hello.", "max_output_tokens": 8, "background": True}


@contextlib.asynccontextmanager
async def agent(box: Box, name: str = "scribe", **fields: Any) -> AsyncIterator[httpx.AsyncClient]:
    """Asks as a new agent."""
    await box.create(name, **fields)
    access = box.tokens(name)
    head = {"authorization": f"Bearer {access['model']}"}
    async with httpx.AsyncClient(
        base_url=access["openai_base_url"], headers=head, trust_env=False, timeout=60
    ) as client:
        yield client


@contextlib.contextmanager
def held(server: LlamaServer) -> Iterator[None]:
    os.kill(server.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server.process.pid, signal.SIGCONT)


async def begin(client: httpx.AsyncClient, **more: Any) -> dict[str, Any]:
    got = await client.post("/responses", json={**SHORT, **more})
    assert got.status_code == 200, got.text
    found: dict[str, Any] = got.json()
    return found


async def ended(box: Box, response: dict[str, Any]) -> JobState:
    return (await box.services.jobs.get(response["id"].removeprefix("resp_"), wait_s=30)).state


async def with_keeping(box: Box, server: LlamaServer, settings: Settings = QUICK) -> None:
    await with_model(box, server, settings)
    await box.services.config.change({"proxy.responses_kept_mb": 4}, "uid:0")


async def test_it_costs_one_request_of_its_agent(box: Box, llama_server_on_socket: LlamaServer) -> None:
    await with_keeping(box, llama_server_on_socket)
    async with agent(box) as client:
        begun = await begin(client)
        assert await ended(box, begun) is JobState.DONE
        whole = (await client.get(f"/responses/{begun['id']}")).json()
        row = await metered(box, (await box.view("scribe"))["id"], "default")
        assert (row["endpoint"], row["cut"]) == ("/v1/responses", 0)
        usage = whole["usage"]
        assert (row["tokens_in"], row["tokens_out"]) == (usage["input_tokens"], usage["output_tokens"])
        result = await box.services.model_jobs.result(begun["id"].removeprefix("resp_"))
        assert (result["usage"]["tokens_in"], result["usage"]["tokens_out"]) == (row["tokens_in"], row["tokens_out"])
        assert result["answer"] == whole["output"][0]["content"][0]["text"]


async def test_no_prompt_and_no_answer_is_in_the_database_of_each_backup(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    await with_keeping(box, llama_server_on_socket)
    async with agent(box) as client:
        begun = await begin(client, input="the-word-nobody-else-says", instructions="a-rule-nobody-else-has")
        await ended(box, begun)
        whole = (await client.get(f"/responses/{begun['id']}")).json()
    text = whole["output"][0]["content"][0]["text"]
    rows = await box.services.audit_log._database.read(_everything)
    for secret in ("the-word-nobody-else-says", "a-rule-nobody-else-has", text):
        assert secret not in rows


def _everything(conn: Any) -> str:
    names = [row["name"] for row in conn.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
    return json.dumps([[tuple(row) for row in conn.execute(f'SELECT * FROM "{name}"')] for name in names], default=str)


async def test_one_agent_has_so_many_at_a_time(
    box: Box, llama_server_on_socket: LlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_responses, "OF_ONE_AGENT", 2)
    await with_keeping(box, llama_server_on_socket)
    async with agent(box) as client, agent(box, "other") as other:
        with held(llama_server_on_socket):
            begun = [await begin(client) for _ in range(2)]
            refused = await client.post("/responses", json=SHORT)
            assert (refused.status_code, "2 responses of this agent are being made" in refused.text) == (429, True)
            await begin(other)
            monkeypatch.setattr(background_responses, "HELD_OF_ONE_BYTES", 10_000)
            refused = await other.post("/responses", json={**SHORT, "input": "x" * 10_000})
            assert (refused.status_code, "10000 bytes are the most" in refused.text) == (429, True)
            monkeypatch.setattr(background_responses, "HELD_BYTES", 1000)
            assert (await other.post("/responses", json=SHORT)).status_code == 503
        monkeypatch.setattr(background_responses, "HELD_BYTES", 100_000)
        for one in begun:
            assert await ended(box, one) is JobState.DONE
        await begin(client)


async def test_one_that_was_cancelled_is_put_together_once(
    box: Box, llama_server_on_socket: LlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []

    class Counted(JobOutputReader):
        def __init__(self, path: Path) -> None:
            read.append(path.stem)
            super().__init__(path)

    monkeypatch.setattr(final_responses, "JobOutputReader", Counted)
    await with_keeping(box, llama_server_on_socket)
    async with agent(box) as client:
        begun = await begin(client, max_output_tokens=4000)
        job = begun["id"].removeprefix("resp_")
        async for event in box.services.model_jobs.events(job, follow=True):
            if event.data.get("type") == "response.output_text.delta":
                break
        cancelled = (await client.post(f"/responses/{begun['id']}/cancel")).json()
        assert (cancelled["status"], len(cancelled["output"])) == ("cancelled", 1)
        polled = await asyncio.gather(*(client.get(f"/responses/{begun['id']}") for _ in range(8)))
        assert all(one.json() == cancelled for one in polled)
        assert read == [job]
        assert (await client.delete(f"/responses/{begun['id']}")).status_code == 200
        assert (await client.get(f"/responses/{begun['id']}")).status_code == 404


async def test_local_only_is_in_its_order_and_in_the_grant_of_its_job(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    await with_keeping(box, llama_server_on_socket)
    jobs = box.services.model_jobs
    async with agent(box) as client:
        for fields, is_local_only in (({"X-Hive-Local-Only": "1"}, True), ({}, False)):
            with held(llama_server_on_socket):
                begun = (await client.post("/responses", json=SHORT, headers=fields)).json()
                job = begun["id"].removeprefix("resp_")
                assert (await jobs.order(job)).local_only is is_local_only
                assert jobs._runs[job].grant.is_local_only is is_local_only
            assert await ended(box, begun) is JobState.DONE


async def test_jobs_that_wait_for_others_are_queued(box: Box, llama_server_on_socket: LlamaServer) -> None:
    settings = msgspec.structs.replace(QUICK, jobs=JobsSection(at_once=1))
    await with_keeping(box, llama_server_on_socket, settings)
    async with agent(box) as client:
        with held(llama_server_on_socket):
            begun = [await begin(client) for _ in range(3)]

            async def statuses() -> list[str]:
                return [(await client.get(f"/responses/{one['id']}")).json()["status"] for one in begun]

            while (found := await statuses()) != ["in_progress", "queued", "queued"]:
                assert found == ["queued"] * 3
            cancelled = (await client.post(f"/responses/{begun[1]['id']}/cancel")).json()
            assert (cancelled["status"], cancelled["output"]) == ("cancelled", [])
        assert await ended(box, begun[2]) is JobState.DONE


async def test_events_of_the_last_ones_are_kept_and_the_answers_of_all(
    box: Box, llama_server_on_socket: LlamaServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_responses, "KEPT_OF_ONE_AGENT", 1)
    await with_keeping(box, llama_server_on_socket)
    async with agent(box) as client:
        begun = [await begin(client) for _ in range(3)]
        for one in begun:
            assert await ended(box, one) is JobState.DONE
        database, view = box.services.audit_log._database, await box.view("scribe")

        async def left() -> list[str]:
            found: list[str] = await database.read(lambda conn: store.background_of_agent(conn, view["id"]))
            return found

        for _ in range(500):
            if len(await left()) == 1:
                break
            await asyncio.sleep(0.02)
        assert await left() == [begun[-1]["id"].removeprefix("resp_")]
        for one in begun:
            assert (await client.get(f"/responses/{one['id']}")).json()["status"] in ("completed", "incomplete")
            assert (await client.post(f"/responses/{one['id']}/cancel")).json()["id"] == one["id"]
        gone = await client.get(f"/responses/{begun[0]['id']}", params={"stream": "true"})
        assert (gone.status_code, "kept no more" in gone.text) == (400, True)
        assert (await client.delete(f"/responses/{begun[0]['id']}")).json()["deleted"] is True
        assert (await client.get(f"/responses/{begun[0]['id']}")).status_code == 404


async def test_what_is_too_old_goes_and_what_is_under_way_does_not(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    await with_keeping(box, llama_server_on_socket)
    async with agent(box) as client:
        old = await begin(client)
        await ended(box, old)
        in_background = box.services.responses.in_background
        assert in_background is not None
        await in_background.forget_older(time.time() - 3600)
        assert len(await box.services.audit_log._database.read(store.background_of_all)) == 1
        with held(llama_server_on_socket):
            await begin(client)
            await in_background.forget_older(time.time() + 3600)
            [left] = await box.services.audit_log._database.read(store.background_of_all)
        assert left != old["id"].removeprefix("resp_")


async def test_where_jobs_are_off_that_is_said(box: Box, llama_server_on_socket: LlamaServer) -> None:
    await with_keeping(box, llama_server_on_socket, msgspec.structs.replace(QUICK, jobs=JobsSection(enabled=False)))
    async with agent(box) as client:
        refused = await client.post("/responses", json=SHORT)
        assert (refused.status_code, "model jobs are off" in refused.text) == (501, True)


async def test_a_budget_that_is_spent_fails_it(box: Box, llama_server_on_socket: LlamaServer) -> None:
    await with_keeping(box, llama_server_on_socket)
    async with agent(box, tokens_per_day=1) as client:
        first, second = await begin(client), await begin(client)
        assert {await ended(box, first), await ended(box, second)} <= {JobState.DONE, JobState.FAILED}
        third = await begin(client)
        assert await ended(box, third) is JobState.FAILED
        told = (await client.get(f"/responses/{third['id']}")).json()
        assert (told["status"], told["error"]["code"]) == ("failed", "rate_limit_exceeded")


async def test_a_request_that_is_too_long_for_an_order_is_refused(
    box: Box, llama_server_on_socket: LlamaServer
) -> None:
    await with_keeping(box, llama_server_on_socket)
    async with agent(box, tier="high") as client:
        refused = await client.post("/responses", json={**SHORT, "input": "x" * (4 * 1024 * 1024)})
        assert refused.status_code == 400, refused.text
        assert "at most 4194304 bytes" in refused.text
        refused = await client.post("/responses", json={**SHORT, "input": '"' * (1536 * 1024)})
        assert (refused.status_code, "4194304 are the most" in refused.text) == (400, True)


async def test_an_agent_that_sleeps_finds_what_it_has_begun(box: Box, llama_server_on_socket: LlamaServer) -> None:
    await with_keeping(box, llama_server_on_socket)
    async with agent(box) as client:
        await box.start("scribe", "uid:0")
        with held(llama_server_on_socket):
            begun = await begin(client)
            await box.pause("scribe", timeout_s=10, now=False, actor="uid:0")
        assert await ended(box, begun) is JobState.DONE
        assert (await box.view("scribe"))["status"] == "paused"


async def test_a_backup_of_what_an_operator_deletes_has_none(box: Box, llama_server_on_socket: LlamaServer) -> None:
    """`hive agent responses NAME --delete` means these too."""
    await with_keeping(box, llama_server_on_socket)
    async with agent(box) as client:
        begun = await begin(client)
        await ended(box, begun)
        assert (await client.get(f"/responses/{begun['id']}")).status_code == 200
        await box.services.responses.delete((await box.view("scribe"))["id"])
        assert (await client.get(f"/responses/{begun['id']}")).status_code == 404
        found = await box.services.audit_log._database.read(store.background_of_all)
        assert found == []
    await until(lambda: not list((box.paths.jobs).glob("*.out")))
