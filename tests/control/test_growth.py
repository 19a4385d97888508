"""Acts on one agent cost as much where there are many: the agents asked about, the rows written, the answers."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from asyncio import to_thread
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hive.agents.spec import check
from hive.audit.audit_log import AuditLog
from hive.client.client import Client
from hive.control import registration
from hive.control.effects import REMOVED_AT_ONCE, Forgetting
from hive.control.registration import UidLook, uids_in_use
from hive.domain import Agent, AgentSpec, RuntimeKind
from hive.errors import BadRequest, StoreFull
from hive.link.messages import Activity, AskActivity
from hive.store import agents, audit, chain
from hive.store.database import Database
from hive.store.live import Live
from tests.control.box import Box, is_alive

ACTOR = "uid:0"


def external(name: str) -> AgentSpec:
    return check(AgentSpec(name=name, runtime=RuntimeKind.EXTERNAL))


async def with_agents(box: Box, count: int) -> Box:
    await box.everything()
    await asyncio.gather(*(box.services.agents.create(external(f"e{number:03}"), ACTOR) for number in range(count)))
    return box


# Agents asked about ---------------------------------------------------------------------------------------------------


async def test_what_is_shown_of_one_agent_is_asked_of_that_one_alone(box: Box) -> None:
    """The proxy was asked about all agents wherever one was shown, woken or made: 3.5 ms with 1,000 agents, as it asked
    the kernel about each of them."""
    await with_agents(box, 5)
    box.proxy.told.clear()
    view = await box.view("e003")
    await box.services.agents.create(external("new"), ACTOR)
    await box.resume("e003", ACTOR)
    await box.services.agent_views.page("e001", 2)
    # (the idle check asks about everybody now and then)
    asked = [message.agents for message in box.proxy.told if isinstance(message, AskActivity) and message.agents]
    assert [len(named) for named in asked] == [1, 1, 1, 2]
    assert asked[0] == asked[2] == [view["id"]]
    box.proxy.told.clear()
    await box.services.agent_views.all()
    assert AskActivity() in box.proxy.told


async def test_what_was_seen_of_one_agent_alone_counts_until_all_are_looked_at(box: Box) -> None:
    await with_agents(box, 2)
    assert box.daemon is not None
    agent, other = (box.life(name).agent.id for name in ("e000", "e001"))
    sleeper = box.daemon.sleeper
    box.proxy.seen = {agent: _seen(1), other: _seen(1)}
    await sleeper.look()
    box.proxy.seen = {agent: _seen(2), other: _seen(2)}
    await sleeper.look([agent])
    assert (sleeper.activity(agent).in_flight, sleeper.activity(other).in_flight) == (2, 1)
    box.proxy.seen = {other: _seen(3)}
    await sleeper.look([agent])
    assert sleeper.activity(agent).in_flight == 0
    await sleeper.look()
    assert (sleeper.activity(agent).in_flight, sleeper.activity(other).in_flight) == (0, 3)


def _seen(in_flight: int) -> Activity:
    return Activity(in_flight=in_flight)


async def test_what_is_told_in_short(box: Box) -> None:
    await with_agents(box, 3)
    told = box.services.agent_views.shorts("", 2)
    assert [agent["name"] for agent in told["agents"]] == ["e000", "e001"]
    assert (told["next"], told["total"]) == ("e001", 3)
    assert {"id", "name", "tenant", "runtime", "status", "depth", "since"} == told["agents"][0].keys()


# Pages ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("short", [0, 1])
async def test_the_pages_are_all_agents_by_name(box: Box, short: int) -> None:
    """An agent that comes or goes between two pages moves no other out of them."""
    await with_agents(box, 5)
    client = Client(box.paths.api_socket)

    def page(after: str | None) -> Any:
        return client.get("/api/agents", limit=2, after=after, short=short)

    first = await to_thread(page, None)
    assert ([agent["name"] for agent in first["agents"]], first["next"], first["total"]) == (
        ["e000", "e001"],
        "e001",
        5,
    )
    await box.services.agents.remove("e001", ACTOR)
    second = await to_thread(page, first["next"])
    assert ([agent["name"] for agent in second["agents"]], second["next"]) == (["e002", "e003"], "e003")
    last = await to_thread(page, second["next"])
    assert ([agent["name"] for agent in last["agents"]], last["next"], last["total"]) == (["e004"], None, 4)
    if not short:
        everybody = (await to_thread(client.get, "/api/agents"))["agents"]
        assert [agent["name"] for agent in everybody] == ["e000", "e002", "e003", "e004"]


@pytest.mark.parametrize("query", [{"limit": 1001}, {"limit": 5, "since": ""}, {"short": 1, "since": ""}, {"short": 2}])
async def test_what_does_not_go_together_is_refused(client: Client, query: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        await to_thread(client.get, "/api/agents", **query)


# Removal of many ------------------------------------------------------------------------------------------------------


async def test_many_are_removed_by_one_order_and_each_is_audited(box: Box) -> None:
    """It took 232 s for 5,000: a transaction each, and three searches through every key of Redis."""
    await with_agents(box, 120)
    view = await box.create("real")
    client = Client(box.paths.api_socket)
    names = ["real", *(f"e{number:03}" for number in range(1, 120)), "nobody", view["id"]]
    answer = await to_thread(client.post, "/api/removals", {"agents": names})
    removed = {one["name"] for one in answer["removed"]}
    assert removed == {"real", *(f"e{number:03}" for number in range(1, 120))}
    failed = {one["agent"]: (one["status"], one["code"]) for one in answer["failed"]}
    assert failed == {"nobody": (404, "not_found"), view["id"]: (404, "not_found")}
    assert [agent["name"] for agent in await box.services.agent_views.all()] == ["e000"]
    assert not is_alive(view["pid"])
    assert not box.paths.home(view["id"]).exists()
    rows = await box.audit(audit.Filter())
    told = [row for row in rows if row["act"] == "agent.removed"]
    assert {row["detail"]["name"] for row in told} == removed
    assert {row["actor"] for row in told} == {f"uid:{os.geteuid()}"}
    order = next(row for row in rows if row["act"] == "order.remove_many")
    counted = {"agents": 122, "removed": 120, "not_removed": ["nobody", view["id"]]}
    assert {name: value for name, value in order["detail"].items() if name != "user"} == counted
    assert box.daemon is not None
    links = await box.daemon._database.read(lambda conn: [*audit.links(conn)])
    assert chain.verify(links).bad is None


async def test_a_hundred_are_forgotten_in_one_transaction(tmp_path: Path) -> None:
    class Counting(Database):
        writes = 0

        async def write(self, work: Any) -> Any:
            self.writes += 1
            return await super().write(work)

    database = Counting.open(tmp_path / "hive.db")
    some = [Agent(id=f"{n:032x}", spec=external(f"e{n:03}")) for n in range(2 * REMOVED_AT_ONCE + 1)]
    for agent in some:
        await database.write(lambda conn, agent=agent: agents.insert(conn, agent))
    journal = AuditLog(database, Live(tmp_path / "no.sock"))
    forgetting, before = Forgetting(journal), database.writes
    journal.note("agent.stopped", target=some[0].id)
    with journal.subscribe() as events:
        await asyncio.gather(*(forgetting.forget(agent, ACTOR) for agent in some))
        told = [await anext(events) for _ in some]
    assert database.writes - before <= 4
    assert {event["agent"] for event in told} == {agent.id for agent in some}
    assert await database.read(agents.all) == []
    rows = await database.read(lambda conn: audit.tail(conn, 1000))
    assert [row.act for row in rows] == ["agent.stopped"] + ["agent.removed"] * len(some)
    database.close()


async def test_a_removal_that_cannot_be_written_is_none(tmp_path: Path) -> None:
    """Its row would else say that it was removed, and the next start would bring the agent back."""

    class Full(Database):
        is_full = False

        async def write(self, work: Any) -> Any:
            if self.is_full:
                raise StoreFull("the disk is full")
            return await super().write(work)

    database = Full.open(tmp_path / "hive.db")
    agent = Agent(id=f"{1:032x}", spec=external("ann"))
    await database.write(lambda conn: agents.insert(conn, agent))
    journal = AuditLog(database, Live(tmp_path / "no.sock"))
    forgetting, database.is_full = Forgetting(journal), True
    journal.note("agent.stopped", target=agent.id)
    for _ in range(2):
        with pytest.raises(StoreFull):
            await forgetting.forget(agent, ACTOR)
    database.is_full = False
    assert [found.name for found in await database.read(agents.all)] == ["ann"]
    await forgetting.forget(agent, ACTOR)
    rows = await database.read(lambda conn: audit.tail(conn, 10))
    assert [row.act for row in rows] == ["agent.stopped", "agent.removed"]
    database.close()


@pytest.mark.parametrize("agents_named", [[], ["x"] * 1001, "x", ["x" * 101]])
async def test_an_order_to_remove_nobody_or_too_many_is_refused(client: Client, agents_named: Any) -> None:
    with pytest.raises(BadRequest):
        await to_thread(client.post, "/api/removals", {"agents": agents_named})


# Uids -----------------------------------------------------------------------------------------------------------------

HIDES = "import ctypes, os; os.setuid(54321); ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)"
IS_ROOT_TOO = "import os; os.setresuid(54322, 0, 54323)"
UNTIL_KILLED = "; print('up', flush=True); import time; time.sleep(100)"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes processes of other users")
@pytest.mark.parametrize(("program", "found"), [(HIDES, {54321}), (IS_ROOT_TOO, {0, 54322, 54323})])
def test_the_uids_of_a_process_are_seen_whatever_it_is(program: str, found: set[int]) -> None:
    """Of one that may not be looked into, and of one that has root's among others."""
    assert not (found - {0}) & uids_in_use()
    command = ["/usr/bin/python3", "-c", program + UNTIL_KILLED]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"up\n"
            assert found <= uids_in_use()
        finally:
            process.kill()


