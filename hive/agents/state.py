"""The state of one agent, in memory and on its way to SQLite.

From the record's creation to its removal nothing else in Hive changes it (tests/agents/test_state.py): the transitions
beside this file call the methods here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

import msgspec

from hive.agents.effects import Effects
from hive.agents.reconcile import Truth
from hive.agents.transition_lock import TransitionLock
from hive.domain import AT_REST, Agent, AgentSpec, AgentStatus, SleepDepth
from hive.errors import HiveError, WrongState
from hive.link.helper import PagedOut, Stat
from hive.link.messages import Open, Refused

log = logging.getLogger("hive.agents")
Answer = Callable[[Open | Refused], None]

RECORD_AGAIN_S = 1.0
GONE = Stat(state=Truth.GONE)


class LifecycleState:
    """The state of one agent: memory decides, SQLite records. Shared by its transitions.

    Only the turn's holder changes `agent`. What others tell at any time is `leaving`, `held`, `gone` and `waiting`.

    `leaving`: stops, restarts, removals that wait for their turn. `held`: programs inside that keep it awake. `gone`:
    its main process ended and that is not acted on yet. `waiting`: callbacks for when it is awake, or certain not to
    be. `awake_since`, `asleep_since`: loop time of its last start or wake, and of its last sleep, or of this
    daemon's start where it slept before. `swap_bytes`: a deep sleeper's memory in swap at the last look;
    `working_set_bytes`: what of its memory it used after a wake, None where that was not seen yet.
    `kept_awake_by`: the actor that asked for it, empty where an earlier daemon was asked.
    """

    def __init__(self, agent: Agent, effects: Effects) -> None:
        self.agent = agent
        self.effects = effects
        self.loop = asyncio.get_running_loop()
        self.turns = TransitionLock(agent.name)
        self.leaving = 0
        self.held = 0
        self.gone = False
        self.waiting: list[Answer] = []
        self.awake_since = self.asleep_since = self.loop.time()
        self.swap_bytes = 0
        self.working_set_bytes: int | None = None
        self.kept_awake_by = ""
        self._keep_awake_until = self._loop_time_of(agent.keep_awake_until)
        self.pid: int | None = None
        self.address = ""
        self.started_spec: AgentSpec | None = None
        self._record_later: asyncio.TimerHandle | None = None
        self._is_unrecorded = False

    @property
    def status(self) -> AgentStatus:
        return self.agent.status

    @property
    def sleeps_light(self) -> bool:
        return self.agent.status is AgentStatus.PAUSED and self.agent.depth is SleepDepth.LIGHT

    # The record -------------------------------------------------------------------------------------------------

    def become(self, status: AgentStatus, reason: str, actor: str, *, bump: bool = False, stopped_by: str = "") -> None:
        """Changes the state in memory, whatever is recorded of it later."""
        self.take(replaced(self.agent, status, reason, bump=bump, stopped_by=stopped_by), actor)

    def take(self, agent: Agent, actor: str) -> None:
        """Takes a record that is already written; else as `become`."""
        before, self.agent = self.agent, agent
        if agent.status is AgentStatus.PAUSED and before.status is not AgentStatus.PAUSED:
            self.asleep_since, self.swap_bytes = self.loop.time(), 0
        self.effects.changed(before, agent, actor)

    async def become_once_recorded(self, status: AgentStatus, reason: str, actor: str) -> None:
        """The next generation, recorded first. Raises what `Effects.save` raises, and nothing has changed."""
        following = replaced(self.agent, status, reason, bump=True)
        await self.effects.save(following)
        self.take(following, actor)

    async def record_intent(self) -> None:
        """Writes the state in memory before it is acted on. Raises what `Effects.save` raises, `Interrupted`."""
        await self.turns.unless_interrupted(self.effects.save(self.agent))

    async def commit_sleep(self, reason: str, actor: str) -> None:
        """Asleep: recorded first, and not taken where the turn is interrupted meanwhile. Raises as `record_intent`."""
        asleep = replaced(self.agent, AgentStatus.PAUSED, reason)
        await self.turns.unless_interrupted(self.effects.save(asleep))
        self.take(asleep, actor)

    def sleep_at(self, depth: SleepDepth, goal: SleepDepth, actor: str) -> None:
        """The same sleep, of the same generation: the gate has nothing to do with it."""
        self.take(msgspec.structs.replace(self.agent, depth=depth, depth_goal=goal), actor)

    async def change_spec(self, spec: AgentSpec) -> None:
        """Recorded first; the gate is told. Raises what `Effects.save` raises."""
        await self._change(msgspec.structs.replace(self.agent, spec=spec))
        self.effects.gates.tell(self.agent)

    async def note_stopped_by(self, by: str) -> None:
        """Of an agent at rest, recorded first (`Agent.stopped_by`). Raises what `Effects.save` raises."""
        await self._change(msgspec.structs.replace(self.agent, stopped_by=by))

    async def keep_awake(self, until: float | None, actor: str) -> None:
        """Recorded first: it outlives this daemon. `until`: Unix seconds. Raises what `Effects.save` raises."""
        await self._change(msgspec.structs.replace(self.agent, keep_awake_until=until))
        self.kept_awake_by = actor
        self._keep_awake_until = self._loop_time_of(until)

    async def _change(self, changed: Agent) -> None:
        """Takes `changed` once it is recorded: no transition, nobody is told."""
        await self.effects.save(changed)
        self.agent = changed

    def kept_awake_for_s(self) -> float:
        """Seconds for which it is still kept from sleeping when idle; 0 or less where nothing keeps it awake."""
        return self._keep_awake_until - self.loop.time()

    def _loop_time_of(self, at: float | None) -> float:
        """A step of the host's clock later on neither shortens nor lengthens it."""
        return 0.0 if at is None else self.loop.time() + at - time.time()

    async def record(self) -> None:
        """Writes what already is so. Where that fails memory goes on, and it is tried again until it is written."""
        try:
            await self.effects.save(self.agent)
        except HiveError as error:
            if not self._is_unrecorded:
                log.error("agent_not_recorded agent=%s status=%s error=%s", self.agent.name, self.status, error.message)
            self._is_unrecorded = True
            if self._record_later is None:
                self._record_later = self.loop.call_later(RECORD_AGAIN_S, self._record_again)
        else:
            if self._is_unrecorded:
                log.info("agent_recorded_again agent=%s status=%s", self.agent.name, self.status)
            self._is_unrecorded = False

    def _record_again(self) -> None:
        self._record_later = None
        self.turns.follow(self.record, "record")

    # Its process ------------------------------------------------------------------------------------------------

    def paged_out(self, paged: PagedOut) -> None:
        """Takes note of what of its memory is in swap, and of what it used of it."""
        self.swap_bytes, self.working_set_bytes = paged.swap_bytes, paged.working_set_bytes

    def saw(self, stat: Stat) -> None:
        """Ground truth of its process."""
        self.swap_bytes, self.working_set_bytes = stat.swap_bytes, stat.working_set_bytes
        self.lives(stat.pid, stat.address)

    def lives(self, pid: int | None, address: str) -> None:
        """Its main process, and where its port is reached (`AgentRow.address`, empty for 127.0.0.1)."""
        moved, self.pid, self.address = address not in ("", self.address), pid, address
        if moved:
            self.effects.gates.tell(self.agent)

    def started_with(self, spec: AgentSpec) -> None:
        self.started_spec = spec

    def note_end(self) -> None:
        """Its main process ended; a transition acts on it later."""
        self.gone = True

    def no_process(self) -> None:
        """Nothing of it lives: it is about to be started, or at rest."""
        self.gone, self.pid, self.started_spec = False, None, None

    def to_be_started(self) -> None:
        """The spec it ran by is of no more use; `gone` stays until it is started."""
        self.started_spec = None

    def note_awake(self) -> None:
        """It was started or woken just now."""
        self.awake_since = self.loop.time()

    async def look(self) -> Stat:
        """Ground truth. Raises LinkLost, TimedOut."""
        agent = self.agent.id
        return (await self.effects.helper.stat([agent])).get(agent, GONE)

    # Those that want something of it ----------------------------------------------------------------------------

    def hold(self) -> None:
        """A program runs inside."""
        self.held += 1

    def release(self) -> None:
        self.held -= 1

    def begin_leaving(self) -> None:
        """A stop, restart or removal waits for its turn."""
        self.leaving += 1

    def end_leaving(self) -> None:
        """It has its turn."""
        self.leaving -= 1

    def wait(self, answer: Answer) -> None:
        """A caller waits for it to be awake."""
        self.waiting.append(answer)

    @property
    def opened(self) -> Open:
        return Open(agent=self.agent.id, generation=self.agent.generation)

    @property
    def refused(self) -> Refused:
        return Refused(
            agent=self.agent.id,
            generation=self.agent.generation,
            status=str(self.status),
            why=self.agent.told_of_failure,
        )

    def answer(self, answer: Open | Refused) -> None:
        waiting, self.waiting = self.waiting, []
        for tell in waiting:
            tell(answer)


