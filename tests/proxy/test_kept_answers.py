"""`/v1/responses/{id}` and what hangs on it: real sockets to the client, a real link to a real file behind it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.endpoints.endpoints import Keeps
from hive.errors import BadRequest, NotFound, PreviousNotFound, Saturated
from hive.link.messages import Failed
from hive.link.responses import KeepResponse
from hive.proxy import kept_answers, stored_responses
from tests.proxy.harness import Client, Proxy, get, post
from tests.proxy.keeping import OUTPUT, keep, keeping
from tests.waiting import until


async def ask(proxy: Proxy, target: str, method: str = "GET", *, path: Path | None = None) -> tuple[int, Any]:
    client = await Client.unix(path or proxy.socket_path)
    request = get(target.encode(), method=method.encode()) if method != "POST" else post(target.encode(), b"")
    status, fields, body = await client.ask(request)
    assert fields[b"x-request-id"]
    client.close()
    return status, json.loads(body)


async def test_what_was_kept_is_read_listed_and_deleted(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, _):
        first = keep(proxy)
        keep(proxy, "resp_2", previous="resp_1", text="and now?")
        assert await ask(proxy, "/v1/responses/resp_1") == (200, json.loads(first))
        status, page = await ask(proxy, "/v1/responses/resp_2/input_items?order=asc&limit=2&include[]=x")
        assert (status, page["object"], page["has_more"]) == (200, "list", True)
        assert [item["role"] for item in page["data"]] == ["user", "assistant"]
        _, rest = await ask(proxy, f"/v1/responses/resp_2/input_items?order=asc&after={page['last_id']}")
        assert [item["content"][0]["text"] for item in rest["data"]] == ["and now?"]
        deleted = {"id": "resp_1", "object": "response", "deleted": True}
        assert await ask(proxy, "/v1/responses/resp_1", "DELETE") == (200, deleted)
        status, told = await ask(proxy, "/v1/responses/resp_1", "DELETE")
        assert (status, told["error"]["message"]) == (404, "Response with id 'resp_1' not found.")
        status, told = await ask(proxy, "/v1/responses/resp_2/cancel", "POST")
        assert (status, told["error"]["message"].split(";")[0]) == (400, "Cannot cancel a synchronous response.")
        assert [event.endpoint for event in proxy.events] == [], "it is no request to the model"


@pytest.mark.parametrize("tail", ["", "/input_items", "/cancel"])
async def test_another_agents_is_404_in_the_words_of_one_that_never_was(tail: str, tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, _):
        keep(proxy)
        bob = proxy.another("bob")
        methods = ["POST"] if tail == "/cancel" else ["GET", "DELETE"] if not tail else ["GET"]
        for method in methods:
            his = await ask(proxy, f"/v1/responses/resp_1{tail}", method, path=bob)
            never = await ask(proxy, f"/v1/responses/resp_0{tail}", method, path=bob)
            assert his[0] == never[0] == 404
            assert his[1]["error"]["message"] == never[1]["error"]["message"].replace("resp_0", "resp_1")
        assert (await ask(proxy, "/v1/responses/resp_1"))[0] == 200


async def test_with_storage_off_the_daemon_is_not_asked(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        keep(proxy)
        settings = proxy.path.settings
        off = msgspec.structs.replace(settings.proxy, responses_kept_mb=0)
        proxy.path.use_settings(msgspec.structs.replace(settings, proxy=off))
        status, told = await ask(proxy, "/v1/responses/resp_1")
        assert (status, "proxy.responses_kept_mb" in told["error"]["message"]) == (404, True)
        assert len(daemon.heard) <= 1


@pytest.mark.parametrize(
    ("target", "method", "status"),
    [
        ("/v1/responses/..%2f", "GET", 404),
        ("/v1/responses/" + "x" * 129, "GET", 404),
        ("/v1/responses/resp_1", "PUT", 405),
        ("/v1/responses/resp_1/input_items", "DELETE", 405),
        ("/v1/responses/resp_1/cancel", "GET", 405),
        ("/v1/responses/resp_1/", "GET", 403),
        ("/v1/responses/resp_1/x", "GET", 403),
        ("/v1/responses/resp_1/input_items/x", "GET", 403),
        ("/v1/responses//input_items", "GET", 403),
        ("/v1/responses/", "GET", 403),
        ("/v1/responses/resp_1?stream=true", "GET", 400),
        ("/v1/responses/resp_1/input_items?limit=101", "GET", 400),
        ("/v1/responses/resp_1/input_items?limit=0", "GET", 400),
        ("/v1/responses/resp_1/input_items?order=up", "GET", 400),
        ("/v1/responses/resp_1/input_items?after=x", "GET", 400),
        ("/v1/responses/resp_1?" + "&".join(f"a{n}=1" for n in range(99)), "GET", 400),
        ("/v1/responses/resp_1?include[]=x&starting_after=3", "GET", 200),
    ],
)
async def test_only_what_is_asked_rightly_is_answered(target: str, method: str, status: int, tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, _):
        keep(proxy)
        found, told = await ask(proxy, target, method)
        assert (found, told.get("error", {}).get("src")) == (status, None if status == 200 else "hive")


async def test_it_is_charged_as_a_request_and_needs_no_backend(tmp_path: Path) -> None:
    async with keeping(tmp_path, window_requests=2) as (proxy, _):
        keep(proxy)
        proxy.path.use_backend(None, [])
        assert [(await ask(proxy, "/v1/responses/resp_1"))[0] for _ in range(3)] == [200, 200, 429]


async def test_a_daemon_that_is_away_is_503_and_what_cannot_be_told_is_dropped(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        keep(proxy)
        assert (await ask(proxy, "/v1/responses/resp_1"))[0] == 200
        daemon.stop()
        await until(lambda: not daemon.client.connected)
        client = await Client.unix(proxy.socket_path)
        status, fields, body = await client.ask(get(b"/v1/responses/resp_1"))
        assert (status, fields[b"retry-after"]) == (503, b"1")
        assert "Hive's daemon is away" in json.loads(body)["error"]["message"]
        stored = proxy.path.stored
        assert stored is not None
        assert not stored.keep("a1", "resp_2", previous_id="", asked=b'""', response=b"{}")
        assert repr(stored) == "<StoredResponses 0 agents ask, 1 dropped>"
        assert caplog.text.count("response_not_kept agent=a1") == 1
        daemon.start()
        await until(lambda: daemon.client.connected)
        assert (await ask(proxy, "/v1/responses/resp_1"))[0] == 200


async def test_one_that_died_while_it_was_asked_is_503_too(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        daemon.go.clear()
        asking = asyncio.ensure_future(ask(proxy, "/v1/responses/resp_1"))
        await until(lambda: len(daemon.heard) == 1)
        daemon.stop()
        assert (await asking)[0] == 503


async def test_what_went_wrong_inside_names_no_file_to_an_agent(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        daemon.instead = Failed(code="not_permitted", message="/var/lib/hive/daemon/responses.db cannot be written")
        status, told = await ask(proxy, "/v1/responses/resp_1")
        assert (status, "/var" in json.dumps(told)) == (503, False)


async def test_a_client_that_leaves_while_it_is_asked_leaves_nothing(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, daemon):
        daemon.go.clear()
        client = await Client.unix(proxy.socket_path)
        asking = asyncio.ensure_future(client.ask(get(b"/v1/responses/resp_1")))
        await until(lambda: len(daemon.heard) == 1)
        client.close()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: proxy.alice.gate.in_flight == 0)
        assert repr(proxy.path.stored) == "<StoredResponses 0 agents ask, 0 dropped>"
        daemon.go.set()
        keep(proxy)
        assert (await ask(proxy, "/v1/responses/resp_1"))[0] == 200


async def test_one_agent_asks_one_thing_at_a_time_and_holds_up_no_other(tmp_path: Path) -> None:
    """Answers of a whole conversation each would else be held for as many connections as it has."""
    async with keeping(tmp_path) as (proxy, daemon):
        keep(proxy, agent="bob")
        bob = proxy.another("bob")
        await until(lambda: len(daemon.heard) == 1)
        daemon.go.clear()
        asking = [asyncio.ensure_future(ask(proxy, "/v1/responses/resp_1")) for _ in range(8)]
        await until(lambda: proxy.alice.gate.in_flight == 8 and len(daemon.heard) == 2)
        daemon.go.set()
        assert (await ask(proxy, "/v1/responses/resp_1", path=bob))[0] == 200
        assert len([message for message in daemon.heard if getattr(message, "agent", "") == "a1"]) == 1
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_what_nobody_reads_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that asks for long answers and reads none of them would fill the proxy's memory."""
    monkeypatch.setattr(kept_answers, "LONG_BYTES", 1000)
    async with keeping(tmp_path, body_budget_bytes=8_000_000, body_max_bytes=1_000_000) as (proxy, _):
        keep(proxy, text="x" * 900_000)
        deaf = [await Client.unix(proxy.socket_path) for _ in range(3)]
        for client in deaf:
            client.writer.write(get(b"/v1/responses/resp_1/input_items"))
        await until(lambda: proxy.alice.gate.in_flight == 0)
        await until(lambda: len(proxy.alice.connections) == 3)
        assert sum(connection.unsent_bytes for connection in proxy.alice.connections) <= 1_000_000
        status, told = await ask(proxy, "/v1/responses/resp_1/input_items")
        assert (status, "has not read" in told["error"]["message"]) == (503, True)
        for client in deaf:
            client.close()


