"""Questions of a look to a real daemon, and that less is asked costs nothing of what is seen."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from hive.client.client import Client
from hive.domain import BackendInfo, BackendKind, UsageEvent
from hive.settings.table import InferenceSection, Settings
from hive.tui import watch as watch_module
from hive.tui.snapshot import Answers, View
from hive.tui.watch import Watch
from tests.control.box import AWAKE, Box
from tests.waiting import until


class Counting(Client):
    """Counts what is asked for."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, timeout_s=20)
        self.asked: Counter[str] = Counter()

    def _sent(self, method: str, path: str, *rest: Any) -> AbstractContextManager[Any]:  # type: ignore[override]
        self.asked[path] += 1
        return super()._sent(method, path, *rest)


class Look:
    """A watch of this box, and what its last look asked for beside health and agents."""

    def __init__(self, box: Box) -> None:
        self._client = Counting(box.paths.api_socket)
        self.watch = Watch(self._client)

    async def at(self, shown: Collection[str] | None = ()) -> tuple[Answers, set[str]]:
        self._client.asked.clear()
        answers = await asyncio.to_thread(self.watch.ask, shown)
        assert max(self._client.asked.values()) == 1
        assert {"/api/health", "/api/agents"} <= self._client.asked.keys()
        return answers, {path.rpartition("/")[2] for path in self._client.asked} - {"health", "agents"}

    async def until_quiet(self) -> None:
        """Returns once nothing new is seen."""
        for _ in range(200):
            if not (await self.at())[1]:
                return
            await asyncio.sleep(0.05)
        raise AssertionError("there is always news")


def lasting(views: Collection[View]) -> list[tuple[Any, ...]]:
    return [(view.name, view.status, view.depth, view.in_flight, view.requests, view.wakes) for view in views]


async def test_what_has_no_reason_to_have_changed_is_not_asked_for(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    ann = (await box.create("ann"))["id"]
    await box.create("bob")
    look = Look(box)
    assert (await look.at())[1] == {"inference", "memory", "gpus", "pool", "stats", "events"}
    await look.until_quiet()

    async def seen_within_s(kind: set[str]) -> Answers:
        """The first look that asks for more; it asks for exactly that."""
        for _ in range(200):
            answers, asked = await look.at()
            if asked:
                assert asked == kind
                return answers
            await asyncio.sleep(0.05)
        raise AssertionError("nothing was asked for")

    monkeypatch.setattr(watch_module, "SELDOM_S", 1000.0)
    await box.pause(ann, timeout_s=10, now=False, deep=False, actor="uid:0")
    answers = await seen_within_s({"stats", "events"})
    assert answers.events[-1]["kind"] == "agent.paused"
    await look.until_quiet()
    assert box.daemon is not None
    given = {"id": "p-1", "epoch": "p", "event_no": 1, "tenant": "default", "model": "m", "backend": "demo"}
    box.daemon._counters.add([UsageEvent(**given, endpoint="/v1", agent_id=ann, tokens_out=7)])  # type: ignore[arg-type]
    answers = await seen_within_s({"stats"})
    assert answers.stats["tokens_out"] == 7
    await look.until_quiet()
    box.daemon.effects.backend = BackendInfo(kind=BackendKind.VLLM, address="127.0.0.1:1", label="vLLM")
    answers = await seen_within_s({"inference"})
    assert answers.inference["label"] == "vLLM"
    await look.until_quiet()
    monkeypatch.setattr(watch_module, "SELDOM_S", 0.0)
    assert (await look.at())[1] == {"inference", "memory", "gpus", "pool", "stats", "events"}


@pytest.mark.parametrize(
    ("path", "answer"), [(watch_module.GPUS, {"gpus": [{}]}), (watch_module.POOL, {"enabled": True})]
)
async def test_what_moves_by_itself_is_asked_at_each_look_where_there_is_some(
    box: Box, monkeypatch: pytest.MonkeyPatch, path: str, answer: dict[str, Any]
) -> None:
    look = Look(box)
    await look.at()
    look.watch._kept[path] = (answer, look.watch._kept[path][1])
    asked: list[str] = []
    monkeypatch.setattr(look.watch, "_newer", lambda path: asked.append(path) or answer)  # type: ignore[func-returns-value]
    for _ in range(3):
        await look.at()
    assert asked == [path] * 3


async def test_who_asks_for_little_sees_what_who_asks_for_all_sees(box: Box) -> None:
    names = ["cid", "ann", "bob"]
    ids = {name: (await box.create(name))["id"] for name in names}
    little, all_of_it = Look(box), Look(box)
    await little.at()

    async def is_the_same() -> list[View]:
        for _ in range(200):
            seen = (await little.at())[0].agents
            if lasting(seen) == lasting(whole := (await all_of_it.at(None))[0].agents):
                return [*whole]
            await asyncio.sleep(0.05)
        raise AssertionError(f"{lasting(seen)} is not {lasting(whole)}")

    assert [view.name for view in await is_the_same()] == sorted(names)
    await box.pause(ids["ann"], timeout_s=10, now=False, deep=False, actor="uid:0")
    assert [view.status for view in await is_the_same()] == ["paused", "running", "running"]
    await box.services.agents.remove(ids["ann"], "uid:0")
    await box.create("aaa")
    assert [view.name for view in await is_the_same()] == ["aaa", "bob", "cid"]
    await box.stop_daemon()
    await box.start_daemon()
    await until(lambda: box.services.health.view()["helper"]["connected"])
    assert [view.name for view in await is_the_same()] == ["aaa", "bob", "cid"]


async def test_who_is_on_the_screen_is_shown_as_it_is_now(box: Box) -> None:
    await box.stop_daemon()
    await box.start_daemon(Settings(inference=InferenceSection(enabled="false"), agents=AWAKE.agents))
    ann = (await box.create("ann", idle_s=1000.0))["id"]
    look = Look(box)
    await look.until_quiet()
    first = (await look.at([ann, "gone"]))[0].agents[0]
    for _ in range(100):
        await asyncio.sleep(0.1)
        if (await look.at([ann]))[0].agents[0].brief != first.brief:
            break
    else:
        raise AssertionError(f"it says {first.brief} for ever")
    assert (first.held_bytes or 0) > 0
