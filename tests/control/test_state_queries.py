"""A real process reads a real database: what ends it, and that nothing is left of it."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.control import state_queries
from hive.control.state_queries import StateQueries
from hive.errors import BadRequest, HiveError, NotFound, NotPermitted, Saturated, TimedOut, TooLarge
from hive.host.process import ProcessTable
from hive.store.migrations import migrate
from hive.store.responses_file import ResponsesFile

ENDLESS = "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c"


class Asked:
    def __init__(self, directory: Path) -> None:
        self.path = directory / "hive.db"
        conn = sqlite3.connect(self.path, isolation_level=None)
        conn.execute("PRAGMA journal_mode = WAL")
        migrate(conn)
        conn.close()
        self.responses = ResponsesFile(directory / "responses.db")
        self.queries = StateQueries(self.path, self._responses)

    async def _responses(self) -> Path | None:
        if not self.responses.exists:
            return None
        await self.responses.do(lambda conn: None)
        return self.responses.path

    async def query(self, sql: str, **asked: Any) -> Any:
        given = {"limit": 100, "timeout_s": 30.0, "secrets": False, **asked}
        return msgspec.json.decode((await self.queries.query(sql, {}, **given)).text)


@pytest.fixture
async def asked(tmp_path: Path) -> AsyncIterator[Asked]:
    asked = Asked(tmp_path)
    yield asked
    while asked.queries._running:  # noqa: ASYNC110 - killed, and not reaped yet
        await asyncio.sleep(0.01)
    asked.responses.close()


async def test_a_query_is_answered_by_another_process(asked: Asked) -> None:
    found = await asked.query("SELECT count(*) AS n FROM agents")
    assert (found["rows"], found["truncated"], found["hidden"]) == ([{"n": 0}], None, [])
    assert repr(asked.queries) == "<StateQueries 0/2 running>"


@pytest.mark.parametrize(
    ("sql", "error"),
    [("SELEC", BadRequest), ("DELETE FROM agents", NotPermitted), ("SELECT zeroblob(99999999)", TooLarge)],
)
async def test_what_is_wrong_comes_back_as_the_error_it_is(asked: Asked, sql: str, error: type[HiveError]) -> None:
    with pytest.raises(error):
        await asked.query(sql)


async def test_what_needs_more_memory_than_it_may_have_is_ended(asked: Asked) -> None:
    """Memory of SQLite for a sort has no limit of SQLite's: in the daemon it would be the daemon's memory."""
    with pytest.raises(TooLarge, match="more than 256 MiB of memory"):
        await asked.query(
            "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c LIMIT 100000)"
            " SELECT x, zeroblob(10000) AS big FROM c ORDER BY x DESC, big"
        )


async def test_a_step_that_cannot_be_interrupted_is_killed(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """`trim` compares each byte with each: 10^11 comparisons, between which SQLite looks at no clock."""
    monkeypatch.setattr(state_queries, "START_S", 1.0)
    with pytest.raises(TimedOut):
        await asked.query(
            "SELECT trim(hex(zeroblob(500000)), replace(hex(zeroblob(400000)), '00', '1') || '0')", timeout_s=0.2
        )


async def test_a_query_too_long_is_ended_by_itself(asked: Asked) -> None:
    with pytest.raises(TimedOut, match=r"within 0\.1 s"):
        await asked.query(ENDLESS, timeout_s=0.1)


async def test_a_caller_that_is_cancelled_ends_it(asked: Asked) -> None:
    asking = asyncio.ensure_future(asked.query(ENDLESS))
    while not (children := readers()):  # noqa: ASYNC110 - a process says nothing when it begins
        await asyncio.sleep(0.01)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    while asked.queries._running:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    assert not readers() & children


def readers() -> set[int]:
    """The processes below this one whose command line names the program."""
    import os

    below = ProcessTable().with_descendants({os.getpid()}) - {os.getpid()}
    return {pid for pid in below if "hive.store.query_process" in _words(pid)}


def _words(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


async def test_no_more_than_two_at_a_time(asked: Asked) -> None:
    asking = [asyncio.ensure_future(asked.query(ENDLESS)) for _ in range(2)]
    while asked.queries._running < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    with pytest.raises(Saturated) as refused:
        await asked.queries.tables()
    assert refused.value.retry_after_s == 1
    for one in asking:
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)


async def test_a_long_query_does_not_keep_the_log_from_being_cut(asked: Asked) -> None:
    """A reader holds a checkpoint up: once it is killed, the write-ahead log is cut."""
    writer = sqlite3.connect(asked.path, isolation_level=None)
    asking = asyncio.ensure_future(asked.query(f"{ENDLESS}, agents"))
    while not readers():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    writer.execute("INSERT INTO uids VALUES (1, 'a', NULL)")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    while asked.queries._running:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    busy, _, _ = writer.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    writer.close()
    assert busy == 0


async def test_kept_responses_are_tables_like_others_once_there_are_some(asked: Asked) -> None:
    with pytest.raises(BadRequest, match="no such table: responses"):
        await asked.query("SELECT * FROM responses")
    await asked.responses.do(
        lambda conn: conn.execute("INSERT INTO responses VALUES (1, 'a', 'r', NULL, 1.0, 9, 'asked', 'answered')")
    )
    sql = "SELECT r.id, items, response, name FROM responses AS r LEFT JOIN agents AS a ON a.id = r.agent_id"
    found = await asked.query(sql)
    assert found["rows"] == [{"id": "r", "items": None, "response": None, "name": None}]
    assert found["hidden"] == ["responses.items", "responses.response"]
    found = await asked.query(sql, secrets=True)
    assert found["rows"] == [{"id": "r", "items": "asked", "response": "answered", "name": None}]


async def test_tables_and_schema(asked: Asked) -> None:
    tables = msgspec.json.decode((await asked.queries.tables()).text)["tables"]
    assert {"agents", "audit_log", "schema_steps"} <= {table["name"] for table in tables}
    [schema] = msgspec.json.decode((await asked.queries.schema(["uids"])).text)["tables"]
    assert schema["sql"][0].startswith("CREATE TABLE uids")
    with pytest.raises(NotFound) as missing:
        await asked.queries.schema(["uid"])
    assert missing.value.hint == "did you mean `uids`?"


async def test_a_process_that_ends_without_a_word_is_an_error_and_not_an_answer(
    asked: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(asked.path.parent))
    shadow = asked.path.parent / "msgspec.py"
    shadow.write_text("import os; os._exit(7)")
    with pytest.raises(HiveError, match="ended \\(code 7\\)"):
        await asked.query("SELECT 1")
