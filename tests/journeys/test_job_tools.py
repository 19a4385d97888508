"""Tools of jobs on a whole Hive: agents with users of their own, a real MCP server inside one, its parts killed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.raw_vmm import listens
from tests.jobs.packages import copy_packages
from tests.journeys.stack import PYTHON, Stack, stack, until
from tests.ports import free_port
from tests.worker.scripted import Folder

pytestmark = [
    pytest.mark.redis,
    pytest.mark.skipif(
        subprocess.run([PYTHON, "-c", "import sys; print(sys.version_info[:2])"], capture_output=True, text=True).stdout
        != f"{sys.version_info[:2]}\n",
        reason=f"{PYTHON} is of another version than the tests, whose packages agents are given",
    ),
]
JOBS = Path(__file__).parents[1] / "jobs"


class Box:
    """A Hive whose model is scripted, and an agent `scribe` that has MCP servers and answers calls itself."""

    def __init__(self, hive: Stack, folder: Path) -> None:
        self.hive = hive
        self.folder = folder
        self.programs = hive.programs
        self.server = [PYTHON, str(hive.programs / "mcp_server.py")]
        packages = copy_packages(["mcp", "mcp-server-time"], hive.programs / "packages")
        for name in ("mcp_server.py", "tool_agent.py"):
            (hive.programs / name).write_bytes((JOBS / name).read_bytes())
        for path in hive.programs.rglob("*"):
            path.chmod(0o755)
        port = free_port()
        hive.create("scribe", "tool_agent.py", str(port), port=port, env={"PYTHONPATH": str(packages)}, idle_s=0)

    @property
    def agent(self) -> Any:
        return self.hive.get("/api/agents/scribe")

    def mcp(self, *command: str, **more: Any) -> dict[str, Any]:
        return {"type": "mcp", "agent": "scribe", "command": list(command), **more}

    def run(self, script: str, *tools: dict[str, Any], flag: str = "--wait") -> subprocess.CompletedProcess[str]:
        """`hive job run`."""
        file = self.folder / "tools.json"
        file.write_text(json.dumps(tools))
        words = ["job", "run", "t", "--model", "scripted", "--tools", str(file), "--state-dir", str(self.hive.state)]
        command = [sys.executable, "-m", "hive", *words, "--json", *([flag] if flag else []), script]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=120)

    def begin(self, script: str, *tools: dict[str, Any]) -> str:
        done = self.run(script, *tools, flag="")
        assert done.returncode == 0, done.stderr
        return str(json.loads(done.stdout)["id"])

    def results(self, job: str) -> list[str]:
        """Of the calls of a job, once it has ended."""
        until(lambda: self.hive.get(f"/api/jobs/{job}")["state"] != "running", within_s=60, what=f"the end of {job}")
        turns = self.hive.get(f"/api/jobs/{job}/result")["turns"]
        return [one["result"] for turn in turns for one in turn["results"]]

    def inside(self) -> list[int]:
        """Processes of MCP servers."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes()
            except OSError:
                continue
            if self.server[1].encode() in words:
                found.append(int(path.parent.name))
        return found


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    folder = tmp_path_factory.mktemp("model")
    model = Folder(folder)
    process = subprocess.Popen(model.launch().command, stdout=subprocess.DEVNULL)
    try:
        until(lambda: listens(model.socket), within_s=10, what="a model")
        with stack(url=str(model.socket)) as hive:
            yield Box(hive, folder)
    finally:
        process.kill()
        process.wait()


def status(pid: int, field: str) -> str:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(line.split(":\t", 1)[1] for line in lines if line.startswith(f"{field}:"))


def test_a_job_asks_a_real_server_inside_an_agent_what_time_it_is(box: Box) -> None:
    server = box.mcp(PYTHON, "-m", "mcp_server_time", names=["get_current_time"])
    job = box.begin('call get_current_time={"timezone":"Europe/Berlin"} | data 3', server)
    assert json.loads(box.results(job)[0])["timezone"] == "Europe/Berlin"


def test_the_server_has_what_its_agent_has_and_no_more(box: Box) -> None:
    job = box.begin("call pid={} | call hang={} | data 1", box.mcp(*box.server))
    try:
        (pid,) = until(box.inside, within_s=60, what="a server")
        own = int(box.agent["pid"])
        for field in ("Uid", "Gid", "Groups", "CapEff", "CapBnd", "NoNewPrivs", "Seccomp"):
            assert status(pid, field) == status(own, field), field
        for kind in ("net", "mnt", "pid"):
            assert os.readlink(f"/proc/{pid}/ns/{kind}") == os.readlink(f"/proc/{own}/ns/{kind}"), kind
        group, around = (Path(f"/proc/{one}/cgroup").read_text().strip() for one in (pid, own))
        assert os.path.commonpath([group, around]) in (around, os.path.dirname(around)), (group, around)
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"OPENAI_BASE_URL" in environment
    finally:
        box.hive.client().delete(f"/api/jobs/{job}")
    until(lambda: not box.inside(), within_s=30, what="its end")


@pytest.mark.parametrize("killed", ["daemon", "sandbox"])
def test_nothing_is_left_inside_where_a_part_of_hive_is_killed(box: Box, killed: str) -> None:
    job = box.begin("call pid={} | call hang={} | data 1", box.mcp(*box.server))
    until(lambda: box.hive.get(f"/api/jobs/{job}")["progress"] == "turn 2", within_s=60, what="the second turn")
    box.hive.restart(killed)
    until(lambda: not box.inside(), within_s=60, what="its end")
    if killed == "daemon":
        ended = box.hive.get(f"/api/jobs/{job}/result")
        assert (ended["status"], ended["reason"]) == ("failed", "worker_restarted")
        assert ended["turns"][0]["results"][0]["result"].split()[0].isdecimal()
    else:
        assert "is gone: it ended" in box.results(job)[1]


def test_an_agents_own_tool_is_called_and_its_job_prints_the_answer(box: Box) -> None:
    echo = {"type": "function", "agent": "scribe", "function": {"name": "echo"}}
    done = box.run('call echo={"n":7} | text done', echo)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["answer"], found["turns"][0]["results"][0]["result"]) == ("done", '{"n": 7}')


@pytest.mark.wide
def test_a_job_whose_server_does_not_let_go_of_it_is_cancelled_and_no_other_job_is(box: Box) -> None:
    port = free_port()
    (box.programs / "stuck_server.py").write_bytes((JOBS / "stuck_server.py").read_bytes())
    (box.programs / "stuck_server.py").chmod(0o755)
    box.hive.create("stuck", "stuck_server.py", str(port), port=port, idle_s=0)
    other = box.begin("every 0.2 data 600")
    job = box.begin("call hang={} | data 1", {"type": "mcp", "agent": "stuck", "path": "/mcp"})
    client = box.hive.client()
    until(lambda: any(e["event"] == "tool_call" for e in client.job_output(job)), within_s=30, what="it calls")
    box.hive.client().delete(f"/api/jobs/{job}")
    assert box.hive.get(f"/api/jobs/{job}")["state"] == "cancelled"
    assert box.hive.get(f"/api/jobs/{other}")["status"] == "in_progress"
    box.hive.client().delete(f"/api/jobs/{other}")
    assert box.hive.get(f"/api/jobs/{other}")["state"] == "cancelled"
