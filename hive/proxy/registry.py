"""The agents as the proxy knows them: told by the daemon, found by id, name or token."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from hive.domain import Caller, CallerKind, Tier, WakeCause
from hive.errors import AgentAsleep
from hive.link.messages import Activity, AgentRow
from hive.models.cache_epochs import CacheEpochs
from hive.proxy.stopping import Stopping
from hive.queue.body_budget import BodyShare
from hive.queue.connection_shares import ConnectionHolder
from hive.queue.gate import Gate, GateState, WakeCaller
from hive.queue.limits import SlidingWindow, window_of
from hive.queue.queue import FairQueue, FairShares, Flow, Queue, QueueView, Turning, joined
from hive.queue.tenants import Tenant, Tenants
from hive.queue.wakes import WakeTimes
from hive.settings.table import Proxy as ProxySettings
from hive.settings.table import TenantRow
from hive.wire.connection import Connection
from hive.wire.listeners import SocketListener

OPERATOR = "operator"
PREWARM = "prewarm"
"""The name under which the requests are counted that Hive itself makes to have a prompt read."""
UNHEARD = 0
"""Generation of an agent the daemon has not spoken of; its own start at 1."""
UNHEARD_S = 2.0
"""Time after the start until an agent on its own socket is served if the daemon was not heard (design.md §3)."""


class AgentEntry:
    """One agent: its row from the daemon, its gate, its window, its position in the queue, its connections.

    `callers`: connections to ingress that asked for it last. `jobs`: those of model jobs that ask as this agent, which
    keep it no more awake than its callers' do. `listeners`: those that are its own, by path.
    `usual_tokens_out`: moving average of its requests' tokens out, charged before the true count is known. `bodies`,
    `callers_bodies`: the part of the budget that its own requests and its callers' hold; `uploads`: of the disk's, its
    files. `plans`: the plans for its
    bodies by slot and endpoint (of the data path, kept here because they are the agent's). `prompts_of`: the agent
    whose prompts it sends, another one for a prompt that is read ahead.
    """

    __slots__ = (
        "bodies",
        "caller",
        "callers",
        "callers_bodies",
        "connections",
        "flow",
        "gate",
        "jobs",
        "listeners",
        "model",
        "plans",
        "prompts_of",
        "row",
        "tenant",
        "uploads",
        "usual_tokens_out",
        "window",
    )

    def __init__(self, row: AgentRow, gate: Gate, flow: Flow, tenant: Tenant, settings: ProxySettings) -> None:
        self.gate = gate
        self.flow = flow
        self.window = SlidingWindow(settings.window_requests, settings.window_s)
        self.connections: ConnectionHolder[Connection] = ConnectionHolder(is_agents=row.id != PREWARM)
        self.callers: ConnectionHolder[Connection] = ConnectionHolder()
        self.jobs: ConnectionHolder[Connection] = ConnectionHolder()
        self.listeners: dict[str, SocketListener] = {}
        self.plans: dict[tuple[str, bytes], Any] = {}
        self.usual_tokens_out = 128.0
        self.bodies = BodyShare(tenant.bodies, is_tenants=row.id == OPERATOR)
        self.callers_bodies = BodyShare(tenant.bodies, of=self.bodies)
        self.uploads = BodyShare(tenant.uploads, is_tenants=row.id == OPERATOR)
        self.prompts_of = row.id
        self.learn(row, tenant)

    def __repr__(self) -> str:
        return f"<AgentEntry {self.row.name} {self.gate} {self.flow}>"

    def learn(self, row: AgentRow, tenant: Tenant) -> None:
        """Takes over what the daemon says, except the gate and the position in the queue."""
        self.row = row
        self.tenant = tenant
        self.bodies.move(tenant.bodies)
        self.callers_bodies.move(tenant.bodies)
        self.uploads.move(tenant.uploads)
        self.model = row.model or ""
        kind = CallerKind.OPERATOR if row.id == OPERATOR else CallerKind.AGENT
        self.caller = Caller(kind, row.id, row.tenant, row.tier, tenant.models)

    def close_listeners(self, path: str = "") -> None:
        """Accepts no more connections there; without a path at none of its listeners. Open connections stay."""
        for known in [path] if path else list(self.listeners):
            listener = self.listeners.pop(known, None)
            if listener is not None:
                listener.close()

    def learn_tokens_out(self, tokens: int) -> None:
        self.usual_tokens_out += 0.1 * (tokens - self.usual_tokens_out)

    def activity(self, now: float) -> Activity:
        gate = self.gate
        return Activity(
            in_flight=gate.in_flight,
            parked=gate.parked,
            ingress=gate.ingress,
            quiet_s=None if gate.last_active is None else now - gate.last_active,
            why_busy=gate.why_busy(now) or "",
        )


def concurrency_of(tier: Tier, settings: ProxySettings) -> int:
    """Requests of one agent of this tier at the backend at once."""
    return {
        Tier.LOW: settings.tier_low_concurrency,
        Tier.MEDIUM: settings.tier_medium_concurrency,
        Tier.HIGH: settings.tier_high_concurrency,
    }[tier]


def _differs_in_state_only(old: AgentRow, new: AgentRow) -> bool:
    """Whether the agent is the same but for being awake, asleep or stopped: nothing decided of it changes by that.

    >>> row = AgentRow(id="a1", name="a", generation=1, gate="open", status="running")
    >>> _differs_in_state_only(row, replace(row, gate="asleep", generation=2, status="paused"))
    True
    >>> _differs_in_state_only(row, replace(row, tenant="other"))
    False
    """
    return replace(old, gate=new.gate, generation=new.generation, status=new.status, why=new.why) == new


class Registry:
    """All agents, and the outside of their gates: calls to the daemon are passed on, the sockets are asked here."""

    def __init__(self, daemon: WakeCaller, settings: ProxySettings, tenants: Mapping[str, TenantRow]) -> None:
        self._daemon = daemon
        self._settings = settings
        self.tenants = Tenants(tenants, rate_limit=settings.tenant_rate_limit)
        self.shares: FairShares[Turning] = FairShares()
        self.queue: Queue = FairQueue(self.shares, depth=settings.queue_depth)
        """The line before the one backend there is."""
        self.stopping: dict[Stopping, None] = {}
        """Requests that were given up and whose servers have not stopped yet."""
        self.wakes = WakeTimes()
        self._asked_at: dict[str, float] = {}
        """Agents with a caller that waits for the wake, and the time of the ask."""
        self._turns: deque[Turning] = deque()
        self._giving = False
        self.by_id: dict[str, AgentEntry] = {}
        self.stand_ins: list[AgentEntry] = []
        """Entries for the prewarms that are running, one for each agent whose prompt is read."""
        self._by_name: dict[str, AgentEntry] = {}
        self._by_model_digest: dict[str, AgentEntry] = {}
        self._by_ingress_digest: dict[str, AgentEntry] = {}
        self._by_cid: dict[int, AgentEntry] = {}
        self.generation = 0
        """Grows with every change that makes earlier decisions about a request invalid."""
        self.has_budgets = False
        """True if anybody has a budget of tokens: then usage is asked for, whatever is written down of it."""
        self._groups: Counter[str] = Counter()
        """The number of agents by the group that shares a prefix cache."""
        self._operators_groups: set[str] = set()
        """The groups that operators have asked for, two at most: whether there are several is all that matters."""
        self.epochs = CacheEpochs()
        """Epochs that flushes have raised; another object with every word of the daemon on them."""
        self.vsock_listener: SocketListener | None = None
        """The one listener of all guests that are known by their context id."""
        self.heard = False
        """True once the daemon's table has come."""
        self.internal_digest = ""
        self.operator = self._new(
            AgentRow(id=OPERATOR, name=OPERATOR, generation=0, gate="open", status="", tier=Tier.HIGH)
        )

    # from the daemon ----------------------------------------------------------------------------------------------

    def replace_all(self, rows: list[AgentRow], internal_digest: str) -> list[AgentEntry]:
        """The daemon's whole table; the entries it no longer has are forgotten and returned."""
        self.heard = True
        self.generation += 1
        self.internal_digest = internal_digest
        known = {row.id for row in rows}
        gone = [self.forget(agent) for agent in list(self.by_id) if agent not in known]
        for row in rows:
            if (entry := self.by_id.get(row.id)) is not None:
                # a daemon that lost its last writes knows less than it once told, and is right all the same
                entry.gate.generation = min(entry.gate.generation, row.generation)
            self.learn(row)
        return [entry for entry in gone if entry is not None]

    def learn(self, row: AgentRow) -> AgentEntry:
        """One agent is so; its gate moves to the daemon's state, unless that is older than the gate's own."""
        entry = self.by_id.get(row.id)
        if entry is not None and _differs_in_state_only(entry.row, row):
            entry.row = row
        else:
            entry = self._learn_anew(entry, row)
        entry.gate.move(GateState(row.gate), row.generation, row.status, row.why)
        return entry

    def _learn_anew(self, entry: AgentEntry | None, row: AgentRow) -> AgentEntry:
        """Takes over a row's identity, place and rights; all that was decided before is decided again."""
        self.generation += 1
        if entry is None:
            entry = self._new(row)
            self.by_id[row.id] = entry
        else:
            self._unindex(entry)
            self._count(entry, -1)
            entry.learn(row, self.tenants.of(row.tenant))
            self._update_queue(entry)
        self._count(entry, 1)
        self._by_name[row.name] = entry
        if row.cid is not None:
            self._by_cid[row.cid] = entry
        if row.model_digest:
            self._by_model_digest[row.model_digest] = entry
        if row.ingress_digest:
            self._by_ingress_digest[row.ingress_digest] = entry
        return entry

    def unheard(self, agent: str) -> AgentEntry:
        """The entry of an agent whose socket came from the helper before its row from the daemon: closed until that
        comes."""
        entry = self.by_id.get(agent)
        if entry is None:
            entry = self._new(AgentRow(id=agent, name=agent, generation=UNHEARD, gate="closed", status="unknown"))
            entry.gate.move(GateState.CLOSED, UNHEARD, "unknown")
            self.by_id[agent] = entry
            self._count(entry, 1)
        return entry

    def serve_unheard(self) -> None:
        """The daemon is not there: serve those it never spoke of (a sleeping agent cannot ask)."""
        for entry in self.by_id.values():
            entry.gate.move(GateState.OPEN, UNHEARD, "unknown")

    def forget(self, agent: str) -> AgentEntry | None:
        """Refuses parked requests and closes its connections. None where it was not known."""
        entry = self.by_id.pop(agent, None)
        if entry is None:
            return None
        self.generation += 1
        self._unindex(entry)
        self._count(entry, -1)
        entry.gate.move(GateState.REFUSED, entry.gate.generation, "removed")
        entry.close_listeners()
        for connection in [*entry.connections, *entry.jobs]:
            if connection.exchange is not None:
                connection.exchange.refuse(AgentAsleep("the agent is removed"))
            connection.close()
        self.shares.forget(entry.flow)
        return entry

    def use_settings(self, settings: ProxySettings, tenants: Mapping[str, TenantRow]) -> None:
        """The configuration was read again: limits of agents and tenants are these from now on."""
        self.generation += 1
        self._settings = settings
        self.tenants.use(tenants, rate_limit=settings.tenant_rate_limit)
        for queue in self.shares.queues.values():
            queue.depth = settings.queue_depth
        for entry in [*self.by_id.values(), self.operator]:
            entry.gate.parked_max = settings.parked_max
            entry.window = window_of(settings.window_requests, settings.window_s, entry.window)
            entry.learn(entry.row, self.tenants.of(entry.row.tenant))
            self._update_queue(entry)
        self._groups = Counter(entry.tenant.cache_group for entry in self.by_id.values())

    def use_epochs(self, epochs: CacheEpochs) -> None:
        """No request is sent from now on that was read with earlier ones (`Exchange._8_ask_backend`)."""
        self.epochs = epochs
        self.generation += 1

    def on_behalf_of(self, tenant_name: str) -> tuple[Caller, Tenant, Flow]:
        """The operator where it asks for a tenant: its limits, its models, its position in the queue."""
        tenant = self.tenants.of(tenant_name)
        own = self.operator.caller
        caller = Caller(own.kind, own.id, tenant_name, own.tier, tenant.models)
        limit = concurrency_of(own.tier, self._settings)
        return caller, tenant, self.shares.flow(own.id, tenant_name, limit=limit, weight=tenant.weight)

    def stand_in(self, agent: str) -> AgentEntry | None:
        """The entry for a prewarm of the agent: with its model, tier, tenant and so its cache, but with a gate, a
        window and a position in the queue of its own. A tenant has one such position for all of them. None if the agent
        is not known."""
        entry = self.by_id.get(agent)
        if entry is None:
            return None
        row = replace(entry.row, id=PREWARM, name=PREWARM, address=None, cid=None)
        tenant = self.tenants.of(row.tenant)
        flow = self.shares.flow(f"{PREWARM} {tenant.name}", tenant.name, limit=1, weight=tenant.weight)
        found = AgentEntry(row, Gate(PREWARM, self, parked_max=0), flow, tenant, self._settings)
        found.prompts_of = agent
        self.stand_ins.append(found)
        return found

    def stands_in_no_more(self, entry: AgentEntry) -> None:
        self.stand_ins.remove(entry)
        if not any(other.flow is entry.flow for other in self.stand_ins):
            self.shares.forget(entry.flow)

    def activity(self, agents: Collection[str], now: float) -> dict[str, Activity]:
        """The activity of the known agents among those named; of all if none is named. The kernel is asked for each."""
        known = self.by_id
        named = [agent for agent in agents if agent in known] if agents else known
        return {agent: known[agent].activity(now) for agent in named}

    def cache_groups(self) -> int:
        """The number of groups that share a prefix cache: those of all agents, or 2 where an operator asked for another
        one beside a single one."""
        return max(len(self._groups), min(2, len(self._groups.keys() | self._operators_groups)))

    def note_operators_group(self, group: str) -> None:
        """An operator asks for a tenant: its prompts are one more group's, also where no agent is that tenant's."""
        if group not in self._groups and group not in self._operators_groups and len(self._operators_groups) < 2:
            self._operators_groups.add(group)
            self.generation += 1

    def _count(self, entry: AgentEntry, by: int) -> None:
        group = entry.tenant.cache_group
        self._groups[group] += by
        if not self._groups[group]:
            del self._groups[group]

    def give_turns(self, waiters: Iterable[Turning]) -> None:
        """Each owns a place and begins. One that fails at once gives its place to the next: a loop, not a recursion."""
        self._turns.extend(waiters)
        if self._giving:
            return
        self._giving = True
        try:
            while self._turns:
                self._turns.popleft().on_turn()
        finally:
            self._giving = False

    # callers ------------------------------------------------------------------------------------------------------

    def by_model_token(self, token: bytes) -> AgentEntry | None:
        """The entry with this model token; the internal token is the operator's. Digests are looked up: time tells
        nothing."""
        digest = hashlib.sha256(token).hexdigest()
        if digest == self.internal_digest:
            return self.operator
        return self._by_model_digest.get(digest)

    @staticmethod
    def digest_of(token: bytes) -> str:
        """The digest by which a token is known."""
        return hashlib.sha256(token).hexdigest()

    def by_cid(self, cid: int) -> AgentEntry | None:
        """The agent whose guest has this AF_VSOCK context id."""
        return self._by_cid.get(cid)

    def named(self, ref: str) -> AgentEntry | None:
        """The agent of this name, or id."""
        return self._by_name.get(ref) or self.by_id.get(ref)

    def by_ingress_token(self, name: str, token: bytes) -> AgentEntry | None:
        """The agent of this name if this token lets callers in to it; unknown name and wrong token look the same."""
        digest = hashlib.sha256(token).hexdigest()
        entry = self._by_name.get(name)
        if entry is None or not (digest == self.internal_digest or self._by_ingress_digest.get(digest) is entry):
            return None
        return entry

    # for the gates ------------------------------------------------------------------------------------------------

    def wake(self, agent: str, cause: WakeCause) -> None:
        self._asked_at.setdefault(agent, time.monotonic())
        self._daemon.wake(agent, cause)

    def wake_ended(self, agent: str, *, awake: bool) -> None:
        asked_at = self._asked_at.pop(agent, None)
        if asked_at is not None and awake:
            self.wakes.took(time.monotonic() - asked_at)

    def tell_quiet(self, agent: str) -> None:
        self._daemon.tell_quiet(agent)

    def why_busy_outside(self, agent: str, now: float, *, unread_counts: bool) -> str | None:
        """Accepts all that waits in the agent's own listeners, then looks at each of its connections."""
        entry = self.by_id.get(agent)
        if entry is None:
            return None
        for listener in entry.listeners.values():
            listener.accept_waiting()
        if entry.row.cid is not None and self.vsock_listener is not None:
            self.vsock_listener.accept_waiting()
        for connection in entry.connections:
            reason = connection.why_busy(now, unread_counts=unread_counts)
            if reason is not None:
                return reason
        return None

    def _new(self, row: AgentRow) -> AgentEntry:
        gate = Gate(row.id, self, parked_max=self._settings.parked_max)
        tenant = self.tenants.of(row.tenant)
        limit = concurrency_of(row.tier, self._settings)
        flow = self.shares.flow(row.id, row.tenant, limit=limit, weight=tenant.weight)
        return AgentEntry(row, gate, flow, tenant, self._settings)

    def _update_queue(self, entry: AgentEntry) -> None:
        """Updates the queue after a change of tier, tenant or weight; requests that get a place by that go."""
        limit = concurrency_of(entry.row.tier, self._settings)
        tenant = entry.tenant
        self.give_turns(self.shares.move(entry.flow, tenant=tenant.name, limit=limit, weight=tenant.weight))

    def new_line(self) -> Queue:
        """The line of one more server; it shares accounts and limits with the others."""
        return FairQueue(self.shares, depth=self._settings.queue_depth)

    def queue_view(self, now: float) -> QueueView:
        """The lines of all servers at this moment, in one."""
        return joined([queue.view(now) for queue in self.shares.queues.values()])

    def _unindex(self, entry: AgentEntry) -> None:
        row = entry.row
        for index, key in (
            (self._by_name, row.name),
            (self._by_model_digest, row.model_digest),
            (self._by_ingress_digest, row.ingress_digest),
        ):
            if index.get(key) is entry:
                del index[key]
        if row.cid is not None and self._by_cid.get(row.cid) is entry:
            del self._by_cid[row.cid]
