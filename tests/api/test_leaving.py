"""Clients that leave before they are answered, over the services of a real daemon."""

from __future__ import annotations

import asyncio
import json
import socket
from asyncio import to_thread
from pathlib import Path
from typing import Any

import pytest

from hive.agents.lifecycle import AgentLifecycle
from hive.api.server import serve
from hive.client.client import Client, path_of
from hive.domain import JobState
from hive.store.jobs import StoredJob
from hive.store.messages import StoredMessage
from tests.control.box import Box
from tests.waiting import until

AGENT: dict[str, Any] = {"name": "alice", "command": ["/bin/sleep", "9"], "port": 9000}
WAITS = ["/api/jobs/j1?wait_s=600", "/api/agents/alice/messages/m1?wait_s=600"]


class Waiting:
    """In the place of what is waited for: a job, and a message of a new agent `alice`. `now`: how many wait."""

    def __init__(self, live: Box, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0
        self.over = asyncio.Event()
        monkeypatch.setattr(live.services.jobs, "get", self._job)
        monkeypatch.setattr(live.services.message_delivery, "get", self._message)

    async def _job(self, job_id: str, *, wait_s: float) -> StoredJob:
        await self._wait(wait_s)
        state = JobState.DONE if self.over.is_set() else JobState.RUNNING
        return StoredJob(id=job_id, kind="k", state=state, actor="a", created_at=1.0, updated_at=1.0)

    async def _message(self, life: AgentLifecycle, message_id: str, *, within_s: float) -> StoredMessage:
        await self._wait(within_s)
        delivered_at = 1.0 if self.over.is_set() else None
        return StoredMessage(
            id=message_id, agent_id=life.agent.id, text="", sender="a", sent_at=1.0, delivered_at=delivered_at
        )

    async def _wait(self, wait_s: float) -> None:
        if wait_s:
            self.now += 1
            try:
                await asyncio.wait_for(self.over.wait(), wait_s)
            finally:
                self.now -= 1


@pytest.fixture
async def waiting(live: Box, client: Client, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    await to_thread(client.post, "/api/agents", AGENT)
    return Waiting(live, monkeypatch)


def send(path: Path, request: bytes) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(60)
    sock.connect(str(path))
    sock.sendall(request)
    return sock


def get(target: str) -> bytes:
    return f"GET {target} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()


def body_of(sock: socket.socket) -> Any:
    return json.loads(b"".join(iter(lambda: sock.recv(65536), b"")).partition(b"\r\n\r\n")[2])


@pytest.mark.parametrize("target", WAITS)
async def test_nobody_waits_for_a_client_that_left(live: Box, waiting: Waiting, target: str) -> None:
    """uvicorn cancels nothing: a client that asked and hung up, again and again, left a task for ten minutes each."""
    socks = [await to_thread(send, live.paths.api_socket, get(target)) for _ in range(5)]
    await until(lambda: waiting.now == 5)
    for sock in socks:
        sock.close()
    await until(lambda: waiting.now == 0)


@pytest.mark.parametrize("target", WAITS)
async def test_who_stays_is_answered_once_it_is_over(live: Box, waiting: Waiting, target: str) -> None:
    with await to_thread(send, live.paths.api_socket, get(target)) as sock:
        await until(lambda: waiting.now == 1)
        waiting.over.set()
        assert (await to_thread(body_of, sock))["state"] in ("done", "delivered")


async def test_who_waits_when_the_server_ends_is_told_how_it_is_by_then(live: Box, waiting: Waiting) -> None:
    """A wait kept the daemon from leaving until uvicorn cut it, without an answer."""
    path = live.paths.runtime / "again.sock"
    server = await serve(live.services, path)
    with await to_thread(send, path, get(WAITS[0])) as sock:
        await until(lambda: waiting.now == 1)
        await server.close()
        assert (await to_thread(body_of, sock))["state"] == "running"


async def test_a_client_that_leaves_inside_its_body_is_no_failure_of_hive(
    client: Client, live: Box, caplog: pytest.LogCaptureFixture
) -> None:
    """`api_failed` with a traceback was in the log for each of them."""
    await to_thread(client.post, "/api/agents", AGENT)
    path = live.paths.runtime / "again.sock"
    server = await serve(live.services, path)
    answering = server._uvicorn.server_state.tasks
    head = b"POST /api/agents/alice/messages HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"
    sock = await to_thread(send, path, head)
    await until(lambda: len(answering) == 1)
    sock.close()
    await until(lambda: not answering)
    await server.close()
    assert "api_failed" not in caplog.text
    assert (await to_thread(client.get, path_of("alice", "messages")))["messages"] == []
