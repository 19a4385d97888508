"""The API of jobs and of the inference server, over a desk in memory."""

from __future__ import annotations

import json
import socket
from asyncio import to_thread
from pathlib import Path
from typing import Any

import pytest

from hive.api.server import ApiServer
from hive.client.client import Client
from hive.errors import BadRequest, NotFound, WrongState

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


async def test_a_switch_is_a_job_answered_with_202(api: ApiServer, client: Client, tmp_path: Path, desk: Any) -> None:
    status, job = await to_thread(post, tmp_path / "hive.sock", b'{"backend":"vllm"}')
    assert (status, job["state"], job["kind"], job["step"]) == (202, "running", "backend.switch", "close")
    assert desk.actors == [job["actor"]]
    assert (await to_thread(client.get, INFERENCE))["switch"]["id"] == job["id"]
    with pytest.raises(WrongState):
        await to_thread(client.post, INFERENCE, {"backend": "llama"})
    await to_thread(client.get, f"/api/jobs/{job['id']}")
    ended = await to_thread(client.get, f"/api/jobs/{job['id']}", wait_s=5)
    assert (ended["state"], ended["result"]["backend"]) == ("done", "vllm")
    assert [found["id"] for found in (await to_thread(client.get, "/api/jobs", limit=5))["jobs"]] == [job["id"]]


async def test_what_is_done_already_is_200(api: ApiServer, tmp_path: Path) -> None:
    status, job = await to_thread(post, tmp_path / "hive.sock", b'{"backend":"demo"}')
    assert (status, job["state"], job["result"]["changed"]) == (200, "done", False)


async def test_a_job_is_cancelled_by_its_id(client: Client) -> None:
    job = await to_thread(client.post, INFERENCE, {"backend": "http://127.0.0.1:9"})
    assert (await to_thread(client.delete, f"/api/jobs/{job['id']}"))["state"] == "cancelled"
    for verb in (client.get, client.delete):
        with pytest.raises(NotFound):
            await to_thread(verb, "/api/jobs/nonsense")


@pytest.mark.parametrize("body", [{}, {"backend": 5}, {"backend": "vllm", "unit": "sshd.service"}, []])
async def test_a_bad_order_is_refused(client: Client, body: Any) -> None:
    with pytest.raises(BadRequest):
        await to_thread(client.post, INFERENCE, body)


async def test_the_log_is_text_and_the_list_is_json(client: Client) -> None:
    lines = await to_thread(lambda: list(client.lines("/api/system/backends/logs", backend="vllm", tail=2)))
    assert [line.decode()[:6] for line in lines] == ["line 0", "line 1"]
    with pytest.raises(NotFound):
        await to_thread(lambda: list(client.lines("/api/system/backends/logs", backend="x")))
    assert [row["backend"] for row in (await to_thread(client.get, "/api/system/backends"))["backends"]] == ["vllm"]
