"""What is read where the daemon is down: SQLite in each state it can be left in, and Redis."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest

from hive.domain import Agent, AgentSpec, AgentStatus
from hive.errors import DependencyDown
from hive.settings import Paths
from hive.store import agents, audit, keys
from hive.store.audit import AuditRow
from hive.store.database import Database
from hive.tui.source import Source, read

ANN = Agent(id="id-ann", spec=AgentSpec(name="ann", command=["/bin/true"]), status=AgentStatus.PAUSED, reason="idle")


async def with_ann(path: Path) -> Database:
    database = Database.open(path)
    await database.write(lambda conn: agents.insert(conn, ANN))
    act = AuditRow(
        at=1.7e9, actor="hive", act="agent.paused", target="id-ann", origin="idle", detail={"from": "a", "to": "b"}
    )
    await database.write(lambda conn: audit.append(conn, act))
    return database


def source_of(tmp_path: Path) -> Source:
    return Source([tmp_path / "hive.sock"], tmp_path, uid=0, env={})


async def test_a_database_that_was_closed_is_read_and_nothing_is_left_beside_it(tmp_path: Path) -> None:
    (await with_ann(tmp_path / "hive.db")).close()
    before = sorted(os.listdir(tmp_path))
    snapshot = source_of(tmp_path).look()
    assert [(row.name, row.status, row.why, row.rss_bytes) for row in snapshot.agents] == [
        ("ann", "paused", "idle", None)
    ]
    assert [event.text for event in snapshot.events] == ["ann a → b"]
    assert (snapshot.source, snapshot.is_live) == ("store", False)
    assert str(tmp_path / "hive.db") in snapshot.problems[0]
    assert sorted(os.listdir(tmp_path)) == before


async def test_what_a_killed_writer_left_in_its_wal_is_not_missed(tmp_path: Path) -> None:
    database = await with_ann(tmp_path / "hive.db")
    assert (tmp_path / "hive.db-wal").stat().st_size > 0
    assert [agent.name for agent in read(tmp_path / "hive.db")[0]] == ["ann"]
    database.close()


@pytest.mark.parametrize("content", [b"", b"no database at all" * 100])
def test_a_database_that_is_none_says_so(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "hive.db").write_bytes(content)
    with pytest.raises(DependencyDown, match=r"hive\.db cannot be read"):
        source_of(tmp_path).look()


def test_without_daemon_and_database_it_is_the_daemon_that_is_named(tmp_path: Path) -> None:
    with pytest.raises(DependencyDown, match="no Hive answers"):
        source_of(tmp_path).look()


async def test_redis_knows_when_an_agent_was_active_last(short_path: Path, redis_server: Any) -> None:
    (await with_ann(short_path / "hive.db")).close()
    assert redis_server.socket == Paths(short_path, short_path).redis_socket
    import redis

    with redis.Redis(unix_socket_path=str(redis_server.socket)) as client:
        client.zadd(keys.AGENTS_ACTIVITY, {"id-ann": time.time() - 60})
    source = Source([short_path / "hive.sock"], short_path, uid=0, env={})
    assert 60 <= ((await asyncio.to_thread(source.look)).agents[0].idle_s or 0) < 90
    redis_server.kill()
    assert (await asyncio.to_thread(source.look)).agents[0].idle_s is None
