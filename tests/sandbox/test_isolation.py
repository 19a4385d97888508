"""Reach of an agent that may go nowhere (`egress = []`) in Hive and its neighbours: its own way to Hive, only.

All of it is tried from inside, by a program that tells what came of each; what is tried is printed (`pytest -rP`).
The same program outside, as root, reaches every one of them: that they can be reached is not what makes it fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import pytest

from hive.control import secret_files
from hive.domain import INNER_PORT, RuntimeKind
from hive.errors import NotSupported
from hive.link.server import bind_private
from hive.link.specs import SandboxSpec
from hive.runtimes.docker import DockerRuntime
from hive.runtimes.runtime import Runtime
from hive.sandbox.server import HelperServer
from hive.settings.table import Paths, Sandbox
from hive.store.database import Database
from tests import docker_engine
from tests.runtimes.benches import docker_spec
from tests.runtimes.containers import WITH_PROGRAMS
from tests.sandbox.harness import PYTHON, SLEEP, A, B, Daemon, OpenHelper, runtimes, spec
from tests.waiting import until

if TYPE_CHECKING:
    from tests.conftest import RedisServer

Connect = Callable[..., Awaitable[Daemon]]
pytestmark = [
    pytest.mark.redis,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own takes root"),
]

PROBE = """
import json, os, socket, sys, time

def door(where):  # a container runs before its network is known, and the door into it is made after that
    for _ in range(100):
        try: return tcp(where)
        except ConnectionRefusedError: time.sleep(0.05)
    tcp(where)

def tcp(where):
    host, _, port = where.rpartition(":")
    socket.create_connection((host, int(port)), 5).close()

def unix(where):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(5)
        sock.connect(where.replace("@", "\\0", 1) if where[0] == "@" else where)

def read(where):
    with open(where, "rb") as file: file.read(1)

def open_(where):
    os.close(os.open(where, os.O_RDONLY))

def write(where):
    with open(where, "ab"): pass

def look(where):
    os.listdir(where)

def signal(where):
    os.kill(int(where), 0)

tried = {}
for how, where in json.loads(sys.argv[1]):
    try:
        globals()["open_" if how == "open" else how](where)
        tried[f"{how} {where}"] = "reached"
    except OSError as error:
        tried[f"{how} {where}"] = type(error).__name__
