"""Responses that agents had kept, in a real daemon: told over a real link, bound, and gone with their agent."""

from __future__ import annotations

import asyncio
import json

import msgspec
import pytest

from hive.control import kept_responses, views
from hive.errors import BadRequest, NotFound
from hive.link.message import LinkMessage
from hive.link.messages import Done
from hive.link.responses import (
    AskHistory,
    AskInputItems,
    AskResponse,
    DropResponse,
    HistoryIs,
    KeepResponse,
    ResponseIs,
)
from hive.settings.table import Settings
from hive.store import responses
from tests.control.box import AWAKE, Box
from tests.fakes.proxy_peer import ProxyPeer
from tests.waiting import until

MOST = 1_000_000


def keeping(mb: int = 1, days: int = 30) -> Settings:
    proxy = msgspec.structs.replace(AWAKE.proxy, responses_kept_mb=mb, responses_kept_days=days)
    return msgspec.structs.replace(AWAKE, proxy=proxy)


def told(agent: str, name: str, previous: str | None = None, *, text: str = "") -> KeepResponse:
    output = [{"id": f"msg_{name}", "type": "message", "role": "assistant", "content": text or f"answer {name}"}]
    asked, response = json.dumps(f"question {name}"), json.dumps({"id": name, "output": output})
    return KeepResponse(agent=agent, id=name, previous_id=previous, asked=asked.encode(), response=response.encode())


async def ask(proxy: ProxyPeer, question: LinkMessage) -> LinkMessage:
    return await proxy.client.link.ask_any(question, timeout_s=20)


async def history(proxy: ProxyPeer, agent: str, name: str) -> list[str]:
    found = await ask(proxy, AskHistory(agent=agent, previous_id=name, most_bytes=MOST))
    assert isinstance(found, HistoryIs)
    return [item["content"] for item in json.loads(found.history)]


async def created(box: Box, name: str = "bob") -> str:
    return (await box.create(name))["id"]


async def test_what_is_told_is_found_by_what_is_asked_behind_it(box: Box) -> None:
    await box.everything(keeping())
    agent, proxy = await created(box), box.proxy
    assert not box.paths.responses.exists(), "made when it is needed"
    for name, previous in (("r1", None), ("r2", "r1"), ("r3", "r2")):
        proxy.client.link.tell(told(agent, name, previous))
    assert (await history(proxy, agent, "r3"))[-2:] == ["question r3", "answer r3"]
    assert len(await history(proxy, agent, "r3")) == 6
    kept = await ask(proxy, AskResponse(agent=agent, id="r2"))
    assert isinstance(kept, ResponseIs)
    assert kept.content == told(agent, "r2").response
    page = await ask(proxy, AskInputItems(agent=agent, id="r2", limit=1, ascending=True, most_bytes=MOST))
    assert isinstance(page, ResponseIs)
    assert json.loads(page.content)["has_more"] is True
    named = await ask(proxy, AskHistory(agent=agent, previous_id="", items=["msg_r1"], most_bytes=MOST))
    assert isinstance(named, HistoryIs)
    assert (named.history, json.loads(named.items[0])["id"]) == (b"[]", "msg_r1")
    assert isinstance(await ask(proxy, DropResponse(agent=agent, id="r2")), Done)
    with pytest.raises(NotFound, match="'r2' not found"):
        await history(proxy, agent, "r3")
    with pytest.raises(BadRequest, match="no item 'x'"):
        await ask(proxy, AskInputItems(agent=agent, id="r1", limit=1, after="x", most_bytes=MOST))


