"""Agents that live elsewhere: Hive gives them a token and meters them; there is nothing to start, freeze or stop."""

from __future__ import annotations

from collections.abc import Mapping

from hive.agents.effects import HelperVerbs
from hive.agents.lifecycle import AgentLifecycle
from hive.domain import ALIVE, RuntimeKind
from hive.errors import NotSupported
from hive.link.helper import PagedOut, Started, Stat
from hive.link.specs import SandboxSpec


class WithElsewhere:
    """The helper's verbs, answered here for agents of runtime `external`.

    `lives`: all agents by id, as the roster keeps them. `enabled` False: there is no helper, and whatever needs one
    raises NotSupported.
    """

    def __init__(self, helper: HelperVerbs, lives: Mapping[str, AgentLifecycle], *, enabled: bool) -> None:
        self._helper = helper
        self._lives = lives
        self._enabled = enabled

    def __repr__(self) -> str:
        return f"<WithElsewhere {self._helper!r}>" if self._enabled else "<WithElsewhere no helper>"

    @property
    def connected(self) -> bool:
        """Whether there is a part to ask; true where there is no helper, as nothing needs to wait for one."""
        return self._helper.connected or not self._enabled

    async def define(self, agent: str, spec: SandboxSpec) -> object:
        return None if spec.runtime is RuntimeKind.EXTERNAL else await self._asked().define(agent, spec)

    async def start(self, agent: str) -> Started:
        return Started(pid=0) if self._is_elsewhere(agent) else await self._asked().start(agent)

    async def stop(self, agent: str, *, grace_s: float) -> object:
        return None if self._nothing_is_known(agent) else await self._helper.stop(agent, grace_s=grace_s)

    async def freeze(self, agent: str, generation: int) -> object:
        if self._is_elsewhere(agent):
            raise NotSupported("it lives elsewhere, Hive cannot put it to sleep")
        return await self._asked().freeze(agent, generation)

    async def confirm(self, agent: str, generation: int) -> None:
        await self._asked().confirm(agent, generation)

    async def thaw(self, agent: str) -> object:
        return None if self._is_elsewhere(agent) else await self._asked().thaw(agent)

    async def page_out(self, agent: str, generation: int) -> PagedOut:
        return await self._asked().page_out(agent, generation)

    async def remove(self, agent: str) -> None:
        if not self._nothing_is_known(agent):
            await self._helper.remove(agent)

    async def stat(self, agents: list[str], *, pss: bool = False) -> dict[str, Stat]:
        told = self._elsewhere(agents)
        asked = [agent for agent in agents if agent not in told]
        if not self._enabled or (agents and not asked):
            return told
        return {**await self._helper.stat(asked, pss=pss), **told}

    async def reconcile(self, asleep: dict[str, int]) -> dict[str, Stat]:
        return {**await self._asked().reconcile(asleep), **self._elsewhere([])}

    def _elsewhere(self, agents: list[str]) -> dict[str, Stat]:
        """Stats of the agents named, of all where none is, that live elsewhere: by the state each was last given."""
        named = [self._lives[agent] for agent in agents if agent in self._lives] if agents else self._lives.values()
        found = [life.agent for life in named if life.agent.spec.runtime is RuntimeKind.EXTERNAL]
        return {agent.id: Stat(state="running" if agent.status in ALIVE else "gone") for agent in found}

    def _is_elsewhere(self, agent: str) -> bool:
        life = self._lives.get(agent)
        return life is not None and life.agent.spec.runtime is RuntimeKind.EXTERNAL

    def _nothing_is_known(self, agent: str) -> bool:
        """A helper that is there is asked all the same: it may have run the agent before its description changed."""
        return not self._enabled or (self._is_elsewhere(agent) and not self._helper.connected)

    def _asked(self) -> HelperVerbs:
        if not self._enabled:
            raise NotSupported(
                "this Hive runs no agents itself: [sandbox] enabled = false",
                hint='an agent with runtime = "external" runs wherever you start it',
            )
        return self._helper
