"""A process that is told when to kill itself (see fuse.py), from the outside; and the daemon that lives through it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import warnings
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from hive.agents.effects import GateVerbs, HelperVerbs, HostMemory
from hive.agents.lifecycle import AgentLifecycle
from hive.agents.roster import Roster
from hive.agents.transition_lock import outcome_of
from hive.domain import Agent, AgentStatus, SleepDepth, WakeCause
from hive.errors import HiveError
from hive.link.specs import SandboxSpec
from hive.settings.table import Agents, Settings, Sleep
from hive.tasks import spawn

STEPS_MAX = 1000
"""No transition has so many."""


class Mortal:
    """One process at a time, out of a program that ends in `fuse.bear`."""

    def __init__(self, process: asyncio.subprocess.Process, order: Path) -> None:
        self._process = process
        self._order = order
        self._end: asyncio.Task[int] | None = None
        self.pid = 0

    async def live(self) -> None:
        """The next one. The last must have ended."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(b"\n")
        self.pid = int(await self._process.stdout.readline())
        self._end = asyncio.create_task(self._ended(self._process.stdout))

    @staticmethod
    async def _ended(said: asyncio.StreamReader) -> int:
        return int(await said.readline())

    def is_to_die(self, what: str, step: int, child: int = 0) -> None:
        """At this step from its first `what` on."""
        beside = self._order.with_suffix(".beside")
        beside.write_text(f"{what} {step} {child}")
        beside.rename(self._order)

    @property
    def is_dead(self) -> bool:
        return self._end is None or self._end.done()

    @property
    def watcher(self) -> asyncio.Task[int]:
        """Done when it ends: its exit code, -9 where it was killed."""
        assert self._end is not None
        return self._end

    def has_orphans(self) -> bool:
        """Whether a child that the last one forked has not become another program yet."""
        program = os.fsencode(self._order)
        found = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        return any(program in _words(pid) for pid in found if pid not in (self.pid, self._process.pid))

    async def kill(self) -> None:
        """Kills it, whatever its fuse says."""
        self._order.unlink(missing_ok=True)
        if not self.is_dead:
            with contextlib.suppress(ProcessLookupError):  # it just did
                os.kill(self.pid, signal.SIGKILL)
            await asyncio.wait([self.watcher])


def _words(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


@contextlib.asynccontextmanager
async def mortal(program: Path, arguments: Sequence[str], order: Path) -> AsyncIterator[Mortal]:
    """`program ORDER ARGUMENTS…` has imported all it needs, and waits. Nothing of it is left in the end.

    On a failed test what it said last is printed.
    """
    tests, log = Path(__file__).parents[1], order.with_suffix(".log")
    with log.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(program),
            str(order),
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env={**os.environ, "PYTHONPATH": f"{tests.parent}:{tests}"},
        )
    found = Mortal(process, order)
    try:
        yield found
    except BaseException:
        print(log.read_text(errors="replace")[-4000:])
        raise
    finally:
        await found.kill()
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()


class Bystanders:
    """World of one daemon whose record is memory: what it decides is real, and so is what it asks of others.

    `wrong` tells what must never be: a freeze before its intent is recorded, a generation that falls.
    """

    settings = Settings(sleep=Sleep(minimum_awake_s=0.0), agents=Agents(stop_grace_s=0.2))

    def __init__(self, agent: Agent, spec: SandboxSpec, helper: HelperVerbs, gates: GateVerbs) -> None:
        self.helper = helper
        self.gates = gates
        self.record = agent
        self.forgotten = False
        self.wrong: list[str] = []
        self._spec = spec
        self.roster = Roster(self)
        self.life: AgentLifecycle = self.roster.add(agent)

    async def save(self, agent: Agent) -> None:
        await asyncio.sleep(0)
        if agent.generation < self.record.generation:
            self.wrong.append(f"recorded g{agent.generation} over g{self.record.generation}")
        self.record = agent

    async def forget(self, agent: Agent, actor: str) -> None:
        self.roster.drop(agent.id)
        self.forgotten = True

    async def sandbox_spec(self, agent: Agent) -> SandboxSpec:
        return self._spec

    def changed(self, before: Agent, after: Agent, actor: str) -> None:
        if after.generation < before.generation:
            self.wrong.append(f"g{after.generation} after g{before.generation}")

    def memory(self) -> HostMemory:
        return HostMemory(available_bytes=64 << 30, swap_free_bytes=64 << 30)

    async def is_new_boot(self) -> bool:
        return False

    async def note_boot(self) -> None: ...

    def woke(self, cause: WakeCause, took_ms: float, depth: SleepDepth) -> None: ...

    def fell_asleep(self) -> None: ...

    def failed(self, agent: Agent) -> None: ...

    # As hive/daemon.py has it -------------------------------------------------------------------------------------

    def helper_here(self) -> None:
        spawn(self._reconcile(), name="reconcile")

    async def _reconcile(self) -> None:
        while self.helper.connected:
            if not isinstance(await outcome_of(self.roster.reconcile()), HiveError):
                self.reconciled += 1
                return
            await asyncio.sleep(0.05)

    reconciled = 0

    @property
    def status(self) -> AgentStatus:
        return self.life.status

    @property
    def rests(self) -> bool:
        """No transition of the agent is under way."""
        return "in transition" not in repr(self.life)


async def kill_tasks(*, but: asyncio.Task[int]) -> None:
    """As kill -9 of the daemon: no task goes on but this one and `but`."""
    task = None
    tasks = asyncio.all_tasks() - {asyncio.current_task(), but}
    for task in tasks:
        task.cancel()
    with warnings.catch_warnings():
        # A coroutine whose task is killed before its first step was never awaited, and that is meant.
        warnings.simplefilter("ignore", RuntimeWarning)
        await asyncio.gather(*tasks, return_exceptions=True)
        tasks.clear()
        del task
