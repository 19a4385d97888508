"""Making, changing and removing agents: their records, ids, uids and ports, and all that goes with an agent."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import time
from collections.abc import Collection
from typing import NamedTuple

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.roster import Roster
from hive.agents.spec import changed_fields
from hive.agents.starting import HIVE
from hive.agents.transition_lock import outcome_of
from hive.audit.audit_log import AuditLog
from hive.control import views
from hive.control.agent_views import AgentViews
from hive.control.effects import DaemonEffects
from hive.control.kept_responses import KeptResponses
from hive.control.listening import ListenPlace
from hive.control.message_delivery import MessageDelivery
from hive.control.own_ports import own_ports, refuse_own
from hive.control.scheduler import Scheduler
from hive.control.templates import TemplateDesk
from hive.domain import ALIVE, Agent, AgentSpec, AgentStatus, Isolation, RuntimeKind
from hive.errors import HiveError, WrongState
from hive.link.messages import Leaving
from hive.link.proxy_link import ProxyGates
from hive.settings.table import Settings
from hive.shapes.agents import AgentView, Applied, KeptDeleted, Removals, Removed
from hive.shapes.system import Shutdown
from hive.store import agents as agents_store
from hive.store import template_uids
from hive.store.database import Database

REMOVED_AT_ONCE = 100
"""Agents that are stopped and removed together: as many as go in one transaction."""
OF_ITS_PORT = frozenset({"port", "egress", "runtime"})
"""Fields by which an agent comes to listen at another port of this host."""


class AgentRegistry:
    """A transition of an agent that exists is asked of its lifecycle; what makes or removes agents is here."""

    def __init__(
        self,
        *,
        roster: Roster,
        effects: DaemonEffects,
        views: AgentViews,
        database: Database,
        audit_log: AuditLog,
        proxy_link: ProxyGates,
        message_delivery: MessageDelivery,
        scheduler: Scheduler,
        responses: KeptResponses,
        settings: Settings,
        templates: TemplateDesk,
        isolation: Isolation,
        api: ListenPlace,
    ) -> None:
        """`settings`: those at the daemon's start. `api`: where the API listens on TCP."""
        self._roster = roster
        self._effects = effects
        self._views = views
        self._database = database
        self._audit_log = audit_log
        self._proxy_link = proxy_link
        self._message_delivery = message_delivery
        self._scheduler = scheduler
        self._responses = responses
        self._settings = settings
        self._templates = templates
        self._has_uids = isolation is not Isolation.NONE
        self._api = api
        self._uids = UidLook()
        self._being_made: dict[str, asyncio.Event] = {}
        """Name → set once its record is written, or cannot be."""

    def __repr__(self) -> str:
        return f"<AgentRegistry {len(self._roster)} agents>"

    async def create(self, spec: AgentSpec, actor: str) -> AgentView:
        """Recorded and started. What cannot be started is not left behind.

        Raises BadRequest for a port of Hive's and for a template that is not there, NotPermitted for another tenant's,
        WrongState where its name or its port is taken.
        """
        self._templates.check(spec)
        self._refuse_port(spec)
        life = await self._register(spec, actor)
        try:
            await life.start(actor)
        except HiveError:
            await outcome_of(self._remove(life, actor))
            raise
        return await self._views.of(life)

    async def apply(self, spec: AgentSpec, actor: str, *, dry_run: bool = False) -> Applied:
        """Recorded; a new agent is not started, one that lives goes on as it was started. One that lives elsewhere may
        ask from now on, as after `create`: there is nothing of it that Hive could start later.

        An agent of this name that is being made is waited for: two orders at once make it once. With `dry_run` only the
        changes that would be made. Raises WrongState for another's cid or port, and for another template.
        """
        life = await self._settled(spec.name)
        before = None if life is None else life.agent.spec
        answer: Applied = {
            "agent": None,
            "created": life is None,
            "changed": [] if before is None else changed_fields(before, spec),
            "changes": views.changes(before, spec),
            "restart_needed": False,
            "dry_run": dry_run,
        }
        if before is not None and before.template != spec.template:
            raise _of_another_template(before, spec)
        if life is None or "tenant" in answer["changed"]:
            self._templates.check(spec)
        if life is None or OF_ITS_PORT.intersection(answer["changed"]):
            self._refuse_port(spec)
        if life is None and not dry_run:
            life = await self._register(spec, actor)
        elif life is not None and before is not None:
            answer["restart_needed"] = life.status in ALIVE and views.restart_needed(life, before, spec)
            if answer["changed"] and not dry_run:
                await self._change(life, spec, answer["changed"], actor)
        if life is not None:
            is_elsewhere = spec.runtime is RuntimeKind.EXTERNAL
            if is_elsewhere and life.status is AgentStatus.CREATED and not dry_run:
                await life.start(actor)
            answer["agent"] = await self._views.of(life)
        return answer

    async def remove(self, ref: str, actor: str) -> Removed:
        """Stopped and forgotten, with its messages, schedules and responses; its usage stays."""
        life = self._roster.find(ref)
        await self._remove(life, actor)
        return {"removed": life.agent.id, "name": life.agent.name}

    async def remove_many(self, refs: Collection[str], actor: str) -> Removals:
        """Removes each; one that fails keeps no other one, and one named twice is removed once."""
        permits = asyncio.Semaphore(REMOVED_AT_ONCE)

        async def remove(ref: str) -> Removed:
            async with permits:
                return await self.remove(ref, actor)

        outcomes = await asyncio.gather(*(outcome_of(remove(ref)) for ref in dict.fromkeys(refs)))
        told: Removals = {"removed": [], "failed": []}
        for ref, outcome in zip(dict.fromkeys(refs), outcomes, strict=True):
            if isinstance(outcome, HiveError):
                told["failed"].append(views.not_removed_view(ref, outcome))
            else:
                told["removed"].append(outcome)
        return told

    async def delete_responses(self, life: AgentLifecycle, actor: str) -> KeptDeleted:
        """All that are kept of the agent; they are on the disk no more when this returns."""
        agent, deleted = life.agent, await self._responses.delete(life.agent.id)
        detail = {"name": agent.name, "deleted": deleted}
        self._audit_log.note("agent.responses_deleted", target=agent.id, actor=actor, detail=detail)
        return {"deleted": deleted, "name": agent.name}

    async def shutdown(self, actor: str) -> Shutdown:
        """Hive is going down: ingress refuses, every agent is stopped, and comes back with Hive if its spec says so."""
        self._proxy_link.say(Leaving())
        lives = list(self._roster)
        ends = await asyncio.gather(*(outcome_of(life.stop(actor, by=HIVE)) for life in lives))
        told: Shutdown = {"stopped": [], "failed": []}
        for life, end in zip(lives, ends, strict=True):
            told["failed" if isinstance(end, HiveError) else "stopped"].append(life.agent.name)
        return told

    def _refuse_port(self, spec: AgentSpec) -> None:
        """Raises BadRequest for a port of Hive's, WrongState for another agent's."""
        if spec.port is None or self._effects.has_own_network(spec):
            return
        backend = "/" if self._effects.backend is None else self._effects.backend.address
        wanted, proxy_link = self._settings.proxy, self._proxy_link
        model, ingress = proxy_link.port or wanted.port, proxy_link.ingress_port or wanted.ingress_port
        refuse_own(spec, own_ports(model=model, ingress=ingress, api=self._api.port, backend=backend))
        self._effects.agent_ports.refuse_recorded(spec)

    async def _settled(self, name: str) -> AgentLifecycle | None:
        """The agent of this name, once none of it is being made."""
        while (made := self._being_made.get(name)) is not None:
            await made.wait()
        return self._roster.named(name)

    async def _register(self, spec: AgentSpec, actor: str) -> AgentLifecycle:
        """A new agent, `created`. Raises WrongState where its name is taken, also by one that is being made."""
        if self._roster.named(spec.name) is not None or spec.name in self._being_made:
            raise agents_store.name_taken(spec.name)
        made = self._being_made[spec.name] = asyncio.Event()
        try:
            return await self._recorded(spec, actor)
        finally:
            del self._being_made[spec.name]
            made.set()

    async def _recorded(self, spec: AgentSpec, actor: str) -> AgentLifecycle:
        """Writes the record of a new agent, and makes it known to all of Hive."""
        agent_id = self._new_id()
        seen = await self._uids.look() if self._has_uids else UidsSeen(frozenset(), 0.0)
        now = time.time()

        def work(conn: sqlite3.Connection) -> Agent:
            uid = self._allocated(conn, agent_id, spec, seen) if self._has_uids else None
            agent = Agent(id=agent_id, spec=spec, uid=uid, since=now, created_at=now)
            agents_store.insert(conn, agent)
            return agent

        agent: Agent = await self._database.write(work)
        life = self._roster.add(agent)
        self._effects.put(agent)
        self._proxy_link.tell(agent)
        self._audit_log.note("agent.created", target=agent.id, actor=actor, detail={"name": spec.name})
        return life

    def _allocated(self, conn: sqlite3.Connection, agent_id: str, spec: AgentSpec, seen: UidsSeen) -> int:
        """Its uid; of a template's agent one of the template's block, which is reserved with its first agent."""
        first_uid = self._settings.agents.first_uid
        if spec.template is None:
            return agents_store.allocate_uid(
                conn, agent_id, first_uid=first_uid, in_use=seen.in_use, freed_before=seen.at
            )
        block = template_uids.reserve(
            conn,
            spec.template,
            spec.tenant,
            first_uid=first_uid,
            in_use=seen.in_use,
            described=self._templates.described,
            freed_before=seen.at,
        )
        return template_uids.allocate(conn, agent_id, spec.template, block, in_use=seen.in_use, freed_before=seen.at)

    def _new_id(self) -> str:
        """32 hex digits. The first 8 name its socket, so no two agents share them."""
        while self._roster.has_socket(agent_id := secrets.token_hex(16)):
            pass
        return agent_id

    async def _change(self, life: AgentLifecycle, spec: AgentSpec, changed: list[str], actor: str) -> None:
        await life.change_spec(spec)
        if "tenant" in changed:
            self._effects.on_forgotten(life.agent.id)
        self._effects.put(life.agent)
        detail = {"name": spec.name, "changed": changed}
        self._audit_log.note("agent.changed", target=life.agent.id, actor=actor, detail=detail)

    async def _remove(self, life: AgentLifecycle, actor: str) -> None:
        await life.remove(actor)
        self._roster.drop(life.agent.id)
        self._views.forget(life.agent.id)
        self._message_delivery.forget(life.agent.id)
        self._scheduler.forget(life.agent.id)
        await self._responses.forget(life.agent.id)


