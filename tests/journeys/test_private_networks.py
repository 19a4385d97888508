"""Agents that may go nowhere, or to some networks only, on a whole Hive: called and calling, awake and asleep."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from hive.host import packet_filter
from hive.host.cgroup import Subtree
from hive.link.helper import dialled
from hive.proxy.ingress import SWITCHED
from tests.fakes.programs import fake_backend
from tests.journeys.stack import Stack, stack, until
from tests.ports import free_port

pytestmark = [
    pytest.mark.root,
    pytest.mark.redis,
    pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own takes root"),
]

PORT = 8000
NOWHERE: list[str] = []
SOME = ["0.0.0.0/0", "::/0"]
KINDS = [pytest.param(NOWHERE, id="nowhere"), pytest.param(SOME, id="some", marks=pytest.mark.cgroup)]


@pytest.fixture(scope="module")
def hive() -> Iterator[Stack]:
    with fake_backend("llama") as backend, stack(url=backend.url) as hive:
        yield hive


@pytest.fixture
def agent(hive: Stack, egress: list[str]) -> Iterator[str]:
    """One that listens at `PORT` and may go so far; its name."""
    if egress and (Subtree.find(hive.state) is None or packet_filter.why_not()):
        pytest.skip("no packet filters here")
    hive.create("alice", "private.py", port=free_port() if egress else PORT, egress=egress, idle_s=0.0)
    until(lambda: hive.agent_lines("alice"), within_s=20, what="alice listens")
    yield "alice"
    hive.client().delete("/api/agents/alice")


def url(hive: Stack) -> str:
    return str(hive.get("/api/agents/alice/tokens")["ingress_url"])


def call(hive: Stack) -> str:
    answer = httpx.get(url(hive), trust_env=False, timeout=30)
    assert answer.status_code == 200, answer.text
    return answer.text


def tried(hive: Stack, *places: str) -> dict[str, Any]:
    answer = httpx.post(url(hive), json=places, trust_env=False, timeout=30)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def pause(hive: Stack) -> None:
    assert hive.post("/api/agents/alice/pause")["status"] == "paused"


@pytest.mark.parametrize("egress", KINDS)
def test_it_is_called_awake_and_asleep(hive: Stack, agent: str, egress: list[str]) -> None:
    assert call(hive) == "1"
    for number in range(2, 5):
        pause(hive)
        assert call(hive) == str(number)
        assert hive.get("/api/agents/alice")["status"] == "running"


@pytest.mark.parametrize("egress", KINDS)
def test_a_websocket_is_opened_to_it_awake_and_asleep(hive: Stack, agent: str, egress: list[str]) -> None:
    token, port = hive.get("/api/agents/alice/tokens")["ingress"], hive.health()["proxy"]["ingress_port"]
    for asleep in (False, True):
        if asleep:
            pause(hive)
        with socket.create_connection(("127.0.0.1", port), 20) as sock, sock.makefile("rb") as answers:
            sock.sendall(
                b"GET /agents/alice/ws HTTP/1.1\r\nhost: h\r\nx-hive-token: %b\r\nupgrade: websocket\r\n"
                b"connection: Upgrade\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
                b"sec-websocket-version: 13\r\n\r\n" % token.encode()
            )
            assert answers.readline() == SWITCHED
            while answers.readline() != b"\r\n":
                pass
            frame = b"\x81\x85\x00\x00\x00\x00hello"
            sock.sendall(frame)
            assert answers.read(len(frame)) == frame
        until(lambda: hive.get("/api/agents/alice")["ingress_open"] == 0, within_s=10, what="its end was noticed")


@pytest.mark.parametrize("egress", KINDS)
def test_it_asks_the_model_as_any_sdk_would_and_reaches_nothing_else_of_the_host(
    hive: Stack, agent: str, egress: list[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as backend, socket.create_server(("127.0.0.2", 0)) as other:
        hidden = [
            f"127.0.0.1:{backend.getsockname()[1]}",
            f"127.0.0.2:{other.getsockname()[1]}",
            f"127.0.0.1:{hive.health()['proxy']['ingress_port']}",
        ]
        found = tried(hive, *hidden)
        for sock in (backend, other):
            sock.setblocking(False)
            with pytest.raises(BlockingIOError):
                sock.accept()
    assert found["tokens"] > 0
    assert set(found["reached"]) == set(hidden)
    assert "reached" not in found["reached"].values()
    until(lambda: hive.get("/api/agents/alice")["requests"] >= 1, within_s=10, what="it is metered as its own")


@pytest.mark.breadth(2)
@pytest.mark.parametrize("egress", KINDS)
def test_after_a_kill_of_helper_or_proxy_it_is_called_as_before(hive: Stack, agent: str, egress: list[str]) -> None:
    pid = hive.get("/api/agents/alice")["pid"]
    assert call(hive) == "1"
    for number, name in enumerate(("sandbox", "proxy"), 2):
        hive.restart(name)
        until(lambda: hive.get("/api/agents/alice")["status"] == "running", within_s=20, what="it is known again")
        pause_again(hive)
        assert call(hive) == str(number)
    assert hive.get("/api/agents/alice")["pid"] == pid
    assert tried(hive)["tokens"] > 0


def pause_again(hive: Stack) -> None:
    """A helper or proxy that has just come may say so."""
    until(lambda: hive.post("/api/agents/alice/pause")["status"] == "paused", within_s=20, what="it sleeps")


@pytest.mark.wide
@pytest.mark.parametrize("egress", [pytest.param(NOWHERE, id="nowhere")])
def test_what_it_does_not_answer_is_told_without_where_it_is(hive: Stack, agent: str, egress: list[str]) -> None:
    """The way there is the helper's: nothing a caller could use."""
    hive.post("/api/agents", {"name": "mute", "command": ["/bin/sleep", "1000"], "port": PORT, "egress": []})
    hive.post("/api/agents/mute/start")
    try:
        answer = httpx.get(hive.get("/api/agents/mute/tokens")["ingress_url"], trust_env=False, timeout=30)
        assert answer.status_code == 502
        assert f"agent mute is not reached: nothing listens on 127.0.0.1:{PORT}" in answer.text
        assert dialled("") not in answer.text
    finally:
        hive.client().delete("/api/agents/mute")


@pytest.mark.wide
def test_as_it_is_shown_its_networks_are_named(hive: Stack) -> None:
    hive.post("/api/agents", {"name": "shown", "command": ["/bin/sleep", "1000"], "egress": SOME})
    try:
        assert hive.get("/api/agents/shown")["egress"] == SOME
    finally:
        hive.client().delete("/api/agents/shown")
