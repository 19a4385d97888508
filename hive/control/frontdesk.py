"""The desk behind the API, the part about agents: every question and order, answered from the parts of the daemon."""

from __future__ import annotations

import asyncio
import secrets
import sqlite3
import time
from collections.abc import Collection, Iterable
from typing import NamedTuple

import msgspec

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.spec import changed_fields
from hive.agents.starting import HIVE
from hive.agents.tokens import TokenKind
from hive.agents.transition_lock import outcome_of
from hive.control import views
from hive.control.change_feed import ChangeFeed
from hive.control.executing import ExecOrder, Inside
from hive.control.overview import Overview
from hive.control.own_ports import own_ports, refuse_own
from hive.control.responses_desk import ResponsesDesk
from hive.control.services import Services
from hive.control.tail import Output
from hive.control.token_desk import TokenDesk
from hive.control.uids import UidLook, UidsSeen
from hive.domain import ALIVE, Agent, AgentSpec, Isolation
from hive.errors import HiveError, LinkLost, WrongState
from hive.link.messages import Leaving, Stat
from hive.shapes import system
from hive.shapes.agents import (
    AgentChanges,
    AgentPage,
    AgentUsage,
    AgentView,
    Applied,
    MessageDropped,
    MessageList,
    MessageOf,
    OfAgent,
    Removals,
    Removed,
    ScheduleCancelled,
    ScheduleList,
    ScheduleOf,
    ShortPage,
    Tokens,
)
from hive.store import agents as agents_store
from hive.store import usage

REMOVED_AT_ONCE = 100
"""Agents that are stopped and removed together: as many as go in one transaction (forgetting.py)."""
VIEWS_AT_ONCE = 200
"""Shown before others have their turn: some 5 ms."""
FREEZERS = {"signals": "signal"}
"""The helper's word → the API's."""


class SeenAgents(NamedTuple):
    """The facts asked for the views: ground truth, messages that wait, times of the next wakes; by agent.

    None where the part that knows could not be asked.
    """

    stats: dict[str, Stat] | None
    waiting: dict[str, int] | None
    next_times: dict[str, float]


OF_ITS_PORT = frozenset({"port", "egress", "runtime"})
"""Fields by which an agent comes to listen at another port of this host."""


