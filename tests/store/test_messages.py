"""Messages and schedules in a real database."""

from __future__ import annotations

import sqlite3
from typing import Any

import msgspec
import pytest

from hive.domain import Agent, AgentSpec
from hive.errors import BadRequest, NotFound, Saturated
from hive.store import agents, messages, migrations, schedules
from hive.store.database import Database
from hive.store.messages import StoredMessage
from hive.store.schedules import StoredSchedule


def message(number: int, agent: str = "a1", **fields: object) -> StoredMessage:
    base = StoredMessage(
        id=f"m{number}", agent_id=agent, text=f"text {number} ü", sender="uid:0", sent_at=float(number)
    )
    return msgspec.structs.replace(base, **fields)


def schedule(agent: str = "a1", **fields: object) -> StoredSchedule:
    base = StoredSchedule(id=0, agent_id=agent, at=100.0, actor="uid:0", created_at=1.0)
    return msgspec.structs.replace(base, **fields)


@pytest.fixture(autouse=True)
async def _agents(database: Database) -> None:
    for agent in ("a1", "b2"):
        record = Agent(id=agent, spec=AgentSpec(name=f"x{agent}", command=["true"]))
        await database.write(lambda conn, record=record: agents.insert(conn, record))  # type: ignore[misc]


async def add(database: Database, *new: StoredMessage) -> None:
    for one in new:
        await database.write(lambda conn, one=one: messages.add(conn, one, name="alice"))  # type: ignore[misc]


async def waiting(database: Database, agent: str = "a1") -> list[StoredMessage]:
    return await database.read(lambda conn: messages.undelivered(conn, agent))


async def test_messages_wait_in_the_order_they_were_sent_each_for_its_agent(database: Database) -> None:
    await add(database, message(2), message(1), message(3, agent="b2"))
    assert await waiting(database) == [message(2), message(1)]
    assert await database.read(lambda conn: messages.first_waiting(conn, "a1")) == message(2)
    assert await database.read(messages.waiting) == {"a1": 2, "b2": 1}
    assert await database.read(lambda conn: messages.get(conn, "a1", "m3")) is None


async def test_what_was_refused_waits_no_more_and_is_still_there(database: Database) -> None:
    await add(database, message(1), message(2))
    refused = message(1, attempts=5, refusals=5, last_error="404", refused_at=9.0)
    await database.write(lambda conn: messages.update(conn, refused))
    assert await waiting(database) == [refused, message(2)]
    assert await database.read(lambda conn: messages.first_waiting(conn, "a1")) == message(2)
    assert await database.read(messages.waiting) == {"a1": 1}


async def test_a_delivered_message_loses_its_text_and_few_are_kept(database: Database) -> None:
    many = [message(number) for number in range(messages.DELIVERED_KEPT + 3)]
    await add(database, *many, message(99, agent="b2"))
    for number, one in enumerate([*many, message(99, agent="b2")]):
        done = msgspec.structs.replace(one, attempts=1, delivered_at=100.0 + number)
        await database.write(lambda conn, done=done: messages.update(conn, done))  # type: ignore[misc]
    assert await database.read(lambda conn: messages.get(conn, "a1", "m2")) is None
    kept = await database.read(lambda conn: messages.get(conn, "a1", "m3"))
    assert kept == message(3, text="", attempts=1, delivered_at=103.0)
    assert await waiting(database) == []
    assert await database.read(lambda conn: messages.get(conn, "b2", "m99")) is not None


async def test_more_than_a_hundred_undelivered_are_refused_and_a_place_comes_free(database: Database) -> None:
    await add(database, *(message(number) for number in range(messages.UNDELIVERED_MAX)))
    with pytest.raises(Saturated, match="100 messages for alice are not delivered yet"):
        await add(database, message(1000))
    await add(database, message(1001, agent="b2"))
    assert await database.write(lambda conn: messages.drop(conn, "a1", "m0"))
    await add(database, message(1000))


async def test_a_message_that_was_dropped_stays_dropped_however_its_attempt_ends(database: Database) -> None:
    await add(database, message(1))
    assert not await database.write(lambda conn: messages.drop(conn, "b2", "m1"))
    assert await database.write(lambda conn: messages.drop(conn, "a1", "m1"))
    await database.write(lambda conn: messages.update(conn, message(1, attempts=1)))
    assert await waiting(database) == []


async def test_a_delivered_message_cannot_be_dropped(database: Database) -> None:
    await add(database, message(1))
    await database.write(lambda conn: messages.update(conn, message(1, delivered_at=5.0)))
    assert not await database.write(lambda conn: messages.drop(conn, "a1", "m1"))


async def test_the_waiting_are_counted_by_agent_of_those_who_are_asked_for(database: Database) -> None:
    await add(database, message(1), message(2), message(3), message(4, agent="b2"))
    await database.write(lambda conn: messages.update(conn, message(1, refused_at=5.0)))
    assert await database.read(messages.waiting) == {"a1": 2, "b2": 1}
    assert await database.read(lambda conn: messages.waiting(conn, ["b2"])) == {"b2": 1}
    assert await database.read(lambda conn: messages.waiting(conn, ["c3"])) == {}


