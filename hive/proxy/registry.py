"""The agents as the proxy knows them: told by the daemon, found by id, name or token."""

from __future__ import annotations

import hashlib

from hive.domain import Caller, CallerKind, Tier, WakeCause
from hive.link.messages import Activity, AgentRow
from hive.proxy.gate import Daemon, Gate, State
from hive.proxy.limits import SlidingWindow
from hive.proxy.queue import Line
from hive.settings import Proxy as ProxySettings
from hive.wire.connection import Connection
from hive.wire.listeners import Listener

OPERATOR = "operator"
UNHEARD = 0
"""Generation of an agent the daemon has not spoken of; its own start at 1."""
UNHEARD_S = 2.0
"""With the daemon not heard since the start, an agent on its own socket is served after this long (design.md §3)."""


class Entry:
    """One agent: what the daemon said of it, its gate, its window, its line, its connections."""

    __slots__ = ("caller", "connections", "gate", "line", "listener", "model", "row", "window")

    def __init__(self, row: AgentRow, gate: Gate, settings: ProxySettings) -> None:
        self.gate = gate
        self.window = SlidingWindow(settings.window_requests, settings.window_s)
        self.line: Line[object] = Line(concurrency_of(row.tier, settings), settings.queue_depth)
        self.connections: set[Connection] = set()
        self.listener: Listener | None = None
        self.learn(row, settings)

    def __repr__(self) -> str:
        return f"<Entry {self.row.name} {self.gate} {self.line}>"

    def learn(self, row: AgentRow, settings: ProxySettings) -> None:
        """Takes over what the daemon says, except the gate."""
        self.row = row
        self.model = row.model or ""
        kind = CallerKind.OPERATOR if row.id == OPERATOR else CallerKind.AGENT
        self.caller = Caller(kind, row.id, row.tenant, row.tier)
        self.line.resize(concurrency_of(row.tier, settings))

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


class Registry:
    """All agents, and what their gates see as outside: the daemon is passed through, the sockets are asked here."""

    def __init__(self, daemon: Daemon, settings: ProxySettings) -> None:
        self._daemon = daemon
        self._settings = settings
        self.by_id: dict[str, Entry] = {}
        self._by_name: dict[str, Entry] = {}
        self._by_model_digest: dict[str, Entry] = {}
        self._by_ingress_digest: dict[str, Entry] = {}
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
        if entry is None:
            entry = self._new(row)
            self.by_id[row.id] = entry
        else:
            self._unindex(entry)
            entry.learn(row, self._settings)
        self._by_name[row.name] = entry
        if row.model_digest:
            self._by_model_digest[row.model_digest] = entry
        if row.ingress_digest:
            self._by_ingress_digest[row.ingress_digest] = entry
        entry.gate.move(State(row.gate), row.generation, row.status)
        return entry

    def unheard(self, agent: str) -> Entry:
        """An agent whose socket came from the helper before the daemon spoke of it: closed until it does."""
        entry = self.by_id.get(agent)
        if entry is None:
            entry = self._new(AgentRow(id=agent, name=agent, generation=UNHEARD, gate="closed", status="unknown"))
            entry.gate.move(State.CLOSED, UNHEARD, "unknown")
            self.by_id[agent] = entry
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
        self._unindex(entry)
        entry.gate.move(State.REFUSED, entry.gate.generation, "removed")
        if entry.listener is not None:
            entry.listener.close()
        for connection in list(entry.connections):
            connection.close()
        return entry

    # who asks -----------------------------------------------------------------------------------------------------

    def by_model_token(self, token: bytes) -> Entry | None:
        """Whose model token this is; the internal one is the operator's. Digests are looked up: time tells nothing."""
        digest = hashlib.sha256(token).hexdigest()
        if digest == self.internal_digest:
            return self.operator
        return self._by_model_digest.get(digest)

    def by_ingress_token(self, name: str, token: bytes) -> Entry | None:
        """The agent of this name if this token lets callers in to it; unknown name and wrong token look the same."""
        digest = hashlib.sha256(token).hexdigest()
        entry = self._by_name.get(name)
        if entry is None or not (digest == self.internal_digest or self._by_ingress_digest.get(digest) is entry):
            return None
        return entry

    # for the gates ------------------------------------------------------------------------------------------------

    def wake(self, agent: str, cause: WakeCause) -> None:
        self._daemon.wake(agent, cause)

    def tell_quiet(self, agent: str) -> None:
        self._daemon.tell_quiet(agent)

    def why_busy_outside(self, agent: str, now: float, *, unread_counts: bool) -> str | None:
        """Accepts all that waits in the agent's own listener, then looks at each of its connections."""
        entry = self.by_id.get(agent)
        if entry is None:
            return None
        if entry.listener is not None:
            entry.listener.accept_waiting()
        for connection in entry.connections:
            reason = connection.why_busy(now, unread_counts=unread_counts)
            if reason is not None:
                return reason
        return None

    def _new(self, row: AgentRow) -> Entry:
        gate = Gate(row.id, self, parked_max=self._settings.parked_max)
        return Entry(row, gate, self._settings)

    def _unindex(self, entry: Entry) -> None:
        row = entry.row
        for index, key in (
            (self._by_name, row.name),
            (self._by_model_digest, row.model_digest),
            (self._by_ingress_digest, row.ingress_digest),
        ):
            if index.get(key) is entry:
                del index[key]
