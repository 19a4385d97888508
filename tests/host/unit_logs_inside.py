"""`hive agent logs` of agents that are units: run by test_unit.py in a machine with systemd as PID 1."""

# ruff: noqa: ASYNC110, ASYNC221 - a test's loop may wait for its disk and for journalctl
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hive.api.server import serve
from hive.client.client import Client, path_of
from hive.control.tail import Output, tail
from hive.errors import NotPermitted
from hive.host import systemd
from hive.runtimes.unit import UnitRuntime
from hive.runtimes.unit_plan import unit_of
from hive.settings.table import Paths
from tests.host.unit_agents import PATHS, new_id, started
from tests.sandbox.harness import Daemon
from tests.waiting import until

SAYS_A_LINE = [
    "sh",
    "-c",
    "echo \"start $(cat n 2>/dev/null || echo 0)\"; echo 1 >n; printf 'a\\033]0;x\\007b\\n'; exec sleep 1000",
]
COUNTS = ["sh", "-c", "n=0; while :; do n=$((n + 1)); echo $n; sleep 0.01; done"]


class LogServices:
    """Of the daemon's services what `logs` asks for."""

    paths = PATHS

    def __init__(self) -> None:
        self.roster = self.runtimes = self
        self.api_tokens = None
        """Nobody comes with a token."""

    def find(self, ref: str) -> Any:
        return SimpleNamespace(agent=ref)

    def output_of(self, agent: str, paths: Paths) -> Output:
        return Output(paths.log(agent), unit_of(agent))


@pytest.fixture
async def client() -> AsyncIterator[Client]:
    services: Any = LogServices()
    path = Path("/run/hive-logs.sock")
    server = await serve(services, path)
    yield Client(path)
    await server.close()


