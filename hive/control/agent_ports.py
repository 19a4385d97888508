"""The ports of this host that agents listen at: each is one agent's, as ingress asks for all of them at 127.0.0.1.

An agent with a network or an address of its own has none of them, whatever its `port` is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from hive.agents.lifecycle import AgentLifecycle
from hive.domain import AT_REST, Agent, AgentSpec, AgentStatus
from hive.errors import WrongState


class AgentPorts:
    """Says whose a port is. `lives`: by id; `has_own_network`: of a spec, whether 127.0.0.1 inside is not the host's.

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
                raise _taken(port, agent.name, hint="another port, or --no-network (as root)")

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
                raise _taken(port, other, hint=hint)
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


def _taken(port: int, name: str, *, hint: str) -> WrongState:
    return WrongState(f"port: {port} is {name}'s already", hint=hint)
