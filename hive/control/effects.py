"""The effects of transitions in this daemon: SQLite, helper, proxy, audit log, as `agents/effects.py` asks for them."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping

from hive.agents.effects import GateVerbs, HelperVerbs, HostMemory
from hive.agents.lifecycle import AgentLifecycle
from hive.agents.reconcile import gate_of
from hive.agents.tokens import TokenKind, derive, digest
from hive.audit.audit_log import AuditLog, event_row
from hive.backends.kinds import whereabouts
from hive.control.agent_ports import AgentPorts
from hive.control.counters import Counters
from hive.control.environment import dialect_of, environment, has_own_network
from hive.domain import ALIVE, AT_REST, Agent, AgentSpec, AgentStatus, BackendInfo, ModelInfo, SleepDepth, WakeCause
from hive.host import memory
from hive.host.process import boot_id, is_same_boot, kernel_boot_id
from hive.link.messages import AgentRow
from hive.link.proxy_link import ProxyGates
from hive.link.specs import SandboxSpec, TemplateSpec
from hive.models.prompts import hash_prompt
from hive.settings.table import Paths, Settings
from hive.store import agents, runtime_settings
from hive.store.audit import REMOVED, AuditRecord
from hive.store.database import Database
from hive.store.live import Live
from hive.store.runtime_settings import BOOT
from hive.tasks import spawn

log = logging.getLogger("hive.daemon")

REMOVED_AT_ONCE = 100
"""Agents in one transaction: a commit, which is what a removal costs most, is shared; others wait some 20 ms for it."""
PROXY_WITHIN_S = 10.0
"""A start waits so long for the proxy's port, which the agent needs in its environment."""


