"""kill -9 of the helper at every step of every transition: afterwards true states, and nobody frozen for good.

The helper is the real one, as a process with a fuse (tests/fakes/fuse.py); the daemon's side is the real one, too:
its client, its lives and their reconciliation. The kernel says what is true. Every third step without
HIVE_EXAMPLES.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hive.agents.pausing import Attempt
from hive.agents.reconcile import gate_of
from hive.agents.transition_lock import outcome_of
from hive.domain import ALIVE, Agent, AgentSpec, AgentStatus, WakeCause
from hive.errors import HiveError, LinkLost
from hive.host.cgroup import Subtree, state_label
from hive.host.process import ProcessTable
from hive.link.messages import Activity, Busy, Closed
from hive.sandbox.client import SandboxClient
from hive.settings.table import Paths
from tests.examples import stride
from tests.fakes.fuse import BEGIN
from tests.fakes.mortal import STEPS_MAX, Bystanders, Mortal, kill_tasks, mortal
from tests.sandbox.harness import A, spec, template_spec, uid_of
from tests.swapspace import file_swap
from tests.waiting import until

RUNNING, PAUSED, STOPPED = AgentStatus.RUNNING, AgentStatus.PAUSED, AgentStatus.STOPPED
TWO = ["sh", "-c", "sleep 1000 & wait"]
"""Two processes: half of them may be stopped."""
FORKED = ["-c", "import subprocess; subprocess.Popen(['sleep', '1000']).wait()"]


class OpenGates:
    """A proxy with nothing to object; `gate` is what it was told last."""

    session = 1

    def __init__(self, agent: Agent) -> None:
        self.gate = gate_of(agent.status)

    async def close(self, agent: str, generation: int) -> Closed | Busy:
        return Closed(agent=agent, generation=generation)

    still_closed = close

    async def activity(self, agents: Collection[str] = ()) -> dict[str, Activity]:
        return {}

    def asleep(self, agent: Agent) -> None:
        self.gate = "asleep"

    def open(self, agent: Agent) -> None:
        self.gate = "open"

    def refuse(self, agent: Agent) -> None:
        self.gate = "refused"

    def tell(self, agent: Agent) -> None: ...

    def gone(self, agent: str) -> None:
        self.gate = "gone"


class Seen(NamedTuple):
    """Of the kernel: the agent's living processes, and those of them that are frozen."""

    alive: set[int]
    frozen: set[int]


