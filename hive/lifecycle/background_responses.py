"""Responses that agents have made in the background: jobs of theirs, as the proxy asks for them (link/background.py).

A job keeps the events of its response; its answer is kept with all other responses of the agent once it is whole. Both
go with the agent, with the switch of kept responses, and when the agent deletes the response.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from hive.audit.jobs import Jobs
from hive.control.kept_responses import KeptResponses
from hive.dialects.openai_responses_answers import response_id
from hive.dialects.openai_responses_background import Event, job_of, named
from hive.domain import Agent, JobState
from hive.errors import BadRequest, HiveError, NotFound, NotPermitted, Refusal, Saturated, TooManyRequests
from hive.jobs.order import JobForm, JobOrder
from hive.lifecycle.background_events import EventCursor
from hive.lifecycle.final_responses import FinalResponses
from hive.lifecycle.model_jobs import ModelJobs
from hive.link.background import (
    AskBackground,
    AskBackgroundEvents,
    AskBeginBackground,
    BackgroundEventsAre,
    BackgroundIs,
    CancelBackground,
    DropBackground,
    FromProxyBackground,
)
from hive.link.link import LinkReply, failed
from hive.link.message import LinkMessage
from hive.link.messages import Done
from hive.store import jobs as store
from hive.store.database import Database
from hive.store.job_turns import KIND
from hive.store.jobs import BACKGROUND_FORM, StoredJob
from hive.store.responses import no_such_response
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

OF_ONE_AGENT = 32
"""Responses of one agent that are not made yet."""
HELD_OF_ONE_BYTES = 16 * 1024 * 1024
"""Requests of one agent's, which are held until their responses are made."""
HELD_BYTES = 4 * HELD_OF_ONE_BYTES
"""Those of all agents together."""
KEPT_OF_ONE_AGENT = 100
"""Jobs of one agent that have ended and whose events can be read; of older ones the answer is left, if it is whole."""
WATCH_S = 3600.0
CURSORS_MOST = 256
CURSOR_S = 60.0
"""A reader that asks no more for so long has its events read from the beginning."""

Place = tuple[str, str, int]
"""Agent, response, and the number of the last event that was told."""


class HeldRequest(NamedTuple):
    """One whose response is not made yet."""

    agent: str
    size: int


