"""The audit table behind the API: orders are in it before they are answered, and the roles that may read it can."""

from __future__ import annotations

import asyncio
import os
from asyncio import to_thread
from collections.abc import Callable
from typing import Any

import pytest

from hive.api.server import serve
from hive.client.client import Client, path_of
from hive.errors import BadRequest, DependencyDown, HiveError, NotFound, WrongState
from hive.host.accounts import name_of
from hive.store import audit, chain
from hive.store.database import Database
from tests.control.box import Box, HeldStops

SPEC: dict[str, Any] = {"name": "alice", "command": ["/bin/sleep", "9"]}
ME = f"uid:{os.geteuid()}"


async def told(live: Box) -> list[tuple[str, str, str]]:
    orders = await live.orders()
    assert all((row.actor, row.origin) == (ME, "socket") for row in orders)
    return [(row.act, row.target, row.outcome) for row in orders]


async def test_an_order_is_told_with_its_target_and_its_outcome(client: Client, live: Box) -> None:
    agent = (await to_thread(client.post, "/api/agents", SPEC))["id"]
    await to_thread(client.post, path_of("alice", "stop"))
    await to_thread(client.delete, path_of(agent))
    assert await told(live) == [
        ("order.create", "hive", "ok"),
        ("order.stop", agent, "ok"),
        ("order.remove", agent, "ok"),
    ]
    user = {"user": name_of(os.geteuid())} if name_of(os.geteuid()) else {}
    assert [row.detail for row in await live.orders()] == [{"name": "alice"} | user] * 3


Order = Callable[[Client], object]


@pytest.mark.parametrize(
    ("order", "error", "row"),
    [
        (lambda client: client.post(path_of("nobody", "pause")), NotFound, ("order.pause", "nobody", "not_found")),
        (lambda client: client.post("/api/agents", {"name": "x"}), BadRequest, ("order.create", "hive", "bad_request")),
        (lambda client: client.post("/api/agents", SPEC), WrongState, ("order.create", "hive", "wrong_state")),
        (lambda client: client.delete("/api/jobs/j9"), NotFound, ("order.cancel_job", "hive", "not_found")),
    ],
)
async def test_what_was_refused_is_told_with_the_reason(
    client: Client, live: Box, order: Order, error: type[HiveError], row: tuple[str, str, str]
) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    with pytest.raises(error):
        await to_thread(order, client)
    assert (await told(live))[1:] == [row]
    assert (await live.orders())[1].detail["error"]


async def test_looking_is_no_order_but_being_handed_a_secret_is(client: Client, live: Box) -> None:
    agent = (await to_thread(client.post, "/api/agents", SPEC))["id"]
    for path in ("/api/agents", path_of("alice"), "/api/stats", "/api/audit", path_of("alice", "tokens")):
        await to_thread(client.get, path)
    assert (await told(live))[1:] == [("order.tokens", agent, "ok")]


async def test_a_fault_of_hives_own_is_told_too(client: Client, live: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live.services.agents, "remove", None)
    with pytest.raises(HiveError, match="its log says where"):
        await to_thread(client.delete, path_of("alice"))
    assert await told(live) == [("order.remove", "alice", "internal")]


async def test_an_order_whose_caller_left_is_told_when_it_has_ended(
    client: Client, live: Box, held_stops: HeldStops
) -> None:
    agent = (await to_thread(client.post, "/api/agents", SPEC))["id"]
    with pytest.raises(HiveError):
        await to_thread(lambda: client.post(path_of("alice", "stop"), timeout_s=0.3))
    assert (await told(live))[1:] == []
    held_stops.go.set()
    while not (stopped := (await told(live))[1:]):  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)
    assert stopped == [("order.stop", agent, "ok")]


async def test_rows_are_asked_for_by_filters_in_pages(client: Client) -> None:
    await to_thread(client.post, "/api/agents", SPEC)
    for _ in range(4):
        await to_thread(client.post, path_of("alice", "start"))
    page = await to_thread(
        lambda: client.get("/api/audit", limit=2, agent="alice", actor=ME, act="order.*", since="1h")
    )
    assert [row["act"] for row in page["rows"]] == ["order.start"] * 2
    assert page["next"] == page["rows"][-1]["id"]
    rest = await to_thread(
        lambda: client.get("/api/audit", limit=9, agent="alice", actor=ME, act="order.*", before=page["next"])
    )
    assert [row["act"] for row in rest["rows"]] == ["order.start", "order.start", "order.create"]
    assert rest["next"] is None
    assert (await to_thread(lambda: client.get("/api/audit", actor="uid:12345")))["rows"] == []


