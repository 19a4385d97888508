"""The agents as the proxy knows them: told by the daemon, found by id, name or token."""

from __future__ import annotations

import hashlib
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

from msgspec.structs import replace

from hive.domain import Caller, CallerKind, Tier, WakeCause
from hive.errors import Asleep
from hive.link.messages import Activity, AgentRow
from hive.proxy.body_budget import BodyShare
from hive.proxy.connection_shares import Holder
from hive.proxy.gate import Daemon, Gate, State
from hive.proxy.limits import SlidingWindow, window_of
from hive.proxy.queue import FairQueue, Flow
from hive.proxy.tenants import Tenant, Tenants
from hive.proxy.wakes import WakeTimes
from hive.settings import Proxy as ProxySettings
from hive.settings import TenantRow
from hive.wire.connection import Connection
from hive.wire.listeners import Listener

OPERATOR = "operator"
PREWARM = "prewarm"
"""Whose requests those are that Hive itself makes to have a prompt read: they are counted under this name."""
UNHEARD = 0
"""Generation of an agent the daemon has not spoken of; its own start at 1."""
UNHEARD_S = 2.0
"""With the daemon not heard since the start, an agent on its own socket is served after this long (design.md §3)."""


class Turning(Protocol):
    """Who waits in the queue."""

    def on_turn(self) -> None:
        """A slot is this one's own now."""
        ...

    def on_displaced(self) -> None:
        """Its place was needed more by another one: it waits no longer."""
        ...


Queue = FairQueue[Turning]


class Entry:
    """One agent: what the daemon said of it, its gate, its window, its place in the queue, its connections.

    `callers`: connections to ingress that asked for it last. `listeners`: those that are its own, by path.
    `usual_tokens_out`: moving average of what its requests gave, to be charged before the truth is known.
    `bodies`, `callers_bodies`: what its own requests and its callers' hold of the budget.
    `plans`: how its bodies are read, by endpoint (the data path's own, kept here because it is the agent's).
    """

    __slots__ = (
        "bodies",
        "caller",
        "callers",
        "callers_bodies",
        "connections",
        "flow",
        "gate",
        "listeners",
        "model",
        "plans",
        "row",
        "tenant",
        "usual_tokens_out",
        "window",
    )

    def __init__(self, row: AgentRow, gate: Gate, flow: Flow, tenant: Tenant, settings: ProxySettings) -> None:
        self.gate = gate
        self.flow = flow
        self.window = SlidingWindow(settings.window_requests, settings.window_s)
        self.connections: Holder[Connection] = Holder(is_agents=row.id != PREWARM)
        self.callers: Holder[Connection] = Holder()
        self.listeners: dict[str, Listener] = {}
        self.plans: dict[bytes, Any] = {}
        self.usual_tokens_out = 128.0
        self.bodies = BodyShare(tenant.bodies, is_tenants=row.id == OPERATOR)
        self.callers_bodies = BodyShare(tenant.bodies, of=self.bodies)
        self.learn(row, tenant)

    def __repr__(self) -> str:
        return f"<Entry {self.row.name} {self.gate} {self.flow}>"

    def learn(self, row: AgentRow, tenant: Tenant) -> None:
        """Takes over what the daemon says, except the gate and the place in the queue."""
        self.row = row
        self.tenant = tenant
        self.bodies.move(tenant.bodies)
        self.callers_bodies.move(tenant.bodies)
        self.model = row.model or ""
        kind = CallerKind.OPERATOR if row.id == OPERATOR else CallerKind.AGENT
        self.caller = Caller(kind, row.id, row.tenant, row.tier, tenant.models)

    def close_listeners(self, path: str = "") -> None:
        """Accepts nobody there any more; without a path at none of its listeners. Open connections stay."""
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
    return replace(old, gate=new.gate, generation=new.generation, status=new.status) == new


