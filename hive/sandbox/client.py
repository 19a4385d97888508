"""The helper's verbs, typed: what daemon and `hive up` call."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from hive.domain import BackendKind, RuntimeKind
from hive.errors import HiveError, LinkLost
from hive.link.client import LinkClient
from hive.link.execution import EndExecution, Execute, Executed, Executing, Resize, TerminalSize
from hive.link.helper import (
    AskBackend,
    AskBackendLog,
    AskRuntimes,
    AskStat,
    AskTemplates,
    BackendIs,
    BackendLog,
    BackendStart,
    BackendStop,
    Confirm,
    Define,
    Defined,
    Ended,
    Freeze,
    Frozen,
    PagedOut,
    PageOut,
    ProxyStats,
    Reaped,
    Reconcile,
    Remove,
    RestartTemplate,
    Runtimes,
    Start,
    Started,
    Stat,
    Stop,
    Templates,
    TemplateStat,
    Thaw,
    Thawed,
    ThawedAlone,
)
from hive.link.leases import (
    AskLeases,
    HolderMoved,
    LeaseEnd,
    LeaseExpect,
    LeaseForget,
    LeaseGrant,
    LeaseHolder,
    LeasesHeld,
)
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import Done, Hello
from hive.link.slots import (
    AskServerProgram,
    AskSlotLog,
    AskSlots,
    ServerProgramIs,
    SlotGrant,
    SlotIsRunning,
    SlotMoved,
    SlotPrepare,
    SlotProcess,
    SlotsRunning,
    SlotStart,
    SlotStop,
)
from hive.link.specs import RuntimeCapabilities, SandboxSpec

ANSWER_S = 5.0
"""Longest wait for what the helper does at once, or gives up after 2 s itself."""
REAPED_MAX = 1000
"""Ends of orphans kept while there is no helper: far more than there are agents."""
DISK_S = 120.0
"""For what the disk decides: deleting a large home, paging out."""
TEMPLATE_S = 150.0
"""For a template: its imports, its script until `hive.ready()`, its old process to end. For a start, which may be the
first of a template, or unpack a container's image, or boot a kernel."""
UNIT_S = 100.0
"""For a service: the one it conflicts with may have to be stopped first."""
LOOK_S = 15.0
"""For a question to systemd or to its journal."""
ENGINE_S = 60.0
"""For what an engine does, or a machine that boots."""


class Execution(NamedTuple):
    """A program inside an agent. `form`, `descriptors`: as in `Executing`, the caller's from now on.

    `ended`: its exit code as a shell counts, None where nobody knows it; LinkLost where the helper is gone.
    """

    run: str
    form: str
    descriptors: list[int]
    ended: asyncio.Future[int | None]


def _seen(answer: asyncio.Future[LinkMessage]) -> None:
    if not answer.cancelled():
        answer.exception()


def _ignore(*_: object) -> None:
    """Does nothing: the default for callbacks."""


