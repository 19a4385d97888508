"""The API of jobs and of the inference server: a real daemon and two demo servers."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from asyncio import to_thread
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from hive.client.client import Client
from hive.demo import server
from hive.domain import BackendKind
from hive.errors import BadRequest, NotFound, WrongState
from hive.tasks import spawn
from tests.control.box import Box
from tests.waiting import until

INFERENCE = "/api/system/inference"


def post(path: Path, body: bytes) -> tuple[int, Any]:
    """Status and answer of POST /api/system/inference."""
    head = b"POST /api/system/inference HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(
        body
    )
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(path))
        sock.sendall(head + body)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    return int(answer.split()[1]), json.loads(answer.partition(b"\r\n\r\n")[2])


@pytest.fixture
async def demo(box: Box) -> AsyncIterator[str]:
    """The box with everything in it, on a demo server; the address of another one."""
    first, other = server.listen(port=0), server.listen(port=0)
    serving = [spawn(server.serve(listener, handle_signals=False), name="demo") for listener in (first, other)]
    await box.everything(backend=(BackendKind.DEMO, f"127.0.0.1:{first.getsockname()[1]}"))
    await until(lambda: box.inference()["running"])
    yield f"127.0.0.1:{other.getsockname()[1]}"
    for task in serving:
        task.cancel()


@pytest.fixture
def client(box: Box, demo: str) -> Client:
    return Client(box.paths.api_socket, timeout_s=20)


async def test_a_switch_is_a_job_answered_with_202(box: Box, client: Client, demo: str) -> None:
    held = asyncio.Event()
    box.proxy.holds_backend = held
    status, job = await to_thread(post, box.paths.api_socket, json.dumps({"backend": demo}).encode())
    assert (status, job["state"], job["kind"]) == (202, "running", "backend.switch")
    assert job["actor"] == f"uid:{os.geteuid()}"
    assert (await to_thread(client.get, INFERENCE))["switch"]["id"] == job["id"]
    with pytest.raises(WrongState):
        await to_thread(client.post, INFERENCE, {"backend": "llama"})
    held.set()
    ended = await to_thread(client.get, f"/api/jobs/{job['id']}", wait_s=20)
    assert (ended["state"], ended["result"]["backend"]) == ("done", "demo")
    assert (await to_thread(client.get, INFERENCE))["address"] == demo
    assert [found["id"] for found in (await to_thread(client.get, "/api/jobs", limit=5))["jobs"]] == [job["id"]]


async def test_what_is_done_already_is_200(box: Box, demo: str) -> None:
    status, job = await to_thread(post, box.paths.api_socket, b'{"backend":"demo"}')
    assert (status, job["state"], job["result"]["changed"]) == (200, "done", False)


async def test_a_job_is_cancelled_by_its_id(box: Box, client: Client, demo: str) -> None:
    box.proxy.holds_backend = held = asyncio.Event()
    job = await to_thread(client.post, INFERENCE, {"backend": demo})
    assert (await to_thread(client.delete, f"/api/jobs/{job['id']}"))["state"] == "cancelled"
    held.set()
    for verb in (client.get, client.delete):
        with pytest.raises(NotFound):
            await to_thread(verb, "/api/jobs/nonsense")


@pytest.mark.parametrize("body", [{}, {"backend": 5}, {"backend": "vllm", "unit": "sshd.service"}, []])
async def test_a_bad_order_is_refused(client: Client, body: Any) -> None:
    with pytest.raises(BadRequest):
        await to_thread(client.post, INFERENCE, body)


async def test_the_log_is_text_and_the_list_is_json(box: Box, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    async def log(kind: str, lines: int) -> str:
        return "".join(f"line {number} of {kind}\n" for number in range(lines))

    with pytest.raises(NotFound):
        await to_thread(lambda: list(client.lines("/api/system/backends/logs", backend="x")))
    monkeypatch.setattr(box.services.switcher, "log", log)  # it would be systemd's journal
    lines = await to_thread(lambda: list(client.lines("/api/system/backends/logs", backend="vllm", tail=2)))
    assert lines == [b"line 0 of vllm\n", b"line 1 of vllm\n"]
    assert "demo" in [row["backend"] for row in (await to_thread(client.get, "/api/system/backends"))["backends"]]