async def test_a_history_is_asked_for_in_the_words_of_the_original(tmp_path: Path) -> None:
    async with keeping(tmp_path) as (proxy, _):
        keep(proxy)
        keep(proxy, "resp_2", previous="resp_1")
        stored = proxy.path.stored
        assert stored is not None
        found = await stored.history("a1", "resp_2", ["msg_1"], most_bytes=10_000)
        assert [item["role"] for item in json.loads(found.history)] == ["user", "assistant"] * 2
        assert json.loads(found.items[0]) == OUTPUT[0]
        with pytest.raises(PreviousNotFound, match=r"^Previous response with id 'x' not found\.$") as caught:
            await stored.history("a1", "x", [], most_bytes=10_000)
        assert (caught.value.status, caught.value.code) == (400, "previous_response_not_found")
        with pytest.raises(NotFound, match="Item with id 'x' not found"):
            await stored.history("a1", "", ["x"], most_bytes=10_000)
        with pytest.raises(BadRequest, match="longer than 10 bytes"):
            await stored.history("a1", "resp_2", [], most_bytes=10)


async def test_what_is_kept_never_fills_the_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wakes go over it too, and a link with too much unsent is given up."""
    async with keeping(tmp_path) as (proxy, daemon):
        keep(proxy)
        await until(lambda: len(daemon.heard) == 1)
        monkeypatch.setattr(stored_responses, "UNSENT_MOST_BYTES", 2_000_000)
        monkeypatch.setattr(daemon.client.link, "_unsent_bytes", 1_500_000)
        stored = proxy.path.stored
        assert stored is not None
        assert not stored.keep("a1", "resp_2", previous_id="", asked=b"x" * 600_000, response=b"{}")
        monkeypatch.undo()
        assert isinstance(daemon.heard[0], KeepResponse)
        proxy.path.stored = None
        with pytest.raises(Saturated):
            await kept_answers.said_of_kept(proxy.path, proxy.alice, Keeps.GET, b"/v1/responses/r")