class Registry:
    """All agents, and what their gates see as outside: the daemon is passed through, the sockets are asked here."""

    def __init__(self, daemon: Daemon, settings: ProxySettings, tenants: Mapping[str, TenantRow]) -> None:
        self._daemon = daemon
        self._settings = settings
        self.tenants = Tenants(tenants)
        self.queue: Queue = FairQueue(depth=settings.queue_depth)
        self.wakes = WakeTimes()
        self._asked_at: dict[str, float] = {}
        """Agents somebody waits for, and since when."""
        self._turns: deque[Turning] = deque()
        self._giving = False
        self.by_id: dict[str, Entry] = {}
        self.stand_ins: list[Entry] = []
        """Of agents whose prompt is being read."""
        self._by_name: dict[str, Entry] = {}
        self._by_model_digest: dict[str, Entry] = {}
        self._by_ingress_digest: dict[str, Entry] = {}
        self._by_cid: dict[int, Entry] = {}
        self.generation = 0
        """Grows with whatever changes what was decided about a request before."""
        self._groups: Counter[str] = Counter()
        """Agents by the group whose prefix cache they share."""
        self.vsock_listener: Listener | None = None
        """Where the guests that are agents by their context id arrive, all at one."""
        self.heard = False
        """Whether the daemon's table has come at least once."""
        self.internal_digest = ""
        self.operator = self._new(
            AgentRow(id=OPERATOR, name=OPERATOR, generation=0, gate="open", status="", tier=Tier.HIGH)
        )

    # from the daemon ----------------------------------------------------------------------------------------------

    def replace_all(self, rows: list[AgentRow], internal_digest: str) -> list[Entry]:
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

    def learn(self, row: AgentRow) -> Entry:
        """One agent is so; its gate moves to where the daemon says, unless that is older than what the gate knows."""
        entry = self.by_id.get(row.id)
        if entry is not None and _differs_in_state_only(entry.row, row):
            entry.row = row
        else:
            entry = self._learn_anew(entry, row)
        entry.gate.move(State(row.gate), row.generation, row.status)
        return entry

    def _learn_anew(self, entry: Entry | None, row: AgentRow) -> Entry:
        """Who it is, where it belongs and what it may: whatever was decided before is decided again."""
        self.generation += 1
        if entry is None:
            entry = self._new(row)
            self.by_id[row.id] = entry
        else:
            self._unindex(entry)
            self._count(entry, -1)
            entry.learn(row, self.tenants.of(row.tenant))
            self._place(entry)
        self._count(entry, 1)
        self._by_name[row.name] = entry
        if row.cid is not None:
            self._by_cid[row.cid] = entry
        if row.model_digest:
            self._by_model_digest[row.model_digest] = entry
        if row.ingress_digest:
            self._by_ingress_digest[row.ingress_digest] = entry
        return entry

    def unheard(self, agent: str) -> Entry:
        """An agent whose socket came from the helper before the daemon spoke of it: closed until it does."""
        entry = self.by_id.get(agent)
        if entry is None:
            entry = self._new(AgentRow(id=agent, name=agent, generation=UNHEARD, gate="closed", status="unknown"))
            entry.gate.move(State.CLOSED, UNHEARD, "unknown")
            self.by_id[agent] = entry
            self._count(entry, 1)
        return entry

    def serve_unheard(self) -> None:
        """The daemon is not there: serve those it never spoke of (a sleeping agent cannot ask)."""
        for entry in self.by_id.values():
            entry.gate.move(State.OPEN, UNHEARD, "unknown")

    def forget(self, agent: str) -> Entry | None:
        """Flushes what is parked and closes its connections. None where it was not known."""
        entry = self.by_id.pop(agent, None)
        if entry is None:
            return None
        self.generation += 1
        self._unindex(entry)
        self._count(entry, -1)
        entry.gate.move(State.REFUSED, entry.gate.generation, "removed")
        entry.close_listeners()
        for connection in list(entry.connections):
            if connection.exchange is not None:
                connection.exchange.refuse(Asleep("the agent is removed"))
            connection.close()
        self.queue.forget(entry.flow)
        return entry

    def use_settings(self, settings: ProxySettings, tenants: Mapping[str, TenantRow]) -> None:
        """The configuration was read again: limits of agents and tenants are these from now on."""
        self.generation += 1
        self._settings = settings
        self.tenants.use(tenants)
        self.queue.depth = settings.queue_depth
        for entry in [*self.by_id.values(), self.operator]:
            entry.gate.parked_max = settings.parked_max
            entry.window = window_of(settings.window_requests, settings.window_s, entry.window)
            entry.learn(entry.row, self.tenants.of(entry.row.tenant))
            self._place(entry)
        self._groups = Counter(entry.tenant.cache_group for entry in self.by_id.values())

    def on_behalf_of(self, tenant_name: str) -> tuple[Caller, Tenant, Flow]:
        """The operator where it asks for a tenant: its limits, its models, its place in the queue."""
        tenant = self.tenants.of(tenant_name)
        own = self.operator.caller
        caller = Caller(own.kind, own.id, tenant_name, own.tier, tenant.models)
        limit = concurrency_of(own.tier, self._settings)
        return caller, tenant, self.queue.flow(own.id, tenant_name, limit=limit, weight=tenant.weight)

    def stand_in(self, agent: str) -> Entry | None:
        """One that has the agent's model, tier, tenant and so its cache, and a gate, a window and a place in the line
        that are not the agent's: a tenant has one place for all of these. None where the agent is not known."""
        entry = self.by_id.get(agent)
        if entry is None:
            return None
        row = replace(entry.row, id=PREWARM, name=PREWARM, address=None, cid=None)
        tenant = self.tenants.of(row.tenant)
        flow = self.queue.flow(f"{PREWARM} {tenant.name}", tenant.name, limit=1, weight=tenant.weight)
        found = Entry(row, Gate(PREWARM, self, parked_max=0), flow, tenant, self._settings)
        self.stand_ins.append(found)
        return found

    def stands_in_no_more(self, entry: Entry) -> None:
        self.stand_ins.remove(entry)
        if not any(other.flow is entry.flow for other in self.stand_ins):
            self.queue.forget(entry.flow)

    def activity(self, agents: Collection[str], now: float) -> dict[str, Activity]:
        """What is seen of the agents named that are known, of all where none is. Each is asked of the kernel."""
        known = self.by_id
        named = [agent for agent in agents if agent in known] if agents else known
        return {agent: known[agent].activity(now) for agent in named}

    def cache_groups(self) -> int:
        """How many groups of agents share a prefix cache each, of all agents there are."""
        return len(self._groups)

    def _count(self, entry: Entry, by: int) -> None:
        group = entry.tenant.cache_group
        self._groups[group] += by
        if not self._groups[group]:
            del self._groups[group]

    def give_turns(self, waiters: Iterable[Turning]) -> None:
        """Each owns a slot and begins. One that fails at once gives its slot to the next: a loop, not a recursion."""
        self._turns.extend(waiters)
        if self._giving:
            return
        self._giving = True
        try:
            while self._turns:
                self._turns.popleft().on_turn()
        finally:
            self._giving = False

    # who asks -----------------------------------------------------------------------------------------------------

    def by_model_token(self, token: bytes) -> Entry | None:
        """Whose model token this is; the internal one is the operator's. Digests are looked up: time tells nothing."""
        digest = hashlib.sha256(token).hexdigest()
        if digest == self.internal_digest:
            return self.operator
        return self._by_model_digest.get(digest)

    def by_cid(self, cid: int) -> Entry | None:
        """The agent whose guest has this AF_VSOCK context id."""
        return self._by_cid.get(cid)

    def by_ingress_token(self, name: str, token: bytes) -> Entry | None:
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

    def _new(self, row: AgentRow) -> Entry:
        gate = Gate(row.id, self, parked_max=self._settings.parked_max)
        tenant = self.tenants.of(row.tenant)
        limit = concurrency_of(row.tier, self._settings)
        flow = self.queue.flow(row.id, row.tenant, limit=limit, weight=tenant.weight)
        return Entry(row, gate, flow, tenant, self._settings)

    def _place(self, entry: Entry) -> None:
        """Tier, tenant or weight may have changed; those who may go by that, go."""
        limit = concurrency_of(entry.row.tier, self._settings)
        tenant = entry.tenant
        self.give_turns(self.queue.move(entry.flow, tenant=tenant.name, limit=limit, weight=tenant.weight))

    def _unindex(self, entry: Entry) -> None:
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
