"""The world of this daemon's agents: SQLite, helper, proxy and journal, as `agents/world.py` asks for them."""

from __future__ import annotations

import logging
import sqlite3
import time

from hive.agents.lifecycle import Life
from hive.agents.reconcile import gate_of
from hive.agents.tokens import TokenKind, derive, digest
from hive.agents.world import Gates, Helper
from hive.control.environment import dialect_of, environment
from hive.control.gates import ProxyGates
from hive.control.journal import Journal
from hive.control.stats import Counters
from hive.domain import ALIVE, Agent, AgentStatus, BackendInfo, ModelInfo, WakeCause
from hive.link.messages import AgentRow, SandboxSpec
from hive.settings import Paths, Settings
from hive.store import agents, audit
from hive.store.database import Database
from hive.store.live import Live

log = logging.getLogger("hive.daemon")

PROXY_WITHIN_S = 10.0
"""A start waits so long for the proxy's port, which the agent needs in its environment."""


class DaemonWorld:
    """See `hive.agents.world.World`. `backend` and `models` are what the watch found last."""

    def __init__(
        self,
        paths: Paths,
        settings: Settings,
        *,
        key: bytes,
        database: Database,
        live: Live,
        journal: Journal,
        counters: Counters,
        helper: Helper,
        gates: ProxyGates,
    ) -> None:
        self.settings = settings
        self.helper: Helper = helper
        self.gates: Gates = gates
        self._paths = paths
        self._key = key
        self._database = database
        self._live = live
        self._journal = journal
        self._counters = counters
        self._proxy = gates
        self.backend: BackendInfo | None = None
        self.models: list[ModelInfo] = []
        self.started_with_port: dict[str, int] = {}
        """Agent → the proxy's port in the environment it was started with, by this daemon or as kept from before."""

    # agents/world.py ----------------------------------------------------------------------------------------------

    async def save(self, agent: Agent) -> None:
        rows = self._journal.take()

        def work(conn: sqlite3.Connection) -> None:
            agents.update(conn, agent)
            for row in rows:
                audit.append(conn, row)

        try:
            await self._database.write(work)
        except BaseException:
            self._journal.give_back(rows)
            raise

    async def forget(self, agent: Agent) -> None:
        await self._database.write(lambda conn: agents.remove(conn, agent.id, now=time.time()))
        self._live.forget_agent(agent.id)
        self._counters.forget(agent.id)
        self.started_with_port.pop(agent.id, None)

    async def sandbox_spec(self, agent: Agent) -> SandboxSpec:
        port = await self._proxy.ports(PROXY_WITHIN_S)
        self.started_with_port[agent.id] = port
        return SandboxSpec(
            name=agent.name,
            command=agent.spec.command,
            env=environment(
                agent,
                port=port,
                token=self.token(agent, TokenKind.MODEL),
                socket=str(self._paths.agent_socket(agent.id)),
                dialect=dialect_of(self.backend),
                model=self._model_of(agent),
            ),
            home=str(self._paths.home(agent.id)),
            log=str(self._paths.log(agent.id)),
            uid=agent.uid,
            gid=agent.uid,
            runtime=agent.spec.runtime,
            port=agent.spec.port,
            egress=agent.spec.egress,
            limits=agent.spec.limits,
            docker=agent.spec.docker,
            firecracker=agent.spec.firecracker,
        )

    def changed(self, before: Agent, after: Agent, actor: str) -> None:
        # A line for where it arrives; the way there is in the audit table, and here only with debug.
        passing = after.status in (AgentStatus.PAUSING, AgentStatus.RESUMING)
        log.log(
            logging.DEBUG if passing else logging.INFO,
            "agent_%s agent=%s was=%s generation=%d actor=%s reason=%r",
            *(after.status, after.name, before.status, after.generation, actor, after.reason),
        )
        self.put(after)
        self._journal.changed(before, after, actor)

    def woke(self, cause: WakeCause, took_ms: float) -> None:
        self._counters.woke(cause, took_ms)

    def fell_asleep(self) -> None:
        self._counters.fell_asleep()

    def failed(self, agent: Agent) -> None:  # noqa: ARG002 - who failed is in the journal
        self._counters.failed()

    # for the daemon -----------------------------------------------------------------------------------------------

    def put(self, agent: Agent) -> None:
        """Redis shows how it is."""
        self._live.put_agent(agent.id, paused=agent.depth != "awake", tier=agent.spec.tier, cid=agent.spec.cid)

    def token(self, agent: Agent, kind: TokenKind) -> str:
        return derive(self._key, agent.id, kind, agent.token_serial)

    def row(self, agent: Agent, life: Life | None) -> AgentRow:
        """What the proxy should know of it. What lives listens where it was told to when it was started."""
        started = life.started_spec if life is not None and agent.status in ALIVE else None
        port = (started or agent.spec).port
        return AgentRow(
            id=agent.id,
            name=agent.name,
            generation=agent.generation,
            gate=gate_of(agent.status),
            status=str(agent.status),
            tier=agent.spec.tier,
            tenant=agent.spec.tenant,
            model=agent.spec.model,
            model_digest=digest(self.token(agent, TokenKind.MODEL)),
            ingress_digest=digest(self.token(agent, TokenKind.INGRESS)),
            address=None if port is None else (life.address if life is not None else "") or f"127.0.0.1:{port}",
            cid=agent.spec.cid,
        )

    def _model_of(self, agent: Agent) -> str | None:
        offered = self.models[0].name if self.models else None
        return agent.spec.model or self.settings.inference.default_model or offered
