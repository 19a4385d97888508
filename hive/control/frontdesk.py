"""The desk behind the API: every question and order, answered from the parts the daemon is made of."""

from __future__ import annotations

import asyncio
import os
import secrets
import sqlite3
import time
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from hive import __version__
from hive.agents.lifecycle import Life
from hive.agents.roster import Roster
from hive.agents.sleeper import Sleeper
from hive.agents.spec import changed_fields
from hive.agents.tokens import TokenKind
from hive.agents.turns import outcome_of
from hive.control import views
from hive.control.gates import ProxyGates
from hive.control.journal import Journal
from hive.control.stats import Counters
from hive.control.uids import uids_in_use
from hive.control.usage import UsageConsumer
from hive.control.world import DaemonWorld
from hive.domain import ALIVE, Agent, AgentSpec, Isolation
from hive.errors import HiveError, LinkLost, WrongState
from hive.link.messages import Leaving, Stat
from hive.sandbox.client import SandboxClient
from hive.settings import Paths, Settings
from hive.store import agents as agents_store
from hive.store import usage
from hive.store.database import Database
from hive.store.live import Live

Answer = dict[str, Any]
FREEZERS = {"signals": "signal"}
"""What the helper calls it → what the API does."""


@dataclass(frozen=True)
class Parts:
    """What the daemon is made of. `freezer`: how agents will be frozen here, until one has been seen."""

    epoch: str
    started_at: float
    paths: Paths
    settings: Settings
    isolation: Isolation
    freezer: str
    internal_token: str
    database: Database
    live: Live
    journal: Journal
    counters: Counters
    consumer: UsageConsumer
    gates: ProxyGates
    helper: SandboxClient
    world: DaemonWorld
    roster: Roster
    sleeper: Sleeper


