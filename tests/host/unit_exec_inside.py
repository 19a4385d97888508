"""Programs inside agents that are units: run by test_unit.py in a machine with systemd as PID 1. Nothing is played."""

# ruff: noqa: ASYNC240 - a test's loop may wait for its disk
from __future__ import annotations

import asyncio
import os
import secrets
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from hive.errors import LinkLost, WrongState
from hive.link.execution import TerminalSize
from hive.sandbox.client import Execution
from tests.host.unit_agents import PYTHON, SLEEP, Connect, asleep, group_of, new_id, started
from tests.sandbox.harness import Daemon, alive
from tests.waiting import until

STATUS = ("Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp")
SHARED = ("net", "ipc", "pid", "user", "cgroup", "time")
FAMILY = "sleep 54321 & echo $$ $!; exec sleep 54322"


class Ran(NamedTuple):
    code: int | None
    output: bytes
    errors: bytes


def status_of(pid: int | str) -> dict[str, str]:
    fields = dict(row.split(":\t", 1) for row in Path(f"/proc/{pid}/status").read_text().splitlines() if ":\t" in row)
    return {name: fields[name].strip() for name in STATUS}


async def begun(daemon: Daemon, agent: str, *command: str, terminal: TerminalSize | None = None) -> Execution:
    return await daemon.client.execute(agent, secrets.token_hex(8), list(command), terminal)


async def line(execution: Execution, which: int = 1) -> str:
    descriptor, said = execution.descriptors[which], b""
    while not said.endswith(b"\n"):
        piece = await asyncio.to_thread(os.read, descriptor, 1)
        assert piece, said
        said += piece
    return said.decode().strip()


async def all_of(descriptor: int) -> bytes:
    said = b""
    while data := await asyncio.to_thread(os.read, descriptor, 65536):
        said += data
    return said


async def ran(daemon: Daemon, agent: str, *command: str, given: bytes = b"") -> Ran:
    execution = await begun(daemon, agent, *command)
    stdin, stdout, stderr = execution.descriptors

    def give() -> None:
        with os.fdopen(stdin, "wb") as file:
            file.write(given)

    _, output, errors = await asyncio.gather(asyncio.to_thread(give), all_of(stdout), all_of(stderr))
    os.close(stdout)
    os.close(stderr)
    return Ran(await execution.ended, output, errors)


def close(execution: Execution) -> None:
    for descriptor in execution.descriptors:
        os.close(descriptor)


def exec_units() -> str:
    listed = ["systemctl", "list-units", "--all", "--plain", "--no-legend", "hive-exec@*"]
    return subprocess.run(listed, capture_output=True, text=True, check=True).stdout


async def test_its_exit_code_and_its_bytes_come_through(daemon: Daemon) -> None:
    agent = new_id()
    await started(daemon, agent, SLEEP, egress=[])
    data = os.urandom(3 * 1024 * 1024 + 5)
    assert await ran(daemon, agent, "cat", given=data) == (0, data, b"")
    assert await ran(daemon, agent, "sh", "-c", "echo $0; echo err >&2; exit 7", "it's $HOME;") == (
        7,
        b"it's $HOME;\n",
        b"err\n",
    )
    assert (await ran(daemon, agent, "sh", "-c", "kill -9 $$")).code == 137
    await until(lambda: not exec_units())


async def test_it_has_the_sandbox_of_the_agent(daemon: Daemon) -> None:
    """User, capabilities, filters of system calls, group, namespaces; what the agent sees of files it sees, too."""
    agent = new_id()
    pid = await started(daemon, agent, ["sh", "-c", "echo mine >/tmp/seen; exec sleep 1000"], egress=[])
    execution = await begun(daemon, agent, "sh", "-c", "echo $$; cat /tmp/seen; ls /run /root; pwd; exec sleep 1000")
    mine = await line(execution)
    assert await line(execution) == "mine"
    await until(lambda: Path(f"/proc/{mine}/comm").read_text() == "sleep\n")
    assert status_of(mine) == status_of(pid)
    assert status_of(mine)["Seccomp"] == "2"
    assert [os.readlink(f"/proc/{mine}/ns/{one}") for one in SHARED] == [
        os.readlink(f"/proc/{pid}/ns/{one}") for one in SHARED
    ]
    assert os.readlink(f"/proc/{mine}/ns/net") != os.readlink("/proc/self/ns/net")
    inside, own = Path(f"/proc/{mine}/cgroup").read_text().strip(), Path(f"/proc/{pid}/cgroup").read_text().strip()
    assert inside.startswith(f"{own}/exec-")
    assert Path(f"/proc/{mine}/limits").read_text() == Path(f"/proc/{pid}/limits").read_text()
    assert Path(f"/proc/{mine}/root/etc/hive").exists() == Path(f"/proc/{pid}/root/etc/hive").exists()
    close(execution)
    await daemon.client.end_execution(execution.run)
    assert not alive(int(mine))
    assert alive(pid)


