"""Agents, uids, audit rows in a real database."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hive.domain import Agent, AgentSpec, AgentStatus, RestartPolicy, SleepDepth, Tier
from hive.errors import WrongState
from hive.store import agents, audit
from hive.store.audit import AuditRecord
from hive.store.database import Database
from hive.store.migrations import migrate

ALICE = Agent(
    id="a1",
    spec=AgentSpec(
        name="alice",
        command=["/usr/bin/python3", "-u", "agent.py"],
        env={"WHO": "ällice"},
        port=9000,
        tier=Tier.HIGH,
        model="llama3.2",
        restart=RestartPolicy.ON_FAILURE,
        idle_s=1.5,
    ),
    status=AgentStatus.PAUSED,
    depth=SleepDepth.LIGHT,
    depth_goal=SleepDepth.LIGHT,
    generation=7,
    since=1000.25,
    reason="idle for 312 s",
    uid=70001,
    token_serial=2,
    created_at=900.0,
)
BOB = Agent(id="b2", spec=AgentSpec(name="bob", command=["true"]), created_at=800.0)


async def test_an_agent_comes_back_as_it_was_written(database: Database) -> None:
    await database.write(lambda conn: agents.insert(conn, ALICE))
    await database.write(lambda conn: agents.insert(conn, BOB))
    assert await database.read(agents.all) == [BOB, ALICE]


async def test_a_prompt_is_kept_and_written_only_when_it_changes(database: Database) -> None:
    def alice(prompt: str | None, *, ahead: bool = False, reason: str = "") -> Agent:
        spec = msgspec.structs.replace(ALICE.spec, system_prompt=prompt, prewarm_on_start=ahead)
        return msgspec.structs.replace(ALICE, spec=spec, reason=reason)

    changes = [alice("Be kind."), alice("Be kind.", ahead=True), alice(None, ahead=True), alice("ü" * 9), alice(None)]
    await database.write(lambda conn: agents.insert(conn, ALICE))
    for agent in changes:
        await database.write(lambda conn, agent=agent: agents.update(conn, agent))  # type: ignore[misc]
        assert await database.read(agents.all) == [agent]
        written = await database.write(lambda conn, agent=agent: rows_written(conn, agent))  # type: ignore[misc]
        assert written == 1, "its own row alone"
    await database.write(lambda conn: agents.update(conn, changes[0]))
    await database.write(lambda conn: agents.remove(conn, "a1", now=1.0))
    left = await database.read(lambda conn: conn.execute("SELECT count(*) FROM agent_prompts").fetchone()[0])
    assert left == 0


def rows_written(conn: sqlite3.Connection, agent: Agent) -> int:
    before = conn.total_changes
    agents.update(conn, msgspec.structs.replace(agent, reason="another"))
    return conn.total_changes - before


async def test_a_taken_name_is_refused_on_insert_and_on_rename(database: Database) -> None:
    await database.write(lambda conn: agents.insert(conn, ALICE))
    twin = msgspec.structs.replace(ALICE, id="a2")
    with pytest.raises(WrongState, match="an agent named alice already"):
        await database.write(lambda conn: agents.insert(conn, twin))
    await database.write(lambda conn: agents.insert(conn, BOB))
    renamed = msgspec.structs.replace(BOB, spec=ALICE.spec)
    with pytest.raises(WrongState, match="an agent named alice already"):
        await database.write(lambda conn: agents.update(conn, renamed))


async def test_a_taken_cid_is_refused_on_insert_and_on_change_and_its_holder_is_named(database: Database) -> None:
    def with_cid(agent: Agent, cid: int | None) -> Agent:
        return msgspec.structs.replace(agent, spec=msgspec.structs.replace(agent.spec, cid=cid))

    await database.write(lambda conn: agents.insert(conn, with_cid(ALICE, 5)))
    with pytest.raises(WrongState, match="cid 5 is that of alice already"):
        await database.write(lambda conn: agents.insert(conn, with_cid(BOB, 5)))
    await database.write(lambda conn: agents.insert(conn, with_cid(BOB, 6)))
    with pytest.raises(WrongState, match="cid 5 is that of alice already"):
        await database.write(lambda conn: agents.update(conn, with_cid(BOB, 5)))
    with pytest.raises(WrongState, match="an agent named bob already"):
        await database.write(lambda conn: agents.insert(conn, msgspec.structs.replace(with_cid(BOB, 7), id="b3")))
    assert await database.read(agents.all) == [with_cid(BOB, 6), with_cid(ALICE, 5)]
    await database.write(lambda conn: agents.update(conn, with_cid(ALICE, None)))
    await database.write(lambda conn: agents.update(conn, with_cid(BOB, 5)))
    await database.write(lambda conn: agents.remove(conn, BOB.id, now=1.0))
    await database.write(lambda conn: agents.update(conn, with_cid(ALICE, 5)))
    assert await database.read(agents.all) == [with_cid(ALICE, 5)]


async def test_an_update_from_an_old_copy_does_not_set_totals_back(database: Database) -> None:
    await database.write(lambda conn: agents.insert(conn, BOB))
    await database.write(lambda conn: conn.execute("UPDATE agents SET total_tokens_in = 55").fetchall())
    await database.write(lambda conn: agents.touch(conn, {"b2": 950.0}))
    await database.write(lambda conn: agents.touch(conn, {"b2": 940.0}))
    running = msgspec.structs.replace(BOB, status=AgentStatus.RUNNING, generation=3)
    await database.write(lambda conn: agents.update(conn, running))
    (found,) = await database.read(agents.all)
    assert (found.status, found.generation, found.tokens_in, found.last_active_at) == ("running", 3, 55, 950.0)


async def test_a_uid_is_kept_until_removal_and_not_given_out_while_a_process_lives(database: Database) -> None:
    def allocate(agent: str, in_use: set[int]) -> object:
        return database.write(lambda conn: agents.allocate_uid(conn, agent, first_uid=70000, in_use=in_use))

    assert await allocate("a1", set()) == 70000  # type: ignore[misc]
    assert await allocate("b2", set()) == 70001  # type: ignore[misc]
    assert await allocate("a1", {70000}) == 70000  # type: ignore[misc]
    await database.write(lambda conn: agents.remove(conn, "a1", now=1.0))
    assert await allocate("c3", {70000}) == 70002  # type: ignore[misc]
    assert await allocate("d4", set()) == 70000  # type: ignore[misc]


async def test_a_uid_that_came_back_after_the_last_look_is_not_given_out(database: Database) -> None:
    """A process of its agent may be left, of which a look that was taken before it ended knows nothing."""

    def allocate(agent: str, freed_before: float) -> Any:
        return database.write(
            lambda conn: agents.allocate_uid(
                conn, agent, first_uid=70000, in_use=frozenset(), freed_before=freed_before
            )
        )

    assert await allocate("a1", 5.0) == 70000
    await database.write(lambda conn: agents.remove(conn, "a1", now=6.0))
    assert await allocate("b2", 6.0) == 70001
    assert await allocate("c3", 6.5) == 70000


async def test_giving_a_uid_out_and_back_looks_at_no_other_agents(database: Database) -> None:
    """Every row was read for each agent that was made, and again for each that was removed."""
    queries = (
        "SELECT uid FROM uids WHERE agent_id = ? AND freed_at IS NULL",
        "SELECT uid FROM uids WHERE freed_at IS NOT NULL AND uid >= ? AND freed_at < ? ORDER BY uid",
        "SELECT max(uid) FROM uids",
        "UPDATE uids SET freed_at = ? WHERE agent_id = ? AND freed_at IS NULL",
    )
    for query in queries:
        plan = await database.read(
            lambda conn, query=query: [*conn.execute(f"EXPLAIN QUERY PLAN {query}", ("1",) * query.count("?"))]  # type: ignore[misc]
        )
        assert all("SCAN" not in row["detail"] for row in plan), [row["detail"] for row in plan]


@settings(max_examples=50, deadline=None)
@given(
    steps=st.lists(st.tuples(st.sampled_from(["take", "free"]), st.integers(0, 5)), max_size=30),
    alive=st.sets(st.integers(65530, 65545), max_size=5),
)
def test_no_two_agents_ever_hold_one_uid(steps: list[tuple[str, int]], alive: set[int]) -> None:
    import sqlite3

    conn = sqlite3.connect(":memory:", isolation_level=None)
    conn.row_factory = sqlite3.Row
    migrate(conn)
    held: dict[str, int] = {}
    for step, number in steps:
        agent = f"agent-{number}"
        if step == "free":
            agents.remove(conn, agent, now=1.0)
            held.pop(agent, None)
            continue
        uid = agents.allocate_uid(conn, agent, first_uid=65530, in_use=alive)
        assert held.setdefault(agent, uid) == uid
        assert uid not in alive | agents.NOT_FOR_AGENTS
        assert len(set(held.values())) == len(held)
    conn.close()


async def test_the_audit_tail_is_the_last_rows_oldest_first(database: Database) -> None:
    rows = [
        AuditRecord(
            at=float(n), actor="uid:0", act="agent.paused", target="a1", origin="api", detail={"n": n, "ü": [1]}
        )
        for n in range(5)
    ]
    for row in rows:
        await database.write(lambda conn, row=row: audit.append(conn, row))  # type: ignore[misc]
    assert await database.read(lambda conn: audit.tail(conn, 2)) == rows[3:]
    assert await database.read(lambda conn: audit.tail(conn, 99)) == rows


async def test_the_template_of_an_agent_is_kept_beside_its_spec(database: Database) -> None:
    """Code that knows no templates refuses a spec with an unknown field: it reads the rest of it."""
    agent = msgspec.structs.replace(ALICE, spec=msgspec.structs.replace(ALICE.spec, template="lg"))
    await database.write(lambda conn: agents.insert(conn, agent))
    await database.write(lambda conn: agents.insert(conn, BOB))
    assert await database.read(agents.all) == [BOB, agent]
    await database.write(lambda conn: agents.update(conn, agent))
    assert await database.read(agents.all) == [BOB, agent]
    spec = await database.read(lambda conn: conn.execute("SELECT spec FROM agents WHERE id = 'a1'").fetchone()[0])
    assert "template" not in spec
    await database.write(lambda conn: agents.remove(conn, "a1", now=1.0))
    assert await database.read(lambda conn: conn.execute("SELECT count(*) FROM agent_templates").fetchone()[0]) == 0
