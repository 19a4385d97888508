"""Wakes agents at their times. schedule_times.py decides what is due, and when next; this acts on it and records it.

A time that passed while Hive was down is made up for once, and said to be late. What kill -9 hits between the wake and
its record is done once more by the next daemon: waking what is awake changes nothing.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Callable, Coroutine, Iterable
from datetime import tzinfo
from typing import Any

import msgspec

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.roster import Roster
from hive.audit.audit_log import AuditLog
from hive.control import schedule_times
from hive.domain import AgentStatus, WakeCause
from hive.errors import BadRequest, HiveError, NotFound
from hive.store import schedules
from hive.store.database import Database
from hive.store.schedules import NOTE_MAX_BYTES, StoredSchedule
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

RECORD_AGAIN_S = 5.0


def fired(schedule: StoredSchedule, outcome: str, now: float, zone: tzinfo) -> StoredSchedule | None:
    """The schedule after it was acted on at `now`; None where it was for once.

    >>> from datetime import UTC
    >>> hourly = StoredSchedule(id=1, agent_id="a", at=0.0, every_s=3600.0, actor="uid:0", created_at=0.0)
    >>> fired(hourly, "woken", 1.0, UTC).at
    3600.0
    """
    if schedule.every_s is None:
        return None
    at = schedule_times.next_after(schedule, now, zone)
    return msgspec.structs.replace(schedule, at=at, last_at=schedule.at, last_outcome=outcome)


class Scheduler:
    """Every schedule of every agent, in memory and in SQLite. `recorded`: what SQLite has.

    `zone`: asked each time, the host's may change.
    """

    def __init__(
        self,
        roster: Roster,
        database: Database,
        audit_log: AuditLog,
        recorded: Iterable[StoredSchedule],
        *,
        zone: Callable[[], tzinfo] = schedule_times.local_zone,
    ) -> None:
        self._roster = roster
        self._database = database
        self._audit_log = audit_log
        self.zone = zone
        self._schedules = {schedule.id: schedule for schedule in recorded}
        self._acting: set[int] = set()
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Scheduler {len(self._schedules)} schedules, {len(self._acting)} being acted on>"

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            now = time.time()
            self.check(now)
            self._changed.clear()
            times = [schedule.at for schedule in self._schedules.values() if schedule.id not in self._acting]
            try:
                async with asyncio.timeout(schedule_times.wait_s(times, time.time())):
                    await self._changed.wait()
            except TimeoutError:
                continue

    def check(self, now: float) -> None:
        """Begins to act on what is due."""
        zone = self.zone()
        for schedule in list(self._schedules.values()):
            if schedule.id in self._acting:
                continue
            right = self._schedules[schedule.id] = schedule_times.put_right(schedule, now, zone)
            if schedule_times.is_due(right, now):
                self._acting.add(schedule.id)
                self._spawn(self._act(right, now), f"schedule {schedule.id}")

    def close(self) -> None:
        """Ends; what is being acted on is left to the next daemon."""
        for task in self._tasks:
            task.cancel()

    # What is asked of it ------------------------------------------------------------------------------------------

    def of(self, agent: str) -> list[StoredSchedule]:
        """The agent's schedules, the next one first."""
        return sorted((found for found in self._schedules.values() if found.agent_id == agent), key=lambda s: s.at)

    def next_times(self) -> dict[str, float]:
        """Agent → when it is woken next."""
        times: dict[str, float] = {}
        for schedule in self._schedules.values():
            times[schedule.agent_id] = min(schedule.at, times.get(schedule.agent_id, schedule.at))
        return times

    async def add(self, life: AgentLifecycle, when: str, every: str | None, note: str, actor: str) -> StoredSchedule:
        """Raises BadRequest, Saturated, StoreFull."""
        now = time.time()
        first = schedule_times.parse_when(when, now=now, zone=self.zone())
        every_s = None if every is None else schedule_times.seconds_of(every, field="every")
        if every_s is not None:
            schedule_times.check_every(every_s)
        if len(note.encode(errors="replace")) > NOTE_MAX_BYTES:
            raise BadRequest(f"note: more than {NOTE_MAX_BYTES} bytes")
        new = StoredSchedule(
            id=0,
            agent_id=life.agent.id,
            at=first.at,
            every_s=every_s,
            clock=first.clock if schedule_times.by_days(every_s) else "",
            note=note,
            actor=actor,
            created_at=now,
        )
        added = await self._database.write(lambda conn: schedules.add(conn, new, name=life.agent.name))
        self._schedules[added.id] = added
        self._changed.set()
        detail = {"name": life.agent.name, "schedule": added.id, "first_at": added.at, "every_s": every_s, "note": note}
        self._audit_log.note("schedule.added", target=added.agent_id, actor=actor, detail=detail)
        return added

    async def cancel(self, life: AgentLifecycle, schedule_id: int, actor: str) -> StoredSchedule:
        """Raises NotFound where the agent has no such schedule."""
        schedule = self._schedules.get(schedule_id)
        if schedule is None or schedule.agent_id != life.agent.id:
            name = life.agent.name
            raise NotFound(f"{name} has no schedule {schedule_id}", hint=f"hive agent wake-at {name} --list")
        await self._database.write(lambda conn: schedules.remove(conn, schedule_id))
        self._schedules.pop(schedule_id, None)
        detail = {"name": life.agent.name, "schedule": schedule_id, "note": schedule.note}
        self._audit_log.note("schedule.cancelled", target=schedule.agent_id, actor=actor, detail=detail)
        return schedule

    def forget(self, agent: str) -> None:
        """The agent was removed, and with it its rows."""
        for schedule in self.of(agent):
            self._schedules.pop(schedule.id, None)

    # Acting -------------------------------------------------------------------------------------------------------

    async def _act(self, schedule: StoredSchedule, now: float) -> None:
        life = self._roster.get(schedule.agent_id)
        if life is None:  # being removed
            self._schedules.pop(schedule.id, None)
            self._acting.discard(schedule.id)
            return
        outcome = await _woken(life) + schedule_times.how_late(schedule, now)
        late_ms = round(1000 * (time.time() - schedule.at), 1)
        log.info("schedule_fired agent=%s schedule=%d outcome=%r", life.agent.name, schedule.id, outcome)
        detail = {
            "name": life.agent.name,
            "schedule": schedule.id,
            "note": schedule.note,
            "outcome": outcome,
            "late_ms": late_ms,
        }
        self._audit_log.note("schedule.fired", target=schedule.agent_id, detail=detail)
        after = fired(schedule, outcome, time.time(), self.zone())
        if schedule.id in self._schedules:  # else it was cancelled meanwhile
            if after is None:
                del self._schedules[schedule.id]
            else:
                self._schedules[schedule.id] = after
        self._acting.discard(schedule.id)
        self._changed.set()
        await self._record(schedule.id)

    async def _record(self, schedule_id: int) -> None:
        """Writes how it is now, until it is written: what is not would be done again by the next daemon."""
        while True:
            try:
                await self._database.write(_writes(schedule_id, self._schedules.get(schedule_id)))
                return
            except HiveError as error:
                log.error("schedule_not_recorded schedule=%d error=%s", schedule_id, error.message)
            await asyncio.sleep(RECORD_AGAIN_S)

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = spawn(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _writes(schedule_id: int, schedule: StoredSchedule | None) -> Callable[[sqlite3.Connection], None]:
    def work(conn: sqlite3.Connection) -> None:
        if schedule is None:
            schedules.remove(conn, schedule_id)
        else:
            schedules.update(conn, schedule)

    return work


async def _woken(life: AgentLifecycle) -> str:
    """Wakes it, and says in words what came of that."""
    was_awake = life.status is AgentStatus.RUNNING
    status = await life.awaken(WakeCause.SCHEDULE)
    if status:
        return f"refused: it is {status}"
    return "was awake" if was_awake else "woken"