async def test_it_cannot_do_what_the_agent_cannot(daemon: Daemon) -> None:
    agent = new_id()
    await started(daemon, agent, SLEEP, egress=[])
    program = (
        "import ctypes, os\n"
        "libc = ctypes.CDLL(None, use_errno=True)\n"
        "print(libc.unshare(0x10000000), ctypes.get_errno())\n"
        "print(os.path.exists('/var/lib/hive/sandbox'), os.listdir('/home'))\n"
        "open('/etc/mine', 'w')\n"
    )
    code, output, errors = await ran(daemon, agent, PYTHON, "-c", program)
    assert (code, output) == (1, b"-1 1\nFalse []\n")
    assert b"Read-only file system" in errors


async def test_a_sleeper_is_not_entered_and_one_that_is_entered_is_not_frozen(daemon: Daemon) -> None:
    agent = new_id()
    await started(daemon, agent, SLEEP, egress=[])
    await asleep(daemon, agent)
    with pytest.raises(WrongState, match="asleep"):
        await begun(daemon, agent, "true")
    await daemon.client.thaw(agent)
    execution = await begun(daemon, agent, "sleep", "1000")
    with pytest.raises(WrongState, match="runs a program inside"):
        await daemon.client.freeze(agent, 9)
    close(execution)
    await daemon.client.end_execution(execution.run)


async def test_it_ends_with_the_link_it_was_asked_for_on(daemon: Daemon, connect: Connect) -> None:
    agent = new_id()
    await started(daemon, agent, SLEEP, egress=[])
    caller = await connect()
    execution = await begun(caller, agent, "sh", "-c", FAMILY)
    pids = [int(word) for word in (await line(execution)).split()]
    caller.client.close()
    await until(lambda: not any(alive(pid) for pid in pids))
    close(execution)


async def test_it_ends_with_its_agent(daemon: Daemon) -> None:
    agent = new_id()
    await started(daemon, agent, SLEEP, egress=[])
    execution = await begun(daemon, agent, "sh", "-c", FAMILY)
    pids = [int(word) for word in (await line(execution)).split()]
    await daemon.client.stop(agent, grace_s=1)
    await until(lambda: not any(alive(pid) for pid in pids))
    await execution.ended
    close(execution)
    await until(lambda: not group_of(agent).exists())


async def test_a_killed_helper_leaves_nothing_of_it_once_the_next_one_is_there(
    helper_process: Callable[[], subprocess.Popen[bytes]], connect: Connect
) -> None:
    agent = new_id()
    first = helper_process()
    daemon = await connect()
    pid = await started(daemon, agent, SLEEP, egress=[])
    execution = await begun(daemon, agent, "sh", "-c", FAMILY)
    pids = [int(word) for word in (await line(execution)).split()]
    first.kill()
    first.wait()
    with pytest.raises(LinkLost):
        await execution.ended
    close(execution)
    helper_process()
    await until(lambda: not any(alive(one) for one in pids))
    await until(lambda: not exec_units())
    assert alive(pid)
    await until(lambda: daemon.client.connected)
    await daemon.client.stop(agent, grace_s=1)


async def test_a_terminal_is_its_own(daemon: Daemon) -> None:
    agent = new_id()
    await started(daemon, agent, SLEEP, egress=[])
    terminal = TerminalSize(rows=33, columns=101, kind="dumb")
    execution = await begun(daemon, agent, "sh", "-c", "stty size; echo $TERM; tty; read x; echo $x", terminal=terminal)
    assert await line(execution, 0) == "33 101"
    assert await line(execution, 0) == "dumb"
    assert (await line(execution, 0)).startswith("/dev/pts/")
    os.write(execution.descriptors[0], b"typed\r")
    assert [await line(execution, 0), await line(execution, 0)] == ["typed", "typed"]
    assert await execution.ended == 0
    close(execution)


async def test_a_filtered_agent_is_entered_within_its_filter(daemon: Daemon) -> None:
    """A list of networks is a packet filter on the agent's control group, and on all below it."""
    agent = new_id()
    await started(daemon, agent, SLEEP, egress=["192.0.2.0/24"])
    program = "import socket\nsocket.create_connection(('127.0.0.1', 9), 2)"
    listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 9)
    async with listener:
        done = await ran(daemon, agent, PYTHON, "-c", program)
    assert (done.code, b"PermissionError" in done.errors or b"Timeout" in done.errors) == (1, True)