@pytest.mark.parametrize(
    ("fields", "state"),
    [({}, "waiting"), ({"refused_at": 5.0}, "refused"), ({"delivered_at": 5.0}, "delivered")],
)
def test_a_message_waits_until_it_is_delivered_or_refused(fields: dict[str, Any], state: str) -> None:
    assert message(1, **fields).state == state


@pytest.mark.parametrize(
    ("text", "said"),
    [("", "empty"), ("ü" * 131_073, "262146 bytes, at most 262144"), ("\ud800", "not UTF-8")],
    ids=["empty", "large", "surrogate"],
)
def test_a_text_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(BadRequest, match=said):
        messages.check_text(text)
    messages.check_text("ü" * 131_072)
    messages.check_text("\0")


async def test_schedules_come_back_as_written_and_change(database: Database) -> None:
    def added(new: StoredSchedule) -> object:
        return database.write(lambda conn: schedules.add(conn, new, name="alice"))

    daily = schedule(every_s=86400.0, clock="07:30:00", note="ü")
    first: StoredSchedule = await added(daily)  # type: ignore[misc]
    second: StoredSchedule = await added(schedule("b2"))  # type: ignore[misc]
    assert first == msgspec.structs.replace(daily, id=first.id)
    assert await database.read(schedules.all) == [first, second]
    later = msgspec.structs.replace(first, at=200.0, last_at=100.0, last_outcome="woken")
    await database.write(lambda conn: schedules.update(conn, later))
    await database.write(lambda conn: schedules.remove(conn, second.id))
    await database.write(lambda conn: schedules.update(conn, second))
    assert await database.read(schedules.all) == [later]
    third: StoredSchedule = await added(schedule())  # type: ignore[misc]
    assert third.id > second.id  # no number is given out twice: `--cancel` would mean another one


async def test_an_agent_has_at_most_a_hundred_schedules(database: Database) -> None:
    def fill(conn: sqlite3.Connection) -> None:
        for _ in range(schedules.SCHEDULES_MAX):
            schedules.add(conn, schedule(), name="alice")

    await database.write(fill)
    with pytest.raises(Saturated, match="alice has 100 schedules already"):
        await database.write(lambda conn: schedules.add(conn, schedule(), name="alice"))
    await database.write(lambda conn: schedules.add(conn, schedule("b2"), name="bob"))


async def test_what_belongs_to_an_agent_goes_with_it(database: Database) -> None:
    for agent in ("a1", "b2"):
        await database.write(lambda conn, agent=agent: schedules.add(conn, schedule(agent), name="x"))  # type: ignore[misc]
    await add(database, message(1), message(2, agent="b2"))
    await database.write(lambda conn: agents.remove(conn, "a1", now=1.0))
    assert await waiting(database) == []
    assert await waiting(database, "b2") == [message(2, agent="b2")]
    assert [found.agent_id for found in await database.read(schedules.all)] == ["b2"]


async def test_nothing_is_kept_for_an_agent_that_was_removed_meanwhile(database: Database) -> None:
    """A message that met its agent's removal stayed in the file for ever, and so did a schedule."""
    await database.write(lambda conn: agents.remove(conn, "a1", now=1.0))
    with pytest.raises(NotFound, match="alice was removed"):
        await add(database, message(1))
    with pytest.raises(NotFound, match="alice was removed"):
        await database.write(lambda conn: schedules.add(conn, schedule(), name="alice"))
    assert (await waiting(database), await database.read(schedules.all)) == ([], [])


def test_agents_of_an_older_hive_are_kept_and_have_no_opinion_on_what_is_new() -> None:
    """A file with the first two steps, as the release before this one wrote it."""
    conn = sqlite3.connect(":memory:", isolation_level=None)
    conn.row_factory = sqlite3.Row
    migrations.migrate(conn, migrations.STEPS[:2])
    spec = '{"name":"alice","command":["x"]}'
    old = (
        "INSERT INTO agents (id, name, runtime, spec, status, depth, depth_goal, generation, reason, since, tenant,"
        " restart, token_serial, created_at)"
        f" VALUES ('a1', 'alice', 'process', '{spec}', 'paused', 'light', 'light', 3, '', 5.0, 'default', 'no', 1, 4.0)"
    )
    conn.execute(old)
    assert migrations.migrate(conn) == len(migrations.STEPS) - 2
    (found,) = agents.all(conn)
    assert (found.keep_awake_until, found.stopped_by, found.status) == (None, "", "paused")
    agents.update(conn, msgspec.structs.replace(found, keep_awake_until=7.5, stopped_by="operator"))
    (found,) = agents.all(conn)
    assert (found.keep_awake_until, found.stopped_by) == (7.5, "operator")
    conn.close()
