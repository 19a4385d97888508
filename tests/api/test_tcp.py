"""The API on TCP: the callers let in, the bounds, and tokens from their making to their end."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import socket
import time
from asyncio import to_thread
from collections.abc import AsyncIterator
from typing import Any

import pytest

from hive.api import app as api_module
from hive.api import connections
from hive.api.failures import Failures
from hive.api.server import serve
from hive.control.listening import WantedAddress, listen
from hive.doctor.checks import running
from hive.domain import Role
from hive.errors import ConfigError
from tests.api.over_tcp import TcpApi, until_closed
from tests.control.box import Box
from tests.waiting import until

HEALTH = b"GET /api/health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture
async def api(live: Box) -> AsyncIterator[TcpApi]:
    found = TcpApi(live.services.api_tokens, hosts="hive.lan")
    server = await serve(live.services, live.paths.runtime / "again.sock", tcp=found.tcp)
    yield found
    await server.close()


def with_token(token: str, more: bytes = b"") -> bytes:
    return HEALTH + b"Authorization: Bearer " + token.encode() + b"\r\n" + more + b"\r\n"


# --- the Hive meant ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST", "[::1]", "[0:0::1]", "hive.lan", "Hive.lan:8443"]
)
async def test_the_names_of_this_hive_are_taken(api: TcpApi, host: str) -> None:
    token = await api.token("a", Role.VIEWER)
    assert (await api.ask("GET", "/api/health", token=token, Host=host)).status == 200
    if ":8443" not in host:
        assert (await api.ask("GET", "/api/health", token=token, Host=f"{host}:{api.port}")).status == 200


@pytest.mark.parametrize(
    "host",
    ["evil.test", "localhost:1", "127.0.0.2", "localhost.evil.test", "hive.lan.evil.test", "a@localhost", "", "[::1"],
)
async def test_another_name_is_refused_whatever_the_token(api: TcpApi, host: str) -> None:
    """A page at evil.test whose name suddenly leads to 127.0.0.1 (DNS rebinding)."""
    token = await api.token("a", Role.ADMIN)
    answered = await api.ask("GET", "/api/health", token=token, Host=host)
    assert (answered.status, answered.json["code"]) == (403, "not_permitted")
    assert answered.json["hint"]


async def test_a_user_without_a_token_still_learns_that_it_is_hives(api: TcpApi) -> None:
    port = running.Port("the API", api.port, None, running.UNSEEN)
    assert (await running.asked(port)).ours == api.port


@pytest.mark.parametrize("fields", [b"Host: localhost\r\nHost: localhost\r\n", b""])
async def test_one_host_field_is_wanted(api: TcpApi, fields: bytes) -> None:
    token = await api.token("a", Role.ADMIN)
    with api.connect() as sock:
        request = b"GET /api/health HTTP/1.1\r\n%sAuthorization: Bearer %s\r\nConnection: close\r\n\r\n"
        await to_thread(sock.sendall, request % (fields, token.encode()))
        assert (await to_thread(until_closed, sock)).startswith(b"HTTP/1.1 403 ")


@pytest.mark.parametrize("target", [b"http://evil.test/api/health", b"http://localhost/api/health"])
async def test_a_target_with_a_host_in_it_is_refused(api: TcpApi, target: bytes) -> None:
    """The host in the target counts (RFC 9112 §3.2.2), and Host was the one that was checked."""
    token = (await api.token("a", Role.ADMIN)).encode()
    with api.connect() as sock:
        request = b"GET %s HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n"
        await to_thread(sock.sendall, request % (target, token))
        assert (await to_thread(until_closed, sock)).startswith(b"HTTP/1.1 400 ")


async def test_a_malformed_head_is_answered_without_a_body(api: TcpApi) -> None:
    with api.connect() as sock:
        await to_thread(sock.sendall, b"HEAD /api/health HTTP/1.1\r\nHost: localhost\r\nx y\r\n\r\n")
        head, _, body = (await to_thread(until_closed, sock)).partition(b"\r\n\r\n")
    assert (head.startswith(b"HTTP/1.1 400 "), body) == (True, b"")


@pytest.mark.parametrize(
    "origin", ["http://evil.test", "null", "http://localhost:1", "file://", "https://localhost.evil.test"]
)
async def test_a_page_of_another_origin_is_refused_and_no_cors_header_is_ever_sent(api: TcpApi, origin: str) -> None:
    token = await api.token("a", Role.ADMIN)
    for method in ("GET", "OPTIONS", "POST"):
        answered = await api.ask(
            method, "/api/tokens", token=token, Origin=origin, Access_Control_Request_Method="POST"
        )
        assert answered.status == 403
        assert not [name for name in answered.headers if name.startswith("access-control-")]


async def test_a_page_of_our_own_origin_may_ask(api: TcpApi) -> None:
    token = await api.token("a", Role.VIEWER)
    for host, origin in (
        (f"localhost:{api.port}", f"http://localhost:{api.port}"),
        ("hive.lan:8443", "https://hive.lan:8443"),
    ):
        answered = await api.ask("GET", "/api/health", token=token, Host=host, Origin=origin)
        assert answered.status == 200
        assert not [name for name in answered.headers if name.startswith("access-control-")]


# --- tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field", ["Basic eDp5", "Bearer", "Bearer a b", "bearer:x", "Token {}", "Bearer {}x", "Bearer\t{}"]
)
async def test_what_is_no_bearer_token_is_401_and_says_which_scheme(api: TcpApi, field: str) -> None:
    token = await api.token("a", Role.ADMIN)
    answered = await api.ask("GET", "/api/health", Authorization=field.replace("{}", token))
    assert (answered.status, answered.headers["www-authenticate"]) == (401, "Bearer")


async def test_two_tokens_are_none(api: TcpApi) -> None:
    token = await api.token("a", Role.ADMIN)
    with api.connect() as sock:
        more = b"Authorization: Bearer " + token.encode() + b"\r\nConnection: close\r\n"
        await to_thread(sock.sendall, with_token(token, more))
        assert (await to_thread(until_closed, sock)).startswith(b"HTTP/1.1 401 ")


async def test_the_scheme_is_in_any_case(api: TcpApi) -> None:
    token = await api.token("a", Role.ADMIN)
    assert (await api.ask("GET", "/api/health", Authorization=f"bEARER  {token}")).status == 200


async def test_the_internal_token_is_an_operator(api: TcpApi, live: Box) -> None:
    internal = live.services.internal_token
    assert (await api.ask("POST", "/api/agents/none/stop", token=internal)).status == 404
    assert (await api.ask("GET", "/api/tokens", token=internal)).status == 403
    told = [(row.actor, row.origin, row.outcome) for row in await live.orders()]
    assert told == [("internal", "tcp:127.0.0.1", "not_found")]


async def test_a_token_is_made_shown_once_used_listed_and_revoked(api: TcpApi, live: Box) -> None:
    admin = await api.token("root", Role.ADMIN)
    made = await api.ask("POST", "/api/tokens", token=admin, body={"name": "ci", "role": "viewer", "expires_in": "30d"})
    assert made.status == 201
    token = made.json["token"]
    assert token.startswith("hive_")
    assert len(token) >= 48
    assert made.json["created_by"] == "token:root"
    assert (await api.ask("GET", "/api/health", token=token)).status == 200
    listed = await api.ask("GET", "/api/tokens", token=admin)
    [ci] = [found for found in listed.json["tokens"] if found["name"] == "ci"]
    assert 30 * 86400 - 60 < ci["expires_at"] - time.time() <= 30 * 86400
    assert abs(ci["last_used_at"] - time.time()) < 60
    assert token.encode() not in listed.body
    assert b"digest" not in listed.body
    revoked = await api.ask("DELETE", "/api/tokens/ci", token=admin)
    assert (revoked.status, revoked.json["state"]) == (200, "revoked")
    assert (await api.ask("GET", "/api/health", token=token)).status == 401
    assert b"ci" not in (await api.ask("GET", "/api/tokens", token=admin)).body
    assert b"revoked" in (await api.ask("GET", "/api/tokens?all=1", token=admin)).body
    orders = await live.orders()
    assert token not in repr(orders)
    assert [(row.act, row.detail.get("name"), row.detail.get("role")) for row in orders] == [
        ("order.create_token", "ci", "viewer"),
        ("order.revoke_token", "ci", "viewer"),
    ]


@pytest.mark.parametrize(
    ("order", "status"),
    [
        ({"name": "Ci", "role": "viewer"}, 400),
        ({"name": "", "role": "viewer"}, 400),
        ({"name": "ci"}, 400),
        ({"name": "ci", "role": "root"}, 400),
        ({"name": "ci", "role": "viewer", "expires_in": "soon"}, 400),
        ({"name": "ci", "role": "viewer", "expires_in": 0}, 400),
        ({"name": "ci", "role": "viewer", "expires_in": 1e300}, 400),
        ({"name": "ci", "role": "viewer", "expires_at": 5}, 400),
        ({"name": "root", "role": "viewer"}, 409),
    ],
)
async def test_a_bad_order_makes_none(api: TcpApi, order: dict[str, Any], status: int) -> None:
    admin = await api.token("root", Role.ADMIN)
    assert (await api.ask("POST", "/api/tokens", token=admin, body=order)).status == status
    assert len((await api.ask("GET", "/api/tokens?all=1", token=admin)).json["tokens"]) == 1


async def test_a_name_is_free_again_once_its_token_is_dead(api: TcpApi) -> None:
    admin = await api.token("root", Role.ADMIN)
    await api.token("ci", Role.VIEWER, expires_in_s=-0.5)
    first = await api.token("ci", Role.VIEWER)
    assert (await api.ask("DELETE", "/api/tokens/ci", token=admin)).status == 200
    second = await api.token("ci", Role.VIEWER)
    assert (await api.ask("GET", "/api/health", token=first)).status == 401
    assert (await api.ask("GET", "/api/health", token=second)).status == 200
    states = [found["state"] for found in (await api.ask("GET", "/api/tokens?all=1", token=admin)).json["tokens"]]
    assert sorted(states) == ["expired", "live", "live", "revoked"]


async def test_revoking_ends_the_streams_of_that_token_and_no_other(api: TcpApi, live: Box) -> None:
    admin = await api.token("root", Role.ADMIN)
    stream = b"GET /api/events?follow=1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n"
    with api.connect() as one, api.connect() as other:
        for name, sock in (("one", one), ("other", other)):
            await to_thread(sock.sendall, stream % (await api.token(name, Role.VIEWER)).encode())
            assert (await to_thread(sock.recv, 65536)).startswith(b"HTTP/1.1 200 ")
        await until(lambda: live.followers == 2)
        assert (await api.ask("DELETE", "/api/tokens/one", token=admin)).status == 200
        await to_thread(until_closed, one)
        await until(lambda: live.followers == 1)


async def test_a_stream_ends_when_its_token_expires(api: TcpApi, live: Box) -> None:
    token = await api.token("short", Role.VIEWER, expires_in_s=0.5)
    with api.connect() as sock:
        more = b"GET /api/events?follow=1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n"
        await to_thread(sock.sendall, more % token.encode())
        assert (await to_thread(until_closed, sock)).startswith(b"HTTP/1.1 200 ")
    await until(lambda: live.followers == 0)
    assert (await api.ask("GET", "/api/health", token=token)).status == 401


async def test_whoever_ends_its_own_token_is_told_so(api: TcpApi) -> None:
    admin = await api.token("root", Role.ADMIN)
    assert (await api.ask("DELETE", "/api/tokens/root", token=admin)).json["state"] == "revoked"
    assert (await api.ask("DELETE", "/api/tokens/root", token=admin)).status == 401


# --- failures ------------------------------------------------------------------------------------------------------


async def test_after_too_many_failures_they_are_429_a_good_token_is_not_and_the_log_has_one_line(
    live: Box, caplog: pytest.LogCaptureFixture
) -> None:
    api = TcpApi(live.services.api_tokens, failures=Failures(limit=3, span_s=60))
    server = await serve(live.services, live.paths.runtime / "again.sock", tcp=api.tcp)
    token = await api.token("a", Role.VIEWER)
    asked = [
        await api.ask("GET", "/api/health", token=given) for given in ("hive_no", None, "hive_no", "hive_no", None)
    ]
    assert [answered.status for answered in asked] == [401, 401, 401, 429, 429]
    assert 0 < int(asked[-1].headers["retry-after"]) <= 60
    assert asked[-1].json["code"] == "rate_limit_exceeded"
    assert (await api.ask("GET", "/api/health", token=token)).status == 200
    assert [record.message for record in caplog.records if "api_refused" in record.message] == [
        "api_refused peer=127.0.0.1 count=1 error=this token is not known here, or was revoked"
    ]
    await server.close()


# --- what is bounded -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "begun",
    [b"", b"GET /api", HEALTH, HEALTH + b"X: ", b"\r\n"],
    ids=["nothing", "a line", "fields", "a field", "a blank line"],
)
async def test_a_head_that_does_not_come_to_its_end_is_cut(
    api: TcpApi, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.4)
    with api.connect() as sock:
        await to_thread(sock.sendall, begun)
        if begun:
            await to_thread(_trickle, sock, b"x" if begun.strip() else b"\r\n")
        assert await to_thread(until_closed, sock) == b""


def _trickle(sock: socket.socket, piece: bytes) -> None:
    """Until the other side had enough; pytest's own timeout says where it never has."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        while True:
            sock.sendall(piece)
            time.sleep(0.05)


