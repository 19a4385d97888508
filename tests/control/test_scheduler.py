"""Schedules, with a real daemon, helper and database; what is due when is decided in test_schedule_times.py."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from hive.errors import BadRequest, NotFound
from hive.store import schedules
from hive.store.database import Database
from hive.store.schedules import StoredSchedule
from tests.control.box import Box
from tests.waiting import until


async def put_to_sleep(box: Box) -> None:
    await box.pause("bob", timeout_s=5, now=False, actor="uid:0")


async def record(box: Box, agent: str, **fields: Any) -> int:
    """Records a schedule as an earlier daemon left it in the database; this one is down."""
    schedule = StoredSchedule(id=0, agent_id=agent, actor="uid:0", created_at=0.0, **fields)
    database = Database.open(box.paths.database)
    added: StoredSchedule = await database.write(lambda conn: schedules.add(conn, schedule, name="bob"))
    database.close()
    return added.id


async def fired(box: Box) -> list[str]:
    """Outcomes, oldest first."""
    return [event["outcome"] for event in await box.services.audit_log.past(1000) if event["kind"] == "schedule.fired"]


async def until_fired(box: Box) -> str:
    for _ in range(1000):
        if outcomes := await fired(box):
            return outcomes[0]
        await asyncio.sleep(0.01)
    raise AssertionError("no schedule fired")


async def test_a_sleeper_is_woken_at_its_time_and_once_is_once(box: Box) -> None:
    await box.everything()
    await box.create()
    await put_to_sleep(box)
    added = await box.schedule("bob", "+1s", None, "see to it", "uid:7")
    assert (added["every_s"], added["note"]) == (None, "see to it")
    assert (await box.view("bob"))["next_wake_at"] == added["at"]
    assert box.schedules("bob")[0]["spoken"] == added["spoken"]
    view = await box.until("bob", "running")
    assert time.time() >= added["at"]
    assert view["last_wake_cause"] == "schedule"
    assert await until_fired(box) == "woken"
    assert (box.schedules("bob"), (await box.view("bob"))["next_wake_at"]) == ([], None)
    assert box.daemon is not None
    for _ in range(100):
        if not await box.daemon._database.read(schedules.all):
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it is still recorded")


async def test_who_is_awake_stays_so_and_who_is_stopped_is_not_started(box: Box) -> None:
    await box.everything()
    agent = (await box.create())["id"]
    await box.stop_daemon()
    first = await record(box, agent, at=time.time() + 0.5, every_s=3600.0)
    await box.start_daemon()
    assert await until_fired(box) == "was awake"
    (found,) = box.schedules("bob")
    assert (found["id"], found["last_outcome"]) == (first, "was awake")
    await box.stop("bob", "uid:0")
    await box.schedule("bob", "+1s", None, "", "uid:0")
    await until(lambda: len(box.schedules("bob")) == 1)
    assert (await fired(box))[1] == "refused: it is stopped"
    assert (await box.view("bob"))["status"] == "stopped"


async def test_what_passed_while_hive_was_down_is_made_up_for_once_and_said_to_be_late(box: Box) -> None:
    await box.everything()
    agent = (await box.create())["id"]
    await put_to_sleep(box)
    await box.stop_daemon()
    await record(box, agent, at=time.time() - 10 * 3600, every_s=3600.0, note="hourly")
    await record(box, agent, at=time.time() - 100)
    await box.start_daemon()
    await box.until("bob", "running")
    await until(lambda: len(box.schedules("bob")) == 1)
    (found,) = box.schedules("bob")
    assert time.time() < found["at"] <= time.time() + 3600
    outcomes = await fired(box)
    assert len(outcomes) == 2
    assert {outcome.split(" (")[0] for outcome in outcomes} <= {"woken", "was awake"}
    assert all(outcome.endswith(" s late)") for outcome in outcomes)
    before = (found["at"], found["last_outcome"])
    await until(lambda: "0 being acted on" in repr(box.daemon._scheduler))  # type: ignore[union-attr]
    await box.stop_daemon()
    await box.start_daemon()
    await asyncio.sleep(0.2)
    (found,) = box.schedules("bob")
    assert ((found["at"], found["last_outcome"]), len(await fired(box))) == (before, 2)


async def test_a_schedule_whose_record_fails_is_not_done_twice_and_is_recorded_later(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that takes no writes stands for the disk that is full."""
    monkeypatch.setattr("hive.control.scheduler.RECORD_AGAIN_S", 0.01)
    await box.everything()
    await box.create()
    assert box.daemon is not None
    database = box.daemon._database
    await box.schedule("bob", "+1s", None, "", "uid:0")
    database._writer.execute("PRAGMA query_only = ON")
    await until(lambda: not box.schedules("bob"))
    await asyncio.sleep(0.1)
    assert len(await database.read(schedules.all)) == 1
    database._writer.execute("PRAGMA query_only = OFF")
    for _ in range(200):
        if not await database.read(schedules.all):
            break
        await asyncio.sleep(0.01)
    assert await fired(box) == ["was awake"]


async def test_a_cancelled_schedule_and_those_of_a_removed_agent_are_gone(box: Box) -> None:
    await box.everything()
    await box.create()
    added = await box.schedule("bob", "07:30", "1d", "", "uid:0")
    assert added["clock"] == "07:30:00"
    assert (await box.schedule("bob", "07:30", "1h", "", "uid:0"))["clock"] == ""
    await box.create("eve")
    with pytest.raises(NotFound, match=f"eve has no schedule {added['id']}"):
        await box.services.scheduler.cancel(box.life("eve"), added["id"], "uid:0")
    assert (await box.services.scheduler.cancel(box.life("bob"), added["id"], "uid:0")).id == added["id"]
    await box.services.agents.remove("bob", "uid:0")
    assert box.daemon is not None
    assert repr(box.daemon._scheduler) == "<Scheduler 0 schedules, 0 being acted on>"
    assert await box.daemon._database.read(schedules.all) == []


@pytest.mark.parametrize(
    ("when", "every", "note", "said"),
    [
        ("soon", None, "", "when: 'soon' is no time"),
        ("+1h", "1s", "", "every: 1 is not from 10 seconds"),
        ("+1h", None, "x" * 501, "note: more than 500 bytes"),
    ],
)
async def test_what_makes_no_sense_is_refused_and_not_kept(
    box: Box, when: str, every: str | None, note: str, said: str
) -> None:
    await box.everything()
    await box.create()
    with pytest.raises(BadRequest, match=said):
        await box.schedule("bob", when, every, note, "uid:0")
    assert box.schedules("bob") == []
