"""The journal: nothing that could not be written is lost, and nothing is told twice."""

from __future__ import annotations

from pathlib import Path

import pytest

from hive.control.journal import Journal, event_of, transition_of
from hive.domain import Agent, AgentSpec, AgentStatus
from hive.errors import DependencyDown
from hive.store import audit
from hive.store.database import Database
from hive.store.live import Live

BOB = Agent(id="a1", spec=AgentSpec(name="bob", command=["/bin/true"]), status=AgentStatus.RUNNING)


def became(status: AgentStatus, before: Agent = BOB, reason: str = "") -> Agent:
    return Agent(id="a1", spec=before.spec, status=status, generation=before.generation + 1, since=9.5, reason=reason)


def test_a_transition_is_one_event_with_a_documented_shape() -> None:
    assert event_of(transition_of(BOB, became(AgentStatus.PAUSING, reason="idle: quiet for 20 s"), "idle")) == {
        "at": 9.5,
        "kind": "agent.pausing",
        "agent": "a1",
        "name": "bob",
        "from": "running",
        "to": "pausing",
        "generation": 1,
        "reason": "idle: quiet for 20 s",
        "actor": "idle",
        "outcome": "ok",
    }


async def test_rows_a_full_disk_did_not_take_are_written_later_in_their_order(
    database: Database, tmp_path: Path
) -> None:
    journal = Journal(database, Live(tmp_path / "redis.sock"))
    journal.note("agent.created", target="a1", detail={"name": "bob"})
    taken = journal.take()
    journal.changed(BOB, became(AgentStatus.PAUSING), "idle")
    journal.give_back(taken)
    kinds = [event["kind"] for event in await journal.past(10)]
    assert kinds == ["agent.created", "agent.pausing"]
    assert [event["kind"] for event in await journal.past(1)] == ["agent.pausing"]
    assert repr(journal) == "<Journal 0 unwritten>"


async def test_a_database_that_is_gone_keeps_the_rows_for_later(database: Database, tmp_path: Path) -> None:
    journal = Journal(database, Live(tmp_path / "redis.sock"))
    journal.note("backend.up")
    database.close()
    with pytest.raises(DependencyDown):
        await journal.flush()
    assert repr(journal) == "<Journal 1 unwritten>"


async def test_rows_of_a_month_ago_are_pruned_in_as_many_slices_as_it_takes(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "PRUNED_AT_ONCE", 2)
    journal = Journal(database, Live(tmp_path / "redis.sock"))
    for _ in range(5):
        journal.changed(BOB, became(AgentStatus.PAUSING), "idle")  # in 1970
    journal.note("backend.up")
    await journal.flush()
    assert await journal.prune() == 5
    assert [event["kind"] for event in await journal.past(10)] == ["backend.up"]