async def test_a_head_without_an_end_is_cut_before_it_fills_the_memory(api: TcpApi) -> None:
    with api.connect() as sock:
        sent = await to_thread(_pour, sock, HEALTH + b"X: ", 64 * 1024 * 1024)
        answer = await to_thread(until_closed, sock)
    assert sent < 16 * 1024 * 1024, "the rest was in nobody's memory but the kernel's"
    assert answer in (b"", connections.TOO_LONG)


async def test_trailers_are_bounded_like_a_head(api: TcpApi) -> None:
    token = await api.token("a", Role.OPERATOR)
    head = b"POST /api/agents HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n" % token.encode()
    begun = head + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX: "
    with api.connect() as sock:
        sent = await to_thread(_pour, sock, begun, 64 * 1024 * 1024)
        await to_thread(until_closed, sock)
    assert sent < 16 * 1024 * 1024


def _pour(sock: socket.socket, begun: bytes, most: int) -> int:
    """The number of bytes that went out before the other side had enough."""
    sent = 0
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        sock.sendall(begun)
        while sent < most:
            sent += sock.send(b"y" * 65536)
    return sent


async def test_without_a_token_no_body_is_kept_and_the_answer_comes_before_its_end(api: TcpApi) -> None:
    with api.connect() as sock:
        begun = b"POST /api/agents HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1073741824\r\n\r\n"
        sent = await to_thread(_pour, sock, begun, 64 * 1024 * 1024)
        answer = await to_thread(until_closed, sock)
    assert sent < 32 * 1024 * 1024
    assert not answer or answer.startswith(b"HTTP/1.1 401 ")


