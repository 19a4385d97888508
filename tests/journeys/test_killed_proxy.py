"""kill -9 of the proxy at every step of every gate's move: afterwards true states, and whoever asks again is answered.

The proxy is the real one, as a process with a fuse (tests/fakes/fuse.py), and so is the daemon's side: its gates, its
lives. The sandbox is a word in memory; who keeps the agent's socket open, as the helper does, is the test.
"""

# ruff: noqa: ASYNC110 - another process sends no asyncio events
from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Coroutine
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hive.agents.pausing import Attempt
from hive.agents.reconcile import gate_of
from hive.agents.transition_lock import outcome_of
from hive.domain import ALIVE, Agent, AgentSpec, AgentStatus, BackendInfo, BackendKind, ModelInfo
from hive.errors import DependencyDown, HiveError, TimedOut, WrongState
from hive.host import accounts
from hive.link.background import FromProxyBackground
from hive.link.helper import AskListeners, Listener, PagedOut, Started, Stat
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import Activity, AgentRow, DaemonTable, Done, Failed, ProxyTable
from hive.link.parking import UseParked
from hive.link.pool import SlotDemands, SlotFlows
from hive.link.proxy_link import ProxyGates
from hive.link.responses import FromProxy
from hive.link.runner import RunnerCall
from hive.link.server import LinkServer, bind_private
from hive.link.specs import SandboxSpec
from hive.link.usage import AskSpent, SpentIs, UsageBatch
from hive.settings.table import Paths
from tests.fakes.fuse import BEGIN
from tests.fakes.mortal import STEPS_MAX, Bystanders, Mortal, mortal
from tests.proxy.harness import CHAT, Backend, Client, digest, post, read_request
from tests.waiting import until

A = "a1a1a1a1a1a1"
RUNNING, PAUSED, STOPPED = AgentStatus.RUNNING, AgentStatus.PAUSED, AgentStatus.STOPPED
TURN = post(b"/v1/chat/completions", CHAT)
CALL = b"GET /agents/alice/turn HTTP/1.1\r\nhost: h\r\nx-hive-token: hi_alice\r\n\r\n"
LAST_STEPS_S = 0.02
"""Time in which the proxy has done its last acts once all is answered."""


class Sandbox:
    """A helper with one agent: it is frozen or it is not. `may_thaw`: else a thaw takes too long."""

    connected = True

    def __init__(self) -> None:
        self.state = "gone"
        self.may_thaw = True

    async def define(self, agent: str, spec: SandboxSpec) -> None: ...

    async def start(self, agent: str) -> Started:
        self.state = "running"
        return Started(pid=1)

    async def stop(self, agent: str, *, grace_s: float) -> None:
        self.state = "gone"

    async def freeze(self, agent: str, generation: int) -> None:
        if self.state == "gone":
            raise WrongState("nothing of it lives")
        self.state = "frozen"

    async def confirm(self, agent: str, generation: int) -> None:
        if self.state != "frozen":
            raise WrongState("it was thawed")

    async def thaw(self, agent: str) -> None:
        if not self.may_thaw:
            raise TimedOut("it does not run yet")
        if self.state == "gone":
            raise WrongState("nothing of it lives")
        self.state = "running"

    async def page_out(self, agent: str, generation: int) -> PagedOut:
        raise NotImplementedError

    async def remove(self, agent: str) -> None: ...

    async def stat(self, agents: list[str], *, pss: bool = False) -> dict[str, Stat]:
        return {A: Stat(state=self.state)}

    async def reconcile(self, asleep: dict[str, int]) -> dict[str, Stat]:
        return await self.stat([])