def _of_another_template(before: AgentSpec, after: AgentSpec) -> WrongState:
    """
    >>> str(_of_another_template(AgentSpec(name="a", template="lg"), AgentSpec(name="a")))
    'template: a was created with lg, and stays so: not with none'
    """
    was, would = before.template or "none", after.template or "none"
    return WrongState(
        f"template: {after.name} was created with {was}, and stays so: not with {would}",
        hint="its user is of that template's: remove it and create it anew",
    )


# the users that processes live under ----------------------------------------------------------------------------------


UIDS_KEPT_S = 10.0
"""With 10,000 processes a look takes some 40 ms: not at each of a thousand agents that are made one after the other."""


class UidsSeen(NamedTuple):
    """`in_use`: as of `at`, Unix seconds. No process runs under a uid that was free then and given to no agent."""

    in_use: frozenset[int]
    at: float


class UidLook:
    """Tells the uids that processes live under, looked at no more often than every UIDS_KEPT_S.

    So a removed agent's uid is not given out while one of its processes is left. What an agent gave back since the last
    look is not vouched for.
    """

    def __init__(self) -> None:
        self._seen: UidsSeen | None = None
        self._turn = asyncio.Lock()

    def __repr__(self) -> str:
        return f"<UidLook {self._seen and self._seen.at}>"

    async def look(self) -> UidsSeen:
        async with self._turn:
            began = time.time()
            if self._seen is None or not self._seen.at <= began < self._seen.at + UIDS_KEPT_S:
                self._seen = UidsSeen(await asyncio.to_thread(uids_in_use), began)
            return self._seen


def uids_in_use() -> frozenset[int]:
    """Real, effective and saved uids of every process. Reads all of /proc: not on the loop."""
    in_use: set[int] = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            in_use.update(_uids_of(name))
    return frozenset(in_use)


def _uids_of(pid: str) -> list[int]:
    """The owner of its directory is its effective uid, whatever it hides; reading all three takes five times as long.

    They differ of programs that are root's by their mode, and of those that are read. Agents cannot gain privileges:
    theirs are one.
    """
    try:
        uid = os.stat(f"/proc/{pid}").st_uid
        if uid:
            return [uid]
        with open(f"/proc/{pid}/status", "rb") as file:
            line = next((line for line in file if line.startswith(b"Uid:")), b"Uid: 0")
    except OSError:
        return []  # it ended
    return [int(number) for number in line.split()[1:]]