def followers() -> list[int]:
    """pids of the journalctl that follow something."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
            if words[:1] == [b"journalctl"] and b"--follow" in words:
                found.append(int(entry.name))
    return found


async def said(client: Client, agent: str, count: int = 100) -> list[str]:
    await systemd.sync_journal()
    lines = await asyncio.to_thread(lambda: list(client.lines(path_of(agent, "logs"), tail=count)))
    return [line.decode() for line in lines]


async def test_the_helper_says_that_output_is_in_the_journal(runtime: UnitRuntime) -> None:
    assert (await runtime.capabilities()).journal.format("a1") == unit_of("a1")


async def test_logs_are_those_of_all_starts_with_what_systemd_said(daemon: Daemon, client: Client) -> None:
    agent, other = new_id(), new_id()
    await started(daemon, agent, SAYS_A_LINE)
    await started(daemon, other, ["sh", "-c", "echo not mine; exec sleep 1000"])
    await daemon.client.stop(agent, grace_s=5)
    await daemon.client.start(agent)
    await until(lambda: (PATHS.home(agent) / "n").exists())
    while len([line for line in await said(client, agent) if line.startswith("start")]) < 2:
        await asyncio.sleep(0.01)
    lines = await said(client, agent)
    assert [line for line in lines if line.startswith("start")] == ["start 0\n", "start 1\n"]
    assert sum("Started" in line and unit_of(agent) in line for line in lines) == 2, lines
    assert "not mine\n" not in lines
    assert "a\x1b]0;x\x07b\n" in lines, "as from a file: what is harmless for a terminal is the command's to decide"
    assert await said(client, agent, 0) == []
    assert len(await said(client, agent, 2)) == 2


async def test_following_goes_on_over_a_restart_and_ends_when_the_client_leaves(daemon: Daemon, client: Client) -> None:
    agent = new_id()
    await started(daemon, agent, COUNTS)
    stream = client.lines(path_of(agent, "logs"), tail=5, follow=1)
    for _ in range(50):
        await asyncio.to_thread(next, stream)
    assert len(followers()) == 1
    await daemon.client.stop(agent, grace_s=0.2)
    await daemon.client.start(agent)
    while await asyncio.to_thread(next, stream) != b"1\n":
        pass
    await asyncio.to_thread(stream.close)
    await until(lambda: not followers())


async def test_a_client_that_reads_nothing_and_leaves_ends_it_too(daemon: Daemon, client: Client) -> None:
    agent = new_id()
    await started(daemon, agent, ["sh", "-c", "yes 'many words, again and again'"])
    stream = client.lines(path_of(agent, "logs"), tail=100, follow=1)
    await asyncio.to_thread(next, stream)
    await until(lambda: len(followers()) == 1)
    await asyncio.sleep(0.5)  # by now everything between it and us is full
    await asyncio.to_thread(stream.close)
    await until(lambda: not followers())
    await daemon.client.stop(agent, grace_s=0.2)


async def test_following_ends_with_the_server(daemon: Daemon, client: Client) -> None:
    agent = new_id()
    await started(daemon, agent, COUNTS)
    services: Any = LogServices()
    server = await serve(services, Path("/run/hive-logs-2.sock"))
    stream = Client(Path("/run/hive-logs-2.sock")).lines(path_of(agent, "logs"), tail=5, follow=1)
    await asyncio.to_thread(next, stream)
    await server.close()
    assert not followers()
    await asyncio.to_thread(stream.close)


@pytest.fixture
def somebody() -> Iterator[int]:
    """A user in no group."""
    subprocess.run(["useradd", "--system", "--no-create-home", "reader"], check=True)
    yield int(subprocess.run(["id", "-u", "reader"], capture_output=True, text=True, check=True).stdout)
    subprocess.run(["userdel", "reader"], check=True)


async def test_a_daemon_that_may_not_read_the_journal_says_so_and_one_in_the_group_may(
    daemon: Daemon, somebody: int
) -> None:
    agent = new_id()
    await started(daemon, agent, ["sh", "-c", "echo hello; exec sleep 1000"])
    await systemd.sync_journal()
    program = (
        "import asyncio, os, sys\n"
        "from pathlib import Path\n"
        "from hive.control.tail import Output, tail\n"
        "from hive.errors import HiveError\n"
        "groups = [int(gid) for gid in sys.argv[2:]]\n"
        f"os.setgroups(groups); os.setgid({somebody}); os.setuid({somebody})\n"
        "try: print(asyncio.run(tail(Output(Path('/none'), sys.argv[1]), 100)).decode())\n"
        "except HiveError as error: print(type(error).__name__, error.message)\n"
    )
    journal = subprocess.run(["getent", "group", "systemd-journal"], capture_output=True, text=True, check=True)
    gid = journal.stdout.split(":")[2]

    def as_user(*groups: str) -> str:
        command = ["python3", "-c", program, unit_of(agent), *groups]
        return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout

    assert as_user().startswith(NotPermitted.__name__), as_user()
    assert "hello" in as_user(gid).splitlines()


async def test_an_agent_that_has_written_nothing_has_an_empty_log() -> None:
    assert await tail(Output(Path("/none"), unit_of("a9999999")), 10) == b""


# --- hive logs -----------------------------------------------------------------------------------------------------

HIVE = ["python3", "-P", "-m", "hive"]


@pytest.fixture
def service(tmp_path: Path) -> Iterator[None]:
    """A helper as a service of this name, and the target by which an installation is known."""
    Path("/etc/systemd/system/hive.target").write_text("[Unit]\n")
    (tmp_path / "hive.conf").touch()
    where = ["--state-dir", str(tmp_path), "--runtime-dir", str(tmp_path)]
    where += ["--config", str(tmp_path / "hive.conf")]
    run = ["systemd-run", "--quiet", "--unit=hive-sandbox", f"--setenv=PYTHONPATH={os.environ['PYTHONPATH']}"]
    run += ["--setenv=PYTHONDONTWRITEBYTECODE=1", "--", "/usr/bin/python3", "-P", "-m", "hive", "sandbox", *where]
    subprocess.run(run, check=True)
    yield
    subprocess.run(["systemctl", "stop", "hive-sandbox"], check=False)
    Path("/etc/systemd/system/hive.target").unlink()


def hive_logs(*words: str, user: int | None = None) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name != "HIVE_SOCKET"}
    command = [*HIVE, "logs", *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, user=user, extra_groups=[])


def entries(*words: str) -> list[dict[str, Any]]:
    subprocess.run(["journalctl", "--sync"], check=True)
    return [json.loads(line) for line in hive_logs(*words, "--json", "-n", "1000").stdout.splitlines()]


async def test_services_write_json_and_the_command_reads_it_again(service: None) -> None:
    await until(lambda: any(entry["event"] == "sandbox_ready" for entry in entries("sandbox")))
    (ready,) = [entry for entry in entries("sandbox") if entry["event"] == "sandbox_ready"]
    assert (ready["schema"], ready["component"], ready["level"]) == ("log", "sandbox", "info")
    assert ready["fields"]["agents_frozen_by"] == "systemd units"
    for priority, is_there in (("info", True), ("warning", False)):
        words = ["journalctl", "-q", "-o", "cat", "-u", "hive-sandbox", "-p", priority]
        raw = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert ('"event": "sandbox_ready"' in raw) is is_there, "journald has the level as the priority"
    shown = hive_logs("sandbox").stdout
    assert "sandbox    sandbox_ready agents_frozen_by='systemd units' " in shown
    assert '{"' not in shown
    assert any("Started hive-sandbox.service" in entry["text"] for entry in entries()), "and what systemd says"
    assert entries("proxy") == []


async def test_somebody_without_rights_is_told_which(service: None, somebody: int) -> None:
    said = hive_logs(user=somebody)
    assert said.returncode == 4, said
    assert "systemd-journal" in said.stderr
