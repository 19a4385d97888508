"""Every agent of this Hive; hands the words of helper and proxy to the agents they are for."""

from __future__ import annotations

import asyncio
import logging
import re
from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator, Mapping

from hive.agents import boot
from hive.agents.admission import FIRST
from hive.agents.effects import Effects
from hive.agents.lifecycle import AgentLifecycle
from hive.agents.state import GONE, Answer
from hive.agents.transition_lock import outcome_of
from hive.agents.wake_queue import WakeQueue
from hive.domain import Agent, AgentStatus, WakeCause
from hive.errors import HiveError, NotFound
from hive.link.messages import Activity, Refused
from hive.tasks import spawn

log = logging.getLogger("hive.agents")

STARTS_AT_ONCE = 4
"""After a boot: a thousand programs that start together make each other slow, and the host unusable."""
SOCKET_DIGITS = 8
"""So many of an agent's id name its socket (Paths.agent_socket)."""
FOUND_AT_ONCE = 200
"""Told what was found of them before others have their turn: some 3 ms."""


class Roster:
    """The lives by id and by name, which never changes. `line`: where those woken from deep sleep wait for memory."""

    def __init__(self, effects: Effects, lives: dict[str, AgentLifecycle] | None = None) -> None:
        """`lives`: by id, an empty one to be filled, for those that look into it too and are made before."""
        self._effects = effects
        self.line = WakeQueue(effects)
        self._lives: dict[str, AgentLifecycle] = {} if lives is None else lives
        self._by_name: dict[str, AgentLifecycle] = {}
        self._names: list[str] = []
        """In their order."""
        self._sockets: set[str] = set()
        self._is_begun = False

    def __repr__(self) -> str:
        return f"<Roster {len(self._lives)} agents>"

    def __iter__(self) -> Iterator[AgentLifecycle]:
        return iter(list(self._lives.values()))

    def __len__(self) -> int:
        return len(self._lives)

    def add(self, agent: Agent) -> AgentLifecycle:
        life = self._lives[agent.id] = AgentLifecycle(agent, self._effects, self.line)
        if agent.name not in self._by_name:
            insort(self._names, agent.name)
        self._by_name[agent.name] = life
        self._sockets.add(agent.id[:SOCKET_DIGITS])
        return life

    def drop(self, agent: str) -> None:
        if (life := self._lives.pop(agent, None)) is None:
            return
        self._sockets.discard(agent[:SOCKET_DIGITS])
        if self._by_name.get(life.agent.name) is life:
            del self._by_name[life.agent.name]
            del self._names[bisect_left(self._names, life.agent.name)]

    def get(self, agent: str) -> AgentLifecycle | None:
        """The life of the agent with this id."""
        return self._lives.get(agent)

    def named(self, name: str) -> AgentLifecycle | None:
        return self._by_name.get(name)

    def by_name(self, *, after: str = "", limit: int | None = None) -> list[AgentLifecycle]:
        """The lives in the order of their names, those behind `after`, at most `limit`."""
        first = bisect_right(self._names, after) if after else 0
        names = self._names[first:] if limit is None else self._names[first : first + limit]
        return [self._by_name[name] for name in names]

    def has_socket(self, agent: str) -> bool:
        """Whether an agent's socket is called as that of one with this id would be."""
        return agent[:SOCKET_DIGITS] in self._sockets

    def find(self, ref: str) -> AgentLifecycle:
        """The life of the agent with this id, else of this name. Raises NotFound."""
        life = self._lives.get(ref) or self._by_name.get(ref)
        if life is None:
            raise NotFound(f"there is no agent {ref[:64]!r}", hint="hive agent list shows all")
        return life

    def identified(self, ref: str) -> tuple[str, str]:
        """Id and name of the agent that is meant; `ref` itself and nothing where there is none."""
        life = self._lives.get(ref) or self._by_name.get(ref)
        return (ref, "") if life is None else (life.agent.id, life.agent.name)

    def once_known(self, ref: str) -> str:
        """An agent's id; one that was removed has no name any more. Raises NotFound."""
        return ref if re.fullmatch("[0-9a-f]{32}", ref) else self.find(ref).agent.id

    # The helper ---------------------------------------------------------------------------------------------------

    async def reconcile(self) -> None:
        """Reconciles after every (re)connect to the helper: it confirms the sleepers, thaws the rest; each is put
        right.

        Returns when all are. Raises LinkLost, TimedOut.
        """
        for life in self:
            life.helper_back()
        asleep = {life.agent.id: life.agent.generation for life in self if life.status is AgentStatus.PAUSED}
        asked = [(life, life.moment) for life in self]
        is_new_boot = await self._effects.is_new_boot()
        truth = await self._effects.helper.reconcile(asleep)
        for stranger in truth.keys() - self._lives.keys():
            log.warning("agent_unknown agent=%s state=%s", stranger, truth[stranger].state)
        putting_right = []
        for life, moment in asked:
            found = life.found(truth.get(life.agent.id, GONE), moment, is_new_boot=is_new_boot)
            putting_right.append(spawn(outcome_of(found), name=f"reconcile {life.agent.name}"))
            if len(putting_right) % FOUND_AT_ONCE == 0:
                await asyncio.sleep(0)
        for outcome in await asyncio.gather(*putting_right):
            if isinstance(outcome, HiveError) and not isinstance(outcome, NotFound):
                log.warning("agent_not_reconciled error=%s", outcome.message)

    async def start_after_boot(self) -> None:
        """Starts the agents boot.py names, once the first reconciliation is done: a few at a time, high tier first.

        Once per daemon: an agent that Hive stops later is stopped because Hive goes down. Returns when each of them
        runs or could not be started. Raises what the store raises.
        """
        if self._is_begun:
            return
        self._is_begun = True
        is_new_boot = await self._effects.is_new_boot()
        whys = {life: boot.why_started(life.agent, is_new_boot=is_new_boot) for life in self}
        due = [life for life, why in whys.items() if why and life.status is not AgentStatus.RUNNING]
        due.sort(key=lambda life: (FIRST[life.agent.spec.tier], life.agent.created_at))
        permits = asyncio.Semaphore(STARTS_AT_ONCE)

        async def start(life: AgentLifecycle) -> None:
            async with permits:
                outcome = await outcome_of(life.start_after_boot(whys[life]))
            if isinstance(outcome, HiveError):
                log.warning("agent_not_started agent=%s error=%s", life.agent.name, outcome.message)

        if due:
            log.info("starting_after_boot agents=%d is_new_boot=%s", len(due), is_new_boot)
        await asyncio.gather(*(start(life) for life in due))
        await self._effects.note_boot()

    def ended(self, agent: str, exit_code: int | None, pid: int, why: str = "") -> None:
        if (life := self.get(agent)) is not None:
            life.ended(exit_code, pid, why)

    def thawed_alone(self, agent: str, reason: str) -> None:
        if (life := self.get(agent)) is not None:
            life.thawed_alone(reason)

    # The proxy ----------------------------------------------------------------------------------------------------

    def proxy_lost(self) -> None:
        """Aborts every pause under way; sleeping agents sleep on."""
        for life in self:
            life.proxy_lost()

    def proxy_table(self, activity: Mapping[str, Activity]) -> None:
        """Takes the table of activity of a (re)connected proxy: a sleeping agent with work waiting is woken."""
        for life in self:
            life.quiet()
            seen = activity.get(life.agent.id)
            if seen is None or life.status is not AgentStatus.PAUSED:
                continue
            if seen.in_flight or seen.parked or seen.ingress:
                life.wake(WakeCause.INGRESS if seen.ingress else WakeCause.REQUEST, lambda _: None)

    def quiet(self, agent: str) -> None:
        if (life := self.get(agent)) is not None:
            life.quiet()

    def wake(self, agent: str, cause: str, answer: Answer) -> None:
        """The proxy's ask. An unknown agent is refused."""
        life = self.get(agent)
        if life is None:
            answer(Refused(agent=agent, generation=0, status="unknown"))
        else:
            life.wake(WakeCause.INGRESS if cause == WakeCause.INGRESS else WakeCause.REQUEST, answer)