def replaced(agent: Agent, status: AgentStatus, reason: str, *, bump: bool = False, stopped_by: str = "") -> Agent:
    """`agent` in another status, as of now."""
    depth, goal = _depths(agent, status)
    return msgspec.structs.replace(
        agent,
        status=status,
        depth=depth,
        depth_goal=goal,
        generation=agent.generation + bump,
        since=time.time(),
        reason=reason,
        stopped_by=stopped_by,
    )


def _depths(agent: Agent, status: AgentStatus) -> tuple[SleepDepth, SleepDepth]:
    """Depth and its goal where `agent` comes into `status`: a sleep begins light, a wake begins where it slept."""
    match status:
        case AgentStatus.PAUSING:
            return SleepDepth.AWAKE, SleepDepth.LIGHT
        case AgentStatus.PAUSED:
            return SleepDepth.LIGHT, SleepDepth.LIGHT
        case AgentStatus.RESUMING:
            return SleepDepth.LIGHT if agent.depth is SleepDepth.AWAKE else agent.depth, SleepDepth.AWAKE
        case _:
            return SleepDepth.AWAKE, SleepDepth.AWAKE


def wrong_state(agent: Agent, status: AgentStatus) -> WrongState:
    """Names the state, and what would change it."""
    how = f"in error: {agent.reason}" if status is AgentStatus.ERROR else str(status)
    return WrongState(f"{agent.name} is {how}", hint=f"hive agent start {agent.name}" if status in AT_REST else "")