@pytest.mark.parametrize("query", [{"since": "yesterday"}, {"before": -1}, {"limit": 1001}, {"limit": "x"}])
async def test_a_malformed_filter_is_refused(client: Client, query: dict[str, Any]) -> None:
    with pytest.raises(BadRequest):
        await to_thread(lambda: client.get("/api/audit", **query))


async def test_what_a_real_daemon_refuses_203_times_is_a_few_rows_and_what_it_permits_is_all_of_it(box: Box) -> None:
    """Two minutes may be in it. The one thing that was permitted is a row each time."""
    await box.everything()
    server = await serve(box.services, box.paths.runtime / "again.sock")
    client = Client(box.paths.runtime / "again.sock")

    def ask() -> None:
        for path in (path_of("nobody", "tokens"), *[path_of("nobody", "pause")] * 203):
            with pytest.raises(NotFound):
                client.get(path) if path.endswith("tokens") else client.post(path)
        for _ in range(15):
            with pytest.raises(DependencyDown):  # there is no server here; it may be asked all the same
                client.post("/api/models/refresh")

    await to_thread(ask)
    await server.close()
    await box.stop_daemon()
    database = Database.open(box.paths.database)
    rows = [entry.row for entry in await database.read(lambda conn: audit.page(conn, audit.Filter(), 1000))]
    verdict = await database.read(lambda conn: chain.verify(audit.links(conn)))
    database.close()
    pauses = [row for row in rows if row.act == "order.pause"]
    assert sum(row.detail.get("refused_again", 1) for row in pauses) == 203
    assert len(pauses) <= 22
    assert [row.outcome for row in rows if row.act == "order.tokens"] == ["not_found"]
    assert len([row for row in rows if row.act == "order.refresh_models"]) == 15
    assert verdict.bad is None


async def test_a_real_daemon_has_orders_and_what_came_of_them_in_one_whole_chain(box: Box) -> None:
    await box.everything()
    server = await serve(box.services, box.paths.runtime / "again.sock")
    client = Client(box.paths.runtime / "again.sock")
    view = await to_thread(client.post, "/api/agents", {"name": "bob", "command": ["/bin/sleep", "1000"]})
    await to_thread(client.post, path_of("bob", "pause"), {"now": True})
    with pytest.raises(WrongState):
        await to_thread(client.post, "/api/agents", {"name": "bob", "command": ["/bin/sleep", "1000"]})
    await to_thread(client.delete, path_of("bob"))
    found = (await to_thread(lambda: client.get("/api/audit", agent=view["id"])))["rows"]
    by_name = (await to_thread(lambda: client.get("/api/audit", agent="bob", act="order.*")))["rows"]
    await server.close()
    assert [row["act"] for row in by_name] == ["order.remove", "order.create", "order.pause", "order.create"]
    assert [row["outcome"] for row in by_name] == ["ok", "wrong_state", "ok", "ok"]
    acts = [row["act"] for row in found]
    assert {"agent.created", "agent.running", "order.pause", "agent.paused", "agent.removed"} <= set(acts)
    assert {row["origin"] for row in found} == {"socket"}
    assert box.daemon is not None
    await box.stop_daemon()
    database = Database.open(box.paths.database)
    verdict = await database.read(lambda conn: chain.verify(audit.links(conn)))
    database.close()
    assert verdict.bad is None
    assert verdict.rows >= len(acts)


async def test_what_a_person_did_is_found_by_the_name_of_then_and_by_the_number(box: Box) -> None:
    """Every row said `uid:1000`: the name had to be looked up, and could not be once the user was gone."""
    name = name_of(os.geteuid())
    if not name:
        pytest.skip("this user has no name here")
    await box.everything()
    client = Client(box.paths.api_socket)
    await to_thread(client.post, "/api/agents", SPEC)
    by_name, by_number, by_hive = [
        (await to_thread(client.get, "/api/audit", actor=actor))["rows"] for actor in (name, ME, "hive")
    ]
    assert {"order.create", "agent.created"} <= {row["act"] for row in by_name}
    assert [row["id"] for row in by_name] == [row["id"] for row in by_number]
    assert {(row["actor"], row["user"]) for row in by_name} == {(ME, name)}
    assert {row["user"] for row in by_hive} <= {""}
