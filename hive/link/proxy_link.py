"""The daemon's end of its link with the proxy: the proxy's gates, as lives see them, and what the proxy says."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Protocol

from hive.domain import Agent
from hive.errors import HiveError, LinkLost
from hive.host.accounts import Accounts
from hive.link.adapters import AdapterDrained, AdapterRoute, AdaptersAre, DrainAdapter
from hive.link.background import (
    AskBackground,
    AskBackgroundEvents,
    AskBeginBackground,
    CancelBackground,
    DropBackground,
    FromProxyBackground,
)
from hive.link.cache import UseCacheEpochs
from hive.link.figures import AskMetrics, MetricsAre
from hive.link.jobs import JobGrants
from hive.link.link import Link, LinkReply, failed
from hive.link.message import LinkMessage
from hive.link.messages import (
    PROTOCOL,
    Activities,
    Activity,
    AgentGone,
    AgentIs,
    AgentRow,
    AskActivity,
    Asleep,
    Busy,
    Close,
    CloseBackend,
    Closed,
    DaemonTable,
    Done,
    Drained,
    Failed,
    Hello,
    Open,
    ProxyTable,
    Quiet,
    Refused,
    StillClosed,
    Wake,
)
from hive.link.parking import AskSlotOf, SlotOf, UseParked
from hive.link.pool import (
    CloseSlotGate,
    CrashBlame,
    LoadCharged,
    SlotBusy,
    SlotClosed,
    SlotCrashed,
    SlotDemands,
    SlotFlows,
    SlotGone,
    SlotIs,
    SlotRow,
    Slots,
)
from hive.link.prompts import Prewarm, Prewarmed
from hive.link.requests import AskModels, AskQueue, AskTokensCome, CancelRequest, QueueIs, TokensCome
from hive.link.responses import AskHistory, AskInputItems, AskResponse, DropResponse, FromProxy, KeepResponse
from hive.link.runner import RunnerCall
from hive.link.server import LinkServer
from hive.link.tasks import AskTasks, TaskRoute, TasksAre
from hive.link.usage import AgentsActive, AskSpent, SpentIs, UsageBatch

log = logging.getLogger("hive.daemon")

ANSWER_S = 2.0
"""The proxy answers at once; one that does not for so long is as good as gone."""


class ProxyEvents(Protocol):
    """The receiver of the proxy's messages."""

    def table(self) -> DaemonTable:
        """Everything a proxy must know, as it is now."""
        ...

    def row(self, agent: Agent) -> AgentRow: ...

    def proxy_here(self, table: ProxyTable) -> None:
        """A proxy has told its table, the first word of a session."""
        ...

    def proxy_lost(self) -> None: ...

    def quiet(self, agent: str) -> None: ...

    def wake(self, agent: str, cause: str, answer: Callable[[Open | Refused], None]) -> None: ...

    def look_for_models(self, answer: Callable[[Done], None]) -> None: ...

    def about_responses(self, message: FromProxy, reply: LinkReply | None) -> None: ...

    def about_background(self, message: FromProxyBackground, reply: LinkReply) -> None: ...

    def use_parked(self, message: UseParked, reply: LinkReply) -> None: ...

    def runner_asks(self, call: RunnerCall, reply: LinkReply) -> None:
        """A request came to the runner's listener; `RunnerSaid` answers it."""
        ...

    def usage(self, batch: UsageBatch) -> None: ...

    def spent(self, asked: AskSpent, answer: Callable[[SpentIs | Failed], None]) -> None: ...

    def active(self, agents: dict[str, float]) -> None:
        """These agents were active, each at that time (Unix seconds)."""
        ...

    def slot_demands(self, demands: SlotDemands) -> None:
        """Requests wait for these slots of the pool to be loaded, or do so no more."""
        ...

    def slot_flows(self, flows: SlotFlows) -> None:
        """Facts of the requests at these slots of the pool."""
        ...