async def test_without_a_token_a_small_body_is_read_so_that_the_answer_arrives(api: TcpApi) -> None:
    for _ in range(20):
        answered = await api.ask("POST", "/api/agents", token="hive_no", body=b"x" * 500_000)
        assert answered.status == 401


async def test_a_body_that_goes_on_after_its_answer_is_cut_and_not_so_soon_that_the_answer_is_lost(
    api: TcpApi,
) -> None:
    """The rest of a body that was too long was read for as long as it came."""
    token = await api.token("a", Role.OPERATOR)
    head = b"POST /api/agents HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n" % token.encode()
    with api.connect() as sock:
        sent = await to_thread(_pour, sock, head + b"Content-Length: 9999999999\r\n\r\n", 256 * 1024 * 1024)
    assert sent < 64 * 1024 * 1024
    assert (await api.ask("POST", "/api/agents", token=token, body=b"x" * 3_000_000)).status == 413


async def test_whoever_waits_to_be_told_to_go_on_is_told_why_not(api: TcpApi) -> None:
    with api.connect() as sock:
        begun = b"POST /api/agents HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\nExpect: 100-continue\r\n\r\n"
        await to_thread(sock.sendall, begun)
        answer = await to_thread(until_closed, sock)
    assert answer.startswith(b"HTTP/1.1 401 ")
    assert b"connection: close" in answer


