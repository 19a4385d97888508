"""Messages, with a real daemon, helper and proxy, and a real agent with an inbox."""

from __future__ import annotations

import asyncio
import contextlib
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from hive.control import message_delivery
from hive.control.message_delivery import AttemptFate, judge
from hive.domain import AgentSpec
from hive.errors import BadRequest, NotFound, Saturated
from hive.settings.table import Settings
from hive.store import messages
from tests.control.box import AWAKE, SLEEPER, SLEEPY, Box, Caller, daemon_process
from tests.examples import stride
from tests.ports import free_port
from tests.waiting import until

AGENT = ["/usr/bin/python3", str(Path(__file__).with_name("inbox_agent.py"))]


class Reader:
    """The agent `bob` of the box, and what has arrived in its inbox."""

    def __init__(self, box: Box, agent: str) -> None:
        self.id = agent
        self.home = box.paths.home(agent)

    def lines(self) -> list[dict[str, Any]]:
        path = self.home / "inbox.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def texts(self) -> list[str]:
        return [line["message"]["text"] for line in self.lines()]

    def answers(self, status: int) -> None:
        (self.home / "status").write_text(str(status))


async def everything(box: Box, settings: Settings = AWAKE) -> Reader:
    """A whole box with a real proxy, and an agent that listens."""
    await box.start_helper()
    await box.start_daemon(settings)
    await box.start_real_proxy()
    view = await box.create(command=AGENT, port=free_port())
    return Reader(box, view["id"])