async def test_an_unexpected_failure_is_answered_too(box: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else its client waits until the link gives up."""
    await box.everything(keeping())
    agent = await created(box)
    box.proxy.client.link.tell(told(agent, "r1"))

    def broken(*_: object, **__: object) -> bytes:
        raise ZeroDivisionError

    monkeypatch.setattr(responses, "get", broken)
    with pytest.raises(Exception, match="cannot be read"):
        await ask(box.proxy, AskResponse(agent=agent, id="r1"))


async def test_it_is_off_by_default_and_another_agents_is_not_found(box: Box) -> None:
    await box.everything()
    agent = await created(box)
    box.proxy.client.link.tell(told(agent, "r1"))
    for question in (
        AskResponse(agent=agent, id="r1"),
        DropResponse(agent=agent, id="r1"),
        AskHistory(agent=agent, previous_id="r1", most_bytes=MOST),
        AskHistory(agent=agent, previous_id="", items=["r1"], most_bytes=MOST),
    ):
        with pytest.raises(NotFound, match="with id 'r1' not found"):
            await ask(box.proxy, question)
    assert not box.paths.responses.exists()
    await box.services.config.change({"proxy.responses_kept_mb": 1}, "uid:0")
    other = await created(box, "carl")
    box.proxy.client.link.tell(told(agent, "r1"))
    assert await history(box.proxy, agent, "r1") == ["question r1", "answer r1"]
    with pytest.raises(NotFound, match="'r1' not found"):
        await history(box.proxy, other, "r1")
    box.proxy.client.link.tell(told("nobody", "r2"))
    with pytest.raises(NotFound):
        await history(box.proxy, "nobody", "r2")


async def test_a_removed_agents_are_gone_and_stay_so(box: Box) -> None:
    await box.everything(keeping())
    agent, other = await created(box), await created(box, "carl")
    for whose in (agent, other):
        box.proxy.client.link.tell(told(whose, "r1", text="a secret"))
    await history(box.proxy, other, "r1")
    await box.services.agents.remove("bob", "uid:0")
    files = [box.paths.responses, box.paths.responses.with_name("responses.db-wal")]
    assert b"".join(file.read_bytes() for file in files).count(b"a secret") == 1
    box.proxy.client.link.tell(told(agent, "late"))
    with pytest.raises(NotFound):
        await history(box.proxy, agent, "late")
    assert await history(box.proxy, other, "r1") == ["question r1", "a secret"]


async def test_of_an_agent_that_is_not_there_any_more_nothing_outlives_a_start(box: Box) -> None:
    """A kill between the removal of the record and the deletion leaves responses of nobody."""
    await box.everything(keeping())
    agent = await created(box)
    box.proxy.client.link.tell(told(agent, "r1"))
    await history(box.proxy, agent, "r1")
    assert box.daemon is not None
    kept = box.daemon._responses
    await kept._file.do(lambda conn: conn.execute("UPDATE responses SET agent_id = 'gone'").rowcount)
    await box.stop_daemon()
    await box.start_daemon(keeping())
    assert box.daemon is not None
    again = box.daemon._responses
    await until_async(again, "gone", 0)


async def until_async(kept: kept_responses.KeptResponses, agent: str, count: int) -> None:
    for _ in range(2000):
        if (await kept.summed(agent)).responses == count:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{await kept.summed(agent)}")


async def test_an_operator_sees_how_much_is_kept_and_deletes_it(box: Box) -> None:
    await box.everything(keeping())
    agent = await created(box)
    proxy = box.services.effects.settings.proxy
    nothing = views.kept_view(box.life(agent), await box.services.responses.summed(agent), proxy)
    assert (nothing["responses"], nothing["oldest_at"], nothing["most_bytes"]) == (0, None, 1024 * 1024)
    assert await box.services.agents.delete_responses(box.life("bob"), "uid:0") == {"deleted": 0, "name": "bob"}
    box.proxy.client.link.tell(told(agent, "r1"))
    await history(box.proxy, agent, "r1")  # the daemon has read what it was told
    seen = views.kept_view(box.life(agent), await box.services.responses.summed(agent), proxy)
    assert (seen["responses"], seen["bytes"] > 500, seen["oldest_at"] is not None) == (1, True, True)
    assert await box.services.agents.delete_responses(box.life("bob"), "uid:0") == {"deleted": 1, "name": "bob"}
    with pytest.raises(NotFound):
        await history(box.proxy, agent, "r1")


async def test_turning_it_off_deletes_and_a_lower_bound_trims(box: Box) -> None:
    await box.everything(keeping(3))
    agent = await created(box)
    for name in ("r1", "r2", "r3", "r4"):
        box.proxy.client.link.tell(told(agent, name, text="x" * 700_000))
    await history(box.proxy, agent, "r4")
    assert box.daemon is not None
    kept = box.daemon._responses
    assert (await kept.summed(agent)).responses == 4
    await box.services.config.change({"proxy.responses_kept_mb": 1}, "uid:0")
    await until_async(kept, agent, 1)
    assert len(await history(box.proxy, agent, "r4")) == 2
    await box.services.config.change({"proxy.responses_kept_mb": 0}, "uid:0")
    await until_async(kept, agent, 0)


async def test_what_is_too_old_goes(box: Box) -> None:
    await box.everything(keeping(days=1))
    agent = await created(box)
    box.proxy.client.link.tell(told(agent, "r1"))
    box.proxy.client.link.tell(told(agent, "r2"))
    await history(box.proxy, agent, "r2")
    assert box.daemon is not None
    kept = box.daemon._responses
    await kept._file.do(
        lambda conn: conn.execute("UPDATE responses SET kept_at = kept_at - 86401 WHERE id = 'r1'").rowcount
    )
    await kept.tidy()
    assert (await kept.summed(agent)).responses == 1


async def test_it_outlives_the_daemon(box: Box) -> None:
    await box.everything(keeping())
    agent = await created(box)
    box.proxy.client.link.tell(told(agent, "r1"))
    await box.stop_daemon()
    await box.start_daemon(keeping())
    assert await history(box.proxy, agent, "r1") == ["question r1", "answer r1"]


async def test_more_than_the_disk_takes_is_dropped_and_said_once(
    box: Box, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await box.everything(keeping())
    agent = await created(box)
    monkeypatch.setattr(kept_responses, "WAITING_MOST_BYTES", 100)
    for name in ("r1", "r2"):
        box.proxy.client.link.tell(told(agent, name, text="x" * 200))
    assert box.daemon is not None
    kept = box.daemon._responses
    await until(lambda: kept.dropped == 2)
    assert repr(kept) == "<KeptResponses 0 B waiting, 2 dropped>"
    assert caplog.text.count("response_not_kept") == 1
    monkeypatch.undo()
    box.proxy.client.link.tell(told(agent, "r3", text="x" * 2_000_000))  # beyond the bound of the agent
    box.proxy.client.link.tell(told(agent, "r4"))
    assert await history(box.proxy, agent, "r4") == ["question r4", "answer r4"]
    assert kept.dropped == 3