async def test_a_body_that_trickles_is_408(api: TcpApi, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api_module, "BODY_S", 0.3)
    token = await api.token("a", Role.OPERATOR)
    begun = b"POST /api/agents HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\nContent-Length: 90\r\n\r\n{"
    with api.connect() as sock:
        await to_thread(sock.sendall, begun % token.encode())
        assert (await to_thread(sock.recv, 65536)).startswith(b"HTTP/1.1 408 ")


async def test_several_requests_in_one_go_are_not_kept(api: TcpApi) -> None:
    token = await api.token("a", Role.VIEWER)
    with api.connect() as sock:
        await to_thread(sock.sendall, with_token(token) * 1000)
        answer = await to_thread(until_closed, sock)
    assert answer.count(b"HTTP/1.1 ") <= 1


async def test_one_request_after_the_other_on_one_connection(api: TcpApi) -> None:
    token = await api.token("a", Role.VIEWER)
    padding = "x" * 1000  # many heads together are more than one may be

    def ask() -> set[int]:
        connection = http.client.HTTPConnection("127.0.0.1", api.port, timeout=20)
        connection.connect()
        first, found = connection.sock, set()
        for _ in range(200):
            connection.request("GET", "/api/health", headers={"Authorization": f"Bearer {token}", "X-Padding": padding})
            response = connection.getresponse()
            response.read()
            found.add(response.status)
        assert connection.sock is first
        connection.close()
        return found

    assert await to_thread(ask) == {200}


