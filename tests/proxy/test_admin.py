"""The admin socket over real connections, and the door: connections turned away, and the lag told of the loop."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import socket
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hive.link.server import bind_private
from hive.proxy import connection_limits
from hive.proxy.admin import CONNECTIONS_MAX, Admin, AdminSocket
from hive.proxy.connection_limits import TURNED_AWAY_MAX, no_room, turn_away
from hive.proxy.metrics import TABLE, Metrics
from hive.wire.connection import Connection
from hive.wire.deadlines import Deadlines
from hive.wire.listeners import SocketListener
from tests.descriptors import open_descriptors
from tests.waiting import until

QUESTIONS = ["/metrics", "/healthz", "/readyz", "/queue"]


class Office:
    """An admin socket of a proxy that is as the test says."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.not_ready = ""
        self.queue: object = {"waiting": 0, "tenants": []}
        self.metrics = Metrics()
        self.deadlines = Deadlines()
        self.desk = AdminSocket(
            Admin(self.metrics, not_ready=lambda: self.not_ready, queue=lambda: self.queue), self.deadlines
        )
        self._listener = SocketListener(bind_private(path), self.desk.connect)

    def close(self) -> None:
        self._listener.close()
        self.desk.close()
        self.deadlines.close()


@contextlib.asynccontextmanager
async def opened(short_path: Path) -> AsyncIterator[Office]:
    office = Office(short_path / "proxy.sock")
    try:
        yield office
    finally:
        office.close()
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def connected(path: Path) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        yield reader, writer
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, dict[bytes, bytes], bytes]:
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
    lines = head[:-4].split(b"\r\n")
    fields = dict(line.split(b": ", 1) for line in lines[1:])
    body = await asyncio.wait_for(reader.readexactly(int(fields[b"content-length"])), 5)
    return int(lines[0].split(b" ")[1]), fields, body


async def ask(path: Path, target: str, *, method: str = "GET") -> tuple[int, dict[bytes, bytes], bytes]:
    async with connected(path) as (reader, writer):
        writer.write(f"{method} {target} HTTP/1.1\r\nHost: hive\r\n\r\n".encode())
        return await read_answer(reader)


# --- the questions -----------------------------------------------------------------------------------------------


async def test_a_scrape_is_prometheus_text(short_path: Path) -> None:
    async with opened(short_path) as office:
        office.metrics.refused("queue_full")
        status, fields, body = await ask(office.path, "/metrics")
    assert (status, fields[b"content-type"]) == (200, b"text/plain; version=0.0.4; charset=utf-8")
    families = {family.name: family for family in text_string_to_metric_families(body.decode())}
    refused = [s for s in families["hive_proxy_refusals"].samples if s.labels["code"] == "queue_full"]
    assert [sample.value for sample in refused] == [1]


async def test_ready_until_it_is_not(short_path: Path) -> None:
    async with opened(short_path) as office:
        assert (await ask(office.path, "/readyz"))[::2] == (200, b'{"status":"ready"}\n')
        office.not_ready = "draining"
        assert (await ask(office.path, "/readyz"))[::2] == (503, b'{"status":"draining"}\n')
        assert (await ask(office.path, "/healthz"))[::2] == (200, b'{"status":"alive"}\n')


async def test_the_queue_is_told_as_json(short_path: Path) -> None:
    async with opened(short_path) as office:
        office.queue = {"waiting": 3, "tenants": [{"name": "acme", "waiting": 3}]}
        status, fields, body = await ask(office.path, "/queue?pretty=1")
        assert (status, fields[b"content-type"], json.loads(body)) == (200, b"application/json", office.queue)


@pytest.mark.parametrize(
    ("method", "target", "status"),
    [("GET", "/", 404), ("GET", "/metrics/", 404), ("POST", "/metrics", 405), ("DELETE", "/queue", 405)],
)
async def test_other_questions_are_refused_as_everywhere(
    short_path: Path, method: str, target: str, status: int
) -> None:
    async with opened(short_path) as office:
        found, fields, body = await ask(office.path, target, method=method)
    assert found == status
    assert json.loads(body)["error"]["src"] == "hive"
    assert fields.get(b"allow") == (b"GET, HEAD" if status == 405 else None)