print(json.dumps(tried), flush=True)
"""


Targets = dict[str, tuple[str, str]]
"""Things to be out of reach → how that is tried, and where."""


class Case(NamedTuple):
    """A runtime: what a helper runs it with, the spec of an agent of it that runs a command and may go nowhere, and
    what is to be out of its reach besides."""

    name: str
    runtimes: Callable[[Paths], dict[RuntimeKind, Runtime]]
    spec: Callable[[Paths, str, list[str]], SandboxSpec]
    more: Callable[[], Targets] = dict


def as_process(paths: Paths, agent: str, command: list[str]) -> SandboxSpec:
    return spec(paths, agent, command, egress=[])


def with_docker(paths: Paths) -> dict[RuntimeKind, Runtime]:
    settings = Sandbox(docker_socket=str(docker_engine.shared().socket))
    return {
        **runtimes(paths, "signals"),
        RuntimeKind.DOCKER: DockerRuntime(paths, settings, log_max_bytes=65536),
    }


def as_container(paths: Paths, agent: str, command: list[str]) -> SandboxSpec:
    return docker_spec(paths, agent, command, docker=WITH_PROGRAMS)


def around_a_container() -> Targets:
    return {"the Docker engine": ("unix", str(docker_engine.shared().socket))}


BY_CGROUP = Case("process frozen by cgroup", lambda paths: runtimes(paths, "cgroup"), as_process)
BY_SIGNALS = Case("process frozen by signals", lambda paths: runtimes(paths, "signals"), as_process)
CONTAINER = Case("docker", with_docker, as_container, around_a_container)
PROCESSES = [pytest.param(BY_CGROUP, marks=pytest.mark.cgroup), BY_SIGNALS]
CASES = [*PROCESSES, pytest.param(CONTAINER, marks=pytest.mark.docker)]


def name_of(case: Case) -> str:
    return case.name


@pytest.fixture
async def open_helper(paths: Paths, case: Case) -> AsyncIterator[OpenHelper]:
    helpers: list[HelperServer] = []

    async def open_() -> HelperServer:
        helper = HelperServer(paths, case.runtimes(paths))
        await helper.open()
        helpers.append(helper)
        return helper

    yield open_
    for helper in helpers:
        await helper.leave()
    if case is CONTAINER:
        docker_engine.shared().clear(paths.state)


@pytest.fixture
def listening() -> Iterator[Callable[[str], int]]:
    """TCP ports of the host, as backend, API and proxy have them."""
    socks: list[socket.socket] = []

    def listen(host: str) -> int:
        socks.append(socket.create_server((host, 0), backlog=16))
        return int(socks[-1].getsockname()[1])

    yield listen
    for sock in socks:
        sock.close()


@pytest.fixture
async def neighbours(
    paths: Paths,
    open_helper: OpenHelper,
    connect: Connect,
    listening: Callable[[str], int],
    redis_server: RedisServer,
) -> AsyncIterator[tuple[Daemon, Targets]]:
    """A helper, another agent, and around them every socket and file of a Hive, made by what makes them there."""
    await open_helper()
    daemon = await connect()
    await daemon.client.define(B, spec(paths, B, SLEEP))
    other = (await daemon.client.start(B)).pid
    (paths.home(B) / "diary").touch(mode=0o600)
    secret_files.box_key(paths.box_key, {})
    secret_files.internal_token(paths.internal_token, {})
    Database.open(paths.database).close()
    redis_server.socket.parent.chmod(0o711)
    private = {
        "hive.sock": paths.api_socket,
        "link.sock": paths.link_socket,
        "the proxy's admin socket": paths.admin_socket,
        "a backend's unix socket": paths.runtime / "llama.sock",
    }
    socks = [bind_private(path) for path in private.values()]
    abstract = socket.socket(socket.AF_UNIX)
    abstract.bind(f"\0hive-isolation-{os.getpid()}")
    abstract.listen()
    targets = {
        **{name: ("unix", str(path)) for name, path in private.items()},
        **{name: ("tcp", f"127.0.0.1:{listening('127.0.0.1')}") for name in PORTS},
        "a port on every address of the host": ("tcp", f"{own_address()}:{listening('0.0.0.0')}"),
        "sandbox.sock": ("unix", str(paths.sandbox_socket)),
        "Redis": ("unix", str(redis_server.socket)),
        "an abstract socket of the host": ("unix", f"@hive-isolation-{os.getpid()}"),
        "another agent's socket": ("unix", str(paths.agent_socket(B))),
        "the box key": ("read", str(paths.box_key)),
        "the internal token": ("read", str(paths.internal_token)),
        "the database": ("read", str(paths.database)),
        "the helper's table": ("read", str(paths.sandbox_table / f"{B}.json")),
        "the helper's table, to write": ("write", str(paths.sandbox_table / f"{B}.json")),
        "the homes": ("look", str(paths.home(B).parent)),
        "another agent's home": ("look", str(paths.home(B))),
        "another agent's file": ("read", str(paths.home(B) / "diary")),
        "another agent's log": ("read", str(paths.log(B))),
        "its own log, to write": ("write", str(paths.log(A))),
        "the agents' sockets, to see": ("look", str(paths.agent_socket(B).parent)),
        "another agent's token": ("read", f"/proc/{other}/environ"),
        "another agent's memory": ("open", f"/proc/{other}/mem"),
        "another agent, by a signal": ("signal", str(other)),
        "Hive, by a signal": ("signal", str(os.getpid())),
        "Hive's environment": ("read", f"/proc/{os.getpid()}/environ"),
    }
    yield daemon, targets
    for sock in (*socks, abstract):
        sock.close()


PORTS = ("the backend", "the API (:3000)", "the proxy's TCP port", "ingress")


def own_address() -> str:
    """Of this host in its network; no packet is sent for that."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        with contextlib.suppress(OSError):
            sock.connect(("192.0.2.1", 9))
        return str(sock.getsockname()[0]).replace("0.0.0.0", "127.0.0.1")