class SandboxClient:
    """Keeps a link to the helper. Made on a running loop; connects by itself, again and again.

    Every verb raises LinkLost (not connected, or lost before the answer: it may have happened), TimedOut, or what
    the helper answered with: NotFound for an unknown agent, WrongState where its state forbids it.

    `on_connected()`: linked (anew); the caller sends `reconcile` before it trusts anything it remembers.
    `on_lost()`: the link is gone; verbs under way have failed already.
    `on_ended(ended)`: an agent ended that nobody asked to through this link.
    `on_thawed_alone(agent, reason)`: the helper woke an agent by itself.
    `on_slot_moved(process)`: a slot's server is in another state.
    `on_holder_moved(holder)`: a lease's holder is.
    """

    def __init__(
        self,
        path: Path,
        *,
        role: str,
        epoch: str,
        on_ended: Callable[[Ended], None] = _ignore,
        on_thawed_alone: Callable[[str, str], None] = _ignore,
        on_slot_moved: Callable[[SlotProcess], None] = _ignore,
        on_holder_moved: Callable[[LeaseHolder], None] = _ignore,
        on_connected: Callable[[], None] = _ignore,
        on_lost: Callable[[], None] = _ignore,
    ) -> None:
        """`role`: `daemon` or `up`; `epoch` names this run of the caller's process."""
        self._hello = Hello(role=role, epoch=epoch, pid=os.getpid())
        self._on_ended = on_ended
        self._on_thawed_alone = on_thawed_alone
        self._on_slot_moved = on_slot_moved
        self._on_holder_moved = on_holder_moved
        self._on_connected = on_connected
        self._on_lost = on_lost
        self._reaped: deque[Reaped] = deque(maxlen=REAPED_MAX)
        self._executions: dict[str, asyncio.Future[int | None]] = {}
        self._client = LinkClient(
            path, name="sandbox", on_link=self._linked, on_message=self._told, on_lost=lambda _: self._lost()
        )

    def __repr__(self) -> str:
        return f"<SandboxClient {self._hello.role} {'connected' if self.connected else 'not connected'}>"

    @property
    def connected(self) -> bool:
        return self._client.connected

    def close(self) -> None:
        """Hangs up for good."""
        self._client.close()

    def _linked(self, link: Link) -> None:
        link.tell(self._hello)
        self._tell_reaped(link)
        self._on_connected()

    def _lost(self) -> None:
        ended, self._executions = self._executions, {}
        for future in ended.values():
            if not future.done():
                future.set_exception(LinkLost("the helper is gone, and with it the program"))
                future.exception()  # taken, also after its caller has left
        self._on_lost()

    def _told(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:  # noqa: ARG002 - nothing is asked here
        match message:
            case Ended():
                self._on_ended(message)
            case Executed():
                if (ended := self._executions.pop(message.run, None)) is not None and not ended.done():
                    ended.set_result(message.exit_code)
            case ThawedAlone():
                self._on_thawed_alone(message.agent, message.reason)
            case SlotMoved():
                self._on_slot_moved(message.process)
            case HolderMoved():
                self._on_holder_moved(message.holder)
            case _:
                pass

    async def define(self, agent: str, spec: SandboxSpec) -> Path:
        """Makes the agent (or changes its spec for the next start); the path of its own socket."""
        answer = await self._client.link.ask(Define(agent=agent, spec=spec), Defined, timeout_s=DISK_S)
        return Path(answer.socket)

    async def start(self, agent: str) -> Started:
        """Starts it; its pid and address.

        Raises NotFound or NotPermitted for what cannot run, DependencyDown (its engine), WrongState if it runs.
        """
        return await self._client.link.ask(Start(agent=agent), Started, timeout_s=TEMPLATE_S)

    async def stop(self, agent: str, *, grace_s: float) -> Ended:
        """Thaws it, SIGTERM, after `grace_s` seconds SIGKILL. Not running: how it ended last."""
        return await self._client.link.ask(Stop(agent=agent, grace_s=grace_s), Ended, timeout_s=grace_s + ANSWER_S)

    async def freeze(self, agent: str, generation: int) -> Frozen:
        """Returns when none of it runs. It is thawed again unless `confirm` follows within 10 s.

        Raises TimedOut (it would not freeze; awake), WrongState (woken meanwhile, not running, older generation).
        """
        return await self._client.link.ask(Freeze(agent=agent, generation=generation), Frozen, timeout_s=ANSWER_S)

    async def confirm(self, agent: str, generation: int) -> None:
        """Keeps it frozen. Raises WrongState where the helper has thawed it already."""
        await self._client.link.ask(Confirm(agent=agent, generation=generation), Done, timeout_s=ANSWER_S)

    async def thaw(self, agent: str) -> Thawed:
        """Returns when it is verified to run; also if it ran all the time. A freeze under way gives up."""
        return await self._client.link.ask(Thaw(agent=agent), Thawed, timeout_s=ANSWER_S)

    async def page_out(self, agent: str, generation: int) -> PagedOut:
        """Pages out the memory of one that sleeps. Raises WrongState (woken meanwhile), NotSupported, Saturated."""
        return await self._client.link.ask(PageOut(agent=agent, generation=generation), PagedOut, timeout_s=DISK_S)

    async def stat(self, agents: Iterable[str] = (), *, pss: bool = False) -> dict[str, Stat]:
        """Ground truth by agent id, of all where none is named; unknown ones are left out. `pss`: see `AskStat`."""
        asked = AskStat(agents=list(agents), pss=pss)
        return (await self._client.link.ask(asked, ProxyStats, timeout_s=ANSWER_S)).agents

    async def runtimes(self) -> dict[RuntimeKind, RuntimeCapabilities]:
        """The abilities of each runtime on this host now."""
        return (await self._client.link.ask(AskRuntimes(), Runtimes, timeout_s=ENGINE_S)).runtimes

    async def templates(self) -> dict[str, TemplateStat]:
        """The templates that it has started or tried to, by name."""
        return (await self._client.link.ask(AskTemplates(), Templates, timeout_s=LOOK_S)).templates

    async def restart_template(self, name: str) -> TemplateStat:
        """A new process of it, once that is ready or has failed. Raises NotFound where it was never started."""
        answer = await self._client.link.ask(RestartTemplate(name=name), Templates, timeout_s=TEMPLATE_S)
        return answer.templates[name]

    async def reconcile(self, asleep: dict[str, int]) -> dict[str, Stat]:
        """`asleep`: id → generation of all the caller holds asleep; all others are thawed. Answers as `stat`."""
        return (await self._client.link.ask(Reconcile(asleep=asleep), ProxyStats, timeout_s=ANSWER_S)).agents

    async def start_backend(self, kind: str) -> None:
        """Starts the service of this kind of inference server; those that conflict with it are stopped first."""
        await self._client.link.ask(BackendStart(kind=BackendKind(kind)), Done, timeout_s=UNIT_S)

    async def stop_backend(self, kind: str, *, grace_s: float) -> None:
        """Stops it, with SIGKILL after `grace_s` seconds. Not there, or not running: it is stopped."""
        await self._client.link.ask(
            BackendStop(kind=BackendKind(kind), grace_s=grace_s), Done, timeout_s=grace_s + UNIT_S
        )

    async def look_at_backend(self, kind: str) -> BackendIs:
        """The state of its service. Raises DependencyDown where there is no systemd."""
        return await self._client.link.ask(AskBackend(kind=BackendKind(kind)), BackendIs, timeout_s=LOOK_S)

    async def backend_log(self, kind: str, *, lines: int, last_run: bool = False) -> str:
        """The last lines its service wrote."""
        asked = AskBackendLog(kind=BackendKind(kind), lines=lines, last_run=last_run)
        return (await self._client.link.ask(asked, BackendLog, timeout_s=LOOK_S)).text

    async def slot_start(self, id: str, grant: SlotGrant) -> SlotProcess:
        """Starts the server of a slot; returns once it has begun, `on_slot_moved` tells when it serves or has ended.

        Where it runs already that is the answer. Raises NotFound for what root's configuration does not describe,
        ConfigError where that cannot be read, BadRequest (id, grant), WrongState while it is being stopped.
        """
        answer = await self._client.link.ask(SlotStart(id=id, grant=grant), SlotIsRunning, timeout_s=ENGINE_S)
        return answer.process

    async def slot_prepare(self, id: str) -> None:
        """Has a supervisor of this slot, and of no other one, wait for its grant; empty: of none.

        Raises as `slot_start`.
        """
        await self._client.link.ask(SlotPrepare(id=id), Done, timeout_s=ENGINE_S)

    async def slot_stop(self, id: str, *, grace_s: float) -> None:
        """Stops it, with SIGKILL after `grace_s` seconds; returns once nothing of it is left. Not running: at once.

        Raises TimedOut where SIGKILL does not help.
        """
        await self._client.link.ask(SlotStop(id=id, grace_s=grace_s), Done, timeout_s=grace_s + UNIT_S)

    async def slots(self) -> dict[str, SlotProcess]:
        """Every slot with a server, and those whose end no daemon was told of, by id."""
        answer = await self._client.link.ask(AskSlots(), SlotsRunning, timeout_s=LOOK_S)
        return {process.id: process for process in answer.processes}

    async def slot_log(self, id: str, lines: int) -> str:
        """The last lines that its server wrote since its last start."""
        return (await self._client.link.ask(AskSlotLog(id=id, lines=lines), BackendLog, timeout_s=LOOK_S)).text

    async def server_program(self, pid: int, start_ticks: int) -> ServerProgramIs:
        """The program of the server that is this process. Raises NotFound where it is gone, or is not Hive's."""
        asked = AskServerProgram(pid=pid, start_ticks=start_ticks)
        return await self._client.link.ask(asked, ServerProgramIs, timeout_s=ANSWER_S)

    async def lease_expect(self, grant: LeaseGrant, wait_s: float = 30.0) -> None:
        """Lets the one in that shows this grant's nonce within `wait_s`; `on_holder_moved` tells when it is in, or that
        nobody came (`ended`). The same lease again: its grant from now on, as long as nobody has shown the other one.

        Raises BadRequest (a grant that is none), WrongState once its holder was let in or it has ended.
        """
        await self._client.link.ask(LeaseExpect(grant=grant, wait_s=wait_s), Done, timeout_s=ANSWER_S)

    async def lease_end(self, id: str, why: str, *, grace_s: float) -> None:
        """SIGTERM and SIGCONT to all of this lease, after `grace_s` SIGKILL. Returns at once, `on_holder_moved` tells
        its end. Nothing there: it has ended. Asked again: whichever end is nearer."""
        await self._client.link.ask(LeaseEnd(id=id, why=why, grace_s=grace_s), Done, timeout_s=ANSWER_S)

    async def lease_forget(self, id: str) -> None:
        """The end of this lease is booked. Unknown: done. Raises WrongState where it has not ended."""
        await self._client.link.ask(LeaseForget(id=id), Done, timeout_s=ANSWER_S)

    async def leases(self) -> dict[str, LeaseHolder]:
        """Every lease the helper knows of by id, those that ended until they are forgotten."""
        answer = await self._client.link.ask(AskLeases(), LeasesHeld, timeout_s=LOOK_S)
        return {holder.id: holder for holder in answer.holders}

    async def execute(self, agent: str, run: str, command: list[str], terminal: TerminalSize | None) -> Execution:
        """Runs a program inside; see `hive.link.execution.Execute`. It ends with this link, or by `end_execution`."""
        ended: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()
        self._executions[run] = ended
        taken: list[int] = []
        try:
            asked = Execute(agent=agent, run=run, command=command, terminal=terminal)
            answer = await self._client.link.ask_any(asked, timeout_s=ENGINE_S, taken=taken)
            if not isinstance(answer, Executing):
                raise HiveError(f"sandbox: asked Execute, got {type(answer).__name__}")
        except BaseException:
            self._executions.pop(run, None)
            for descriptor in taken:
                os.close(descriptor)
            with contextlib.suppress(HiveError):  # it may have begun all the same
                self._client.link.ask_soon(EndExecution(run=run)).add_done_callback(_seen)
            raise
        return Execution(run, answer.form, taken, ended)

    async def end_execution(self, run: str) -> None:
        """Kills it and all its processes. Does nothing for a program that has ended, or whose helper is gone."""
        await self._client.link.ask(EndExecution(run=run), Done, timeout_s=ENGINE_S)

    async def resize(self, run: str, rows: int, columns: int) -> None:
        """The size of its terminal."""
        await self._client.link.ask(Resize(run=run, rows=rows, columns=columns), Done, timeout_s=ANSWER_S)

    async def remove(self, agent: str) -> None:
        """Kills it and deletes its socket, home and log. An unknown agent: nothing to do."""
        await self._client.link.ask(Remove(agent=agent), Done, timeout_s=DISK_S)

    def reaped(self, pid: int, exit_code: int) -> None:
        """`hive up` tells how an orphan it inherited ended (128 + signal); kept while there is no helper."""
        self._reaped.append(Reaped(pid=pid, exit_code=exit_code))
        if self.connected:
            self._tell_reaped(self._client.link)

    def _tell_reaped(self, link: Link) -> None:
        while self._reaped:
            link.tell(self._reaped.popleft())
