"""`GET /api/agents?since=`: its follower knows as much as a reader of all agents."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from hive.client.client import Client
from hive.control.change_feed import ChangeFeed
from hive.domain import UsageEvent
from hive.errors import BadRequest
from hive.link.messages import Activity
from tests.control.box import Box
from tests.waiting import until

HELD = ("rss_bytes", "held_bytes", "held_at", "pss_bytes", "pss_at")
OF_TIME = ("why", "brief", "sentence", "cpu_us", "messages_waiting", "next_wake_at", *HELD)
"""Fields that change with time alone, or are of others."""


@pytest.fixture(autouse=True)
def unrationed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everybody is looked at each time."""
    true_init = ChangeFeed.__init__

    def begun(self: ChangeFeed, *arguments: Any) -> None:
        true_init(self, *arguments)
        for ration in (self._everybody, self._truth_of_all, self._truth_of_some):
            monkeypatch.setattr(ration, "_least_s", 0.0)
            monkeypatch.setattr(ration, "_share", 1e9)

    monkeypatch.setattr(ChangeFeed, "__init__", begun)


class Follower:
    """Asks the API as `hive top` does, and keeps what it was told."""

    def __init__(self, box: Box) -> None:
        self._client = Client(box.paths.api_socket, timeout_s=20)
        self.cursor = ""
        self.known: dict[str, dict[str, Any]] = {}
        self.told: list[str] = []

    async def ask(self, fresh: Collection[str] = ()) -> dict[str, Any]:
        answer = await asyncio.to_thread(
            self._client.get, "/api/agents", since=self.cursor, fresh=",".join(fresh) or None
        )
        self.told = [view["name"] for view in answer["agents"]]
        before = {} if answer["is_whole"] else self.known
        self.known = before | {view["id"]: view for view in answer["agents"]}
        for agent in answer["gone"]:
            self.known.pop(agent, None)
        self.cursor = answer["cursor"]
        return answer

    async def everything(self) -> dict[str, dict[str, Any]]:
        answer = await asyncio.to_thread(self._client.get, "/api/agents")
        return {view["id"]: view for view in answer["agents"]}


def lasting(views: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        agent: {name: value for name, value in view.items() if name not in OF_TIME} for agent, view in views.items()
    }


async def test_who_follows_knows_what_who_asks_for_everything_knows(box: Box) -> None:
    await box.everything()
    ann, bob = (await box.create("ann"))["id"], (await box.create("bob"))["id"]
    await box.create("cid")
    follower = Follower(box)
    assert (await follower.ask())["is_whole"]
    assert follower.told == ["ann", "bob", "cid"]
    await follower.ask()
    assert not (await follower.ask())["is_whole"]
    assert follower.told == []

    async def is_told(*names: str) -> None:
        """Exactly these, at once or in parts, and then nobody."""
        found: set[str] = set()
        for _ in range(10):
            await follower.ask()
            found |= {*follower.told}
        assert found == {*names}
        assert lasting(follower.known) == lasting(await follower.everything())

    await box.pause(bob, timeout_s=10, now=False, deep=False, actor="uid:0")
    await is_told("bob")
    await box.resume(bob, "uid:0")
    await is_told("bob")
    box.proxy.seen[ann] = Activity(in_flight=2, quiet_s=0.1)
    await is_told("ann")
    assert follower.known[ann]["in_flight"] == 2
    box.proxy.seen[ann] = Activity(in_flight=2, quiet_s=0.2)
    await is_told()
    assert box.daemon is not None
    box.daemon._counters.add([usage(ann)])
    await is_told("ann")
    assert follower.known[ann]["tokens_out"] == 7
    await box.keep_awake("cid", 60.0, "uid:0")
    await is_told("cid")
    await box.stop("cid", "uid:0")
    await is_told("cid")
    await box.create("dan")
    await is_told("dan")
    await box.services.agents.remove(bob, "uid:0")
    await is_told()
    assert bob not in follower.known


def usage(agent: str) -> UsageEvent:
    given = {"id": "p-1", "epoch": "p", "event_no": 1, "tenant": "default", "model": "m", "backend": "demo"}
    return UsageEvent(**given, endpoint="/v1", agent_id=agent, tokens_out=7, created_at=1.7e9)  # type: ignore[arg-type]


