"""Rows of usage, agents' totals, marks, and the questions asked of them, in a real database."""

from __future__ import annotations

import msgspec
import pytest

from hive.domain import Agent, AgentSpec, By, UsageEvent
from hive.store import agents, usage
from hive.store.database import Database
from hive.store.usage import CostOfAgent, CostSums, GroupCost, UsageFilter, UsageMark


def event(no: int, **fields: object) -> UsageEvent:
    row = {
        "id": f"p1-{no}",
        "epoch": "p1",
        "event_no": no,
        "agent_id": "a1",
        "tenant": "default",
        "model": "small",
        "backend": "ollama",
        "endpoint": "/api/chat",
        "tokens_in": 10,
        "tokens_out": 1,
        "created_at": 1000.0 + no,
        **fields,
    }
    return msgspec.convert(row, UsageEvent)


@pytest.fixture
async def alice(database: Database) -> Agent:
    agent = Agent(id="a1", spec=AgentSpec(name="alice", command=["true"]))
    await database.write(lambda conn: agents.insert(conn, agent))
    return agent


async def test_an_event_inserted_twice_counts_once(database: Database, alice: Agent) -> None:
    events = [event(1), event(2), event(2), event(3, tokens_in=None)]
    assert len(await database.write(lambda conn: usage.insert(conn, events))) == 3
    assert await database.write(lambda conn: usage.insert(conn, [*events, event(4)])) == [event(4)]
    (found,) = await database.read(agents.all)
    assert (found.requests, found.tokens_in, found.tokens_out, found.last_active_at) == (4, 30, 4, 1004.0)


async def test_usage_of_a_removed_agent_is_kept_without_its_name(database: Database, alice: Agent) -> None:
    await database.write(lambda conn: usage.insert(conn, [event(1)]))
    await database.write(lambda conn: agents.remove(conn, "a1", now=1.0))
    await database.write(lambda conn: usage.insert(conn, [event(2)]))
    found = await database.read(lambda conn: usage.usage_since(conn, UsageFilter()))
    assert [(cost.agent_id, cost.name, cost.requests) for cost in found.agents] == [("a1", None, 2)]


async def test_usage_since_sums_what_is_known_and_counts_what_is_not(database: Database, alice: Agent) -> None:
    rows = [
        event(1, cached_tokens=4),
        event(2, tokens_in=None, tokens_out=None),
        event(3, cut=True, tokens_out=None),
        event(4, agent_id="b2", tokens_out=1000),
        event(-2000, tokens_in=7777),
    ]
    await database.write(lambda conn: usage.insert(conn, rows))
    found = await database.read(lambda conn: usage.usage_since(conn, UsageFilter(500.0)))
    first = CostOfAgent(agent_id="b2", name=None, requests=1, tokens_in=10, tokens_out=1000)
    second = CostOfAgent(
        agent_id="a1", name="alice", requests=3, tokens_in=20, tokens_out=1, cached_tokens=4, unknown=2, cut=1
    )
    assert found.agents == [first, second]
    assert found.totals == CostSums(requests=4, tokens_in=30, tokens_out=1001, cached_tokens=4, unknown=2, cut=1)


async def test_usage_since_of_nothing_is_zero(database: Database) -> None:
    found = await database.read(lambda conn: usage.usage_since(conn, UsageFilter()))
    assert msgspec.to_builtins(found) == {"agents": [], "totals": dict.fromkeys(CostSums.__struct_fields__, 0)}


async def test_usage_of_one_agent_has_the_published_shape(database: Database, alice: Agent) -> None:
    rows = [event(1), event(2, model="large", tokens_out=None), event(3, duration_ms=1.5), event(4, agent_id="b2")]
    await database.write(lambda conn: usage.insert(conn, rows))
    found = await database.read(lambda conn: usage.agent_usage(conn, "a1", since=0, period="24h", limit=2))
    assert msgspec.to_builtins(found) == {
        "agentId": "a1",
        "period": "24h",
        "totals": {"tokensIn": 30, "tokensOut": 2},
        "byModel": [
            {"model": "small", "totalIn": 20, "totalOut": 2, "count": 2},
            {"model": "large", "totalIn": 10, "totalOut": 0, "count": 1},
        ],
        "recent": [
            {"id": "p1-3", "model": "small", "tokensIn": 10, "tokensOut": 1, "durationMs": 1.5, "createdAt": 1003.0},
            {"id": "p1-2", "model": "large", "tokensIn": 10, "tokensOut": None, "durationMs": 0, "createdAt": 1002.0},
        ],
    }


async def test_an_old_mark_is_pruned_only_when_its_spool_is_gone(database: Database) -> None:
    day = 86400.0
    await database.write(lambda conn: usage.set_marks(conn, {"old": UsageMark(5), "spooled": UsageMark(6, 1)}, now=0.0))
    await database.write(lambda conn: usage.set_marks(conn, {"young": UsageMark(7)}, now=20 * day))
    gone = await database.write(lambda conn: usage.prune_marks(conn, spooled={"spooled"}, now=31 * day))
    assert gone == ["old"]
    assert await database.read(usage.marks) == {"spooled": UsageMark(6, 1), "young": UsageMark(7)}


async def test_usage_is_added_up_by_what_is_asked_and_of_whom(database: Database, alice: Agent) -> None:
    rows = [
        event(1, created_at=3600.0),
        event(2, created_at=7199.9, model="large", tokens_in=500),
        event(3, created_at=7200.0, tenant="acme", cut=True),
        event(4, created_at=7300.0, agent_id="b2", backend="vllm", tokens_in=None),
    ]
    await database.write(lambda conn: usage.insert(conn, rows))

    async def by(what: By, asked: UsageFilter) -> list[tuple[str | int, int, int]]:
        found = await database.read(lambda conn: usage.usage_by(conn, what, asked))
        return [(cost.key, cost.requests, cost.tokens_in) for cost in found]

    assert await by(By.MODEL, UsageFilter()) == [("large", 1, 500), ("small", 3, 20)]
    assert await by(By.TENANT, UsageFilter()) == [("default", 3, 510), ("acme", 1, 10)]
    assert await by(By.BACKEND, UsageFilter()) == [("ollama", 3, 520), ("vllm", 1, 0)]
    assert await by(By.HOUR, UsageFilter()) == [(3600, 2, 510), (7200, 2, 10)]
    assert await by(By.MODEL, UsageFilter(7200)) == [("small", 2, 10)]
    assert await by(By.HOUR, UsageFilter(agent="a1", tenant="default", model="small")) == [(3600, 1, 10)]
    assert await by(By.TENANT, UsageFilter(agent="nobody")) == []
    (of_acme,) = await database.read(lambda conn: usage.usage_by(conn, By.TENANT, UsageFilter(tenant="acme")))
    assert of_acme == GroupCost(key="acme", requests=1, tokens_in=10, tokens_out=1, cut=1)
    agents = await database.read(lambda conn: usage.usage_since(conn, UsageFilter(model="large")))
    assert [(cost.name, cost.requests) for cost in agents.agents] == [("alice", 1)]
