"""The proxy's end of the link with the daemon: real messages over a real socket, no data path behind it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from hive.errors import NotFound
from hive.link.cache import UseCacheEpochs
from hive.link.client import LinkClient
from hive.link.figures import AskMetrics, MetricsAre
from hive.link.jobs import JobGrants
from hive.link.link import Link, LinkReply, failed
from hive.link.message import LinkMessage
from hive.link.messages import (
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
    Hello,
    Open,
    ProxyTable,
    Quiet,
    Refused,
    StillClosed,
    Wake,
)
from hive.link.prompts import Prewarm
from hive.link.requests import AskQueue, CancelRequest, QueueIs
from hive.link.tasks import AskTasks, TaskRoute, TasksAre
from hive.tasks import spawn


class ProxyPeer:
    """`busy`: agent id → why its gate does not close. `rows`, `gates`: what the daemon said last of each agent."""

    def __init__(self, path: Path, *, epoch: str = "p1", port: int = 11435, ingress_port: int = 8480) -> None:
        self.busy: dict[str, str] = {}
        self.seen: dict[str, Activity] = {}
        self.rows: dict[str, AgentRow] = {}
        self.gates: dict[str, str] = {}
        self.told: list[LinkMessage] = []
        self.prewarms: list[tuple[Prewarm, LinkReply]] = []
        """Questions of the daemon; to be answered by the test."""
        self.queue: QueueIs | None = None
        """The answer about the queue; None: no answer."""
        self.metrics: bytes | None = b""
        """The answer for a scrape; None: no answer."""
        self.tasks: list[TaskRoute] = []
        """The answer about tasks."""
        self.holds_backend: asyncio.Event | None = None
        """The backend is drained once this is set; None: at once."""
        self.cut = 0
        """Requests that did not end when the backend was drained."""
        self.epochs: UseCacheEpochs | None = None
        """Of flushes, as they were told last."""
        self.takes_epochs = True
        self.table: DaemonTable | None = None
        self.role = "proxy"
        self.closed = False
        self._epoch = epoch
        self._port = port
        self._ingress_port = ingress_port
        self._changed = asyncio.Event()
        self.client = LinkClient(path, name="daemon", on_link=self._greet, on_message=self._heard)

    def _greet(self, link: Link) -> None:
        link.tell(Hello(role=self.role, epoch=self._epoch))
        link.tell(ProxyTable(agents=self.seen, port=self._port, ingress_port=self._ingress_port))

    def _heard(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        self.told.append(message)
        match message:
            case DaemonTable():
                self.table = message
                for row in message.agents:
                    self._learn(row)
            case AgentIs(row=row):
                self._learn(row)
            case AgentGone(agent=agent):
                self.rows.pop(agent, None)
                self.gates.pop(agent, None)
            case Open(agent=agent):
                self.gates[agent] = "open"
            case Refused(agent=agent):
                self.gates[agent] = "refused"
            case Asleep(agent=agent):
                self.gates[agent] = "asleep"
            case Close(agent=agent, generation=generation) | StillClosed(agent=agent, generation=generation):
                assert reply is not None
                if why := self.busy.get(agent):
                    reply(Busy(agent=agent, generation=generation, reason=why))
                else:
                    self.gates[agent] = "closed"
                    reply(Closed(agent=agent, generation=generation))
            case CloseBackend():
                assert reply is not None
                spawn(self._drain(reply), name="drain")
            case JobGrants() if reply is not None:
                reply(Done())
            case UseCacheEpochs():
                self.epochs = message
                if reply is not None and self.takes_epochs:
                    reply(Done())
            case AskQueue() if reply is not None and self.queue is not None:
                reply(self.queue)
            case AskMetrics() if reply is not None and self.metrics is not None:
                reply(MetricsAre(text=self.metrics))
            case AskTasks(task=task) if reply is not None:
                reply(TasksAre(tasks=[one for one in self.tasks if task in ("", one.name)]))
            case CancelRequest(id=request) if reply is not None and self.queue is not None:
                kept = [one for one in self.queue.requests if one.id != request]
                is_known = len(kept) < len(self.queue.requests)
                self.queue.requests[:] = kept
                reply(Done() if is_known else failed(NotFound(f"there is no request {request!r}")))
            case Prewarm():
                assert reply is not None
                self.prewarms.append((message, reply))
            case AskActivity(agents=named):
                assert reply is not None
                reply(
                    Activities(agents={agent: self.seen[agent] for agent in named or self.seen if agent in self.seen})
                )
            case _:
                pass
        self._changed.set()

    async def _drain(self, reply: LinkReply) -> None:
        if self.holds_backend is not None:
            await self.holds_backend.wait()
        reply(Drained(cut=self.cut))

    def _learn(self, row: AgentRow) -> None:
        self.rows[row.id] = row
        self.gates[row.id] = row.gate

    async def until_gate(self, agent: str, gate: str) -> None:
        """Returns when the agent's gate stands so."""
        while self.gates.get(agent) != gate:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 20)

    async def until_table(self) -> DaemonTable:
        while self.table is None:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 20)
        return self.table

    def become_quiet(self, agent: str) -> None:
        del self.busy[agent]
        self.client.link.tell(Quiet(agent=agent))

    async def wake(self, agent: str, cause: str = "ingress") -> LinkMessage:
        answer = await self.client.link.ask_any(Wake(agent=agent, cause=cause), timeout_s=20)
        if isinstance(answer, Open):
            self.gates[agent] = "open"
        return answer

    def close(self) -> None:
        self.closed = True
        self.client.close()