class FrontDesk(TokenDesk, ResponsesDesk, Overview):
    """See `hive.control.desk.Desk`."""

    def __init__(self, parts: Services) -> None:
        super().__init__(parts)
        self._lookout = ChangeFeed(parts, self._stats)
        self._uids = UidLook()
        self.state_queries = parts.state_queries

    # agents -------------------------------------------------------------------------------------------------------

    async def views(self) -> list[AgentView]:
        return await self._all_shown(self._parts.roster.by_name(), await self._look([]))

    async def page(self, after: str, limit: int) -> AgentPage:
        lives, following = self._page(after, limit)
        seen = await self._look([life.agent.id for life in lives]) if lives else SeenAgents({}, {}, {})
        total = len(self._parts.roster)
        return {"agents": await self._all_shown(lives, seen), "next": following, "total": total}

    def shorts(self, after: str, limit: int) -> ShortPage:
        lives, following = self._page(after, limit)
        found = [views.short_view(life.agent) for life in lives]
        return {"agents": found, "next": following, "total": len(self._parts.roster)}

    def _page(self, after: str, limit: int) -> tuple[list[AgentLifecycle], str | None]:
        """The lives of a page, and `after` for the next one; None where no agent comes behind it."""
        found = self._parts.roster.by_name(after=after, limit=limit + 1)
        return found[:limit], found[limit - 1].agent.name if len(found) > limit else None

    async def changes(self, since: str, fresh: Collection[str]) -> AgentChanges:
        changed, stats = await self._lookout.look(since, fresh)
        named = {*changed.there, *fresh}
        waiting = await outcome_of(self._parts.courier.waiting([] if changed.is_whole else named)) if named else {}
        seen = SeenAgents(
            stats, None if isinstance(waiting, HiveError) else waiting, self._parts.scheduler.next_times()
        )
        found = [life for agent in named if (life := self._parts.roster.get(agent)) is not None]
        found.sort(key=lambda life: life.agent.name)
        return {
            "agents": await self._all_shown(found, seen),
            "gone": changed.gone,
            "cursor": changed.cursor,
            "is_whole": changed.is_whole,
        }

    async def _all_shown(self, lives: Iterable[AgentLifecycle], seen: SeenAgents) -> list[AgentView]:
        shown = []
        for life in lives:
            shown.append(self._view(life, seen))
            if len(shown) % VIEWS_AT_ONCE == 0:
                await asyncio.sleep(0)
        return shown

    async def view(self, ref: str) -> AgentView:
        return await self._shown(self._parts.roster.find(ref))

    async def create(self, spec: AgentSpec, actor: str) -> AgentView:
        """Recorded and started. What cannot be started is not left behind. Raises BadRequest for a port of Hive's."""
        self._refuse_own_port(spec)
        life = await self._register(spec, actor)
        try:
            await life.start(actor)
        except HiveError:
            await outcome_of(self._remove(life, actor))
            raise
        return await self._shown(life)

    async def apply(self, spec: AgentSpec, actor: str, *, dry_run: bool = False) -> Applied:
        """Recorded; a new agent is not started, one that lives goes on as it was started."""
        life = self._parts.roster.named(spec.name)
        before = None if life is None else life.agent.spec
        answer: Applied = {
            "agent": None,
            "created": life is None,
            "changed": [] if before is None else changed_fields(before, spec),
            "changes": views.changes(before, spec),
            "restart_needed": False,
            "dry_run": dry_run,
        }
        if life is None or OF_ITS_PORT.intersection(answer["changed"]):
            self._refuse_own_port(spec)
        if life is None and not dry_run:
            life = await self._register(spec, actor)
        elif life is not None and before is not None:
            answer["restart_needed"] = life.status in ALIVE and views.restart_needed(life, before, spec)
            if answer["changed"] and not dry_run:
                await self._change(life, spec, answer["changed"], actor)
        if life is not None:
            answer["agent"] = await self._shown(life)
        return answer

    def _refuse_own_port(self, spec: AgentSpec) -> None:
        parts = self._parts
        if spec.port is None or parts.world.has_own_network(spec):
            return
        backend = "/" if parts.world.backend is None else parts.world.backend.address
        wanted, gates = parts.settings.proxy, parts.gates
        model, ingress = gates.port or wanted.port, gates.ingress_port or wanted.ingress_port
        refuse_own(spec, own_ports(model=model, ingress=ingress, api=parts.api.port, backend=backend))

    async def _change(self, life: AgentLifecycle, spec: AgentSpec, changed: list[str], actor: str) -> None:
        await life.change_spec(spec)
        self._parts.world.put(life.agent)
        detail = {"name": spec.name, "changed": changed}
        self._parts.journal.note("agent.changed", target=life.agent.id, actor=actor, detail=detail)

    async def start(self, ref: str, actor: str) -> AgentView:
        life = self._parts.roster.find(ref)
        await life.start(actor)
        return await self._shown(life)

    async def stop(self, ref: str, actor: str) -> AgentView:
        life = self._parts.roster.find(ref)
        await life.stop(actor)
        return await self._shown(life)

    async def restart(self, ref: str, actor: str) -> AgentView:
        life = self._parts.roster.find(ref)
        await life.restart(actor)
        return await self._shown(life)

    async def resume(self, ref: str, actor: str) -> AgentView:
        life = self._parts.roster.find(ref)
        await life.resume(actor)
        return await self._shown(life)

    async def pause(self, ref: str, *, timeout_s: float, now: bool, deep: bool = False, actor: str) -> AgentView:
        life = self._parts.roster.find(ref)
        await life.pause(timeout_s=timeout_s, now=now, deep=deep, actor=actor)
        return await self._shown(life)

    async def execute(self, ref: str, order: ExecOrder, actor: str) -> Inside:
        return await self._parts.executor.begin(ref, order, actor)

    async def keep_awake(self, ref: str, for_s: float, actor: str) -> AgentView:
        life = self._parts.roster.find(ref)
        await life.keep_awake(time.time() + for_s if for_s else None, actor)
        return await self._shown(life)

    async def remove(self, ref: str, actor: str) -> Removed:
        life = self._parts.roster.find(ref)
        await self._remove(life, actor)
        return {"removed": life.agent.id, "name": life.agent.name}

    async def remove_many(self, refs: Collection[str], actor: str) -> Removals:
        """Removes the agents; one named twice is removed once."""
        slots = asyncio.Semaphore(REMOVED_AT_ONCE)

        async def remove(ref: str) -> Removed:
            async with slots:
                return await self.remove(ref, actor)

        outcomes = await asyncio.gather(*(outcome_of(remove(ref)) for ref in dict.fromkeys(refs)))
        told: Removals = {"removed": [], "failed": []}
        for ref, outcome in zip(dict.fromkeys(refs), outcomes, strict=True):
            if isinstance(outcome, HiveError):
                told["failed"].append(views.not_removed_view(ref, outcome))
            else:
                told["removed"].append(outcome)
        return told

    async def shutdown(self, actor: str) -> system.Shutdown:
        """Hive is going down: ingress refuses, every agent is stopped, and comes back with Hive if its spec says so."""
        self._parts.gates.say(Leaving())
        lives = list(self._parts.roster)
        ends = await asyncio.gather(*(outcome_of(life.stop(actor, by=HIVE)) for life in lives))
        told: system.Shutdown = {"stopped": [], "failed": []}
        for life, end in zip(lives, ends, strict=True):
            told["failed" if isinstance(end, HiveError) else "stopped"].append(life.agent.name)
        return told

    async def _register(self, spec: AgentSpec, actor: str) -> AgentLifecycle:
        """A new agent, `created`. Raises WrongState where its name is taken."""
        parts = self._parts
        if parts.roster.named(spec.name) is not None:
            raise WrongState(f"there is an agent named {spec.name} already", hint="hive agent apply changes it")
        agent_id = self._new_id()
        seen = await self._uids.look() if self._has_uids else UidsSeen(frozenset(), 0.0)
        first_uid, now = parts.settings.agents.first_uid, time.time()

        def work(conn: sqlite3.Connection) -> Agent:
            uid = None
            if self._has_uids:
                uid = agents_store.allocate_uid(
                    conn, agent_id, first_uid=first_uid, in_use=seen.in_use, freed_before=seen.at
                )
            agent = Agent(id=agent_id, spec=spec, uid=uid, since=now, created_at=now)
            agents_store.insert(conn, agent)
            return agent

        agent: Agent = await parts.database.write(work)
        life = parts.roster.add(agent)
        parts.world.put(agent)
        parts.gates.tell(agent)
        parts.journal.note("agent.created", target=agent.id, actor=actor, detail={"name": spec.name})
        return life

    @property
    def _has_uids(self) -> bool:
        return self._parts.isolation is not Isolation.NONE

    def _new_id(self) -> str:
        """32 hex digits. The first 8 name its socket, so no two agents share them."""
        while self._parts.roster.has_socket(agent_id := secrets.token_hex(16)):
            pass
        return agent_id

    async def _remove(self, life: AgentLifecycle, actor: str) -> None:
        await life.remove(actor)
        self._parts.roster.drop(life.agent.id)
        self._lacking.pop(life.agent.id, None)
        self._parts.courier.forget(life.agent.id)
        self._parts.scheduler.forget(life.agent.id)
        await self._parts.responses.forget(life.agent.id)

    async def _shown(self, life: AgentLifecycle) -> AgentView:
        return self._view(life, await self._look([life.agent.id]))

    async def _look(self, agents: list[str]) -> SeenAgents:
        """Asks each part about the agents named, about all where none is; a part that cannot be asked is left out."""
        stats, _, waiting = await asyncio.gather(
            self._stats(agents), self._parts.sleeper.look(agents), outcome_of(self._parts.courier.waiting(agents))
        )
        return SeenAgents(
            stats, None if isinstance(waiting, HiveError) else waiting, self._parts.scheduler.next_times()
        )

    async def _stats(self, agents: list[str]) -> dict[str, Stat] | None:
        """None where the helper cannot be asked."""
        stats = await outcome_of(self._parts.helper.stat(agents))
        if isinstance(stats, HiveError):
            return None
        for agent, stat in stats.items():
            self._lacking[agent] = stat.limits
            self._freezer = FREEZERS.get(stat.freezer, stat.freezer) or self._freezer
        return stats

    def _view(self, life: AgentLifecycle, seen: SeenAgents) -> AgentView:
        agent = life.agent.id
        stat = None if seen.stats is None else seen.stats.get(agent, Stat(state="gone"))
        verdict = self._parts.sleeper.verdict(life)
        return views.agent_view(
            life,
            why=verdict.why,
            brief=verdict.brief,
            sentence=self._parts.sleeper.why(life, stat, verdict),
            stat=stat,
            seen=self._parts.sleeper.activity(agent),
            used=self._parts.counters.used(agent),
            messages_waiting=None if seen.waiting is None else seen.waiting.get(agent, 0),
            next_wake_at=seen.next_times.get(agent),
            can=self._parts.runtimes.found.get(life.agent.spec.runtime),
            prewarm_note=self._parts.prewarmer.note(life),
        )

    # messages and schedules ---------------------------------------------------------------------------------------

    async def send(self, ref: str, text: str, actor: str) -> MessageOf:
        life = self._parts.roster.find(ref)
        message = await self._parts.courier.send(life, text, actor)
        return {**_of(life), **views.message_view(message)}

    async def messages(self, ref: str) -> MessageList:
        life = self._parts.roster.find(ref)
        found, why = await self._parts.courier.undelivered(life)
        return {**_of(life), "why": why, "messages": [views.message_view(message) for message in found]}

    async def message(self, ref: str, message_id: str, *, wait_s: float) -> MessageOf:
        life = self._parts.roster.find(ref)
        found = await self._parts.courier.get(life, message_id, within_s=wait_s)
        return {**_of(life), **views.message_view(found)}

    async def drop_message(self, ref: str, message_id: str, actor: str) -> MessageDropped:
        life = self._parts.roster.find(ref)
        dropped = await self._parts.courier.drop(life, message_id, actor)
        return {"dropped": dropped.id, "name": life.agent.name}

    async def schedule(self, ref: str, when: str, every: str | None, note: str, actor: str) -> ScheduleOf:
        life, zone = self._parts.roster.find(ref), self._parts.scheduler.zone()
        added = await self._parts.scheduler.add(life, when, every, note, actor)
        return {**_of(life), **views.schedule_view(added, zone)}

    def schedules(self, ref: str) -> ScheduleList:
        life, zone = self._parts.roster.find(ref), self._parts.scheduler.zone()
        found = self._parts.scheduler.of(life.agent.id)
        return {**_of(life), "schedules": [views.schedule_view(schedule, zone) for schedule in found]}

    async def cancel_schedule(self, ref: str, schedule_id: int, actor: str) -> ScheduleCancelled:
        life = self._parts.roster.find(ref)
        cancelled = await self._parts.scheduler.cancel(life, schedule_id, actor)
        return {"cancelled": cancelled.id, "name": life.agent.name}

    # what belongs to an agent -------------------------------------------------------------------------------------

    def tokens(self, ref: str) -> Tokens:
        agent = self._parts.roster.find(ref).agent
        return views.tokens_view(
            agent.name,
            {kind: self._parts.world.token(agent, kind) for kind in TokenKind},
            port=self._port(),
            ingress_port=self._parts.gates.ingress_port,
            socket=str(self._parts.paths.agent_socket(agent.id)),
        )

    def output(self, ref: str) -> Output:
        """A file, but where the helper says that such agents are units of systemd."""
        agent = self._parts.roster.find(ref).agent
        can = self._parts.runtimes.found.get(agent.spec.runtime)
        if can is None and self._parts.paths.apart:
            raise LinkLost("the helper is not connected: only it knows where the agent's output is")
        unit = "" if can is None else can.journal.format(agent.id)
        return Output(self._parts.paths.log(agent.id), unit)

    async def agent_usage(self, ref: str, period_s: float, period: str, limit: int) -> AgentUsage:
        agent, since = self._parts.roster.find(ref).agent.id, time.time() - period_s
        found: usage.UsageOfAgent = await self._parts.database.read(
            lambda conn: usage.agent_usage(conn, agent, since=since, period=period, limit=limit)
        )
        answer: AgentUsage = msgspec.to_builtins(found)
        return answer


def _of(life: AgentLifecycle) -> OfAgent:
    return {"agent": life.agent.id, "name": life.agent.name, "status": life.status}
