"""Every row of the API × every role × every way to come: made from the table, so that no new row is forgotten."""

from __future__ import annotations

import asyncio
import os
import re
import time
from asyncio import to_thread
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest

from hive.api.app import rows
from hive.api.responses import is_runners
from hive.api.routes import RouteRow
from hive.api.server import serve
from hive.client.client import Client
from hive.domain import Role
from hive.errors import HiveError
from tests.api.over_tcp import TcpApi
from tests.control.box import Box

ROWS: list[RouteRow] = rows(None, pause_timeout_s=1.0, stopping=asyncio.Event())  # type: ignore[arg-type]


AT_THE_SOCKET = ("/api/system/access",)
"""Answered there alone, whatever the role."""


class Entry(NamedTuple):
    """The API of a live daemon, and tokens for it."""

    api: TcpApi
    tokens: dict[str, str | None]
    """Texts that are no good as a token, by why."""
    good: dict[Role, str]
    socket: Path


@pytest.fixture
async def entry(live: Box) -> AsyncIterator[Entry]:
    api, path = TcpApi(live.services.api_tokens), live.paths.runtime / "again.sock"
    server = await serve(live.services, path, tcp=api.tcp)
    revoked = await api.token("revoked", Role.ADMIN)
    await api.api_tokens.revoke("revoked", now=time.time())
    bad = {
        "none": None,
        "wrong": "hive_" + "x" * 43,
        "revoked": revoked,
        "expired": await api.token("expired", Role.ADMIN, expires_in_s=-0.5),
    }
    good = {role: await api.token(role, role) for role in Role}
    yield Entry(api, bad, good, path)
    await server.close()


def path_of(row: RouteRow) -> str:
    return re.sub(r"{[a-zA-Z]+}", "none", row.path)


async def ask(api: TcpApi, row: RouteRow, token: str | None) -> int:
    answered = await api.ask(row.method, path_of(row), token=token, body=b"")
    if answered.status in (401, 403):
        kind, said = "application/problem+json", answered.json
        if is_runners(row.path):
            kind, said = "application/json", said["error"]
        assert answered.headers["content-type"] == kind
        assert said["code"] in ("unauthorized", "not_permitted")
        assert said["hint"]
    assert ("www-authenticate" in answered.headers) is (answered.status == 401)
    assert not [name for name in answered.headers if name.startswith("access-control-")]
    return answered.status


@pytest.mark.breadth(3)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.method} {row.path}")
async def test_a_row_is_for_its_role_and_those_above(entry: Entry, live: Box, row: RouteRow) -> None:
    for why, token in entry.tokens.items():
        assert await ask(entry.api, row, token) == 401, why
    assert await live.orders() == []
    for role, token in entry.good.items():
        status = await ask(entry.api, row, token)
        is_refused = role.rank < row.role.rank or row.path in AT_THE_SOCKET
        assert (status == 403) is is_refused, (role, status)
        assert status != 401, role


async def test_whoever_hive_runs_as_may_everything_at_the_socket(entry: Entry) -> None:
    client = Client(entry.socket, timeout_s=20)
    for row in ROWS:
        assert await to_thread(_status, client, row) not in (401, 403), row.path


def _status(client: Client, row: RouteRow) -> int:
    try:
        if row.method == "GET":
            list(client.lines(path_of(row)))
        else:
            client._ask(row.method, path_of(row), None, {}, 20)
    except HiveError as error:
        return error.status
    return 200


async def test_refused_orders_are_in_the_audit_table_with_the_token_and_where_it_came_from(
    entry: Entry, live: Box
) -> None:
    ordered = [row for row in ROWS if row.is_order and row.role is not Role.VIEWER]
    for row in ordered:
        await ask(entry.api, row, entry.good[Role.VIEWER])
    orders = await live.orders()
    told = {(row.actor, row.origin, row.outcome) for row in orders}
    assert told == {("token:viewer", "tcp:127.0.0.1", "not_permitted")}
    assert len(orders) == len(ordered)


async def test_who_is_nobody_learns_not_even_which_paths_there_are(entry: Entry) -> None:
    for token in (None, "hive_wrong"):
        assert (await entry.api.ask("GET", "/api/nonsense", token=token)).status == 401
        assert (await entry.api.ask("PATCH", "/api/agents", token=token)).status == 401
    assert (await entry.api.ask("GET", "/api/nonsense", token=entry.good[Role.VIEWER])).status == 404


async def test_at_the_socket_a_token_changes_nothing(entry: Entry, live: Box) -> None:
    """Neither for the better nor for the worse: the kernel names the user."""
    for token in (entry.good[Role.VIEWER], "wrong"):
        request = f"POST /api/system/shutdown HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n"
        reader, writer = await asyncio.open_unix_connection(str(entry.socket))
        writer.write(f"{request}Connection: close\r\nContent-Length: 0\r\n\r\n".encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
    assert {row.actor for row in await live.orders()} == {f"uid:{os.geteuid()}"}


async def test_a_viewer_sees_the_names_of_an_agents_environment_and_no_value(entry: Entry) -> None:
    """A token for a dashboard read every agent's keys."""
    spec = {"name": "alice", "command": ["/bin/sleep", "9"], "env": {"KEY": "sesame", "EMPTY": ""}}
    made = await entry.api.ask("POST", "/api/agents", token=entry.good[Role.OPERATOR], body=spec)
    assert made.json["env"] == spec["env"]
    for role, expected in ((Role.VIEWER, {"KEY": "****", "EMPTY": ""}), (Role.OPERATOR, spec["env"])):
        for path in ("/api/agents", "/api/agents?since=", "/api/agents/alice"):
            answered = await entry.api.ask("GET", path, token=entry.good[role])
            found = answered.json["agents"][0] if "agents" in answered.json else answered.json
            assert found["env"] == expected, (role, path)
            assert (b"sesame" in answered.body) is (role is Role.OPERATOR)


async def test_a_prompt_is_shown_to_who_may_steer_its_agent_and_in_no_list(entry: Entry) -> None:
    spec = {"name": "alice", "command": ["/bin/sleep", "9"], "system_prompt": "Open wide.", "prewarm_on_start": True}
    made = await entry.api.ask("POST", "/api/agents", token=entry.good[Role.OPERATOR], body=spec)
    assert made.json["system_prompt"] == "Open wide."
    for role in (Role.VIEWER, Role.OPERATOR):
        for path in ("/api/agents", "/api/agents?since=", "/api/agents/alice", "/api/prompts"):
            answered = await entry.api.ask("GET", path, token=entry.good[role])
            is_shown = role is Role.OPERATOR and path == "/api/agents/alice"
            assert (b"Open wide." in answered.body) is is_shown, (role, path)
            assert b"prewarm" in answered.body