class Forgetting:
    """Removals of agents, gathered while a transaction is written and made together in the next one."""

    def __init__(self, audit_log: AuditLog) -> None:
        self._audit_log = audit_log
        self._waiting: list[tuple[str, AuditRecord, asyncio.Future[None]]] = []
        self._is_writing = False

    def __repr__(self) -> str:
        return f"<Forgetting {len(self._waiting)} waiting>"

    async def forget(self, agent: Agent, actor: str) -> None:
        """Returns once the record is gone and the removal is in the audit table. Raises as `Database.write`."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        row = event_row(REMOVED, target=agent.id, actor=actor, detail={"name": agent.name})
        self._waiting.append((agent.id, row, done))
        if not self._is_writing:
            self._is_writing = True
            spawn(self._write_all(), name="forget agents")
        await asyncio.shield(done)

    async def _write_all(self) -> None:
        while self._waiting:
            some, self._waiting = self._waiting[:REMOVED_AT_ONCE], self._waiting[REMOVED_AT_ONCE:]
            try:
                await self._write([agent for agent, _, _ in some], [row for _, row, _ in some])
            except Exception as error:  # each waiting caller is told, and raises it
                for _, _, done in some:
                    done.set_exception(error)
            else:
                for _, _, done in some:
                    done.set_result(None)
        self._is_writing = False

    async def _write(self, ids: list[str], removals: list[AuditRecord]) -> None:
        def work(conn: sqlite3.Connection) -> None:
            for agent in ids:
                agents.remove(conn, agent, now=time.time())

        await self._audit_log.write_with(work, *removals)
        for row in removals:
            self._audit_log.tell(row)


class DaemonEffects:
    """See `hive.agents.effects.Effects`. `backend` and `models` are what the watch found last."""

    def __init__(
        self,
        paths: Paths,
        settings: Settings,
        *,
        key: bytes,
        database: Database,
        live: Live,
        audit_log: AuditLog,
        counters: Counters,
        helper: HelperVerbs,
        proxy_link: ProxyGates,
        template_of: Callable[[Agent], Awaitable[TemplateSpec | None]],
        lives: Mapping[str, AgentLifecycle],
        own_networks: bool = False,
    ) -> None:
        """`template_of`: the one an agent is forked from. `lives`: by id. `own_networks`: process agents have a network
        namespace each unless they name networks (systemd units)."""
        self.settings = settings
        self.helper: HelperVerbs = helper
        self.gates: GateVerbs = proxy_link
        self._paths = paths
        self._key = key
        self._database = database
        self._live = live
        self._audit_log = audit_log
        self._counters = counters
        self._proxy = proxy_link
        self._template_of = template_of
        self._own_networks = own_networks
        self.agent_ports = AgentPorts(lives, self.has_own_network)
        self._forgetting = Forgetting(audit_log)
        self._is_new_boot: bool | None = None
        self.backend: BackendInfo | None = None
        self.models: list[ModelInfo] = []
        self.on_changed: Callable[[Agent, Agent], None] = lambda before, after: None  # noqa: ARG005
        """Told of every transition."""
        self.on_forgotten: Callable[[str], None] = lambda agent: None  # noqa: ARG005
        """Told of an agent that is removed, or is another tenant's from now on, by its id."""
        self.started_with_port: dict[str, int] = {}
        """Agent → the proxy's port in the environment it was started with, by this daemon or as kept from before.

        Those with a network of their own have none: Hive is at the same address inside, wherever the proxy listens.
        """

    # agents/effects.py ----------------------------------------------------------------------------------------------

    async def save(self, agent: Agent) -> None:
        await self._audit_log.write_with(lambda conn: agents.update(conn, agent))

    async def forget(self, agent: Agent, actor: str) -> None:
        await self._forgetting.forget(agent, actor)
        self._live.forget_agent(agent.id)
        self.on_forgotten(agent.id)
        self._counters.forget(agent.id)
        self.agent_ports.release(agent.id)
        self.started_with_port.pop(agent.id, None)

    def has_own_network(self, spec: AgentSpec) -> bool:
        """Whether 127.0.0.1 inside is not the host's, so that the proxy's port is nothing to it."""
        return has_own_network(spec, processes_too=self._own_networks)

    async def sandbox_spec(self, agent: Agent) -> SandboxSpec:
        port = None
        self.agent_ports.claim(agent)
        self.started_with_port.pop(agent.id, None)
        template = await self._template_of(agent)
        if not self.has_own_network(agent.spec):
            port = self.started_with_port[agent.id] = await self._proxy.ports(PROXY_WITHIN_S)
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
            proxy_port=port,
            limits=agent.spec.limits,
            docker=agent.spec.docker,
            firecracker=agent.spec.firecracker,
            template=template,
        )

    def changed(self, before: Agent, after: Agent, actor: str) -> None:
        self.on_changed(before, after)
        if after.status in AT_REST:
            self.agent_ports.release(after.id)
        if before.status is after.status is AgentStatus.PAUSED:
            self._changed_depth(before, after, actor)
            return
        # A line for where it arrives; the way there is in the audit table, and here only with debug.
        passing = after.status in (AgentStatus.PAUSING, AgentStatus.RESUMING)
        log.log(
            logging.DEBUG if passing else logging.INFO,
            "agent_%s agent=%s was=%s generation=%d actor=%s reason=%r",
            after.status,
            after.name,
            before.status,
            after.generation,
            actor,
            after.reason,
        )
        self.put(after)
        self._audit_log.changed(before, after, actor)

    def _changed_depth(self, before: Agent, after: Agent, actor: str) -> None:
        """The same sleep, deeper (or found to be lighter); that this is only wanted so far is no event."""
        if before.depth is after.depth:
            return
        log.info("agent_sleeps_%s agent=%s generation=%d", after.depth, after.name, after.generation)
        detail = {"name": after.name, "from": str(before.depth), "to": str(after.depth), "generation": after.generation}
        self._audit_log.note(f"agent.sleeps_{after.depth}", target=after.id, actor=actor, detail=detail)
        if after.depth is SleepDepth.DEEP:
            self._counters.fell_deep()

    def memory(self) -> HostMemory:
        host, pressure = memory.read_memory(), memory.read_pressure()
        return HostMemory(host.available_bytes, host.swap_free_bytes, pressure.some_avg10)

    @property
    def _boot(self) -> str:
        """The id of the agents' boot. Where all live elsewhere, a new container of this daemon is no boot of theirs."""
        return boot_id() if self.settings.sandbox.enabled else kernel_boot_id()

    async def is_new_boot(self) -> bool:
        if self._is_new_boot is None:
            noted: str | None = await self._database.read(lambda conn: runtime_settings.get(conn, BOOT))
            self._is_new_boot = noted is not None and not is_same_boot(noted, self._boot)
        return self._is_new_boot

    async def note_boot(self) -> None:
        boot = self._boot
        await self._database.write(lambda conn: runtime_settings.put(conn, BOOT, boot, actor="hive", now=time.time()))
        self._is_new_boot = False

    def woke(self, cause: WakeCause, took_ms: float, depth: SleepDepth) -> None:
        self._counters.woke(cause, took_ms, depth)

    def fell_asleep(self) -> None:
        self._counters.fell_asleep()

    def failed(self, agent: Agent) -> None:  # noqa: ARG002 - the agent is in the journal
        self._counters.failed()

    # for the daemon -----------------------------------------------------------------------------------------------

    def put(self, agent: Agent) -> None:
        """Redis shows how it is."""
        spec, is_paused = agent.spec, agent.depth != "awake"
        text = spec.system_prompt if agent.status in ALIVE else None  # of those that live (seeds/000 §5)
        prompt = None if text is None else (hash_prompt(text), text)
        self._live.put_agent(agent.id, paused=is_paused, tier=spec.tier, cid=spec.cid, prompt=prompt)

    def token(self, agent: Agent, kind: TokenKind) -> str:
        return derive(self._key, agent.id, kind, agent.token_serial)

    def row(self, agent: Agent, life: AgentLifecycle | None) -> AgentRow:
        """The proxy's row about it. A living agent listens at the port it was started with."""
        started = life.started_spec if life is not None and agent.status in ALIVE else None
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
            address=self._address(started or agent.spec, life),
            cid=agent.spec.cid,
            cloud=agent.spec.cloud,
            limits=agent.spec.budget,
            why=agent.told_of_failure,
        )

    def _address(self, spec: AgentSpec, life: AgentLifecycle | None) -> str | None:
        """The address of its port; in a network of its own that is known only once it was started there."""
        if spec.port is None:
            return None
        if life is not None and life.address:
            return life.address
        return None if self.has_own_network(spec) else f"127.0.0.1:{spec.port}"

    def _model_of(self, agent: Agent) -> str | None:
        where = whereabouts(None if self.backend is None else self.backend.kind, self.models)
        offered = next((model.name for model in self.models if where.is_near(model.name)), None)
        return agent.spec.model or self.settings.inference.default_model or offered