async def test_who_is_looked_at_is_told_of_in_any_case_and_as_it_is_now(box: Box) -> None:
    await box.everything()
    ann = (await box.create("ann"))["id"]
    await box.create("bob")
    follower = Follower(box)
    await follower.ask()
    while follower.told:  # what has just begun grows for a moment
        await follower.ask()
    await follower.ask([ann, "no-such-agent"])
    assert follower.told == ["ann"]
    assert follower.known[ann]["rss_bytes"] > 0
    assert follower.known[ann]["brief"]


async def test_without_the_helper_its_figures_are_unknown_until_it_is_back(box: Box) -> None:
    await box.everything()
    ann = (await box.create("ann"))["id"]
    follower = Follower(box)
    await follower.ask()
    await box.stop_helper()
    await until(lambda: not box.services.health.view()["helper"]["connected"])
    await follower.ask()
    assert (follower.told, follower.known[ann]["rss_bytes"]) == (["ann"], None)
    await box.start_helper()
    await until(lambda: box.services.health.view()["helper"]["connected"])
    await follower.ask()
    assert follower.known[ann]["rss_bytes"] > 0


async def test_another_daemon_knows_no_cursor_of_this_one(box: Box) -> None:
    await box.everything()
    await box.create("ann")
    follower = Follower(box)
    await follower.ask()
    await box.stop_daemon()
    await box.start_daemon()
    assert (await follower.ask())["is_whole"]
    assert follower.told == ["ann"]


async def test_the_query_names_no_more_agents_than_a_screen_has(box: Box) -> None:
    await box.everything()
    with pytest.raises(BadRequest, match="251 agents are named, 250 is the limit"):
        await Follower(box).ask([f"a{number}" for number in range(251)])


def nothing_is_due(box: Box, monkeypatch: pytest.MonkeyPatch, *but: str) -> None:
    """As between two looks on a busy box: what is asked of the helper is asked for another reason."""
    for name in {"_truth_of_all", "_truth_of_some"} - {*but}:
        monkeypatch.setattr(getattr(box.services.agent_views._changes, name), "is_due", lambda _: False)


async def test_who_lives_is_never_told_to_be_gone_because_it_was_not_asked_about(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two follow, an agent is made: for two minutes it had no process and no memory."""
    await box.everything()
    await box.create("ann")
    first = await box.services.agent_views.changes("", [])
    nothing_is_due(box, monkeypatch)
    bob = (await box.create("bob"))["id"]
    [view] = (await box.services.agent_views.changes(first["cursor"], []))["agents"]
    assert (view["name"], view["pid"]) == ("bob", box.life(bob).pid)
    assert (view["rss_bytes"] or 0) > 0
    await box.create("cid")
    whole = await box.services.agent_views.changes("", [])
    assert whole["is_whole"]
    assert [view["name"] for view in whole["agents"] if view["rss_bytes"]] == ["ann", "bob", "cid"]
    await box.stop("cid", "uid:0")
    [stopped] = (await box.services.agent_views.changes(whole["cursor"], []))["agents"]
    assert (stopped["status"], stopped["pid"], stopped["rss_bytes"]) == ("stopped", None, 0)
    await box.start("cid", "uid:0")
    [started] = (await box.services.agent_views.changes(whole["cursor"], []))["agents"]
    assert started["pid"] == box.life("cid").pid
    assert (started["rss_bytes"] or 0) > 0


async def test_a_helper_that_is_back_does_not_make_all_but_those_asked_for_gone(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of one agent it was asked, and of all others `unknown` became `gone`."""
    await box.everything()
    ann = (await box.create("ann"))["id"]
    await box.create("bob")
    await box.stop_helper()
    await until(lambda: not box.services.health.view()["helper"]["connected"])
    first = await box.services.agent_views.changes("", [])
    assert [view["rss_bytes"] for view in first["agents"]] == [None, None]
    nothing_is_due(box, monkeypatch, "_truth_of_some")
    await box.start_helper()
    await until(lambda: box.services.health.view()["helper"]["connected"])
    await box.services.agent_views.changes(first["cursor"], [ann])
    told = (await box.services.agent_views.changes("", []))["agents"]
    assert [view["name"] for view in told if view["rss_bytes"]] == ["ann", "bob"]
