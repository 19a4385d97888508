"""An MCP server of a job in an agent that is a container, at a real Docker engine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import docker_engine
from tests.docker_engine import PrivateEngine
from tests.fakes.raw_vmm import listens
from tests.jobs.packages import copy_packages
from tests.journeys.stack import PYTHON, Stack, stack, until
from tests.journeys.test_docker_agents import POLICY
from tests.worker.scripted import Folder

pytestmark = [
    pytest.mark.docker,
    pytest.mark.root,
    pytest.mark.redis,
    pytest.mark.skipif(os.geteuid() != 0, reason="hive up runs containers as other users only as root"),
]
SERVER = Path(__file__).parents[1] / "jobs" / "mcp_server.py"


@pytest.fixture(scope="module")
def engine() -> Iterator[PrivateEngine]:
    with docker_engine.private() as engine:
        yield engine


@pytest.fixture(scope="module")
def hive(engine: PrivateEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """With an agent `boxed`, a container in which the packages of MCP servers are."""
    folder = tmp_path_factory.mktemp("model")
    policy = folder / "sandbox.toml"
    policy.write_text(POLICY)
    policy.chmod(0o644)
    model = Folder(folder)
    process = subprocess.Popen(model.launch().command, stdout=subprocess.DEVNULL)
    try:
        until(lambda: listens(model.socket), within_s=10, what="a model")
        config = f"[sandbox]\ndocker_socket = {engine.socket}\npolicy = {policy}\n"
        with stack(url=str(model.socket), config=config) as hive:
            copy_packages(["mcp"], hive.programs / "packages")
            (hive.programs / SERVER.name).write_bytes(SERVER.read_bytes())
            for path in hive.programs.rglob("*"):
                path.chmod(0o755)
            mounts = [docker_engine.HOST_PROGRAMS, f"{hive.programs}:/programs:ro"]
            hive.post(
                "/api/agents",
                {
                    "name": "boxed",
                    "runtime": "docker",
                    "command": ["/bin/sleep", "100000"],
                    "docker": {"image": docker_engine.IMAGE, "mounts": mounts},
                    "env": {"PYTHONPATH": "/programs/packages"},
                    "idle_s": 0,
                },
            )
            hive.post("/api/agents/boxed/start")
            yield hive
            engine.clear(hive.state)
    finally:
        process.kill()
        process.wait()


def test_an_mcp_server_in_a_container_answers_and_ends_with_its_job(hive: Stack) -> None:
    server = {"type": "mcp", "agent": "boxed", "command": [PYTHON, "/programs/mcp_server.py"]}
    script = (
        'call say={"text":"hello"} | call long={"size":100000} | call pid={} | call die={} | call add={"a":1,"b":2}'
    )
    job = hive.post("/api/jobs", {"name": "t", "model": "scripted", "prompt": script, "tools": [server]})["id"]
    until(lambda: hive.get(f"/api/jobs/{job}")["state"] != "running", within_s=90, what="its end")
    turns = hive.get(f"/api/jobs/{job}/result")["turns"]
    said = [one["result"] for turn in turns for one in turn["results"]]
    assert (said[0], said[4]) == ("hello", "3"), said
    assert said[1] == "x" * 65536 + "\n[cut off after 65536 bytes]"
    assert said[2].split()[1] != "0", "it is not root there"
    assert "I am dying" in said[3]
    until(lambda: not running(), within_s=30, what="the end of the server")


def running() -> list[str]:
    """Command lines of that server."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if b"/programs/mcp_server.py" in words and words.startswith(PYTHON.encode()):
            found.append(words.decode())
    return found
