"""Beginning, seeing and ending jobs in which a model works, over TCP: for whom they are, at a real daemon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from hive.api.server import serve
from hive.domain import JobState, Role
from hive.store import jobs
from hive.store.jobs import StoredJob
from tests.api.over_tcp import TcpApi
from tests.control.box import Box

ORDER: dict[str, Any] = {"name": "tidy", "model": "demo", "prompt": "Hi"}


class JobCallers(NamedTuple):
    api: TcpApi
    tokens: dict[Role, str]

    async def ask(self, role: Role, method: str, path: str, body: object = None) -> Any:
        return await self.api.ask(method, path, token=self.tokens[role], body=body)

    async def statuses(self, method: str, path: str, body: object = None) -> list[int]:
        """Of a viewer, an operator and an admin."""
        return [(await self.ask(role, method, path, body)).status for role in (Role.VIEWER, Role.OPERATOR, Role.ADMIN)]


@pytest.fixture
async def callers(live: Box) -> AsyncIterator[JobCallers]:
    api = TcpApi(live.services.api_tokens)
    server = await serve(live.services, live.paths.runtime / "again.sock", tcp=api.tcp)
    yield JobCallers(api, {role: await api.token(role, role) for role in Role})
    await server.close()


async def test_an_operator_begins_a_job_and_is_told_where_it_is(callers: JobCallers, live: Box) -> None:
    assert await callers.statuses("POST", "/api/jobs", ORDER) == [403, 202, 202]
    await live.create("guest", tenant="acme")
    begun = await callers.ask(Role.OPERATOR, "POST", "/api/jobs", {**ORDER, "tenant": "acme", "priority": "low"})
    job = begun.json
    assert begun.headers["location"] == f"/api/jobs/{job['id']}"
    assert (job["kind"], job["actor"], job["state"]) == ("task", "token:operator", "running")
    assert (job["status"] in ("queued", "in_progress"), job["task"]["tenant"]) == (True, "acme")
    seen = await callers.ask(Role.VIEWER, "GET", f"/api/jobs/{job['id']}")
    assert (seen.status, seen.json["task"]["name"], seen.json["task"]["priority"]) == (200, "tidy", "low")
    [row] = [row for row in await live.orders() if row.detail.get("tenant") == "acme"]
    assert (row.act, row.actor, row.outcome) == ("order.begin_job", "token:operator", "ok")
    assert "Hi" not in str(row.detail), "a prompt is nothing for the audit table"


async def test_what_a_model_said_is_for_operators(callers: JobCallers) -> None:
    job = (await callers.ask(Role.OPERATOR, "POST", "/api/jobs", ORDER)).json["id"]
    assert await callers.statuses("GET", f"/api/jobs/{job}/output") == [403, 200, 200]
    assert (await callers.statuses("GET", f"/api/jobs/{job}/result"))[0] == 403
    assert (await callers.statuses("POST", f"/api/jobs/{job}/release"))[0] == 403


async def test_an_operator_ends_a_job_of_a_model_and_an_admin_what_else_takes_long(
    callers: JobCallers, live: Box
) -> None:
    job = (await callers.ask(Role.OPERATOR, "POST", "/api/jobs", ORDER)).json["id"]
    assert (await callers.ask(Role.VIEWER, "DELETE", f"/api/jobs/{job}")).status == 403
    assert (await callers.ask(Role.OPERATOR, "DELETE", f"/api/jobs/{job}")).json["state"] != "running"
    load = StoredJob(id="e" * 12, kind="model.load", state=JobState.DONE, actor="uid:0", created_at=1.0, updated_at=1.0)
    await live.services.jobs._database.write(lambda conn: jobs.add(conn, load))
    assert await callers.statuses("DELETE", f"/api/jobs/{load.id}") == [403, 403, 409]
    for below in ("output", "result"):
        told = await callers.ask(Role.ADMIN, "GET", f"/api/jobs/{load.id}/{below}")
        assert (told.status, "is a model.load" in told.json["detail"]) == (404, True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": " \n"}, "prompt"),
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"model": ""}, "model"),
        ({"params": {"messages": []}}, "messages"),
        ({"params": {"stream": False}}, "stream"),
        ({"params": []}, "params"),
        ({"tools": [{}] * 129}, "tools"),
        ({"exit_tools": [{"type": "function"}]}, "a tool is"),
        ({"priority": "urgent"}, "priority"),
        ({"form": "responses"}, "form"),
        ({"body": {}}, "body"),
        ({"max_tool_iterations": 0}, "max_tool_iterations"),
        ({"tenant": "../x"}, "tenant"),
        ({"answer_schema": []}, "answer_schema"),
        ({"stop": 1}, "stop"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
async def test_an_order_that_means_nothing_begins_nothing(
    callers: JobCallers, live: Box, wrong: dict[str, Any], said: str
) -> None:
    told = await callers.ask(Role.OPERATOR, "POST", "/api/jobs", {**ORDER, **wrong})
    assert (told.status, told.json["code"], said in told.json["detail"]) == (400, "bad_request", True), told.json
    assert await live.services.jobs.recent(10) == []


async def test_readers_of_one_job_hear_the_same_and_leave_nothing_behind(callers: JobCallers, live: Box) -> None:
    job = (await callers.ask(Role.OPERATOR, "POST", "/api/jobs", ORDER)).json["id"]
    path = f"/api/jobs/{job}/output?follow=1"
    reading = [asyncio.ensure_future(callers.ask(Role.OPERATOR, "GET", path)) for _ in range(3)]
    assert (await callers.ask(Role.OPERATOR, "DELETE", f"/api/jobs/{job}")).json["status"] == "cancelled"
    answers = await asyncio.gather(*reading)
    assert {answer.status for answer in answers} == {200}
    assert len({answer.body for answer in answers}) == 1
    assert answers[0].body.count(b"event: ended\n") == 1
    waiting = [task for task in asyncio.all_tasks() if task.get_name() == "api job output"]
    assert waiting == []