async def test_head_has_the_head_and_no_body(short_path: Path) -> None:
    async with opened(short_path) as office, connected(office.path) as (reader, writer):
        writer.write(b"HEAD /healthz HTTP/1.1\r\nHost: hive\r\n\r\nGET /readyz HTTP/1.1\r\nHost: hive\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert b"content-length: 19\r\n" in head
        assert (await read_answer(reader))[2] == b'{"status":"ready"}\n'


async def test_one_connection_asks_many_questions_in_order(short_path: Path) -> None:
    async with opened(short_path) as office, connected(office.path) as (reader, writer):
        writer.write(b"".join(b"GET %b HTTP/1.1\r\nHost: h\r\n\r\n" % target.encode() for target in QUESTIONS * 3))
        answers = [await read_answer(reader) for _ in QUESTIONS * 3]
    assert [status for status, _, _ in answers] == [200] * 12
    assert answers[1][2] == b'{"status":"alive"}\n'


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"POST /queue HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\n\r\n{}",
        b"GET /queue HTTP/1.1\r\nHost: h\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET /queue HTTP/1.1\r\nHost : h\r\n\r\n",
        b"GET /queue HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 200_000 + b"\r\n\r\n",
    ],
    ids=["body", "smuggled", "space before the colon", "long head"],
)
async def test_the_wire_is_as_strict_as_elsewhere(short_path: Path, request_bytes: bytes) -> None:
    async with opened(short_path) as office, connected(office.path) as (reader, writer):
        writer.write(request_bytes)
        status, _, _ = await read_answer(reader)
        assert 400 <= status < 500


async def test_a_scrape_whose_client_left_is_dropped(short_path: Path) -> None:
    async with opened(short_path) as office:
        pieces: list[str] = []

        def late() -> float:
            pieces.append("read")
            return 1.0

        office.metrics.read("draining", late)
        async with connected(office.path) as (_, writer):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n")
            writer.transport.abort()
        assert (await ask(office.path, "/healthz"))[0] == 200
        assert (await ask(office.path, "/metrics"))[0] == 200
        assert pieces
        await until(lambda: repr(office.desk).startswith("<AdminSocket 0/"))


async def test_what_cannot_be_told_is_an_error_and_not_a_silence(
    short_path: Path, recwarn: pytest.WarningsRecorder
) -> None:
    failures: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context))

    def broken() -> float:
        raise LookupError("no such thing")

    async with opened(short_path) as office:
        office.metrics.read("draining", broken)
        assert (await ask(office.path, "/metrics"))[0] == 500
        assert (await ask(office.path, "/healthz"))[0] == 200
    assert len(failures) == 1


async def test_a_scrape_lets_others_go_on_in_between(short_path: Path) -> None:
    """Piece by piece: other callbacks run between any two metrics."""
    async with opened(short_path) as office:
        rounds: list[int] = []
        count, ticking = 0, True

        def tick() -> None:
            nonlocal count
            count += 1
            if ticking:
                asyncio.get_running_loop().call_soon(tick)

        def reading() -> float:
            rounds.append(count)
            return 1.0

        named = ("in_flight", "parked", "connections")
        for name in named:
            office.metrics.read(name, reading)
        tick()
        await ask(office.path, "/metrics")
        ticking = False
    assert len(set(rounds)) == len(named)


async def test_only_its_own_user_may_connect(short_path: Path) -> None:
    async with opened(short_path) as office:
        mode = office.path.stat()
        assert stat.S_IMODE(mode.st_mode) == 0o600
        assert mode.st_uid == os.geteuid()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