async def state_of(box: Box, message: str) -> str:
    return str((await box.message("bob", message, wait_s=20))["state"])


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attempts follow each other quickly."""
    monkeypatch.setattr(message_delivery, "FIRST_RETRY_S", 0.01)


async def test_a_message_wakes_a_sleeper_and_is_posted_to_its_inbox(box: Box) -> None:
    bob = await everything(box)
    assert await state_of(box, (await box.send("bob", "first", "uid:0"))["id"]) == "delivered"
    await box.pause("bob", timeout_s=5, now=False, actor="uid:0")
    sent = await box.send("bob", "ünd jetzt\n", "uid:7")
    assert (sent["state"], sent["text"], sent["from"]) == ("waiting", "ünd jetzt\n", "uid:7")
    found = await box.message("bob", sent["id"], wait_s=20)
    assert (found["state"], found["attempts"], found["text"]) == ("delivered", 1, "")
    _, line = bob.lines()
    assert line["message"] == {key: sent[key] for key in ("id", "text", "from", "sent_at")}
    assert (line["path"], line["key"], line["type"]) == ("/inbox", sent["id"], "application/json")
    assert line["token"] is None, "its own key is no business of the agent's"
    view = await box.view("bob")
    assert (view["last_wake_cause"], view["messages_waiting"]) == ("message", 0)
    assert (await box.messages("bob"))["messages"] == []


async def test_the_path_is_the_one_of_the_spec_and_can_be_changed(box: Box) -> None:
    bob = await everything(box)
    port = (await box.view("bob"))["port"]
    await box.services.agents.apply(AgentSpec(name="bob", command=AGENT, port=port, inbox="/x/y?z=%20"), "uid:0")
    assert await state_of(box, (await box.send("bob", "hi", "uid:0"))["id"]) == "delivered"
    assert bob.lines()[0]["path"] == "/x/y?z=%20"


async def test_messages_arrive_in_order_also_when_the_first_has_to_wait(box: Box, soon: None) -> None:
    bob = await everything(box)
    bob.answers(503)
    sent = [(await box.send("bob", f"{number}", "uid:0"))["id"] for number in range(5)]
    await until(lambda: len(bob.lines()) >= 3)
    waiting = await box.messages("bob")
    assert [message["id"] for message in waiting["messages"]] == sent
    assert waiting["messages"][0]["last_error"] == "its inbox answered 503: not this one"
    assert waiting["why"] == "its inbox answered 503: not this one"
    assert (await box.view("bob"))["messages_waiting"] == 5
    bob.answers(200)
    assert await state_of(box, sent[-1]) == "delivered"
    accepted = [line["message"]["text"] for line in bob.lines() if line["status"] == 200]
    assert accepted == ["0", "1", "2", "3", "4"]
    assert {line["message"]["text"] for line in bob.lines() if line["status"] == 503} == {"0"}


@pytest.mark.parametrize("status", [404, 302])
async def test_what_the_agent_refuses_is_shown_and_holds_up_nothing(box: Box, soon: None, status: int) -> None:
    bob = await everything(box)
    bob.answers(status)
    first = (await box.send("bob", "spam", "uid:0"))["id"]
    assert await state_of(box, first) == "refused"
    assert bob.texts() == ["spam"] * message_delivery.REFUSALS_MAX
    bob.answers(204)
    second = (await box.send("bob", "ham", "uid:0"))["id"]
    assert await state_of(box, second) == "delivered"
    (kept,) = (await box.messages("bob"))["messages"]
    assert (kept["id"], kept["text"], kept["state"]) == (first, "spam", "refused")
    assert kept["last_error"] == f"its inbox answered {status}: not this one"
    assert (await box.view("bob"))["messages_waiting"] == 0
    kinds = [event["kind"] for event in await box.services.audit_log.past(100) if event["kind"].startswith("message.")]
    assert kinds == ["message.sent", "message.refused", "message.sent", "message.delivered"]
    assert "spam" not in repr(await box.services.audit_log.past(100)), "what it says is no event"


@pytest.mark.parametrize("status", [408, 425, 429, 500])
async def test_later_is_no_refusal(box: Box, soon: None, status: int) -> None:
    bob = await everything(box)
    bob.answers(status)
    sent = (await box.send("bob", "hi", "uid:0"))["id"]
    await until(lambda: len(bob.lines()) > message_delivery.REFUSALS_MAX)
    bob.answers(204)
    assert await state_of(box, sent) == "delivered"


async def test_a_stopped_agent_is_not_started_and_gets_it_when_it_is(box: Box) -> None:
    bob = await everything(box)
    await box.stop("bob", "uid:0")
    sent = await box.send("bob", "hi", "uid:0")
    assert sent["status"] == "stopped"
    assert (await box.message("bob", sent["id"], wait_s=0))["state"] == "waiting"
    for _ in range(50):
        await asyncio.sleep(0.01)
        assert (await box.view("bob"))["status"] == "stopped"
    assert (await box.messages("bob"))["why"] == "bob is stopped"
    await box.start("bob", "uid:0")
    assert await state_of(box, sent["id"]) == "delivered"
    assert bob.texts() == ["hi"]


async def test_a_program_that_was_started_anew_is_tried_at_once_however_long_the_delay(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(message_delivery, "FIRST_RETRY_S", 3600.0)
    bob = await everything(box)
    bob.answers(500)
    sent = (await box.send("bob", "hi", "uid:0"))["id"]
    await until(lambda: len(bob.lines()) == 1)
    bob.answers(204)
    await asyncio.sleep(0.1)
    assert (await box.message("bob", sent, wait_s=0))["state"] == "waiting"
    await box.restart("bob", "uid:0")
    assert await state_of(box, sent) == "delivered"


async def test_an_agent_without_a_port_and_a_text_that_is_none_are_refused_at_once(box: Box) -> None:
    await box.start_helper()
    await box.start_daemon()
    await box.start_proxy()
    await box.create()
    with pytest.raises(BadRequest, match="bob has no port; messages are posted to the inbox"):
        await box.send("bob", "hi", "uid:0")
    await box.create("eve", command=SLEEPER, port=free_port())
    with pytest.raises(BadRequest, match="text: empty"):
        await box.send("eve", "", "uid:0")
    with pytest.raises(NotFound, match="no agent 'mallory'"):
        await box.send("mallory", "hi", "uid:0")


async def test_there_is_an_end_to_what_is_kept(box: Box) -> None:
    bob = await everything(box)
    await box.stop("bob", "uid:0")
    for number in range(messages.UNDELIVERED_MAX):
        await box.send("bob", f"{number}", "uid:0")
    with pytest.raises(Saturated, match="100 messages for bob are not delivered yet"):
        await box.send("bob", "one more", "uid:0")
    first = (await box.messages("bob"))["messages"][0]["id"]
    assert (await box.services.message_delivery.drop(box.life("bob"), first, "uid:0")).id == first
    last = (await box.send("bob", "one more", "uid:0"))["id"]
    await box.start("bob", "uid:0")
    assert await state_of(box, last) == "delivered"
    assert bob.texts() == [*(f"{number}" for number in range(1, messages.UNDELIVERED_MAX)), "one more"]


async def test_a_dropped_message_is_gone_and_the_next_one_goes_on(box: Box, soon: None) -> None:
    bob = await everything(box)
    bob.answers(500)
    first, second = [(await box.send("bob", text, "uid:0"))["id"] for text in ("a", "b")]
    await until(lambda: bob.texts())
    await box.services.message_delivery.drop(box.life("bob"), first, "uid:0")
    bob.answers(204)
    assert await state_of(box, second) == "delivered"
    with pytest.raises(NotFound, match="there is no message"):
        await box.message("bob", first, wait_s=0)
    with pytest.raises(NotFound, match="was delivered already"):
        await box.services.message_delivery.drop(box.life("bob"), second, "uid:0")


async def test_who_waits_for_a_message_learns_that_its_agent_was_removed(box: Box) -> None:
    bob = await everything(box)
    (bob.home / "hold").touch()
    sent = (await box.send("bob", "hi", "uid:0"))["id"]
    waiting = asyncio.ensure_future(box.message("bob", sent, wait_s=60))
    await until(lambda: bob.lines())
    await box.services.agents.remove("bob", "uid:0")
    with pytest.raises(NotFound):
        await waiting
    assert box.daemon is not None
    delivery = box.daemon._message_delivery
    await until(lambda: repr(delivery) == "<MessageDelivery 0 agents with messages>")


async def test_waiting_ends_in_time(box: Box) -> None:
    bob = await everything(box)
    (bob.home / "hold").touch()
    sent = (await box.send("bob", "hi", "uid:0"))["id"]
    assert (await box.message("bob", sent, wait_s=0.2))["state"] == "waiting"
    (bob.home / "hold").unlink()
    assert await state_of(box, sent) == "delivered"


async def test_an_agent_that_reads_its_message_is_not_put_to_sleep(box: Box) -> None:
    bob = await everything(box, SLEEPY)
    (bob.home / "hold").touch()
    sent = (await box.send("bob", "hi", "uid:0"))["id"]
    await until(lambda: bob.lines())
    await asyncio.sleep(5 * SLEEPY.inference.auto_sleep_idle_seconds)
    view = await box.view("bob")
    assert (view["ingress_open"], view["why"]) == (1, "awake: 1 ingress request open")
    (bob.home / "hold").unlink()
    assert await state_of(box, sent) == "delivered"


async def test_what_was_accepted_while_nothing_can_be_recorded_is_not_posted_again(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A database that takes no writes stands for the disk that is full."""
    monkeypatch.setattr(message_delivery, "RECORD_AGAIN_S", 0.01)
    bob = await everything(box)
    assert box.daemon is not None
    writer = box.daemon._database._writer
    (bob.home / "hold").touch()
    sent = [(await box.send("bob", text, "uid:0"))["id"] for text in ("a", "b")]
    await until(lambda: bob.lines())
    writer.execute("PRAGMA query_only = ON")
    (bob.home / "hold").unlink()
    await asyncio.sleep(0.2)
    assert (await box.message("bob", sent[0], wait_s=0))["state"] == "waiting"
    writer.execute("PRAGMA query_only = OFF")
    assert await state_of(box, sent[1]) == "delivered"
    assert bob.texts() == ["a", "b"]


