"""Two agents that ask for one port, the whole way: command line, REST, ingress."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest

from hive.errors import WrongState
from tests.journeys.stack import PYTHON, Stack, stack, until
from tests.ports import free_port

pytestmark = pytest.mark.redis


@pytest.fixture(scope="module")
def hive() -> Iterator[Stack]:
    with stack() as found:
        yield found


@pytest.fixture(scope="module")
def port(hive: Stack) -> int:
    """The port of `first`, a web server."""
    port = free_port()
    command = [PYTHON, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
    hive.post("/api/agents", {"name": "first", "command": command, "port": port})
    return port


def test_the_second_is_refused_by_command_and_by_rest(hive: Stack, port: int) -> None:
    """It was taken, and its URL with its token led to the first."""
    words = ["agent", "create", "dup", "--port", str(port), "--state-dir", str(hive.state), "--", "sleep", "100"]
    ended = subprocess.run([sys.executable, "-m", "hive", *words], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    lines = ended.stderr.splitlines()
    assert lines[0] == f"hive: port: {port} is first's already  [wrong_state]"
    assert "another port, or --no-network (as root)" in lines[1]
    spec = {"name": "dup", "command": ["/bin/sleep", "100"], "port": port}
    refused = pytest.raises(WrongState, match=f"port: {port} is first's already")
    with refused:
        hive.client().post("/api/agents", spec)
    with refused:
        hive.client().put("/api/agents/dup", spec)
    assert [agent["name"] for agent in hive.get("/api/agents")["agents"]] == ["first"]
    url = hive.get("/api/agents/first/tokens")["ingress_url"]
    until(lambda: httpx.get(url, trust_env=False, timeout=30).status_code == 200, within_s=30, what="it is called")


def test_a_call_of_an_agent_that_does_not_listen_names_the_address_once(hive: Stack) -> None:
    port = free_port()
    hive.post("/api/agents", {"name": "mute", "command": ["/bin/sleep", "1000"], "port": port})
    answer = httpx.get(hive.get("/api/agents/mute/tokens")["ingress_url"], trust_env=False, timeout=30)
    hive.client().delete("/api/agents/mute")
    assert answer.status_code == 502
    told = f"agent mute is not reached: nothing listens on 127.0.0.1:{port}"
    assert answer.text.count("127.0.0.1") == 1
    assert told in answer.text
    assert "see `hive agent logs mute`; HIVE_AGENT_PORT has the number" in answer.text