class Stage:
    """One agent, the daemon that holds it, and the helper that dies."""

    def __init__(self, paths: Paths, freezer: str, helper: Mortal, *, forked: bool = False) -> None:
        self._spec = template_spec(paths, A, FORKED) if forked else spec(paths, A, TWO)
        self.paths = paths
        self.helper = helper
        self.freezer = freezer
        self.connected = 0
        self.thawed_alone: list[str] = []
        self._home = b"HOME=" + os.fsencode(paths.home(A))
        self._daemon = self._new_daemon(Agent(id=A, spec=AgentSpec(name="a", command=TWO), uid=uid_of(A)))

    def _new_daemon(self, agent: Agent) -> Bystanders:
        self.gates = OpenGates(agent)
        self.client = SandboxClient(
            self.paths.sandbox_socket,
            role="daemon",
            epoch="test",
            on_ended=lambda ended: self._daemon.roster.ended(ended.agent, ended.exit_code, ended.pid, ended.why),
            on_thawed_alone=lambda agent, reason: self._daemon.roster.thawed_alone(agent, reason),
            on_connected=lambda: self._daemon.helper_here(),
        )
        return Bystanders(agent, self._spec, self.client, self.gates)

    @property
    def daemon(self) -> Bystanders:
        return self._daemon

    def anew(self) -> None:
        """An agent nobody has ever seen, or the last one was removed."""
        self.client.close()
        self._daemon = self._new_daemon(Agent(id=A, spec=AgentSpec(name="a", command=TWO), uid=uid_of(A)))

    async def daemon_dies(self) -> None:
        """No task of it goes on; the next one knows what was recorded."""
        self.client.close()
        await kill_tasks(but=self.helper.watcher)
        self._daemon = self._new_daemon(self._daemon.record)

    async def next_helper(self) -> None:
        """Returns when the daemon has reconciled with it and nothing is under way."""
        before = self.daemon.reconciled
        await self.helper.live()
        await until(lambda: self.daemon.reconciled > before and self.daemon.rests, what=lambda: repr(self.daemon.life))

    def seen(self) -> Seen:
        snapshot = ProcessTable()
        processes = snapshot.processes
        mine = {pid for pid, entries in snapshot.environments.items() if self._home in entries}
        alive = {pid for pid in mine if processes[pid].alive}
        return Seen(alive, {pid for pid in alive if processes[pid].state in "Tt" or _in_frozen_group(pid)})

    async def agrees(self, why: str) -> None:
        """Daemon, helper and kernel say the same."""
        await until(lambda: self.daemon.rests, what=lambda: f"{why}: {self.daemon.life!r}")
        stats = await self.client.stat()
        said = stats[A].state if A in stats else "gone"
        seen, status = self.seen(), self.daemon.status
        where = f"{why}: {self.daemon.life!r}, the helper says {said}, the kernel {seen}"
        assert status in (RUNNING, PAUSED, STOPPED, AgentStatus.CREATED, AgentStatus.ERROR), where
        assert said == {RUNNING: "running", PAUSED: "frozen"}.get(status, "gone"), where
        assert self.gates.gate == {RUNNING: "open", PAUSED: "asleep"}.get(status, self.gates.gate), where
        if status is RUNNING:
            assert len(seen.alive) == 2, where
            assert not seen.frozen, where
        elif status is PAUSED:
            assert len(seen.alive) == 2, where
            assert seen.frozen == seen.alive, where
        else:
            assert not seen.alive, where
        assert self.daemon.record == self.daemon.life.agent, where
        assert self.daemon.wrong == [], where

    def left(self) -> list[str]:
        """Leftovers that should not be there once the agent is removed."""
        found = [self.paths.agent_socket(A), self.paths.home(A), self.paths.log(A)]
        if (subtree := Subtree.find(self.paths.state)) is not None:
            found += [leaf.path for leaf in subtree.leaves()]
        label = state_label(self.paths.state)
        found += [path for path in Path("/sys/fs/cgroup").glob(f"*/hive*{label}*/*") if path.is_dir()]
        return [str(path) for path in found if path.exists() and not path.name.startswith("template.")]


def _in_frozen_group(pid: int) -> bool:
    try:
        groups = Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return False
    path = next((line[3:] for line in groups.splitlines() if line.startswith("0::")), "/")
    for mount in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
        events = Path(mount + path, "cgroup.events")
        if path != "/" and events.exists():
            return "frozen 1" in events.read_text()
    return False


@asynccontextmanager
async def on_stage(paths: Paths, freezer: str, *, forked: bool = False) -> AsyncIterator[Stage]:
    program = Path(__file__).with_name("killed_helper.py")
    order = paths.state.parent / "order"
    async with mortal(program, [str(paths.state), str(paths.runtime), freezer], order) as helper:
        stage = Stage(paths, freezer, helper, forked=forked)
        try:
            yield stage
        finally:
            stage.client.close()
            stage.daemon.life._turns.end()
            await asyncio.sleep(0)


Act = Callable[[Stage], Coroutine[Any, Any, object]]


class Transition(NamedTuple):
    """`lit_by` the first message of what `act` asks for; `frm`: how the agent is before it.

    `steps`: so many it has at least.
    """

    lit_by: str
    frm: AgentStatus
    act: Act
    steps: int
    survives: bool = True


LAST_STEPS_S = 0.02
"""Time in which the helper has done its last acts once it has answered."""


async def _wake(stage: Stage) -> None:
    await stage.daemon.life.awaken(WakeCause.REQUEST)


