"""The effects of transitions in this daemon: SQLite, helper, proxy, audit log, as `agents/effects.py` asks for them."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import PurePosixPath

from hive.agents.effects import GateVerbs, HelperVerbs, HostMemory
from hive.agents.lifecycle import AgentLifecycle
from hive.agents.reconcile import gate_of
from hive.agents.tokens import TokenKind, derive, digest
from hive.audit.audit_log import AuditLog, event_row
from hive.backends.kinds import spec_of, whereabouts
from hive.control.counters import Counters
from hive.domain import (
    ALIVE,
    AT_REST,
    INNER_PORT,
    MOUNTED_SOCKET,
    Agent,
    AgentSpec,
    AgentStatus,
    BackendInfo,
    Dialect,
    ModelInfo,
    RuntimeKind,
    SleepDepth,
    WakeCause,
)
from hive.errors import WrongState
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


# the ports of this host that agents listen at -------------------------------------------------------------------------


class AgentPorts:
    """Says whose a port is: each is one agent's, as ingress asks for all of them at 127.0.0.1. `lives`: by id;
    `has_own_network`: of a spec, whether 127.0.0.1 inside is not the host's; such an agent has none of them.

    Agents that were recorded before a port was one agent's may share one: that of them runs which is started first.
    """

    def __init__(self, lives: Mapping[str, AgentLifecycle], has_own_network: Callable[[AgentSpec], bool]) -> None:
        self._lives = lives
        self._has_own_network = has_own_network
        self._started_at: dict[str, int] = {}
        """Agent → the port of its last start by this daemon, until it is at rest."""

    def __repr__(self) -> str:
        return f"<AgentPorts {len(self._started_at)} started>"

    def refuse_recorded(self, spec: AgentSpec) -> None:
        """Raises WrongState where another agent has the port of `spec`, whether or not it runs."""
        if (port := self._port_of(spec)) is None:
            return
        for life in self._lives.values():
            agent = life.agent
            if agent.name != spec.name and port in (self._started_at.get(agent.id), self._port_of(agent.spec)):
                raise _port_taken(port, agent.name, hint="another port, or --no-network (as root)")

    def claim(self, agent: Agent) -> None:
        """Takes the port of `agent`, which is about to be started. Raises WrongState where another one listens there,
        or is about to."""
        self.release(agent.id)
        if (port := self._port_of(agent.spec)) is None:
            return
        for life in self._lives.values():
            if life.agent.id != agent.id and self._listens_at(life) == port:
                other = life.agent.name
                hint = f"hive agent stop {other}, or hive agent edit {agent.name} for another port"
                raise _port_taken(port, other, hint=hint)
        self._started_at[agent.id] = port

    def release(self, agent: str) -> None:
        """Nothing of it lives."""
        self._started_at.pop(agent, None)

    def _listens_at(self, life: AgentLifecycle) -> int | None:
        """The port of one that lives; one that waits to be started anew, as after a boot, has none yet."""
        agent = life.agent
        if (port := self._started_at.get(agent.id)) is not None:
            return port
        if agent.status in AT_REST or (agent.status is AgentStatus.STARTING and life.pid is None):
            return None
        return self._port_of(agent.spec)

    def _port_of(self, spec: AgentSpec) -> int | None:
        return None if spec.port is None or self._has_own_network(spec) else spec.port


def _port_taken(port: int, name: str, *, hint: str) -> WrongState:
    return WrongState(f"port: {port} is {name}'s already", hint=hint)


# the environment of an agent ------------------------------------------------------------------------------------------


def dialect_of(backend: BackendInfo | None) -> Dialect:
    """The dialect for an agent that speaks both: Ollama where the backend does, else OpenAI, which all speak."""
    speaks_ollama = backend is not None and Dialect.OLLAMA in spec_of(backend.kind).dialects
    return Dialect.OLLAMA if speaks_ollama else Dialect.OPENAI


def has_own_network(spec: AgentSpec, *, processes_too: bool = False) -> bool:
    """Whether 127.0.0.1 inside is not the host's. `processes_too`: so it is of process agents that name no networks
    (systemd units).

    >>> has_own_network(AgentSpec(name="a")), has_own_network(AgentSpec(name="a", egress=[]))
    (False, True)
    >>> has_own_network(AgentSpec(name="a", egress=["192.0.2.0/24"]), processes_too=True)
    False
    """
    return spec.runtime is not RuntimeKind.PROCESS or spec.egress == [] or (spec.egress is None and processes_too)


NODE_OPTIONS = "--max-semi-space-size=1"
"""V8 else lets the space for what is young grow: 8 MiB more of an agent after 15 turns, the same CPU time a turn."""


def is_node(spec: AgentSpec) -> bool:
    """Whether its command is Node itself, on this host: an image may have options of its own in its environment.

    >>> [is_node(AgentSpec(name="a", command=[word])) for word in ("node", "/usr/bin/nodejs", "npx", "/srv/node.py")]
    [True, True, False, False]
    """
    return spec.runtime is RuntimeKind.PROCESS and PurePosixPath((spec.command or [""])[0]).name in ("node", "nodejs")


def environment(
    agent: Agent, *, port: int | None, token: str, socket: str, dialect: Dialect, model: str | None
) -> dict[str, str]:
    """The environment of an agent: what it can replace, its own variables, then Hive's, which it cannot replace.

    `port`: the proxy's, None for an agent with a network of its own; `token`: the model token, which is the API key
    everywhere; `socket`: the agent's own, as the host sees it.

    >>> from hive.domain import AgentSpec
    >>> agent = Agent(id="a1", spec=AgentSpec(name="bob", command=["/bin/bob"], port=9000))
    >>> found = environment(agent, port=11435, token="hm_x", socket="/s", dialect=Dialect.OPENAI, model=None)
    >>> found["OPENAI_BASE_URL"], found["OLLAMA_HOST"], found["HIVE_AGENT_PORT"]
    ('http://127.0.0.1:11435/v1', 'http://127.0.0.1:11435/a/hm_x', '9000')
    >>> found = environment(agent, port=None, token="hm_x", socket="/s", dialect=Dialect.OPENAI, model=None)
    >>> found["OPENAI_BASE_URL"], found["OLLAMA_HOST"], found["OPENAI_API_KEY"]
    ('http://127.0.0.1:11434/v1', 'http://127.0.0.1:11434', 'hm_x')
    """
    hive = f"http://127.0.0.1:{INNER_PORT if port is None else port}"
    found = {
        **({"NODE_OPTIONS": NODE_OPTIONS} if is_node(agent.spec) else {}),
        **agent.spec.env,
        "OPENAI_BASE_URL": f"{hive}/v1",
        "OPENAI_API_KEY": token,
        "OLLAMA_HOST": hive if port is None else f"{hive}/a/{token}",
        "HIVE_AGENT": agent.name,
        "HIVE_DIALECT": str(dialect),
    }
    match agent.spec.runtime:
        case RuntimeKind.PROCESS:
            found["HIVE_PROXY_SOCKET"] = socket
        case RuntimeKind.DOCKER:
            found["HIVE_PROXY_SOCKET"] = MOUNTED_SOCKET
        case RuntimeKind.FIRECRACKER:
            pass  # nothing of the host's file system is inside
        case RuntimeKind.EXTERNAL:
            pass  # its starter gives it what it needs
    if agent.spec.port is not None:
        found["HIVE_AGENT_PORT"] = str(agent.spec.port)
    if model:
        found["HIVE_MODEL"] = model
    return found