async def test_all_processes_are_looked_at_once_for_many_new_agents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each agent that was made read the files of every process: 60 ms with 1,000."""
    looks: list[float] = []

    def look() -> frozenset[int]:
        looks.append(time.time())
        return frozenset({7})

    monkeypatch.setattr(registration, "uids_in_use", look)
    looking = UidLook()
    seen = await asyncio.gather(*(looking.look() for _ in range(5)))
    assert len(looks) == 1
    assert {one.in_use for one in seen} == {frozenset({7})}
    assert seen[0].at <= looks[0]
    monkeypatch.setattr(registration, "UIDS_KEPT_S", 0.0)
    await looking.look()
    assert len(looks) == 2


async def test_no_two_agents_have_sockets_of_one_name(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first 8 digits of an id name its socket; they are free again once the agent is removed."""
    await box.everything()
    first = (await box.services.agents.create(external("ann"), ACTOR))["id"]
    offered = iter([first[:8] + "0" * 24, "ab" * 16, first])
    monkeypatch.setattr(registration, "secrets", SimpleNamespace(token_hex=lambda _: next(offered)))
    assert (await box.services.agents.create(external("bob"), ACTOR))["id"] == "ab" * 16
    await box.services.agents.remove("ann", ACTOR)
    assert (await box.services.agents.create(external("eve"), ACTOR))["id"] == first