TRANSITIONS = {
    "define": Transition("Define", AgentStatus.CREATED, lambda stage: stage.daemon.life.start("t"), 30, survives=False),
    "start": Transition("Start", STOPPED, lambda stage: stage.daemon.life.start("t"), 8, survives=False),
    "freeze": Transition("Freeze", RUNNING, lambda stage: stage.daemon.life.fall_asleep("idle"), 5),
    "confirm": Transition("Confirm", RUNNING, lambda stage: stage.daemon.life.fall_asleep("idle"), 1),
    "thaw": Transition("Thaw", PAUSED, _wake, 2),
    "page out": Transition("PageOut", PAUSED, lambda stage: stage.daemon.life.go_deep(), 3),
    "stop": Transition("Stop", RUNNING, lambda stage: stage.daemon.life.stop("t"), 12, survives=False),
    "stop asleep": Transition("Stop", PAUSED, lambda stage: stage.daemon.life.stop("t"), 12, survives=False),
    "remove": Transition("Remove", STOPPED, lambda stage: stage.daemon.life.remove("t"), 18, survives=False),
}


async def _bring_to(stage: Stage, status: AgentStatus) -> int | None:
    """The agent is so, with a helper that lives; the pid of its main process."""
    if stage.helper.is_dead:
        await stage.next_helper()
    life = stage.daemon.life
    if stage.daemon.forgotten or (status is AgentStatus.CREATED and life.status is not status):
        if not stage.daemon.forgotten:
            await life.remove("t")
        stage.anew()
        await until(lambda: stage.daemon.reconciled)
        life = stage.daemon.life
    if status is AgentStatus.CREATED:
        return None
    if life.status not in ALIVE:
        await life.start("t")
        await until(lambda: len(stage.seen().alive) == 2, what="its second process")
    if status is STOPPED:
        await life.stop("t")
    elif status is RUNNING:
        await life.resume("t")
    elif status is PAUSED:
        await life.resume("t")  # it may sleep deep
        await life.pause(timeout_s=5, now=False, actor="t")
    return life.pid


async def _one_death(stage: Stage, name: str, step: int, *, child: int = 0, daemon_too: bool = False) -> bool:
    """Whether it died of it, and all is true again."""
    transition, why = TRANSITIONS[name], f"{name}, killed at step {step or f'{child} of a child'}"
    pid = await _bring_to(stage, transition.frm)
    generation = stage.daemon.life.agent.generation
    stage.helper.is_to_die(transition.lit_by, step, child)
    doing = asyncio.ensure_future(_done(stage, transition.act))
    died = stage.helper.watcher
    await asyncio.wait([doing, died], return_when=asyncio.FIRST_COMPLETED)
    if not died.done():
        wrong = doing.result()
        await asyncio.wait([died], timeout=20 if wrong else LAST_STEPS_S)
        if not died.done():
            assert not wrong, f"{why}: {wrong}"
            await stage.helper.kill()
            return False
    if daemon_too:
        await stage.daemon_dies()
    assert died.result() == -9, why
    await stage.next_helper()
    await until(lambda: not stage.helper.has_orphans(), what="its child goes on or ends")
    await asyncio.wait([doing])
    if stage.daemon.forgotten:
        assert not stage.seen().alive, why
        return True
    await stage.agrees(why)
    assert stage.daemon.life.agent.generation >= generation, why
    if transition.survives:
        assert stage.daemon.life.pid == pid, f"{why}: another process"
        await _a_sleep_and_a_wake(stage, why)
    return True


async def _done(stage: Stage, act: Act) -> str:
    """The reason why it was not done; what the end of the helper may say, and nothing else."""
    outcome = await outcome_of(act(stage))
    assert not isinstance(outcome, HiveError) or isinstance(outcome, LinkLost), outcome
    why_not = outcome.why_not if isinstance(outcome, Attempt) else outcome
    return "" if why_not is None else str(why_not)


async def _a_sleep_and_a_wake(stage: Stage, why: str) -> None:
    life = stage.daemon.life
    if life.status is PAUSED:
        await life.resume("t")
        await stage.agrees(f"{why}; woken")
    await life.pause(timeout_s=5, now=False, actor="t")
    assert life.status is PAUSED, why
    await life.resume("t")
    await stage.agrees(f"{why}; paused and woken")