# Restarts -------------------------------------------------------------------------------------------------------------


async def test_a_message_outlives_the_daemon_and_the_proxy(box: Box, soon: None) -> None:
    bob = await everything(box)
    await box.kill_real_proxy()
    sent = (await box.send("bob", "hi", "uid:0"))["id"]
    await asyncio.sleep(0.1)
    assert (await box.messages("bob"))["why"] == "the proxy is not connected"
    await box.stop_daemon()
    await box.start_daemon(AWAKE)
    assert (await box.messages("bob"))["messages"][0]["id"] == sent
    await box.start_real_proxy()
    assert await state_of(box, sent) == "delivered"
    assert [line["key"] for line in bob.lines()] == [sent]


async def test_what_was_accepted_and_not_recorded_is_posted_again_with_the_same_id(box: Box) -> None:
    """kill -9 of the daemon by the agent, after it has the message and before it answers."""
    await box.start_helper()
    process = daemon_process(box)
    box.spawn_real_proxy()
    caller = Caller(box.paths.api_socket)
    await caller.until_proxy()
    view = await caller.ask("POST", "/api/agents", {"name": "bob", "command": AGENT, "port": free_port()})
    bob = Reader(box, view["id"])
    (bob.home / "kill").write_text(str(process.pid))
    with contextlib.suppress(httpx.RemoteProtocolError):  # it may be killed before its answer has left
        await caller.ask("POST", "/api/agents/bob/messages", {"text": "first"})
    await until(lambda: process.poll() is not None)
    process.communicate()
    first = bob.lines()[0]["key"]
    process = daemon_process(box)
    second = (await caller.ask("POST", "/api/agents/bob/messages", {"text": "second"}))["id"]
    found = await caller.ask("GET", f"/api/agents/bob/messages/{second}?wait_s=30", None)
    assert found["state"] == "delivered"
    assert [(line["key"], line["message"]["text"]) for line in bob.lines()] == [
        (first, "first"),
        (first, "first"),
        (second, "second"),
    ]
    await caller.ask("DELETE", "/api/agents/bob", None)
    process.terminate()
    _, complaint = await asyncio.to_thread(process.communicate)
    assert (process.returncode, "Traceback" in complaint) == (0, False), complaint


