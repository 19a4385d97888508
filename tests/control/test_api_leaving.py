"""Clients that leave before they are answered, over a desk in memory."""

from __future__ import annotations

import asyncio
import json
import socket
from asyncio import to_thread
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hive.api.server import ApiServer, serve
from hive.client.client import Client, path_of

AGENT: dict[str, Any] = {"name": "alice", "command": ["/bin/sleep", "9"], "port": 9000}
WAITS = ["/api/jobs/j1?wait_s=600", "/api/agents/alice/messages/m1?wait_s=600"]


async def until(holds: Callable[[], bool]) -> None:
    """Returns when it holds; pytest's own timeout says when it never does."""
    while not holds():  # noqa: ASYNC110 - what is waited for has no event
        await asyncio.sleep(0.01)


class Waiting:
    """In the place of what is waited for. `now`: how many wait."""

    def __init__(self, desk: Any) -> None:
        self.now = 0
        self.over = asyncio.Event()
        desk.job = desk.message = self._ask

    async def _ask(self, *ref: str, wait_s: float) -> dict[str, Any]:
        if wait_s:
            self.now += 1
            try:
                await asyncio.wait_for(self.over.wait(), wait_s)
            finally:
                self.now -= 1
        return {"id": ref[-1], "is_over": self.over.is_set()}


def send(path: Path, request: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(20)
    sock.connect(str(path))
    sock.sendall(request)
    return sock


def get(target: str) -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


def body_of(sock: socket.socket) -> Any:
    return json.loads(b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize("target", WAITS)
async def test_nobody_waits_for_a_client_that_left(api: ApiServer, desk: Any, tmp_path: Path, target: str) -> None:
    """uvicorn cancels nothing: a client that asked and hung up, again and again, left a task for ten minutes each."""
    waiting = Waiting(desk)
    socks = [await to_thread(send, tmp_path / "hive.sock", get(target)) for _ in range(5)]
    await until(lambda: waiting.now == 5)
    for sock in socks:
        sock.close()
    await until(lambda: waiting.now == 0)


@pytest.mark.parametrize("target", WAITS)
async def test_who_stays_is_answered_once_it_is_over(api: ApiServer, desk: Any, tmp_path: Path, target: str) -> None:
    waiting = Waiting(desk)
    with await to_thread(send, tmp_path / "hive.sock", get(target)) as sock:
        await until(lambda: waiting.now == 1)
        waiting.over.set()
        assert (await to_thread(body_of, sock))["is_over"]


async def test_who_waits_when_the_server_ends_is_told_how_it_is_by_then(desk: Any, tmp_path: Path) -> None:
    """A wait kept the daemon from leaving until uvicorn cut it, without an answer."""
    server = await serve(desk, tmp_path / "hive.sock")
    waiting = Waiting(desk)
    with await to_thread(send, tmp_path / "hive.sock", get(WAITS[0])) as sock:
        await until(lambda: waiting.now == 1)
        await server.close()
        assert await to_thread(body_of, sock) == {"id": "j1", "is_over": False}


async def test_a_client_that_leaves_inside_its_body_is_no_failure_of_hive(
    client: Client, desk: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """`api_failed` with a traceback was in the log for each of them."""
    await to_thread(client.post, "/api/agents", AGENT)
    head = b"POST /api/agents/alice/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    before = asyncio.all_tasks()
    sock = await to_thread(send, tmp_path / "hive.sock", head)
    await until(lambda: asyncio.all_tasks() > before)
    sock.close()
    await until(lambda: asyncio.all_tasks() <= before)
    assert "api_failed" not in caplog.text
    assert (await to_thread(client.get, path_of("alice", "messages")))["messages"] == []