async def test_a_crowd_without_tokens_keeps_nobody_out_who_has_one(api: TcpApi) -> None:
    token = await api.token("a", Role.VIEWER)
    crowd = [api.connect() for _ in range(connections.CONNECTIONS_MAX + 20)]
    try:
        assert (await api.ask("GET", "/api/health", token=token)).status == 200
        await to_thread(until_closed, crowd[0])  # the first to come had to go
    finally:
        for sock in crowd:
            sock.close()


async def test_where_all_have_one_another_is_turned_away_in_words(api: TcpApi) -> None:
    token = await api.token("a", Role.VIEWER)
    stream = b"GET /api/events?follow=1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n"
    crowd = [api.connect() for _ in range(connections.CONNECTIONS_MAX)]
    try:
        for sock in crowd:
            await to_thread(sock.sendall, stream % token.encode())
            assert (await to_thread(sock.recv, 65536)).startswith(b"HTTP/1.1 200 ")
        with api.connect() as late:
            assert await to_thread(until_closed, late) == connections.FULL
    finally:
        for sock in crowd:
            sock.close()


async def test_a_refused_request_takes_its_connection_with_it(api: TcpApi) -> None:
    """One that was trusted kept its place: 128 of a token that was revoked, each with a bad request now and then, and
    nobody else came in."""
    token = await api.token("a", Role.VIEWER)
    with api.connect() as sock:
        await to_thread(sock.sendall, with_token(token))
        assert (await to_thread(sock.recv, 65536)).startswith(b"HTTP/1.1 200 ")
        await to_thread(sock.sendall, with_token(token))
        assert (await to_thread(sock.recv, 65536)).startswith(b"HTTP/1.1 200 ")
        await api.api_tokens.revoke("a", now=time.time())
        await to_thread(sock.sendall, with_token(token))
        refused = await to_thread(until_closed, sock)
    assert refused.startswith(b"HTTP/1.1 401 ")
    assert b"\r\nconnection: close\r\n" in refused


async def test_a_peer_that_reads_nothing_is_let_go(api: TcpApi, live: Box, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "STALLED_S", 0.3)
    token = await api.token("a", Role.VIEWER)
    stream = b"GET /api/events?follow=1 HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer %s\r\n\r\n"
    with api.connect() as sock:
        await to_thread(sock.sendall, stream % token.encode())
        await until(lambda: live.followers == 1)
        big = {"at": 1.0, "kind": "agent.paused", "agent": "a", "name": "alice", "reason": "x" * 100_000}
        while live.followers != 0:
            live.feed.publish(big)
            await asyncio.sleep(0.01)


# --- where it listens ----------------------------------------------------------------------------------------------


def test_a_taken_port_moves_up_by_one_only_where_it_may() -> None:
    first = listen(WantedAddress("127.0.0.1", 0, move=False))
    taken = first.getsockname()[1]
    with first, pytest.raises(ConfigError, match=f"port {taken} of 127.0.0.1 for the API cannot be taken") as refused:
        listen(WantedAddress("127.0.0.1", taken, move=False))
    assert "sport" in refused.value.hint
    first = listen(WantedAddress("127.0.0.1", 0, move=False))
    with first, listen(WantedAddress("127.0.0.1", first.getsockname()[1], move=True)) as moved:
        assert moved.getsockname()[1] > first.getsockname()[1]


def test_an_address_of_somebody_else_is_said_also_where_it_may_move() -> None:
    with pytest.raises(ConfigError, match=r"of 192\.0\.2\.1 for the API"):
        listen(WantedAddress("192.0.2.1", 3000, move=True))
