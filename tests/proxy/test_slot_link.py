"""The slots over a real link: the daemon's end is its own, the proxy's orders are carried out before real servers."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from hive.domain import Agent
from hive.errors import LinkLost
from hive.host.accounts import own
from hive.link.background import FromProxyBackground
from hive.link.client import LinkClient
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import AgentRow, DaemonTable, Done, Failed, Hello, Open, ProxyTable, Refused
from hive.link.parking import UseParked
from hive.link.pool import SlotBusy, SlotClosed, SlotDemands, SlotFlows
from hive.link.proxy_link import ProxyGates
from hive.link.responses import FromProxy
from hive.link.runner import RunnerCall
from hive.link.usage import AskSpent, SpentIs, UsageBatch
from hive.proxy.slot_orders import SlotOrders
from tests.proxy.harness import STREAM
from tests.proxy.test_slots import Pool, ask, hold, pooled
from tests.waiting import until


class Heard:
    """The daemon's news of the slots."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.demands: list[SlotDemands] = []
        self.flows: list[SlotFlows] = []

    def table(self) -> DaemonTable:
        return DaemonTable(agents=[], backend=None, models=[], marks={}, internal_digest="", slots=[])

    def row(self, agent: Agent) -> AgentRow:
        raise NotImplementedError

    def proxy_here(self, table: ProxyTable) -> None: ...

    def proxy_lost(self) -> None: ...

    def quiet(self, agent: str) -> None: ...

    def wake(self, agent: str, cause: str, answer: Callable[[Open | Refused], None]) -> None: ...

    def look_for_models(self, answer: Callable[[Done], None]) -> None: ...

    def about_responses(self, message: FromProxy, reply: LinkReply | None) -> None: ...

    def about_background(self, message: FromProxyBackground, reply: LinkReply) -> None: ...

    def usage(self, batch: UsageBatch) -> None: ...

    def spent(self, asked: AskSpent, answer: Callable[[SpentIs | Failed], None]) -> None: ...

    def use_parked(self, message: UseParked, reply: LinkReply) -> None: ...

    def runner_asks(self, call: RunnerCall, reply: LinkReply) -> None: ...

    def active(self, agents: dict[str, float]) -> None: ...

    def slot_demands(self, demands: SlotDemands) -> None:
        self.demands.append(demands)

    def slot_flows(self, flows: SlotFlows) -> None:
        self.flows.append(flows)


@asynccontextmanager
async def linked(tmp_path: Path, *models: str) -> AsyncIterator[tuple[Pool, ProxyGates, Heard]]:
    async with pooled(tmp_path, *models) as pool:
        heard = Heard(pool)
        gates = ProxyGates(epoch="d", events=heard)
        gates.listen(tmp_path / "link.sock", own())
        pool.orders = SlotOrders(pool.proxy.path, lambda message: client.link.tell(message))

        def here(link: Link) -> None:
            link.tell(Hello(role="proxy", epoch="p", pid=os.getpid()))
            link.tell(ProxyTable(agents={}, port=1, ingress_port=2))

        def ordered(link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
            pool.orders.order(message, reply)

        client = LinkClient(tmp_path / "link.sock", name="daemon", on_link=here, on_message=ordered)
        try:
            await until(lambda: gates.session is not None)
            yield pool, gates, heard
        finally:
            client.close()
            gates.stop()


async def test_the_daemon_orders_the_slots_and_hears_of_them(tmp_path: Path) -> None:
    async with linked(tmp_path, "a") as (pool, gates, heard):
        gates.slots([pool.row("a", is_open=False)])
        await until(lambda: "a-1" in pool.proxy.path.slots.pooled)
        client = await pool.client()
        release = hold(pool.servers["a"])
        client.writer.write(ask("a", body=STREAM))
        await until(lambda: any(told.slots["a-1"].waiting for told in heard.demands))
        gates.slot_is(pool.row("a", generation=2))
        await until(lambda: any(told.slots["a-1"].in_flight for told in heard.flows))
        assert await gates.close_slot("a-1", 2, wait_s=9.0, drain_s=None) == SlotBusy(in_flight=1)
        assert await gates.close_slot("a-1", 1, wait_s=9.0, drain_s=5.0) == SlotBusy(in_flight=0)
        release.set()
        assert (await client.answer())[0] == 200
        assert await gates.close_slot("a-1", 2, wait_s=9.0, drain_s=5.0) == SlotClosed()
        gates.slots([])
        await until(lambda: not pool.proxy.path.slots.pooled)


async def test_without_a_proxy_no_slot_is_closed_and_nobody_is_blamed(tmp_path: Path) -> None:
    async with pooled(tmp_path, "a") as pool:
        gates = ProxyGates(epoch="d", events=Heard(pool))
        gates.slots([pool.row("a")])
        with pytest.raises(LinkLost):
            await gates.close_slot("a-1", 1, wait_s=9.0, drain_s=None)
        with pytest.raises(LinkLost):
            await gates.slot_crashed("a-1", 1)