@pytest.mark.parametrize("daemon_too", [False, pytest.param(True, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("name", [name for name in TRANSITIONS if name != "page out"])
async def test_a_helper_killed_at_any_step_of_a_transition_leaves_true_states(
    paths: Paths, freezer: str, name: str, daemon_too: bool
) -> None:
    """`daemon_too`: the daemon is killed at the same moment; what it had recorded is all that the next one knows."""
    async with on_stage(paths, freezer) as stage:
        for step in count(1, stride(3)):
            assert step < STEPS_MAX
            if not await _one_death(stage, name, step, daemon_too=daemon_too):
                break
        print(f"{name}, {freezer}: killed at steps up to {step - 1}")
        assert step > TRANSITIONS[name].steps, "fewer steps than when this was written: some are not seen any more"
        await _everything_goes(stage)


@pytest.mark.parametrize("daemon_too", [False, pytest.param(True, marks=pytest.mark.chaos)])
@pytest.mark.parametrize("name", ["start", pytest.param("stop", marks=pytest.mark.chaos)])
async def test_a_helper_killed_while_an_agent_is_forked_from_its_template_leaves_true_states(
    paths: Paths, freezer: str, name: str, daemon_too: bool
) -> None:
    """Its template ends with it, and so does a child that was not released; the next helper has a template of its own.

    Between the release and the word in the table the agent is found by its mark.
    """
    async with on_stage(paths, freezer, forked=True) as stage:
        for step in count(1, stride(3)):
            assert step < STEPS_MAX
            if not await _one_death(stage, name, step, daemon_too=daemon_too):
                break
        print(f"{name}, {freezer}: killed at steps up to {step - 1}")
        assert step > (20 if name == "start" else 12)
        await _everything_goes(stage)


@pytest.mark.root
async def test_a_helper_killed_at_any_step_of_a_page_out_leaves_a_sleeper_that_wakes(
    paths: Paths, freezer: str
) -> None:
    with file_swap(64):
        async with on_stage(paths, freezer) as stage:
            for step in count(1, stride(3)):
                assert step < STEPS_MAX
                if not await _one_death(stage, "page out", step):
                    break
            print(f"page out, {freezer}: killed at steps up to {step - 1}")
            assert step > TRANSITIONS["page out"].steps
            await _everything_goes(stage)


async def test_a_helper_killed_while_its_child_becomes_the_agent_leaves_no_second_one(
    paths: Paths, freezer: str
) -> None:
    """Between fork and exec: the child goes on without it, and no table knows of it yet.

    Until it is another program it holds the lock of the state directory: the next helper waits, and finds its mark.
    """
    async with on_stage(paths, freezer) as stage:
        for child in count(1):
            if not await _one_death(stage, "start", 0, child=child):
                break
        print(f"{freezer}: killed at each of {child - 1} steps of the child")
        assert child > 1, "no step of the child was seen"
        await _everything_goes(stage)


def _has_died_or_begun(stage: Stage, reconciled: int) -> bool:
    return stage.helper.is_dead or stage.daemon.reconciled > reconciled


@pytest.mark.parametrize(
    "status", [PAUSED, pytest.param(RUNNING, marks=pytest.mark.chaos), pytest.param(STOPPED, marks=pytest.mark.chaos)]
)
async def test_a_helper_killed_at_any_step_of_its_beginning_is_followed_by_one_that_puts_all_right(
    paths: Paths, freezer: str, status: AgentStatus
) -> None:
    async with on_stage(paths, freezer) as stage:
        pid = await _bring_to(stage, status)
        for step in count(1, stride(3)):
            await stage.helper.kill()
            stage.helper.is_to_die(BEGIN, step)
            before = stage.daemon.reconciled
            await stage.helper.live()
            await until(partial(_has_died_or_begun, stage, before))
            await asyncio.wait([stage.helper.watcher], timeout=LAST_STEPS_S)
            if not stage.helper.is_dead:
                break
            await stage.next_helper()
            await stage.agrees(f"{status}, killed at step {step} of its beginning")
            assert stage.daemon.status is status
            assert stage.daemon.life.pid == pid or status is STOPPED
        print(f"{status}, {freezer}: killed at steps up to {step - 1} of its beginning")
        assert step > 20
        await stage.helper.kill()
        await stage.next_helper()
        if status is not STOPPED:
            await _a_sleep_and_a_wake(stage, "in the end")
        await _everything_goes(stage)


async def _everything_goes(stage: Stage) -> None:
    if stage.helper.is_dead:
        await stage.next_helper()
    if not stage.daemon.forgotten:
        await stage.daemon.life.remove("t")
    await until(lambda: not stage.seen().alive and not stage.left(), what=stage.left)
