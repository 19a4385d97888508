"""Redis, daemon, proxy and a backend as containers (conf/compose.yaml), and an agent that lives in another one."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.journeys.containers import Site, site
from tests.journeys.stack import until

pytestmark = [pytest.mark.docker, pytest.mark.root, pytest.mark.bare, pytest.mark.timeout(600)]

SERVICES = ("redis", "daemon", "proxy", "backend")
HIVES = ("redis", "daemon", "proxy")
PASSWORD, WRONG = secrets.token_hex(24), "wrong-password-of-this-test"
CHAT = """
import json, openai
answer = openai.OpenAI(max_retries=8).chat.completions.create(
    model="hive-demo", messages=[{"role": "user", "content": "hello there"}])
print(json.dumps({"text": answer.choices[0].message.content, "tokens_out": answer.usage.completion_tokens}))
"""
REACHED = """
import json, socket
def reaches(host, port):
    try:
        socket.create_connection((host, port), timeout=2).close()
    except OSError:
        return False
    return True
print(json.dumps([where for where in WHERE if reaches(*where)]))
"""
UNKNOWN = """
import urllib.error, urllib.request
try:
    urllib.request.urlopen("http://proxy:11435/v1/models")
except urllib.error.HTTPError as error:
    print(error.code)
"""
STEER = """
import socket
with socket.socket(socket.AF_UNIX) as sock:
    try:
        sock.connect("/run/hive/daemon/hive.sock")
        sock.sendall(b"GET /api/agents HTTP/1.1\\r\\nHost: hive\\r\\nConnection: close\\r\\n\\r\\n")
        print(sock.recv(4096).decode())
    except PermissionError as error:
        print(error)
"""
SCRAPE = """
import sys, urllib.request
asked = urllib.request.Request("http://127.0.0.1:3000/metrics", headers={"Authorization": f"Bearer {sys.argv[1]}"})
print(urllib.request.urlopen(asked).read().decode())
"""


@pytest.fixture(scope="module")
def hive(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with site(tmp_path_factory.mktemp("site"), PASSWORD) as hive:
        yield hive


@pytest.fixture(scope="module")
def token(hive: Site) -> str:
    """The model token of an agent that lives elsewhere."""
    assert hive.hive("agent", "create", "visitor", "--runtime", "external", "--tenant", "acme")["status"] == "running"
    return str(hive.hive("agent", "show", "visitor", "--tokens")["access"]["model"])


def requests(hive: Site) -> int:
    return int(hive.hive("agent", "show", "visitor")["requests"])


def counted(hive: Site, expected: int) -> None:
    until(lambda: requests(hive) == expected, within_s=30, what=f"{expected} requests are counted")
    assert hive.hive("agent", "show", "visitor")["tokens_out"] > 0


def said_of(hive: Site, service: str, event: str) -> Any:
    """The fields of the last of these events in its log."""
    lines = [line.partition("| ")[2] for line in hive.log(service).splitlines()]
    found = [json.loads(line) for line in lines if line.startswith("{")]
    return [line["fields"] for line in found if line["event"] == event][-1]


def test_all_of_it_is_well_and_says_what_it_is(hive: Site) -> None:
    status = hive.hive("status")
    assert (status["status"], status["problems"], status["isolation"]) == ("ok", [], "full")
    assert status["redis"] == {"up": True, "at": "redis:6379", "why": ""}
    assert status["backend"]["address"] == "backend:11434"
    assert status["helper"]["enabled"] is False
    settings = {f"{row['section']}.{row['key']}": row for row in hive.hive("config", "show")["settings"]}
    assert settings["proxy.listen"]["origin"] == "environment HIVE_PROXY_LISTEN"
    assert settings["sandbox.enabled"]["origin"] == "environment HIVE_SANDBOX_ENABLED"


def test_an_agent_elsewhere_asks_by_its_token_and_is_metered(hive: Site, token: str) -> None:
    before = requests(hive)
    answer = hive.visit(CHAT, token)
    assert "[hive-demo]" in answer["text"]
    counted(hive, before + 1)


def test_who_shares_the_daemons_network_scrapes_the_proxys_metrics_too(hive: Site) -> None:
    """The proxy's own socket is in a container that nobody else gets into."""
    token = hive.hive("token", "create", "prometheus", "--role", "scraper")["token"]
    text = hive.compose("exec", "-T", "daemon", "python3", "-c", SCRAPE, token)
    assert {'hive_up{part="proxy"} 1.0', 'hive_up{part="helper"} 1.0', "hive_proxy_daemon_up 1.0"} <= {
        *text.splitlines()
    }