class BackgroundResponses:
    """`agent_of`: the agent of an id, None where there is none; `is_kept`: whether responses are kept at all."""

    def __init__(
        self,
        jobs: ModelJobs,
        records: Jobs,
        database: Database,
        kept: KeptResponses,
        *,
        agent_of: Callable[[str], Agent | None],
        is_kept: Callable[[], bool],
    ) -> None:
        self._jobs = jobs
        self._records = records
        self._database = database
        self._kept = kept
        self._agent_of = agent_of
        self._is_kept = is_kept
        self._under_way: dict[object, HeldRequest] = {}
        """By their jobs, until those have ended."""
        self._queued: dict[str, Event] = {}
        """Objects of those under way as they were before they were begun: who polls is not answered from the disk."""
        self._cursors: OrderedDict[Place, EventCursor] = OrderedDict()
        """Of readers that will ask for the next events."""
        self._final = FinalResponses(jobs.output_of, self._before)

    def __repr__(self) -> str:
        return f"<BackgroundResponses {len(self._under_way)} under way, {len(self._cursors)} read>"

    def hear(self, message: FromProxyBackground, reply: LinkReply) -> None:
        spawn(self._answer(message, reply), name="background response")

    async def forget(self, agent: str) -> None:
        """All of a removed agent's are ended and gone when this returns; what fails is logged."""
        await self._release_all(lambda conn: store.background_of_agent(conn, agent))

    async def forget_all(self) -> None:
        """Ends what is under way, and deletes all of it; what fails is logged."""
        await self._release_all(store.background_of_all)

    async def forget_older(self, before: float) -> None:
        """Those that ended before that time are gone when this returns; what fails is logged."""
        await self._release_all(lambda conn: store.background_ended_before(conn, before))

    # what the proxy asks ----------------------------------------------------------------------------------------------

    async def _answer(self, message: FromProxyBackground, reply: LinkReply) -> None:
        try:
            reply(await self._said(message))
        except HiveError as error:
            reply(failed(error))
        except Exception:
            reply(failed(HiveError("what is made in the background cannot be read")))
            raise

    async def _said(self, message: FromProxyBackground) -> LinkMessage:
        match message:
            case AskBeginBackground():
                return await self._begin(message)
            case AskBackground(agent=agent, id=name):
                job = await self._found(agent, name)
                return await self._object(job) if job else await self._kept_one(agent, name)
            case CancelBackground(agent=agent, id=name):
                job = await self._found(agent, name)
                return await self._cancel(job, agent) if job else await self._kept_one(agent, name)
            case DropBackground(agent=agent, id=name):
                if (job := await self._found(agent, name)) is None:
                    await self._kept_one(agent, name)
                await self._drop(job, agent, name)
                return Done()
            case AskBackgroundEvents():
                return await self._events(message)

    async def _begin(self, asked: AskBeginBackground) -> BackgroundIs:
        agent = self._agent_of(asked.agent)
        if agent is None:
            raise NotFound("this agent is there no more")
        if not self._is_kept():
            raise BadRequest("nothing is kept of responses any more", hint="proxy.responses_kept_mb in hive.conf is 0")
        size = len(asked.request) + len(asked.response)
        self._check_room(agent.id, size)
        queued: Event = {**msgspec.json.decode(asked.response), "created_at": int(time.time())}
        order = JobOrder(
            name="response",
            model=asked.model,
            form=JobForm.RESPONSES,
            body={"request": asked.request.decode(), "response": queued},
            agent=agent.id,
            local_only=asked.is_local_only,
        )
        place = object()
        self._under_way[place] = held = HeldRequest(agent.id, size)
        try:
            job = await self._jobs.begin(order, actor=f"agent:{agent.name}", agent=agent)
        except NotPermitted as error:  # it would be too deep
            raise Refusal(error.message) from None
        finally:
            del self._under_way[place]
        self._under_way[job.id], self._queued[job.id] = held, named(queued, job.id)
        spawn(self._until_ended(job.id, agent.id), name=f"response of job {job.id}")
        return _is(self._queued[job.id])

    def _check_room(self, agent: str, size: int) -> None:
        """Raises TooManyRequests, and Saturated where others have taken the room."""
        own = [held.size for held in self._under_way.values() if held.agent == agent]
        if len(own) >= OF_ONE_AGENT or sum(own) + size > HELD_OF_ONE_BYTES:
            raise TooManyRequests(
                f"{len(own)} responses of this agent are being made in the background, with requests of {sum(own)}"
                f" bytes; {OF_ONE_AGENT} and {HELD_OF_ONE_BYTES} bytes are the most"
            )
        if sum(held.size for held in self._under_way.values()) + size > HELD_BYTES:
            raise Saturated("too much waits to be made in the background", retry_after_s=5)

    async def _until_ended(self, job: str, agent: str) -> None:
        try:
            while not (await self._records.get(job, wait_s=WATCH_S)).ended:
                pass
        except HiveError as error:
            log.warning("background_not_watched job=%s error=%s", job, error.message)
        finally:
            self._under_way.pop(job, None)
            self._queued.pop(job, None)
        await self._release_all(lambda conn: store.background_ended_of(conn, agent, but_last=KEPT_OF_ONE_AGENT))

    async def _found(self, agent: str, name: str) -> StoredJob | None:
        """The job of a response of this agent; None where there is none (any more)."""
        try:
            job = await self._records.get(job_of(name))
        except NotFound:
            return None
        plan = job.plan
        is_its_own = job.kind == KIND and plan.get("form") == BACKGROUND_FORM and plan.get("agent") == agent
        return job if is_its_own else None

    async def _kept_one(self, agent: str, name: str) -> BackgroundIs:
        """A response whose job is on record no more. Raises NotFound, in the words of one that never was."""
        return BackgroundIs(id=name, content=await self._kept.response(agent, name))

    async def _object(self, job: StoredJob) -> BackgroundIs:
        if job.state is JobState.DONE:
            with suppress(NotFound):
                name = response_id(job.id)
                return BackgroundIs(id=name, content=await self._kept.response(str(job.plan["agent"]), name))
        if job.ended:
            return BackgroundIs(id=response_id(job.id), content=await self._final.of(job))
        return _is({**await self._before(job), "status": self._jobs.status_of(job)})

    async def _before(self, job: StoredJob) -> Event:
        """The answer's object before it was begun. Raises NotFound where it is kept no more."""
        if (queued := self._queued.get(job.id)) is not None:
            return queued
        try:
            body = (await self._jobs.order(job.id)).body
        except NotFound:
            raise no_such_response(response_id(job.id)) from None
        return named(body["response"] if body else {}, job.id)

    async def _cancel(self, job: StoredJob, agent: str) -> BackgroundIs:
        """One that has ended stays as it is."""
        if not job.ended:
            job = await self._jobs.cancel(job.id, actor=f"agent:{self._name_of(agent)}")
        return await self._object(job)

    async def _drop(self, job: StoredJob | None, agent: str, name: str) -> None:
        actor = f"agent:{self._name_of(agent)}"
        if job is not None:
            await self._jobs.cancel(job.id, actor=actor)
            await self._jobs.release(job.id, actor=actor)
            self._final.forget(job.id)
        await self._kept.drop(agent, name)

    def _name_of(self, agent: str) -> str:
        found = self._agent_of(agent)
        return agent if found is None else found.name

    async def _release_all(self, which: Callable[[sqlite3.Connection], list[str]]) -> None:
        try:
            jobs = await self._database.read(which)
        except HiveError as error:
            log.error("background_not_released error=%s", error.message)
            return
        for job in jobs:
            try:
                await self._jobs.cancel(job)
                await self._jobs.release(job)
                self._final.forget(job)
            except NotFound:
                continue
            except HiveError as error:
                log.error("background_not_released error=%s", error.message)

    # events -----------------------------------------------------------------------------------------------------------

    async def _events(self, asked: AskBackgroundEvents) -> BackgroundEventsAre:
        job = await self._found(asked.agent, asked.id)
        if job is None:
            await self._kept_one(asked.agent, asked.id)
            raise _no_events(asked.id)
        cursor = self._cursors.pop((asked.agent, asked.id, asked.after), None)
        if cursor is None:
            cursor = EventCursor(await self._to_tell(job, asked), self._jobs.events(job.id, follow=True), asked.after)
        try:
            batch = await cursor.read(asked.most_bytes, asked.wait_s)
        except NotFound:
            raise _no_events(asked.id) from None
        if batch.is_over:
            cursor.close()
        else:
            self._put_by((asked.agent, asked.id, batch.last), cursor)
        return batch

    async def _to_tell(self, job: StoredJob, asked: AskBackgroundEvents) -> Event:
        """The object that its events are told with. Raises NotFound, BadRequest where only the answer is left."""
        try:
            return await self._before(job)
        except NotFound:
            await self._kept_one(asked.agent, asked.id)
            raise _no_events(asked.id) from None

    def _put_by(self, place: Place, cursor: EventCursor) -> None:
        if (other := self._cursors.pop(place, None)) is not None:
            other.close()
        self._cursors[place] = cursor
        if len(self._cursors) > CURSORS_MOST:
            self._cursors.popitem(last=False)[1].close()
        asyncio.get_running_loop().call_later(CURSOR_S, self._expire, place, cursor)

    def _expire(self, place: Place, cursor: EventCursor) -> None:
        if self._cursors.get(place) is cursor:
            del self._cursors[place]
            cursor.close()


def _no_events(name: str) -> BadRequest:
    return BadRequest(f"the events of {name} are kept no more", hint="ask for the response itself, without stream")


def _is(response: Event) -> BackgroundIs:
    return BackgroundIs(id=str(response["id"]), content=msgspec.json.encode(response))