class FrontDesk:
    """See `hive.control.desk.Desk`."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._freezer = parts.freezer

    # agents -------------------------------------------------------------------------------------------------------

    async def views(self) -> list[Answer]:
        lives = sorted(self._parts.roster, key=lambda life: life.agent.name)
        stats, _ = await asyncio.gather(self._stats([]), self._parts.sleeper.look())
        return [self._view(life, stats) for life in lives]

    async def view(self, ref: str) -> Answer:
        return await self._shown(self._parts.roster.find(ref))

    async def create(self, spec: AgentSpec, actor: str) -> Answer:
        """Recorded and started. What cannot be started is not left behind."""
        life = await self._register(spec, actor)
        try:
            await life.start(actor)
        except HiveError:
            await outcome_of(self._remove(life, actor))
            raise
        return await self._shown(life)

    async def apply(self, spec: AgentSpec, actor: str) -> Answer:
        """Recorded; a new agent is not started, one that lives goes on as it was started."""
        life = next((life for life in self._parts.roster if life.agent.name == spec.name), None)
        if life is None:
            life = await self._register(spec, actor)
            return {"agent": await self._shown(life), "created": True, "changed": [], "restart_needed": False}
        before = life.agent.spec
        if changed := changed_fields(before, spec):
            await life.change_spec(spec)
            self._parts.world.put(life.agent)
            detail = {"name": spec.name, "changed": changed}
            self._parts.journal.note("agent.changed", target=life.agent.id, actor=actor, detail=detail)
        needed = life.status in ALIVE and views.restart_needed(life, before, spec)
        return {"agent": await self._shown(life), "created": False, "changed": changed, "restart_needed": needed}

    async def start(self, ref: str, actor: str) -> Answer:
        life = self._parts.roster.find(ref)
        await life.start(actor)
        return await self._shown(life)

    async def stop(self, ref: str, actor: str) -> Answer:
        life = self._parts.roster.find(ref)
        await life.stop(actor)
        return await self._shown(life)

    async def restart(self, ref: str, actor: str) -> Answer:
        life = self._parts.roster.find(ref)
        await life.restart(actor)
        return await self._shown(life)

    async def resume(self, ref: str, actor: str) -> Answer:
        life = self._parts.roster.find(ref)
        await life.resume(actor)
        return await self._shown(life)

    async def pause(self, ref: str, *, timeout_s: float, now: bool, actor: str) -> Answer:
        life = self._parts.roster.find(ref)
        await life.pause(timeout_s=timeout_s, now=now, actor=actor)
        return await self._shown(life)

    async def remove(self, ref: str, actor: str) -> Answer:
        life = self._parts.roster.find(ref)
        await self._remove(life, actor)
        return {"removed": life.agent.id, "name": life.agent.name}

    async def shutdown(self, actor: str) -> Answer:
        """Hive is going down: ingress refuses, every agent is stopped. `{"stopped": [name, …], "failed": [name, …]}`"""
        self._parts.gates.say(Leaving())
        lives = list(self._parts.roster)
        ends = await asyncio.gather(*(outcome_of(life.stop(actor)) for life in lives))
        failed = [life.agent.name for life, end in zip(lives, ends, strict=True) if isinstance(end, HiveError)]
        return {"stopped": [life.agent.name for life in lives if life.agent.name not in failed], "failed": failed}

    async def _register(self, spec: AgentSpec, actor: str) -> Life:
        """A new agent, `created`. Raises WrongState where its name is taken."""
        parts = self._parts
        if any(life.agent.name == spec.name for life in parts.roster):
            raise WrongState(f"there is an agent named {spec.name} already", hint="hive agent apply changes it")
        agent_id = self._new_id()
        in_use = await asyncio.to_thread(uids_in_use) if self._has_uids else set()
        first_uid, now = parts.settings.agents.first_uid, time.time()

        def work(conn: sqlite3.Connection) -> Agent:
            uid = None
            if self._has_uids:
                uid = agents_store.allocate_uid(conn, agent_id, first_uid=first_uid, in_use=in_use)
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
        taken = {life.agent.id[:8] for life in self._parts.roster}
        while (agent_id := secrets.token_hex(16))[:8] in taken:
            pass
        return agent_id

    async def _remove(self, life: Life, actor: str) -> None:
        await life.remove(actor)
        self._parts.roster.drop(life.agent.id)
        detail = {"name": life.agent.name}
        self._parts.journal.note("agent.removed", target=life.agent.id, actor=actor, detail=detail)

    async def _shown(self, life: Life) -> Answer:
        stats, _ = await asyncio.gather(self._stats([life.agent.id]), self._parts.sleeper.look())
        return self._view(life, stats)

    async def _stats(self, agents: list[str]) -> dict[str, Stat] | None:
        """None where the helper cannot be asked."""
        stats = await outcome_of(self._parts.helper.stat(agents))
        if isinstance(stats, HiveError):
            return None
        for stat in stats.values():
            self._freezer = FREEZERS.get(stat.freezer, stat.freezer) or self._freezer
        return stats

    def _view(self, life: Life, stats: dict[str, Stat] | None) -> Answer:
        agent = life.agent.id
        return views.agent_view(
            life,
            why=self._parts.sleeper.verdict(life).why,
            stat=None if stats is None else stats.get(agent, Stat(state="gone")),
            seen=self._parts.sleeper.activity(agent),
            used=self._parts.counters.used(agent),
        )

    # what belongs to an agent -------------------------------------------------------------------------------------

    def tokens(self, ref: str) -> Answer:
        agent = self._parts.roster.find(ref).agent
        return views.tokens_view(
            agent.name,
            {kind: self._parts.world.token(agent, kind) for kind in TokenKind},
            port=self._port(),
            ingress_port=self._parts.gates.ingress_port,
            socket=str(self._parts.paths.agent_socket(agent.id)),
        )

    def log_path(self, ref: str) -> Path:
        return self._parts.paths.log(self._parts.roster.find(ref).agent.id)

    async def agent_usage(self, ref: str, period_s: float, period: str, limit: int) -> Answer:
        agent, since = self._parts.roster.find(ref).agent.id, time.time() - period_s
        found: usage.AgentUsage = await self._parts.database.read(
            lambda conn: usage.agent_usage(conn, agent, since=since, period=period, limit=limit)
        )
        answer: Answer = msgspec.to_builtins(found)
        return answer

    # the whole ----------------------------------------------------------------------------------------------------

    def health(self) -> Answer:
        parts, problems = self._parts, self._problems()
        backend = parts.world.backend
        return {
            "status": "degraded" if problems else "ok",
            "problems": problems,
            "version": __version__,
            "pid": os.getpid(),
            "epoch": parts.epoch,
            "started_at": parts.started_at,
            "state_dir": str(parts.paths.state),
            "runtime_dir": str(parts.paths.runtime),
            "isolation": str(parts.isolation),
            "freezer": self._freezer,
            "limits": "not enforced",
            "token_tracking": parts.settings.inference.token_tracking,
            "proxy": {
                "connected": parts.gates.session is not None,
                "port": parts.gates.port,
                "ingress_port": parts.gates.ingress_port,
            },
            "helper": {"connected": parts.helper.connected},
            "redis": {"up": parts.live.up},
            "usage": {"degraded": parts.consumer.degraded, "lost": parts.consumer.lost},
            "backend": None if backend is None else msgspec.to_builtins(backend),
        }

    def _problems(self) -> list[str]:
        """One sentence for each thing that is not as it should be, and what it means."""
        parts, backend = self._parts, self._parts.world.backend
        found = (
            (parts.gates.session is None, "the proxy is not connected: no request is served, nobody is put to sleep"),
            (not parts.helper.connected, "the helper is not connected: no agent can be started, paused or woken"),
            (not parts.live.up, "Redis is down: requests are served, their usage waits"),
            (bool(parts.consumer.degraded), f"usage waits, it cannot be written: {parts.consumer.degraded}"),
            (backend is not None and not backend.up, "the backend does not answer"),
        )
        return [sentence for is_so, sentence in found if is_so]

    async def usage(self, since_s: float) -> Answer:
        since = time.time() - since_s
        found: usage.UsageSince = await self._parts.database.read(lambda conn: usage.usage_since(conn, since))
        return {"token_tracking": self._parts.settings.inference.token_tracking, **msgspec.to_builtins(found)}

    def inference(self) -> Answer:
        return views.inference_view(self._parts.world.backend, self._parts.world.models, self._parts.settings)

    def stats(self) -> Answer:
        return self._parts.counters.answer(len(self._parts.roster))

    def access(self) -> Answer:
        port, token = self._port(), self._parts.internal_token
        return {
            "openai_base_url": f"http://127.0.0.1:{port}/v1",
            "ollama_host": f"http://127.0.0.1:{port}/a/{token}",
            "token": token,
        }

    def _port(self) -> int:
        if self._parts.gates.port is None:
            raise LinkLost("the proxy has not connected yet, so its port is not known")
        return self._parts.gates.port

    async def past_events(self, limit: int) -> list[Answer]:
        return await self._parts.journal.past(limit)

    def subscribe(self) -> AbstractContextManager[AsyncIterator[Answer]]:
        return self._parts.journal.subscribe()