class ProxyGates:
    """One proxy at a time: one that connects anew replaces the one before."""

    def __init__(self, *, epoch: str, events: ProxyEvents) -> None:
        self._epoch = epoch
        self._events = events
        self._server: LinkServer | None = None
        self._link: Link | None = None
        self._sessions = 0
        self._session: int | None = None
        self.port: int | None = None
        self.ingress_port: int | None = None
        self._ports_known = asyncio.Event()

    def __repr__(self) -> str:
        return f"<ProxyGates session {self._session}, port {self.port}>"

    def listen(self, path: Path, peers: Accounts) -> None:
        """Proxies may connect from now on. Raises OSError."""
        self._server = LinkServer(
            path,
            name="proxy",
            uids=frozenset({os.geteuid(), peers.proxy}),
            on_link=self._greet,
            on_message=self._on_message,
            on_lost=self._on_lost,
            group=peers.services,
        )

    @property
    def is_listening(self) -> bool:
        return self._server is not None and self._server.is_listening

    def stop(self) -> None:
        if self._server is not None:
            self._server.close()

    # What lives ask and tell --------------------------------------------------------------------------------------

    @property
    def session(self) -> int | None:
        return self._session

    async def close(self, agent: str, generation: int) -> Closed | Busy:
        return _closed_or_busy(await self._ask(Close(agent=agent, generation=generation)))

    async def still_closed(self, agent: str, generation: int) -> Closed | Busy:
        return _closed_or_busy(await self._ask(StillClosed(agent=agent, generation=generation)))

    async def activity(self, agents: Collection[str] = ()) -> dict[str, Activity]:
        answer = await self._ask(AskActivity(agents=list(agents)))
        return answer.agents if isinstance(answer, Activities) else {}

    def asleep(self, agent: Agent) -> None:
        self.say(Asleep(agent=agent.id, generation=agent.generation))

    def open(self, agent: Agent) -> None:
        self.say(Open(agent=agent.id, generation=agent.generation))

    def refuse(self, agent: Agent) -> None:
        self.say(
            Refused(agent=agent.id, generation=agent.generation, status=str(agent.status), why=agent.told_of_failure)
        )

    def tell(self, agent: Agent) -> None:
        self.say(AgentIs(row=self._events.row(agent)))

    def gone(self, agent: str) -> None:
        self.say(AgentGone(agent=agent))

    def say(self, message: LinkMessage) -> None:
        """Tells the proxy, if there is one."""
        if self._link is not None:
            self._link.tell(message)

    @property
    def known_port(self) -> int:
        """The proxy's port. Raises LinkLost before one has told it."""
        if self.port is None:
            raise LinkLost("the proxy has not connected yet, so its port is not known")
        return self.port

    async def ports(self, within_s: float) -> int:
        """The proxy's port, as soon as one has told it. Raises LinkLost."""
        try:
            async with asyncio.timeout(within_s):
                await self._ports_known.wait()
        except TimeoutError:
            raise LinkLost(f"no proxy has connected within {within_s:g} s") from None
        assert self.port is not None
        return self.port

    async def close_backend(self, towards: str, *, drain_s: float, wait_s: float) -> int:
        """Returns once no request is at the backend; how many did not end within `drain_s` and were cut.

        Raises LinkLost, TimedOut.
        """
        message = CloseBackend(towards=towards, drain_s=drain_s, wait_s=wait_s)
        answer = await self._ask(message, timeout_s=drain_s + ANSWER_S)
        return answer.cut if isinstance(answer, Drained) else 0

    def slots(self, rows: list[SlotRow]) -> None:
        """Tells all slots of the pool; one that is not named is gone."""
        self.say(Slots(slots=rows))

    def slot_is(self, row: SlotRow) -> None:
        self.say(SlotIs(slot=row))

    def slot_gone(self, id: str) -> None:
        """Tells that there is no such slot any more."""
        self.say(SlotGone(id=id))

    def adapters_are(self, routes: list[AdapterRoute]) -> None:
        """Tells what answers to each adapter's name, from now on."""
        self.say(AdaptersAre(adapters=routes))

    async def drain_adapter(self, slot: str, at_server: str, *, drain_s: float) -> int:
        """Returns once no request with this name of an adapter is at that server, or after `drain_s`: how many are
        there still. Raises LinkLost, TimedOut."""
        wanted = DrainAdapter(slot=slot, at_server=at_server, drain_s=drain_s)
        answer = await self._ask(wanted, timeout_s=drain_s + ANSWER_S)
        return answer.left if isinstance(answer, AdapterDrained) else 0

    def load_charged(self, load: LoadCharged) -> None:
        """Charges a load to the tenant whose demand caused it."""
        self.say(load)

    async def close_slot(
        self, id: str, generation: int, *, wait_s: float, drain_s: float | None
    ) -> SlotClosed | SlotBusy:
        """Returns once nothing is in flight at the slot, or with what keeps it open (`CloseSlotGate`). Raises LinkLost,
        TimedOut."""
        message = CloseSlotGate(id=id, generation=generation, wait_s=wait_s, drain_s=drain_s)
        answer = await self._ask(message, timeout_s=(drain_s or 0.0) + ANSWER_S)
        if not isinstance(answer, SlotClosed | SlotBusy):
            raise HiveError(f"the proxy answered {type(answer).__name__}")
        return answer

    async def slot_crashed(self, id: str, generation: int) -> CrashBlame:
        """The agents whose requests were there when the server of this slot ended by itself. Raises LinkLost,
        TimedOut."""
        answer = await self._ask(SlotCrashed(id=id, generation=generation))
        if not isinstance(answer, CrashBlame):
            raise HiveError(f"the proxy answered {type(answer).__name__}")
        return answer

    async def queue(self) -> QueueIs:
        """The requests waiting for the model and those running. Raises LinkLost, TimedOut."""
        answer = await self._ask(AskQueue())
        if not isinstance(answer, QueueIs):
            raise HiveError(f"the proxy answered {type(answer).__name__}")
        return answer

    async def metrics(self) -> bytes:
        """The proxy's exposition. Raises LinkLost, TimedOut."""
        answer = await self._ask(AskMetrics())
        if not isinstance(answer, MetricsAre):
            raise HiveError(f"the proxy answered {type(answer).__name__}")
        return answer.text

    async def tokens_come(self) -> bool:
        """Whether part of an answer of the active backend came since that was asked last. Raises LinkLost, TimedOut."""
        answer = await self._ask(AskTokensCome())
        if not isinstance(answer, TokensCome):
            raise HiveError(f"the proxy answered {type(answer).__name__}")
        return answer.comes

    async def tasks(self, asked: AskTasks) -> list[TaskRoute]:
        """The tasks, and what a request for each would be given now. Raises NotFound, LinkLost, TimedOut."""
        answer = await self._ask(asked)
        if not isinstance(answer, TasksAre):
            raise HiveError(f"the proxy answered {type(answer).__name__}")
        return answer.tasks

    async def cancel(self, request_id: str) -> None:
        """Ends a request that is under way. Raises NotFound, LinkLost, TimedOut."""
        await self._ask(CancelRequest(id=request_id))

    async def job_grants(self, grants: JobGrants) -> None:
        """Returns once the proxy lets these jobs ask, and no other. Raises LinkLost, TimedOut."""
        await self._ask(grants)

    async def use_cache_epochs(self, epochs: UseCacheEpochs) -> None:
        """Returns once the proxy sends no request that was read with earlier ones. Raises LinkLost, TimedOut."""
        await self._ask(epochs)

    async def slot_of(self, agent: str) -> SlotOf:
        """The slot of a llama-server whose last user this agent is. Raises NotFound, LinkLost, TimedOut."""
        answer = await self._ask(AskSlotOf(agent=agent))
        if not isinstance(answer, SlotOf):
            raise HiveError(f"the proxy answered {type(answer).__name__}")
        return answer

    async def prewarm(self, agent: str, model: str, system_prompt: str, *, within_s: float) -> Prewarmed:
        """The backend has read the prompt as this agent's. Raises whatever kept it from that, LinkLost, TimedOut."""
        wanted = Prewarm(agent=agent, model=model, system_prompt=system_prompt)
        answer = await self._ask(wanted, timeout_s=within_s)
        if not isinstance(answer, Prewarmed):
            raise HiveError(f"the proxy answered {type(answer).__name__}")
        return answer

    async def _ask(self, message: LinkMessage, *, timeout_s: float = ANSWER_S) -> LinkMessage:
        if self._link is None:
            raise LinkLost("the proxy is not connected")
        return await self._link.ask_any(message, timeout_s=timeout_s)

    # What the proxy says ------------------------------------------------------------------------------------------

    def _greet(self, link: Link) -> None:
        link.tell(Hello(role="daemon", epoch=self._epoch, pid=os.getpid()))

    def _on_message(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        match message:
            case Hello():
                self._hello(link, message)
            case _ if link is not self._link:
                log.warning("peer_ignored peer=%s message=%s", link.name, type(message).__name__)
                if reply is not None:
                    reply(failed(HiveError("another proxy has taken over")))
            case ProxyTable():
                self._sessions += 1
                self._session = self._sessions
                self.port, self.ingress_port = message.port, message.ingress_port
                self._ports_known.set()
                self._events.proxy_here(message)
            case Quiet(agent=agent):
                self._events.quiet(agent)
            case Wake(agent=agent, cause=cause) if reply is not None:
                self._events.wake(agent, cause, reply)
            case AskModels() if reply is not None:
                self._events.look_for_models(reply)
            case KeepResponse() | AskHistory() | AskResponse() | AskInputItems() | DropResponse():
                self._events.about_responses(message, reply)
            case (
                AskBeginBackground() | AskBackground() | AskBackgroundEvents() | CancelBackground() | DropBackground()
            ) if reply is not None:
                self._events.about_background(message, reply)
            case UseParked() if reply is not None:
                self._events.use_parked(message, reply)
            case RunnerCall() if reply is not None:
                self._events.runner_asks(message, reply)
            case UsageBatch():
                self._events.usage(message)
            case AskSpent() if reply is not None:
                self._events.spent(message, reply)
            case AgentsActive(agents=agents):
                self._events.active(agents)
            case SlotDemands():
                self._events.slot_demands(message)
            case SlotFlows():
                self._events.slot_flows(message)
            case _ if reply is not None:
                reply(failed(HiveError(f"{type(message).__name__} is not for the daemon")))
            case _:
                log.warning("message_ignored peer=%s message=%s", link.name, type(message).__name__)

    def _hello(self, link: Link, message: Hello) -> None:
        if message.role != "proxy" or message.protocol != PROTOCOL:
            log.error("peer_refused role=%s protocol=%d pid=%d", message.role, message.protocol, message.pid)
            link.close()
            return
        before, self._link = self._link, link
        if before is not None:
            log.warning("proxy_replaced peer=%s by=%s", before.name, link.name)
            before.close()
            self._gone()
        log.info("proxy_connected pid=%d epoch=%s", message.pid, message.epoch)
        link.tell(self._events.table())

    def _on_lost(self, link: Link) -> None:
        if link is self._link:
            self._link = None
            self._gone()

    def _gone(self) -> None:
        self._session = None
        self._ports_known.clear()
        log.warning("proxy_lost")
        self._events.proxy_lost()


def _closed_or_busy(answer: LinkMessage) -> Closed | Busy:
    if not isinstance(answer, Closed | Busy):
        raise HiveError(f"the proxy answered {type(answer).__name__}")
    return answer
