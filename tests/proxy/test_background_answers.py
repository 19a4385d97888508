"""Responses that are made in the background, as clients ask the proxy for them: real sockets, a real link, and a
daemon's end of it whose job says what a test has it say."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.dialects.openai_responses_background import ENDS, named
from hive.domain import BackendKind
from hive.errors import NotFound
from hive.jobs.order import JobEvent
from hive.lifecycle.background_events import EventCursor
from hive.link.background import (
    AskBackground,
    AskBackgroundEvents,
    AskBeginBackground,
    BackgroundIs,
    CancelBackground,
    DropBackground,
)
from hive.link.link import LinkReply, failed
from hive.link.message import LinkMessage
from hive.link.messages import Done, Failed
from hive.proxy import background_answers, background_responses
from hive.proxy.slot_orders import SlotOrders
from hive.settings.tasks import TaskRow
from hive.tasks import spawn
from tests.proxy.harness import Backend, Client, Proxy, get, post
from tests.proxy.keeping import Daemon, keeping
from tests.proxy.test_leaving import row, set_cloud
from tests.waiting import until

JOB = "0123456789ab"
NAME = f"resp_{JOB}"
ASKED = {"model": "m", "input": "hello", "background": True}


class Jobs:
    """The daemon's one job. `heard`: what the proxy has asked."""

    def __init__(self) -> None:
        self.heard: list[LinkMessage] = []
        self.queued: dict[str, Any] = {"id": NAME, "status": "queued"}
        self._events: list[JobEvent] = []
        self._more = asyncio.Event()
        self._cursors: dict[int, EventCursor] = {}
        self.is_gone = False

    def say(self, kind: str, **fields: Any) -> None:
        data = {"type": kind, **fields, "sequence_number": len(self._events) + 2}
        self._add("response", data)
        if kind in ENDS:
            self.end(kind.removeprefix("response."))

    def end(self, status: str, **fields: Any) -> None:
        self._add("ended", {"status": status, **fields})

    def _add(self, event: str, data: dict[str, Any]) -> None:
        self._events.append(JobEvent(len(self._events) + 1, 0.0, event, data))
        self._more.set()

    async def _follow(self) -> AsyncIterator[JobEvent]:
        at = 0
        while True:
            while at < len(self._events):
                at += 1
                yield self._events[at - 1]
                if self._events[at - 1].event == "ended":
                    return
            self._more.clear()
            await self._more.wait()

    def hear(self, message: LinkMessage, reply: LinkReply) -> None:
        self.heard.append(message)
        spawn(self._answer(message, reply), name="answer")

    async def _answer(self, message: LinkMessage, reply: LinkReply) -> None:
        if self.is_gone:
            reply(failed(NotFound(f"Response with id '{NAME}' not found.")))
            return
        match message:
            case AskBeginBackground(response=response):
                self.queued = named({**json.loads(response), "created_at": 7}, JOB)
                reply(self._is("queued"))
            case AskBackground():
                reply(self._is("in_progress"))
            case CancelBackground():
                self.end("cancelled")
                reply(self._is("cancelled"))
            case DropBackground():
                self.is_gone = True
                reply(Done())
            case AskBackgroundEvents():
                cursor = self._cursors.pop(message.after, None)
                cursor = cursor or EventCursor(self.queued, self._follow(), message.after)
                batch = await cursor.read(message.most_bytes, message.wait_s)
                if not batch.is_over:
                    self._cursors[batch.last] = cursor
                reply(batch)

    def _is(self, status: str) -> BackgroundIs:
        return BackgroundIs(id=NAME, content=json.dumps({**self.queued, "status": status}).encode())


@contextlib.asynccontextmanager
async def working(tmp_path: Path, **settings: Any) -> AsyncIterator[tuple[Proxy, Daemon, Jobs]]:
    async with keeping(tmp_path, **settings) as (proxy, daemon):
        jobs = Jobs()
        daemon.hear_background = jobs.hear
        yield proxy, daemon, jobs