async def test_no_message_is_lost_however_often_the_daemon_is_killed(box: Box) -> None:
    """Ten messages, or five where HIVE_EXAMPLES is not `all`, kill -9 at another moment after each: every one arrives,
    in order but for repetitions."""
    moments = range(0, 10, stride(2))
    await box.start_helper()
    process = daemon_process(box)
    box.spawn_real_proxy()
    caller = Caller(box.paths.api_socket)
    await caller.until_proxy()
    view = await caller.ask("POST", "/api/agents", {"name": "bob", "command": AGENT, "port": free_port()})
    bob = Reader(box, view["id"])
    for number in moments:
        await caller.ask("POST", "/api/agents/bob/messages", {"text": str(number)})
        await asyncio.sleep(0.004 * number)
        process.kill()
        process.communicate()
        process = daemon_process(box)
    await until(lambda: str(moments[-1]) in bob.texts())
    assert sorted(set(bob.texts())) == [str(number) for number in moments]
    assert bob.texts() == sorted(bob.texts())
    assert len({line["key"] for line in bob.lines()}) == len(moments)
    await caller.ask("DELETE", "/api/agents/bob", None)
    process.terminate()
    _, complaint = await asyncio.to_thread(process.communicate)
    assert (process.returncode, "Traceback" in complaint) == (0, False), complaint


@pytest.mark.parametrize(
    ("status", "fate"),
    [
        (200, AttemptFate.ACCEPTED),
        (302, AttemptFate.REFUSED),
        (404, AttemptFate.REFUSED),
        (429, AttemptFate.LATER),
        (500, AttemptFate.LATER),
        (501, AttemptFate.REFUSED),
        (503, AttemptFate.LATER),
        (505, AttemptFate.REFUSED),
    ],
)
def test_what_an_inbox_answers_means_done_later_or_never(status: int, fate: AttemptFate) -> None:
    """Python's http.server answers 501 to any POST: its agent was woken every five minutes for ever."""
    assert judge(status, "", by_hive=False).fate is fate