class Stage:
    """One agent, the daemon that holds it, its callers, and the proxy that dies."""

    def __init__(self, paths: Paths, proxy: Mortal, backend: Backend, port: Backend) -> None:
        self.paths = paths
        self.proxy = proxy
        self.backend = backend
        self.go_on = asyncio.Event()
        self._port = port
        self.sandbox = Sandbox()
        self.gates = ProxyGates(epoch="d", events=self)
        agent = Agent(id=A, spec=AgentSpec(name="alice", command=["x"]))
        spec = SandboxSpec(name="alice", command=["x"], env={}, home="", log="")
        self.daemon = Bystanders(agent, spec, self.sandbox, self.gates)
        self._sock = bind_private(paths.agent_socket(A))
        self._helper = LinkServer(
            paths.sandbox_socket,
            name="helper",
            uids=frozenset({os.geteuid()}),
            on_link=lambda link: None,
            on_message=self._ask_helper,
            on_lost=lambda link: None,
        )
        self.gates.listen(paths.link_socket, accounts.own())

    def close(self) -> None:
        self.gates.stop()
        self._helper.close()
        self._sock.close()
        while Client.opened:
            Client.opened.pop().close()

    def _ask_helper(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        if isinstance(message, AskListeners) and reply is not None:
            link.tell(Listener(agent=A, path=str(self.paths.agent_socket(A))), [self._sock.fileno()])
            reply(Done())

    # What hive/daemon.py does as ProxyEvents ----------------------------------------------------------------------

    def table(self) -> DaemonTable:
        return DaemonTable(
            agents=[self.row(self.daemon.life.agent)],
            backend=BackendInfo(kind=BackendKind.LLAMA, address=self.backend.address, up=True),
            models=[ModelInfo(name="m")],
            marks={},
        )

    def row(self, agent: Agent) -> AgentRow:
        return AgentRow(
            id=agent.id,
            name=agent.name,
            generation=agent.generation,
            gate=gate_of(agent.status),
            status=str(agent.status),
            ingress_digest=digest(b"hi_alice"),
            address=self._port.address,
        )

    def proxy_here(self, table: ProxyTable) -> None:
        self.daemon.roster.proxy_table(table.agents)

    def proxy_lost(self) -> None:
        self.daemon.roster.proxy_lost()

    def quiet(self, agent: str) -> None:
        self.daemon.roster.quiet(agent)

    def usage(self, batch: UsageBatch) -> None:
        """Nothing is committed here."""

    def spent(self, asked: AskSpent, answer: Callable[[SpentIs | Failed], None]) -> None: ...

    def use_parked(self, message: UseParked, reply: LinkReply) -> None: ...

    def runner_asks(self, call: RunnerCall, reply: LinkReply) -> None: ...

    def active(self, agents: dict[str, float]) -> None: ...

    def slot_demands(self, demands: SlotDemands) -> None: ...

    def slot_flows(self, flows: SlotFlows) -> None: ...

    def look_for_models(self, answer: Callable[[Done], None]) -> None:
        raise NotImplementedError

    def about_responses(self, message: FromProxy, reply: LinkReply | None) -> None:
        raise NotImplementedError

    def about_background(self, message: FromProxyBackground, reply: LinkReply) -> None:
        raise NotImplementedError

    def wake(self, agent: str, cause: str, answer: Any) -> None:
        self.daemon.roster.wake(agent, cause, answer)

    # ---------------------------------------------------------------------------------------------------------------

    async def live(self) -> None:
        """Another one begins. Usage that the dead left is no part of this: each would have more of it to tell."""
        shutil.rmtree(self.paths.spool, ignore_errors=True)
        await self.proxy.live()

    async def next_proxy(self) -> None:
        """Returns when both have told their tables."""
        await until(lambda: self.gates.session is None)
        await self.live()
        await until(lambda: self.gates.session is not None, what="a proxy has connected")

    async def ask(self, *, ingress: bool = False) -> int:
        """The status of one answer, 0 where it was cut."""
        try:
            if ingress:
                client = await Client.tcp(self.gates.ingress_port or 0)
            else:
                client = await Client.unix(self.paths.agent_socket(A))
            try:
                return (await client.ask(CALL if ingress else TURN))[0]
            finally:
                client.close()
                if client in Client.opened:
                    Client.opened.remove(client)
        except (ConnectionError, asyncio.IncompleteReadError):
            return 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """The backend answers when it may."""
        while True:
            await read_request(reader)
            await self.go_on.wait()
            writer.write(self.backend.reply)

    async def agrees(self, why: str) -> None:
        """Daemon and sandbox say the same, and the proxy holds nothing for anybody."""
        await until(lambda: self.daemon.rests, what=lambda: f"{why}: {self.daemon.life!r}")
        status = self.daemon.status
        where = f"{why}: {self.daemon.life!r}, it is {self.sandbox.state}"
        assert status in (RUNNING, PAUSED, STOPPED), where
        assert self.sandbox.state == {RUNNING: "running", PAUSED: "frozen"}.get(status, "gone"), where
        assert self.daemon.wrong == [], where
        assert self.daemon.record == self.daemon.life.agent, where
        async with asyncio.timeout(60):
            while (seen := (await self.gates.activity())[A]) != Activity(quiet_s=seen.quiet_s, why_busy=seen.why_busy):
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def on_stage(base: Path) -> AsyncIterator[Stage]:
    top = base
    paths = Paths(top / "s", top)
    for directory in (paths.state, paths.agent_socket(A).parent):
        directory.mkdir()
    backend, port = Backend(), Backend()
    program = Path(__file__).with_name("killed_proxy.py")
    async with mortal(program, [str(paths.state), str(paths.runtime)], top / "order") as proxy:
        stage = Stage(paths, proxy, backend, port)
        backend.script = stage.serve
        await backend.start()
        await port.start()
        stage.go_on.set()
        try:
            yield stage
        finally:
            stage.close()
            await proxy.kill()
            await backend.stop()
            await port.stop()
            await asyncio.sleep(0.01)


# --- what is done ------------------------------------------------------------------------------------------------


async def _sleep(stage: Stage) -> bool:
    attempt = await stage.daemon.life.fall_asleep("idle")
    return isinstance(attempt, Attempt) and attempt.why_not is None


async def _try_to_sleep_while_it_asks(stage: Stage) -> bool:
    """`Busy`; the `Quiet` that is owed then lets the pause through."""
    stage.go_on.clear()
    asking = asyncio.ensure_future(stage.ask())
    pausing = asyncio.ensure_future(outcome_of(stage.daemon.life.pause(timeout_s=5, now=False, actor="t")))
    await asyncio.wait([asking, pausing, stage.proxy.watcher], timeout=0.03)
    stage.go_on.set()
    status, outcome = await asking, await pausing
    assert not isinstance(outcome, HiveError), outcome
    return status == 200


async def _wake(stage: Stage, *, ingress: bool = False) -> bool:
    return await stage.ask(ingress=ingress) == 200


async def _wait_parked(stage: Stage) -> bool:
    """The thaw takes its time; meanwhile others park, too."""
    stage.sandbox.may_thaw = False
    asking = [asyncio.ensure_future(stage.ask(ingress=number % 2 == 1)) for number in range(4)]
    await asyncio.wait([stage.proxy.watcher], timeout=0.03)
    stage.sandbox.may_thaw = True
    return await asyncio.gather(*asking) == [200] * 4


async def _resume(stage: Stage) -> bool:
    await stage.daemon.life.resume("t")
    return True


async def _stop_with_one_parked(stage: Stage) -> bool:
    stage.sandbox.may_thaw = False
    asking = asyncio.ensure_future(stage.ask())
    await until(lambda: stage.daemon.life.waiting)
    await stage.daemon.life.stop("t")
    stage.sandbox.may_thaw = True
    return await asking == 503


async def _start(stage: Stage) -> bool:
    await stage.daemon.life.start("t")
    return True


class Move(NamedTuple):
    """`lit_by`: see killed_proxy.py. `steps`: so many it has at least."""

    lit_by: str
    frm: AgentStatus
    act: Callable[[Stage], Coroutine[Any, Any, bool]]
    steps: int


MOVES = {
    "closed": Move("Close", RUNNING, _sleep, 2),
    "closed for good": Move("StillClosed", RUNNING, _sleep, 1),
    "asleep": Move("Asleep", RUNNING, _sleep, 0),
    "busy": Move("Close", RUNNING, _try_to_sleep_while_it_asks, 8),
    "wake, open": Move("wake", PAUSED, _wake, 8),
    "wake by a caller, open": Move("wake", PAUSED, lambda stage: _wake(stage, ingress=True), 15),
    "parked": Move("wake", PAUSED, _wait_parked, 30),
    "open": Move("Open", PAUSED, _resume, 0),
    "refused": Move("Refused", PAUSED, _stop_with_one_parked, 1),
    "started": Move("AgentIs", STOPPED, _start, 0),
}


async def _bring_to(stage: Stage, status: AgentStatus) -> None:
    if stage.proxy.is_dead:
        await stage.next_proxy()
    life = stage.daemon.life
    await until(lambda: stage.daemon.rests)
    if life.status not in ALIVE:
        await life.start("t")
    if status is STOPPED:
        await life.stop("t")
    elif status is RUNNING:
        await life.resume("t")
    else:
        await life.pause(timeout_s=10, now=False, actor="t")


async def _one_death(stage: Stage, name: str, step: int) -> bool:
    """Whether it died of it, and all is true again."""
    move, why = MOVES[name], f"{name}, killed at step {step}"
    await _bring_to(stage, move.frm)
    generation = stage.daemon.life.agent.generation
    stage.proxy.is_to_die(move.lit_by, step)
    died = stage.proxy.watcher
    doing = asyncio.ensure_future(_done(stage, move))
    await asyncio.wait([doing, died], return_when=asyncio.FIRST_COMPLETED)
    if not died.done():
        done = doing.result()
        await asyncio.wait([died], timeout=LAST_STEPS_S if done else 20)
        if not died.done():
            assert done, f"{why}: it lives and that was not done"
            await stage.proxy.kill()  # its fuse still burns
            return False
    assert died.result() == -9, why
    await stage.next_proxy()
    await asyncio.wait([doing])
    doing.result()
    await stage.agrees(why)
    assert stage.daemon.life.agent.generation >= generation, why
    await _whoever_asks_is_answered(stage, why)
    return True


async def _done(stage: Stage, move: Move) -> bool:
    """Whether it was; what the end of the proxy may say, and nothing else."""
    outcome = await outcome_of(move.act(stage))
    assert not isinstance(outcome, HiveError) or isinstance(outcome, DependencyDown), outcome
    return outcome is True


async def _whoever_asks_is_answered(stage: Stage, why: str) -> None:
    """Asleep or awake, once and again after another sleep; what is stopped is refused."""
    for ingress in (False, True):
        if stage.daemon.status is STOPPED:
            assert await stage.ask(ingress=ingress) == 503, why
            assert stage.daemon.status is STOPPED, why
            continue
        assert await stage.ask(ingress=ingress) == 200, why
        assert stage.daemon.status is RUNNING, why
    if stage.daemon.status is RUNNING:
        await stage.daemon.life.pause(timeout_s=10, now=False, actor="t")
        assert await stage.ask() == 200, why
        await stage.agrees(f"{why}; woken")


@pytest.mark.chaos
@pytest.mark.parametrize("name", MOVES)
async def test_a_proxy_killed_at_any_step_of_a_gates_move_leaves_true_states(short_path: Path, name: str) -> None:
    async with on_stage(short_path) as stage:
        for step in count(1):
            assert step < STEPS_MAX
            if not await _one_death(stage, name, step):
                break
        print(f"{name}: killed at each of {step - 1} steps")
        assert step > MOVES[name].steps, "fewer steps than when this was written: some are not seen any more"


@pytest.mark.chaos
@pytest.mark.parametrize("status", [RUNNING, PAUSED])
async def test_a_proxy_killed_at_any_step_of_its_beginning_is_followed_by_one_that_serves(
    short_path: Path, status: AgentStatus
) -> None:
    """A caller waits in the backlog all the while."""
    async with on_stage(short_path) as stage:
        await _bring_to(stage, status)
        for step in count(1):
            await stage.proxy.kill()
            await until(lambda: stage.gates.session is None)
            await _put_to(stage, status)
            stage.proxy.is_to_die(BEGIN, step)
            asking = asyncio.ensure_future(stage.ask())
            await stage.live()
            await asyncio.wait([asking, stage.proxy.watcher], return_when=asyncio.FIRST_COMPLETED)
            why = f"{status}, killed at step {step} of its beginning"
            if asking.done() and asking.result() == 200:
                break
            await asyncio.wait([stage.proxy.watcher], timeout=20)
            assert stage.proxy.is_dead, f"{why}: it lives and answers with {await asking}"
            await stage.next_proxy()
            assert await asking in (0, 200), why
            await _whoever_asks_is_answered(stage, why)
        print(f"{status}: killed at each of {step - 1} steps of its beginning")
        assert step > 20


async def _put_to(stage: Stage, status: AgentStatus) -> None:
    """Without a proxy nobody is put to sleep: as it was before the last one died."""
    if status is PAUSED and stage.daemon.status is not PAUSED:
        await stage.next_proxy()
        await _bring_to(stage, PAUSED)
        await stage.proxy.kill()
        await until(lambda: stage.gates.session is None)
