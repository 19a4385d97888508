"""SQL over the state of a real daemon, asked at its socket."""

from __future__ import annotations

import asyncio
import json
import os
from asyncio import to_thread
from typing import Any

import pytest

from hive.client.client import Client
from hive.errors import BadRequest, NotPermitted, Saturated
from hive.store.audit import Filter
from tests.control.box import Box
from tests.waiting import until

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"
KEY = "sesame"


@pytest.fixture
async def asked(box: Box) -> Client:
    await box.everything()
    return Client(box.paths.api_socket, timeout_s=60)


def running(box: Box) -> str:
    return repr(box.services.state_queries)


async def orders(box: Box) -> list[dict[str, Any]]:
    """Rows of the audit table about queries, the oldest first."""
    rows = await box.audit(Filter(act="order.query_database"))
    return [dict(row) for row in reversed(rows)]


async def test_it_is_answered_and_in_the_audit_table(box: Box, asked: Client) -> None:
    await box.create("alice", env={"KEY": KEY})
    sql = "SELECT name, spec FROM agents WHERE name = :name"
    body = {"sql": sql, "params": {"name": "alice"}}
    hidden = await to_thread(asked.post, "/api/db/query", body)
    assert hidden["rows"] == [{"name": "alice", "spec": None}]
    assert (hidden["hidden"], hidden["secrets"]) == (["agents.spec"], False)
    shown = await to_thread(asked.post, "/api/db/query", {**body, "secrets": True})
    assert json.loads(shown["rows"][0]["spec"])["env"] == {"KEY": KEY}
    told = [(row["outcome"], row["actor"], row["origin"]) for row in await orders(box)]
    assert told == [("ok", f"uid:{os.geteuid()}", "socket")] * 2
    details = [row["detail"] for row in await orders(box)]
    assert [(one["sql"], one["secrets"], one["rows"]) for one in details] == [(sql, False, 1), (sql, True, 1)]


async def test_what_is_refused_is_in_the_audit_table_too(box: Box, asked: Client) -> None:
    with pytest.raises(NotPermitted, match="reads tables, and nothing else"):
        await to_thread(asked.post, "/api/db/query", {"sql": "DELETE FROM audit_log"})
    with pytest.raises(BadRequest, match="no such table"):
        await to_thread(asked.post, "/api/db/query", {"sql": "SELECT * FROM " + "x" * 3000})
    first, second = await orders(box)
    assert (first["outcome"], first["detail"]["sql"]) == ("not_permitted", "DELETE FROM audit_log")
    assert second["outcome"] == "bad_request"
    assert len(second["detail"]["sql"]) < 1100
    assert "characters left out" in second["detail"]["sql"]


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"sql": ""},
        {"sql": "x" * 65537},
        {"sql": "SELECT 1", "limit": 0},
        {"sql": "SELECT 1", "limit": 100_001},
        {"sql": "SELECT 1", "timeout_s": 61},
        {"sql": "SELECT 1", "timeout_s": 0},
        {"sql": "SELECT 1", "params": [1]},
        {"sql": "SELECT 1", "params": {"a": [1]}},
        {"sql": "SELECT 1", "database": "/etc/passwd"},
    ],
)
async def test_a_body_that_is_none_is_refused(asked: Client, body: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        await to_thread(asked.post, "/api/db/query", body)


async def test_it_ends_with_its_client_and_the_daemon_answers_meanwhile(box: Box, asked: Client) -> None:
    data = json.dumps({"sql": ENDLESS, "timeout_s": 60}).encode()
    reader, writer = await asyncio.open_unix_connection(str(box.paths.api_socket))
    head = f"POST /api/db/query HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    writer.write(f"{head}\r\n\r\n".encode() + data)
    await until(lambda: "1/2" in running(box))
    assert (await to_thread(asked.get, "/api/health"))["pid"] == os.getpid()
    writer.close()
    await until(lambda: "0/2" in running(box))
    assert await reader.read() == b""
    for _ in range(2000):
        if await orders(box):
            break
        await asyncio.sleep(0.01)
    [row] = await orders(box)
    assert (row["outcome"], row["detail"]["error"]) == ("cancelled", "the client left before the answer")


async def test_a_third_is_refused_with_retry_after(box: Box, asked: Client) -> None:
    body = {"sql": ENDLESS, "timeout_s": 20}
    asking = [asyncio.ensure_future(to_thread(asked.post, "/api/db/query", body)) for _ in range(2)]
    await until(lambda: "2/2" in running(box))
    with pytest.raises(Saturated):
        await to_thread(asked.get, "/api/db/tables")
    ended = box.stop_daemon()  # it does not wait for them
    await ended
    assert all(isinstance(one, Exception) for one in await asyncio.gather(*asking, return_exceptions=True))


async def test_tables_and_schema_are_told(asked: Client) -> None:
    tables = (await to_thread(asked.get, "/api/db/tables"))["tables"]
    agents = next(table for table in tables if table["name"] == "agents")
    assert agents["rows"] == 0
    assert [column["name"] for column in agents["columns"] if column["hidden"]] == ["spec"]
    found = await to_thread(lambda: asked.get("/api/db/schema", table=["uids", "jobs"]))
    assert [table["name"] for table in found["tables"]] == ["jobs", "uids"]
