"""Programs that people run inside agents: the checks before, keeping the agent awake for it, and the end of each."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from hive.agents.lifecycle import AgentLifecycle
from hive.agents.roster import Roster
from hive.agents.state import wrong_state
from hive.agents.transition_lock import outcome_of
from hive.audit.shielded import carried_through
from hive.control.runtimes import RuntimeWatch
from hive.domain import AgentStatus, RuntimeKind, WakeCause
from hive.errors import HiveError, NotSupported, TimedOut
from hive.link.execution import TerminalSize
from hive.sandbox.client import Execution, SandboxClient
from hive.tasks import spawn

if TYPE_CHECKING:
    from hive.audit.audit_log import AuditLog  # which loads redis: the API needs none

KEPT_WORDS, KEPT_CHARACTERS = 30, 500
"""Of a command in the audit table."""
LEFT = "its caller left"
STUCK_S = 30.0
ATTENDED_S = 30.0
"""One not used within this from its begin is ended: its caller did not get the answer."""


class ExecOrder(NamedTuple):
    """`has_input`: its stdin is its caller's; else it is at its end from the start."""

    command: Sequence[str]
    has_input: bool
    terminal: TerminalSize | None


class How(msgspec.Struct):
    """The end of one: its exit code, None where that is unknown; `why` where that does not tell, or it has none."""

    exit_code: int | None = None
    why: str = ""


class Inside:
    """One program, from its begin to the end of `async with`: then nothing of it is left, and it is in the audit."""

    def __init__(
        self, life: AgentLifecycle, order: ExecOrder, actor: str, execution: Execution, executor: Executor
    ) -> None:
        self.order = order
        self.execution = execution
        self.how = How(why=LEFT)
        self._life = life
        self._actor = actor
        self._executor = executor
        self._began = time.monotonic()
        self._unattended = asyncio.get_running_loop().call_later(ATTENDED_S, self._give_up)

    def __repr__(self) -> str:
        return f"<Inside {self._life.agent.name} {self.execution.run}>"

    async def __aenter__(self) -> Inside:
        self._unattended.cancel()
        return self

    def _give_up(self) -> None:
        spawn(self._executor.end(self), name="end an unattended program")

    async def __aexit__(self, *_: object) -> None:
        await self._executor.end(self)

    def let_go(self) -> None:
        """Its descriptors are another process's now: what ends there has to end here, too."""
        for descriptor in self.execution.descriptors:
            os.close(descriptor)
        self.execution.descriptors.clear()

    async def resize(self, rows: int, columns: int) -> None:
        """Sets the size of its terminal; a program that has ended has none."""
        await outcome_of(self._executor.helper.resize(self.execution.run, rows, columns))

    def told(self) -> dict[str, object]:
        """For the audit table."""
        return {
            "name": self._life.agent.name,
            **about(self.order),
            "exit_code": self.how.exit_code,
            "why": self.how.why,
            "took_s": round(time.monotonic() - self._began, 3),
        }

    @property
    def agent(self) -> str:
        return self._life.agent.id

    @property
    def actor(self) -> str:
        return self._actor

    def let_sleep(self) -> None:
        """It keeps its agent awake no longer."""
        self._life.release()


class Executor:
    """Begins them."""

    def __init__(
        self, helper: SandboxClient, roster: Roster, runtimes: RuntimeWatch, audit_log: AuditLog, *, enabled: bool
    ) -> None:
        """`enabled`: whether this Hive runs agents itself."""
        self.helper = helper
        self._roster = roster
        self._runtimes = runtimes
        self._audit_log = audit_log
        self._enabled = enabled

    async def begin(self, ref: str, order: ExecOrder, actor: str) -> Inside:
        """Wakes the agent, keeps it awake, and runs the program; the caller ends it with `async with`.

        Raises NotFound, NotSupported for a kind of agent nobody gets into, WrongState where it does not run, and what
        the helper answers (NotPermitted for a program that its policy does not name).
        """
        life = self._roster.find(ref)
        self._check(life)
        life.hold()
        try:
            if status := await life.awaken(WakeCause.OPERATOR, actor=actor):
                raise wrong_state(life.agent, AgentStatus(status))
            run = secrets.token_hex(8)
            execution = await self.helper.execute(life.agent.id, run, list(order.command), order.terminal)
        except BaseException:
            life.release()
            raise
        return Inside(life, order, actor, execution, self)

    def _check(self, life: AgentLifecycle) -> None:
        runtime = life.agent.spec.runtime
        if runtime is RuntimeKind.EXTERNAL:
            raise NotSupported(f"{life.agent.name} lives elsewhere, Hive runs nothing inside")
        can = self._runtimes.found.get(runtime)
        if not self._enabled or (can is not None and can.why_not_exec):
            why = "this Hive runs no agents itself" if can is None else can.why_not_exec
            raise NotSupported(f"no program can be run inside {life.agent.name}: {why}")

    async def end(self, inside: Inside) -> None:
        """Ends it with all its processes; also where its caller is cancelled meanwhile."""
        await carried_through(self._end(inside))

    async def _end(self, inside: Inside) -> None:
        for descriptor in inside.execution.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        outcome = await outcome_of(self._ended(inside.execution))
        if isinstance(outcome, HiveError):
            inside.how.why = outcome.message
        else:
            inside.how.exit_code = outcome
        inside.let_sleep()
        self._audit_log.note("agent.exec_ended", target=inside.agent, actor=inside.actor, detail=inside.told())

    async def _ended(self, execution: Execution) -> int | None:
        """Kills it where it has not ended; its exit code. Raises TimedOut where it hangs in the kernel."""
        if not execution.ended.done():
            await outcome_of(self.helper.end_execution(execution.run))
        try:
            async with asyncio.timeout(STUCK_S):
                return await asyncio.shield(execution.ended)
        except TimeoutError:
            raise TimedOut(f"it does not end within {STUCK_S:g} s of SIGKILL") from None


def about(order: ExecOrder) -> dict[str, object]:
    """Facts for the audit table.

    >>> about(ExecOrder(["sh", "-c", "x" * 600], has_input=False, terminal=None))["command"][:2]
    ['sh', '-c']
    """
    words = list(order.command[:KEPT_WORDS])
    kept, left = [], KEPT_CHARACTERS
    for word in words:
        kept.append(word[: max(0, left)])
        left -= len(word)
    return {"command": kept, "terminal": order.terminal is not None}