def probe(targets: Targets) -> list[str]:
    return [PYTHON, "-S", "-c", PROBE, json.dumps(list(targets.values()))]


def said(text: str) -> dict[str, str]:
    found: dict[str, str] = json.loads(text.splitlines()[-1])
    return found


@pytest.mark.parametrize("case", CASES, ids=name_of)
async def test_an_agent_that_may_go_nowhere_reaches_nothing_but_hives_own_door(
    paths: Paths, neighbours: tuple[Daemon, Targets], case: Case
) -> None:
    daemon, targets = neighbours
    targets |= case.more()
    paths.log(A).touch(mode=0o600)
    outside = await asyncio.to_thread(subprocess.check_output, probe(targets), text=True)
    assert set(said(outside).values()) == {"reached"}, "as root, outside, each of them can be reached"

    door = {"Hive's own door": ("door", f"127.0.0.1:{INNER_PORT}")}
    await daemon.client.define(A, case.spec(paths, A, probe({**targets, **door})))
    await daemon.client.start(A)
    await until(lambda: daemon.ended)
    found = said(paths.log(A).read_text())
    came_of = {name: found[f"{how} {where}"] for name, (how, where) in {**targets, **door}.items()}
    print(f"tried from inside a {case.name} agent:")
    for name, (how, where) in {**targets, **door}.items():
        print(f"  {name:<38} {how:<6} {where:<60} {came_of[name]}")
    assert came_of.pop("Hive's own door") == "reached"
    reached = [name for name, outcome in came_of.items() if outcome == "reached"]
    assert reached == []
    assert len(came_of) == len(targets)


@pytest.mark.parametrize("case", PROCESSES, ids=name_of)
async def test_on_the_hosts_network_the_ports_of_the_host_are_in_reach_and_the_files_are_not(
    paths: Paths, neighbours: tuple[Daemon, Targets], case: Case
) -> None:
    """The meaning of `isolation: uid`, and why `egress = []` is worth asking for."""
    daemon, targets = neighbours
    await daemon.client.define(A, spec(paths, A, probe(targets)))
    await daemon.client.start(A)
    await until(lambda: daemon.ended)
    found = said(paths.log(A).read_text())
    reached = {name for name, (how, where) in targets.items() if found[f"{how} {where}"] == "reached"}
    assert reached == {*PORTS, "a port on every address of the host", "an abstract socket of the host"}


@pytest.mark.parametrize("case", [pytest.param(BY_CGROUP, marks=pytest.mark.cgroup)], ids=name_of)
async def test_one_that_names_networks_has_of_the_host_the_proxys_port_alone(
    paths: Paths, neighbours: tuple[Daemon, Targets], case: Case
) -> None:
    """It is in the host's network, so it sees that network's abstract sockets too (docs/decisions/006)."""
    daemon, targets = neighbours
    proxy_port = int(targets["the proxy's TCP port"][1].rpartition(":")[2])
    listed = spec(paths, A, probe(targets), egress=["0.0.0.0/0", "::/0"], proxy_port=proxy_port)
    try:
        await daemon.client.define(A, listed)
    except NotSupported as error:
        pytest.skip(error.message)
    await daemon.client.start(A)
    await until(lambda: daemon.ended)
    found = said(paths.log(A).read_text())
    reached = {name for name, (how, where) in targets.items() if found[f"{how} {where}"] == "reached"}
    assert reached == {"the proxy's TCP port", "an abstract socket of the host"}


def test_the_probe_tells_a_refusal_from_a_success(tmp_path: Path) -> None:
    (tmp_path / "here").touch()
    targets = {"here": ("read", str(tmp_path / "here")), "gone": ("read", str(tmp_path / "gone"))}
    assert list(said(subprocess.check_output(probe(targets), text=True)).values()) == ["reached", "FileNotFoundError"]