def test_callers_on_this_host_find_the_published_port(hive: Site, token: str) -> None:
    before = requests(hive)
    where = {"OPENAI_BASE_URL": "http://127.0.0.1:11435/v1", "OPENAI_API_KEY": token}
    command = ["nsenter", f"--net={hive.engine.network}", sys.executable, "-c", CHAT]
    said = subprocess.run(command, env={**os.environ, **where}, capture_output=True, text=True, timeout=60, check=False)
    assert "[hive-demo]" in said.stdout, said.stderr
    counted(hive, before + 1)


def test_an_agent_elsewhere_reaches_the_proxy_and_nothing_else(hive: Site, token: str) -> None:
    proxy = [["proxy", 11435]]
    redis, backend = [
        [[address, port] for address in hive.addresses(name)] for name, port in (("redis", 6379), ("backend", 11434))
    ]
    daemon = [[address, port] for address in hive.addresses("daemon") for port in (3000, 11435)]
    question = f"WHERE = {[*proxy, *redis, *backend, *daemon, ['192.0.2.1', 80]]}{REACHED}"
    assert json.loads(hive.compose("exec", "-T", "proxy", "python3", "-c", question)) == [*proxy, *backend]
    assert hive.visit(question, token) == proxy


def test_nobody_asks_without_a_token(hive: Site) -> None:
    assert hive.visit(UNKNOWN, "none") == 401


@pytest.mark.parametrize("service", SERVICES)
def test_each_container_may_as_little_as_it_needs(hive: Site, service: str) -> None:
    told = hive.engine.inspect(hive.name(service))
    host = told["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges:true"]
    assert host["Init"] is True
    assert not host["Privileged"]
    assert host["PidMode"] == host["UsernsMode"] == ""
    assert told["Config"]["User"] not in ("", "root", "0")
    assert not any("docker.sock" in mount["Source"] for mount in told["Mounts"])
    assert (host["PortBindings"] or {}) == (
        {"11435/tcp": [{"HostIp": "127.0.0.1", "HostPort": "11435"}]} if service == "proxy" else {}
    )


def test_the_proxy_may_not_steer_the_daemon(hive: Site) -> None:
    said = hive.compose("exec", "-T", "proxy", "python3", "-c", STEER)
    assert "Permission denied" in said or "HTTP/1.1 403" in said
    assert "visitor" not in said


def test_the_password_is_in_no_command_line_environment_or_log(hive: Site, token: str) -> None:
    for service in SERVICES:
        told = json.dumps(hive.engine.inspect(hive.name(service)))
        told += json.dumps(hive.engine.call("GET", f"/containers/{hive.name(service)}/top?ps_args=-ef")[1])
        assert PASSWORD not in told + hive.log(service), service
        assert token not in told + hive.log(service), service
    for service in HIVES:
        found = hive.compose(
            "exec", "-T", service, "sh", "-c", "cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | tr '\\0' ' '"
        )
        assert "PATH=" in found
        assert PASSWORD not in found, service


@pytest.mark.parametrize("service", HIVES)
def test_whoever_is_killed_comes_back_and_every_request_is_counted_once(hive: Site, token: str, service: str) -> None:
    before = requests(hive)
    hive.visit(CHAT, token)
    hive.kill(service)
    assert "[hive-demo]" in hive.visit(CHAT, token)["text"]
    hive.until_well()
    assert hive.hive("agent", "show", "visitor")["status"] == "running"
    counted(hive, before + 2)
    until(lambda: hive.hive("status")["status"] == "ok", within_s=30, what="all is well")


def test_a_wrong_password_of_redis_is_said_and_requests_flow(hive: Site, token: str) -> None:
    before = requests(hive)
    hive.up(REDIS_URL=f"redis://:{WRONG}@redis:6379")
    status: Any = hive.hive("status")
    assert status["redis"]["up"] is False
    assert "invalid username-password pair" in status["redis"]["why"]
    assert any("invalid username-password pair" in problem for problem in status["problems"])
    said = hive.compose("exec", "-T", "daemon", "hive", "status")
    assert "Redis: redis:6379, DOWN: invalid username-password pair" in said
    assert said_of(hive, "daemon", "redis_down")["error"].startswith("invalid username-password pair")
    assert said_of(hive, "daemon", "secret_in_environment")["name"] == "REDIS_URL"
    assert WRONG not in hive.log("daemon") + hive.log("proxy") + said + json.dumps(status)
    assert "[hive-demo]" in hive.visit(CHAT, token)["text"]
    counted(hive, before + 1)
    hive.up()


def test_it_ends_in_order_and_what_survives_is_there_again(hive: Site, token: str) -> None:
    before = requests(hive)
    hive.visit(CHAT, token)
    hive.compose("down", "--timeout", "30")
    hive.up()
    counted(hive, before + 1)
    assert "[hive-demo]" in hive.visit(CHAT, token)["text"], "the same token"
    counted(hive, before + 2)