async def test_curl_is_all_it_takes(short_path: Path) -> None:
    async with opened(short_path) as office:
        office.not_ready = "draining"
        said: dict[str, tuple[int | None, bytes]] = {}
        for target in QUESTIONS:
            curl = await asyncio.create_subprocess_exec(
                *("curl", "--silent", "--fail", "--unix-socket", str(office.path), f"http://hive{target}"),
                stdout=asyncio.subprocess.PIPE,
            )
            content, _ = await curl.communicate()
            said[target] = (curl.returncode, content)
    assert said["/readyz"][0] == 22, "curl --fail: a 503 is a failure"
    assert said["/healthz"] == (0, b'{"status":"alive"}\n')
    assert said["/metrics"][1].startswith(b"# HELP hive_proxy_requests_total")
    assert len(said["/metrics"][1].splitlines()) > len(TABLE)


# --- the door ----------------------------------------------------------------------------------------------------


async def test_one_admin_connection_too_many_gets_a_503_and_the_others_stay(short_path: Path) -> None:
    async with opened(short_path) as office, contextlib.AsyncExitStack() as stack:
        held = [await stack.enter_async_context(connected(office.path)) for _ in range(CONNECTIONS_MAX)]
        await until(lambda: repr(office.desk).startswith(f"<AdminSocket {CONNECTIONS_MAX}/"))
        status, fields, body = await ask(office.path, "/metrics")
        assert (status, fields[b"retry-after"], fields[b"connection"]) == (503, b"1", b"close")
        assert json.loads(body)["error"]["code"] == "saturated"
        reader, writer = held[-1]
        writer.write(b"GET /healthz HTTP/1.1\r\nHost: h\r\n\r\n")
        assert (await read_answer(reader))[0] == 200


@contextlib.asynccontextmanager
async def closed_door(family: socket.AddressFamily, where: Any) -> AsyncIterator[Any]:
    """A listener that turns every connection away; its address."""

    def nobody(sock: socket.socket) -> Connection | None:
        turn_away(sock)
        return None

    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind(where)
    sock.listen(512)
    address = sock.getsockname()
    listener = SocketListener(sock, nobody)
    try:
        yield address
    finally:
        listener.close()


@pytest.mark.parametrize("kind", ["tcp", "unix"])
async def test_who_is_turned_away_reads_why_even_after_a_long_upload(short_path: Path, kind: str) -> None:
    """Closed with its bytes unread, the client would see a reset and no answer."""
    tcp = kind == "tcp"
    family, where = (socket.AF_INET, ("127.0.0.1", 0)) if tcp else (socket.AF_UNIX, str(short_path / "d"))
    async with closed_door(family, where) as address:
        opening = asyncio.open_connection(*address[:2]) if tcp else asyncio.open_unix_connection(str(address))
        reader, writer = await opening
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: 300000\r\n\r\n" + b"x" * 300_000
        )
        assert undated(await asyncio.wait_for(reader.read(), 5)) == undated(no_room())
        writer.close()
        await until(lambda: connection_limits._TurnedAway.waiting == 0)


def undated(answer: bytes) -> bytes:
    """The answer without its date: a second may end between two of them."""
    return re.sub(rb"date: [^\r]+", b"date", answer)


async def test_a_flood_at_the_door_holds_few_descriptors_and_all_are_given_back(short_path: Path) -> None:
    async with closed_door(socket.AF_UNIX, str(short_path / "d")) as path:
        before = open_descriptors()
        clients = [socket.socket(socket.AF_UNIX) for _ in range(TURNED_AWAY_MAX * 3)]
        for client in clients:
            client.connect(path)
        await until(lambda: connection_limits._TurnedAway.waiting == TURNED_AWAY_MAX)
        await asyncio.sleep(0)
        answers = [undated(client.recv(4096)) for client in clients]
        assert answers == [undated(no_room())] * len(clients)
        assert open_descriptors() - before <= len(clients) + TURNED_AWAY_MAX
        for client in clients:
            client.close()
        await until(lambda: connection_limits._TurnedAway.waiting == 0)
        assert open_descriptors() == before


async def test_a_silent_one_is_not_waited_for_for_ever(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_limits, "LINGER_S", 0.05)
    async with closed_door(socket.AF_UNIX, str(short_path / "d")) as path:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(path)
            await until(lambda: connection_limits._TurnedAway.waiting == 1)
            await until(lambda: connection_limits._TurnedAway.waiting == 0)