class Stream:
    """A stream of events that a client reads."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.events: list[dict[str, Any]] = []
        self.comments = 0
        self._text = b""

    @classmethod
    async def begin(cls, proxy: Proxy, request: bytes) -> Stream:
        client = await Client.unix(proxy.socket_path)
        client.writer.write(request)
        head = await client.reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200"), head
        assert b"content-type: text/event-stream" in head
        return cls(client)

    async def next(self) -> dict[str, Any] | None:
        """The next event; None at the end of a whole answer. Raises IncompleteReadError for one that is cut."""
        while b"\n\n" not in self._text:
            size = int(await self.client.reader.readline() or b"x", 16)
            data = await self.client.reader.readexactly(size + 2)
            if not size:
                return None
            self._text += data[:-2]
        one, _, self._text = self._text.partition(b"\n\n")
        if one.startswith(b":"):
            self.comments += 1
            return await self.next()
        event: dict[str, Any] = json.loads(one.partition(b"data: ")[2])
        self.events.append(event)
        return event

    async def types(self) -> list[str]:
        """The kinds of all events that are left."""
        found = []
        while (event := await self.next()) is not None:
            found.append(event["type"])
        return found


def asks(fields: bytes = b"", **more: Any) -> bytes:
    return post(b"/v1/responses", json.dumps({**ASKED, **more}).encode(), fields=fields)


def streams(after: int | None = None) -> bytes:
    return get(f"/v1/responses/{NAME}?stream=true{'' if after is None else f'&starting_after={after}'}".encode())


async def ask(proxy: Proxy, request: bytes, path: Path | None = None) -> tuple[int, Any]:
    client = await Client.unix(path or proxy.socket_path)
    status, _, body = await client.ask(request)
    client.close()
    return status, json.loads(body)


async def test_it_is_begun_with_the_body_as_it_came_and_nothing_is_asked_of_the_server(tmp_path: Path) -> None:
    async with working(tmp_path) as (proxy, daemon, jobs):
        status, told = await ask(proxy, asks(metadata={"a": "b"}))
        assert (status, told["id"], told["status"], told["background"], told["store"]) == (
            200,
            NAME,
            "queued",
            True,
            True,
        )
        assert told["metadata"] == {"a": "b"}
        [begun] = jobs.heard
        assert isinstance(begun, AskBeginBackground)
        assert (begun.agent, begun.model) == ("a1", "m")
        assert json.loads(begun.request) == {**ASKED, "metadata": {"a": "b"}}
        assert daemon.backend is not None
        assert daemon.backend.requests == []
        assert proxy.events == []
        assert proxy.alice.gate.in_flight == 0


@pytest.mark.parametrize(
    ("more", "status", "match"),
    [
        ({"store": False}, 400, "has to be stored"),
        ({"background": {"job": JOB, "created_at": 1}}, 400, "true or false"),
        ({"background": "yes"}, 400, "true or false"),
        ({"model": "nosuch"}, 404, "nosuch"),
        ({"tools": [{"type": "web_search"}]}, 501, "nothing leaves this box"),
        ({"previous_response_id": "resp_0"}, 400, "Previous response"),
    ],
)
async def test_what_can_come_to_nothing_begins_nothing(
    more: dict[str, Any], status: int, match: str, tmp_path: Path
) -> None:
    async with working(tmp_path) as (proxy, _, jobs):
        found, told = await ask(proxy, asks(**more))
        assert (found, match in told["error"]["message"]) == (status, True), told
        assert jobs.heard == []


async def test_with_nothing_kept_it_is_refused_with_the_settings_name(tmp_path: Path) -> None:
    async with working(tmp_path) as (proxy, _, jobs):
        proxy.path.stored = None
        status, told = await ask(proxy, asks())
        assert (status, "proxy.responses_kept_mb" in told["error"]["message"]) == (501, True)
        assert jobs.heard == []


@contextlib.contextmanager
def far_away(proxy: Proxy, daemon: Daemon, monkeypatch: pytest.MonkeyPatch) -> Iterator[Backend]:
    """Puts `sonnet` beside the active backend, on the same server under an address that is far."""
    server = daemon.backend
    assert server is not None
    monkeypatch.setattr("hive.routing.slot.is_elsewhere", lambda at: at == server.address)
    proxy.path.use_backend(None, [])
    SlotOrders(proxy.path, lambda _: None).heard([row("sonnet", server, BackendKind.REMOTE)])
    set_cloud(proxy, "asked", aliases="fast = gone | sonnet")
    yield server


async def test_local_only_goes_with_it_and_is_checked_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    local = b"x-hive-local-only: 1\r\n"
    async with working(tmp_path) as (proxy, daemon, jobs):
        for fields, is_local_only in ((local, True), (b"x-hive-local-only: 0\r\n", False), (b"", False)):
            assert (await ask(proxy, asks(fields=fields)))[0] == 200
            begun = jobs.heard[-1]
            assert isinstance(begun, AskBeginBackground)
            assert begun.is_local_only is is_local_only
        with far_away(proxy, daemon, monkeypatch) as server:
            jobs.heard.clear()
            for request in (asks(model="sonnet", fields=local), asks(model="fast")):
                status, told = await ask(proxy, request)
                assert (status, told["error"]["code"]) == (403, "cloud_not_permitted"), told
            assert jobs.heard == []
            assert (await ask(proxy, asks(model="sonnet")))[0] == 200
            assert len(jobs.heard) == 1
            assert server.requests == []


async def test_of_one_agent_one_poll_at_a_time_reaches_the_daemon(tmp_path: Path) -> None:
    """Each may be answered with 16 MiB."""
    async with working(tmp_path) as (proxy, daemon, jobs):
        replies: list[LinkReply] = []

        def hold(_: LinkMessage, reply: LinkReply) -> None:
            replies.append(reply)

        def has(number: int) -> bool:
            return len(replies) == number

        daemon.hear_background = hold
        polls = [spawn(ask(proxy, get(f"/v1/responses/{NAME}".encode())), name="poll") for _ in range(4)]
        for number in range(1, 5):
            await until(partial(has, number))
            await asyncio.sleep(0.02)
            assert len(replies) == number
            replies[-1](jobs._is("in_progress"))
        assert {status for status, _ in await asyncio.gather(*polls)} == {200}


async def test_it_is_polled_cancelled_and_deleted(tmp_path: Path) -> None:
    async with working(tmp_path) as (proxy, _, jobs):
        await ask(proxy, asks())
        assert (await ask(proxy, get(f"/v1/responses/{NAME}".encode())))[1]["status"] == "in_progress"
        assert (await ask(proxy, post(f"/v1/responses/{NAME}/cancel".encode(), b"")))[1]["status"] == "cancelled"
        status, told = await ask(proxy, get(f"/v1/responses/{NAME}".encode(), method=b"DELETE"))
        assert (status, told) == (200, {"id": NAME, "object": "response", "deleted": True})
        status, told = await ask(proxy, streams())
        assert (status, told["error"]["message"]) == (404, f"Response with id '{NAME}' not found.")
        assert isinstance(jobs.heard[-1], AskBackgroundEvents)


async def test_a_stream_begins_before_the_model_says_anything(tmp_path: Path) -> None:
    async with working(tmp_path) as (proxy, _, jobs):
        stream = await Stream.begin(proxy, asks(stream=True))
        assert [(await stream.next() or {})["type"] for _ in range(2)] == ["response.created", "response.queued"]
        assert stream.events[0]["response"]["id"] == NAME
        jobs.say("response.in_progress", response={"status": "in_progress"})
        assert (await stream.next() or {})["response"]["status"] == "in_progress"
        assert proxy.alice.gate.in_flight == 1
        jobs.say("response.completed", response={"status": "completed"})
        assert await stream.types() == ["response.completed"]
        await until(lambda: proxy.alice.gate.in_flight == 0)
        status, _, body = await stream.client.ask(get(f"/v1/responses/{NAME}".encode()))
        assert (status, json.loads(body)["id"]) == (200, NAME), "and its connection goes on"


async def test_it_goes_on_from_any_number(tmp_path: Path) -> None:
    async with working(tmp_path) as (proxy, _, jobs):
        for number in range(3):
            jobs.say("response.output_text.delta", delta=str(number), output_index=0, content_index=0)
        jobs.say("response.completed", response={"status": "completed"})
        for after in (None, 0, 1, 3, 5, 6, 999999):
            stream = await Stream.begin(proxy, streams(after))
            await stream.types()
            first = 0 if after is None else after + 1
            assert [event["sequence_number"] for event in stream.events] == list(range(first, 6))


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "9" * 13])
async def test_a_place_that_is_none_is_refused(after: str, tmp_path: Path) -> None:
    async with working(tmp_path) as (proxy, _, _jobs):
        found, told = await ask(proxy, get(f"/v1/responses/{NAME}?stream=true&starting_after={after}".encode()))
        assert (found, "starting_after" in told["error"]["message"]) == (400, True)


@pytest.mark.parametrize("status", ["failed", "cancelled"])
async def test_a_job_that_records_no_end_has_one_all_the_same(status: str, tmp_path: Path) -> None:
    async with working(tmp_path) as (proxy, _, jobs):
        item = {"id": "msg_1", "type": "message", "status": "in_progress", "content": []}
        jobs.say("response.output_item.added", output_index=0, item=item)
        jobs.say("response.output_text.delta", output_index=0, content_index=0, delta="Hel")
        jobs.end(status, reason="worker_restarted", detail="it is gone")
        stream = await Stream.begin(proxy, streams())
        await stream.types()
        last = stream.events[-1]
        assert (last["type"], last["sequence_number"], last["response"]["status"]) == ("response.failed", 4, status)
        assert last["response"]["output"][0]["content"][0]["text"] == "Hel"
        if status == "failed":
            assert last["response"]["error"]["message"] == "worker_restarted: it is gone"


async def test_a_stream_outlives_a_daemon_that_is_away_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_responses, "AGAIN_S", 0.01)
    async with working(tmp_path) as (proxy, daemon, jobs):
        stream = await Stream.begin(proxy, streams())
        await stream.next()
        daemon.stop()
        await until(lambda: not daemon.client.connected)
        jobs.say("response.completed", response={"status": "completed"})
        daemon.start()
        await until(lambda: daemon.client.connected)
        assert await stream.types() == ["response.queued", "response.completed"]


async def test_a_daemon_that_does_not_come_back_cuts_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_responses, "AGAIN_S", 0.01)
    monkeypatch.setattr(background_responses, "AWAY_S", 0.05)
    async with working(tmp_path) as (proxy, daemon, _):
        stream = await Stream.begin(proxy, streams())
        await stream.next()
        daemon.stop()
        with pytest.raises((asyncio.IncompleteReadError, ValueError)):
            await stream.types()
        last = stream.events[-1]
        assert (last["type"], last["sequence_number"], "away" in last["message"]) == ("error", 2, True)
        await until(lambda: proxy.alice.gate.in_flight == 0)


async def test_one_that_is_deleted_meanwhile_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_responses, "WAIT_S", 0.02)
    async with working(tmp_path) as (proxy, _, jobs):
        stream = await Stream.begin(proxy, streams())
        await stream.next()
        jobs.is_gone = True
        with pytest.raises((asyncio.IncompleteReadError, ValueError)):
            await stream.types()
        assert "not found" in stream.events[-1]["message"]


async def test_a_client_that_leaves_leaves_nothing(tmp_path: Path) -> None:
    async with working(tmp_path) as (proxy, _, jobs):
        stream = await Stream.begin(proxy, asks(stream=True))
        await stream.next()
        stream.client.close()
        await until(lambda: proxy.alice.gate.in_flight == 0)
        jobs.say("response.completed", response={"status": "completed"})
        assert (await ask(proxy, get(f"/v1/responses/{NAME}".encode())))[0] == 200


async def test_a_client_that_does_not_read_holds_one_batch_and_is_cut(tmp_path: Path) -> None:
    async with working(tmp_path, between_bytes_s=0.5) as (proxy, _, jobs):
        for _ in range(64):
            jobs.say("response.output_text.delta", delta="x" * 100_000, output_index=0, content_index=0)
        deaf = await Client.unix(proxy.socket_path)
        deaf.writer.write(streams())
        await until(lambda: any(connection.unsent_bytes for connection in proxy.alice.connections))
        await until(lambda: proxy.alice.gate.in_flight == 0)
        asked = [message for message in jobs.heard if isinstance(message, AskBackgroundEvents)]
        assert len(asked) < 16, "the daemon was not asked for what nobody reads"
        deaf.close()


async def test_a_client_that_reads_slowly_gets_all_of_it(tmp_path: Path) -> None:
    async with working(tmp_path) as (proxy, _, jobs):
        for _ in range(40):
            jobs.say("response.output_text.delta", delta="x" * 50_000, output_index=0, content_index=0)
        jobs.say("response.completed", response={"status": "completed"})
        stream = await Stream.begin(proxy, streams())
        await until(lambda: any(connection.unsent_bytes for connection in proxy.alice.connections))
        assert len(await stream.types()) == 43


async def test_an_old_client_has_it_to_the_end_of_the_connection(tmp_path: Path) -> None:
    """HTTP/1.0 knows no chunks."""
    async with working(tmp_path) as (proxy, _, jobs):
        jobs.say("response.completed", response={"status": "completed"})
        client = await Client.unix(proxy.socket_path)
        client.writer.write(streams().replace(b"HTTP/1.1", b"HTTP/1.0"))
        said = await client.reader.read()
        assert b"transfer-encoding" not in said
        assert said.count(b"event: response.") == 3


async def test_signs_of_life_come_to_who_wants_them(tmp_path: Path) -> None:
    async with working(tmp_path, heartbeat_s=1.0) as (proxy, _, jobs):
        stream = await Stream.begin(proxy, streams())
        rest = spawn(stream.types(), name="reads")
        await until(lambda: stream.comments > 0)
        jobs.say("response.completed", response={"status": "completed"})
        assert await rest == ["response.created", "response.queued", "response.completed"]


async def test_a_proxy_that_leaves_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_responses, "WAIT_S", 0.02)
    async with working(tmp_path) as (proxy, _, _jobs):
        stream = await Stream.begin(proxy, streams())
        await stream.next()
        proxy.path.draining = True
        with pytest.raises((asyncio.IncompleteReadError, ValueError)):
            await stream.types()
        assert "starts anew" in stream.events[-1]["message"]


async def test_each_question_is_charged_and_the_jobs_own_request_is_not(tmp_path: Path) -> None:
    async with working(tmp_path, window_requests=2) as (proxy, _, _jobs):
        assert [(await ask(proxy, asks()))[0] for _ in range(3)] == [200, 200, 429]


async def test_what_a_daemon_refuses_is_told_in_its_words(tmp_path: Path) -> None:
    async with working(tmp_path) as (proxy, daemon, _):
        daemon.instead = Failed(code="rate_limit_exceeded", message="32 of them are under way")
        assert (await ask(proxy, asks()))[0] == 429
        daemon.instead = Failed(code="store_full", message="/var/lib/hive is full")
        status, told = await ask(proxy, asks())
        assert (status, "/var" in json.dumps(told)) == (503, False)


async def test_a_task_is_the_job_s_own_to_go_down(tmp_path: Path) -> None:
    """A refusal of the daemon is no reason to try the next model."""
    async with working(tmp_path) as (proxy, daemon, jobs):
        tasks = {"plan": TaskRow(models="m|meta/llama-3 x")}
        proxy.path.use_settings(msgspec.structs.replace(proxy.path.settings, tasks=tasks))
        status, told = await ask(proxy, asks(model="task:plan"))
        assert (status, told["model"]) == (200, "task:plan")
        [begun] = jobs.heard
        assert isinstance(begun, AskBeginBackground)
        assert json.loads(begun.request)["model"] == "task:plan"
        daemon.instead = Failed(code="saturated", message="too much waits")
        assert (await ask(proxy, asks(model="task:plan")))[0] == 503
        assert sum(isinstance(message, AskBeginBackground) for message in daemon.heard) == 2


async def test_a_request_that_is_too_long_does_not_reach_the_daemon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background_answers, "REQUEST_MOST_BYTES", 1000)
    async with working(tmp_path) as (proxy, daemon, _):
        status, told = await ask(proxy, asks(input="x" * 1000))
        assert (status, "at most 1000 bytes" in told["error"]["message"]) == (400, True)
        monkeypatch.setattr(background_responses, "UNSENT_MOST_BYTES", 10)
        status, told = await ask(proxy, asks())
        assert (status, "reads too slowly" in told["error"]["message"]) == (503, True)
        assert daemon.heard == []
