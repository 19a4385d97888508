"""The walls of a unit around an agent: run by test_unit.py in a machine with systemd as PID 1. Nothing is played."""

# ruff: noqa: ASYNC240 - a test's loop may wait for its disk and for systemctl
from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hive.domain import Limits
from hive.errors import BackendDown, BadRequest, HiveError, NotPermitted, NotSupported
from hive.host import packet_filter
from hive.link.client import LinkClient
from hive.link.helper import Dial, Dialled, dialled
from hive.link.messages import Hello
from hive.runtimes import unit
from tests.host.unit_agents import (
    BURN,
    PATHS,
    PYTHON,
    SLEEP,
    Connect,
    asleep,
    group_of,
    new_id,
    report_of,
    reporter,
    show,
    spec_of,
    started,
)
from tests.sandbox.harness import Daemon
from tests.waiting import until

# --- limits --------------------------------------------------------------------------------------------------------


async def test_its_limits_are_the_units(daemon: Daemon) -> None:
    agent = new_id()
    body = "import resource\nfound['files'] = resource.getrlimit(resource.RLIMIT_NOFILE)"
    limits = Limits(memory_mb=64, cpu=0.5, pids=20, files=99)
    await started(daemon, agent, reporter(body), limits=limits)
    shown = show(agent, "MemoryMax", "MemorySwapMax", "CPUQuotaPerSecUSec", "TasksMax", "LimitNOFILE", "OOMPolicy")
    assert shown == {
        "MemoryMax": str(64 << 20),
        "MemorySwapMax": str(64 << 20),
        "CPUQuotaPerSecUSec": "500ms",
        "TasksMax": "20",
        "LimitNOFILE": "99",
        "OOMPolicy": "kill",
    }
    assert (await report_of(agent))["files"] == [99, 99]
    controllers = Path("/sys/fs/cgroup/cgroup.controllers").read_text().split()
    says = (await daemon.client.stat([agent]))[agent].limits
    assert [name for name in ("memory_mb", "cpu", "pids") if name in says] == [
        name
        for name, controller in (("memory_mb", "memory"), ("cpu", "cpu"), ("pids", "pids"))
        if controller not in controllers
    ]


def needs(controller: str) -> None:
    if controller not in Path("/sys/fs/cgroup/cgroup.controllers").read_text().split():
        pytest.skip(f"control groups v2 have no {controller} controller on this host (v1 has it)")


async def test_one_that_uses_more_memory_than_it_may_is_killed_and_that_is_said(
    daemon: Daemon, caplog: pytest.LogCaptureFixture
) -> None:
    needs("memory")
    agent = new_id()
    # Locked, so that it cannot go to swap: eight processes, because each may lock 8 MiB.
    locks = "import ctypes, os, time; [os.fork() for _ in range(3)]; held = ctypes.create_string_buffer(7 << 20); "
    locks += "ctypes.CDLL(None).mlock(held, 7 << 20); time.sleep(1000)"
    command = ["sh", "-c", f"sleep 1000 & {PYTHON} -c '{locks}'; exit 5"]
    await started(daemon, agent, command, limits=Limits(memory_mb=32))
    await until(lambda: daemon.ended)
    assert daemon.ended[-1].exit_code == 137, "all of it, not the one process that was too large"
    assert f"agent_out_of_memory agent=agent-{agent} limits.memory_mb=32" in caplog.text


async def test_one_that_may_use_a_fifth_of_a_core_does_not_use_more(daemon: Daemon) -> None:
    needs("cpu")
    agent = new_id()
    await started(daemon, agent, BURN, limits=Limits(cpu=0.2))
    throttled = group_of(agent) / "cpu.stat"
    await until(lambda: int(re.search(r"nr_throttled (\d+)", throttled.read_text())[1]) > 5)  # type: ignore[index]


async def test_one_that_may_have_few_processes_gets_no_more(daemon: Daemon) -> None:
    needs("pids")
    agent = new_id()
    body = (
        "found['made'] = 0\ntry:\n    while os.fork(): found['made'] += 1\n    time.sleep(1000)\nexcept OSError: pass"
    )
    await started(daemon, agent, reporter(body), limits=Limits(pids=10))
    assert (await report_of(agent))["made"] == 9


async def test_deep_asleep_its_memory_is_in_swap_and_comes_back(daemon: Daemon) -> None:
    """A host without swap says so, and the agent sleeps on as it did."""
    agent = new_id()
    body = "data = os.urandom(1 << 20) * 60\nfound['sum'] = sum(data[::4096])"
    await started(daemon, agent, reporter(body))
    await report_of(agent)
    await asleep(daemon, agent)
    try:
        paged = await daemon.client.page_out(agent, 1)
    except NotSupported as error:
        why_not = error.message
    else:
        why_not = ""
    assert (await daemon.client.stat([agent]))[agent].state == "frozen"
    if why_not:
        pytest.skip(why_not)
    assert paged.how in ("reclaim", "madvise")
    assert paged.swap_bytes > 40 << 20
    assert paged.kept_bytes < 30 << 20
    assert (await daemon.client.stat([agent]))[agent].swap_bytes > 40 << 20
    await daemon.client.thaw(agent)
    assert (await daemon.client.stop(agent, grace_s=5)).exit_code == 143


# --- isolation -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(address: tuple[str, int] | str) -> Iterator[list[int]]:
    """Something that answers there; how many called."""
    family = socket.AF_UNIX if isinstance(address, str) else socket.AF_INET
    calls = [0]
    with socket.socket(family) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        if isinstance(address, str):
            os.chmod(address, 0o666)
        sock.listen()

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    caller, _ = sock.accept()
                    calls[0] += 1
                    caller.sendall(b"served\n")
                    caller.close()

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield calls
        finally:
            sock.shutdown(socket.SHUT_RDWR)
            thread.join()
    if isinstance(address, str):
        os.unlink(address)


TRY = """
def call(address, wait_s=0.3):
    try:
        with socket.socket(socket.AF_UNIX if isinstance(address, str) else socket.AF_INET) as sock:
            sock.settimeout(wait_s)
            sock.connect(address)
            return 'connected ' + sock.recv(100).decode().strip()
    except TimeoutError: return 'connected and silent' if wait_s == 0.3 else 'timeout'
    except OSError as error: return type(error).__name__
def read(path):
    try: return open(path).read(100) or 'empty'
    except OSError as error: return type(error).__name__
def names(path):
    try: return sorted(os.listdir(path))
    except OSError as error: return type(error).__name__
def write(path):
    try: open(path, 'w').write('x'); return 'written'
    except OSError as error: return type(error).__name__
"""


async def test_nothing_but_its_own_home_and_socket_is_within_reach(daemon: Daemon) -> None:
    agent, other = new_id(), new_id()
    await started(daemon, other, SLEEP)
    secrets = [PATHS.state / "box.key", Path("/etc/hive/hive.conf"), Path("/root/secret"), Path("/home/secret")]
    for path in secrets:
        path.parent.mkdir(exist_ok=True)
        path.write_text("secret")
        path.chmod(0o644)
    (PATHS.home(other) / "note").write_text("secret")
    backend, api = ("127.0.0.1", 18000), ("127.0.0.1", 3000)
    unix = [str(PATHS.runtime / name) for name in ("redis.sock", "hive.sock", "backend.sock")] + ["/run/docker.sock"]
    own, others = str(PATHS.agent_socket(agent)), str(PATHS.agent_socket(other))
    program = TRY + (
        f"found['tcp'] = [call(a) for a in [('127.0.0.1', 18000), ('127.0.0.1', 3000), ('10.255.0.1', 80)]]\n"
        f"found['unix'] = [call(a) for a in {unix!r}]\n"
        f"found['others'], found['own'] = call({others!r}), call({own!r})\n"
        f"found['inner'] = call(('127.0.0.1', 11434))\n"
        f"found['files'] = [read(p) for p in {[*map(str, secrets), str(PATHS.home(other) / 'note')]!r}]\n"
        f"found['state'] = names({str(PATHS.state)!r}) + names({str(PATHS.state / 'agents')!r})\n"
        f"found['script'] = read({str(PATHS.runtime / 'start' / agent)!r})\n"
        f"found['runtime'], found['sockets'] = names({str(PATHS.runtime)!r}), names({own!r}[:-14])\n"
        "found['empty'] = [names('/run/systemd'), names('/run/systemd/incoming'), names('/run/user')]\n"
        "found['run'], found['processes'] = names('/run'), [p for p in names('/proc') if p.isdigit()]\n"
        "found['write'] = [write(p) for p in ('/etc/x', '/usr/x', '/var/lib/x', '/run/x', '/dev/x', '/sys/x')]\n"
        "found['may'] = [write(p) for p in ('x', '/tmp/x', '/var/tmp/x', '/dev/shm/x')]\n"
        "found['devices'] = [n for n in names('/dev') if n in ('sda', 'kvm', 'mem', 'fuse', 'vsock', 'net')]\n"
        "import ctypes; libc = ctypes.CDLL(None, use_errno=True)\n"
        "found['calls'] = [libc.unshare(0x10000000), libc.mount(b'x', b'/tmp', b'tmpfs', 0, None), libc.setuid(0),\n"
        "    libc.ptrace(16, 1, 0, 0), libc.setns(0, 0)]\n"
        "try: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW); found['netlink'] = 'made'\n"
        "except OSError as error: found['netlink'] = type(error).__name__\n"
    )
    with served(backend) as calls, served(api) as api_calls, contextlib.ExitStack() as stack:
        for place in unix:
            stack.enter_context(served(place))
        on_11434 = stack.enter_context(served(("127.0.0.1", 11434)))
        await started(daemon, agent, reporter(program))
        found = await report_of(agent)
    print(json.dumps(found, indent=1))
    assert found["tcp"] == ["ConnectionRefusedError", "ConnectionRefusedError", "OSError"]
    assert (calls[0], api_calls[0], on_11434[0]) == (0, 0, 0)
    assert set(found["unix"]) == {"FileNotFoundError"}
    assert found["others"] == "PermissionError"
    assert found["own"] == "connected and silent", "the proxy, which would answer, is not there"
    assert found["inner"] == "connected and silent", "Hive's own listener, not the backend of the host"
    assert set(found["files"]) <= {"FileNotFoundError", "PermissionError"}
    assert found["state"] == ["agents", agent]
    assert found["runtime"] == ["a", "start"]
    assert found["sockets"] == "PermissionError"
    assert found["script"] == "PermissionError"
    assert found["run"] == ["hive", "systemd", "user"], "with systemd's own mount points, empty:"
    assert found["empty"] == [["incoming"], "PermissionError", []]
    assert len(found["processes"]) == 1, "it sees itself alone"
    assert set(found["write"]) <= {"OSError", "PermissionError"}
    assert found["may"] == ["written"] * 4
    assert found["devices"] == []
    assert found["calls"] == [-1] * 5
    assert found["netlink"] == "OSError"
    assert not Path("/tmp/x").exists()
    assert not Path("/dev/shm/x").exists()


async def test_its_socket_may_be_made_anew_while_it_runs(daemon: Daemon) -> None:
    """A starting helper renames a new socket over the old one: a bind mount of the file itself would keep the old."""
    agent = new_id()
    body = TRY + (
        f"while not os.path.exists('go'): time.sleep(0.01)\nfound['own'] = call({str(PATHS.agent_socket(agent))!r})\n"
    )
    await started(daemon, agent, reporter(body))
    path = PATHS.agent_socket(agent)
    path.unlink()
    with served(str(path)):
        (PATHS.home(agent) / "go").touch()
        assert (await report_of(agent))["own"] == "connected served"


async def test_hive_is_at_its_loopback_again_after_the_helper_was_killed(
    helper_process: Callable[[], subprocess.Popen[bytes]], connect: Connect
) -> None:
    first = helper_process()
    daemon = await connect()
    agent = new_id()
    body = TRY + "while not os.path.exists('go'): time.sleep(0.01)\nfound['inner'] = call(('127.0.0.1', 11434))\n"
    await started(daemon, agent, reporter(body))
    first.kill()
    first.wait()
    helper_process()
    await until(lambda: daemon.connected == 2)
    (PATHS.home(agent) / "go").touch()
    assert (await report_of(agent))["inner"] == "connected and silent"


async def test_with_a_list_it_reaches_that_list_and_of_the_loopback_hive_alone(daemon: Daemon) -> None:
    agent = new_id()
    own = str(PATHS.agent_socket(agent))
    body = TRY + (
        "where = [('127.0.0.2', 18000), ('127.0.0.1', 18001), ('127.0.0.1', 18000)]\n"
        f"found['tcp'], found['own'] = [call(address, 1.0) for address in where], call({own!r})\n"
    )
    with (
        served(("127.0.0.2", 18000)) as allowed,
        served(("127.0.0.1", 18001)) as hive,
        served(("127.0.0.1", 18000)) as denied,
    ):
        try:
            await started(daemon, agent, reporter(body), egress=["127.0.0.2/32"], proxy_port=18001)
        except NotSupported as error:
            pytest.skip(error.message)
        found = await report_of(agent)
    assert found["tcp"][:2] == ["connected served"] * 2
    assert found["tcp"][2] in ("timeout", "PermissionError")
    assert (allowed[0], hive[0], denied[0]) == (1, 1, 0)
    assert found["own"] == "connected and silent"


async def test_the_filter_is_as_it_was_after_it_was_killed_and_started_again(daemon: Daemon) -> None:
    """systemd removes the group with the unit: each start has a new one, and the filter of its own spec."""
    agent = new_id()
    body = TRY + "found['tcp'] = call(('127.0.0.1', 18000), 1.0)\n"
    with served(("127.0.0.1", 18000)) as calls:
        for times in (1, 2):
            (PATHS.home(agent) / "report.json").unlink(missing_ok=True)
            try:
                await started(daemon, agent, reporter(body), egress=["192.0.2.0/24"])
            except NotSupported as error:
                pytest.skip(error.message)
            assert (await report_of(agent))["tcp"] in ("timeout", "PermissionError")
            await daemon.client.stop(agent, grace_s=0)
            await until(lambda times=times: not group_of(agent).exists())  # type: ignore[misc]
    assert calls[0] == 0


async def test_a_unit_whose_group_was_exchanged_does_not_become_the_agent(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, put_filter = new_id(), unit._put_filter
    if why_not := packet_filter.why_not():
        pytest.skip(why_not)
    monkeypatch.setattr(unit, "_put_filter", lambda spec, places: put_filter(spec, places) + 1)
    await daemon.client.define(agent, spec_of(agent, SLEEP, egress=["192.0.2.0/24"]))
    with pytest.raises(HiveError, match="not in the group that is filtered"):
        await daemon.client.start(agent)
    assert not group_of(agent).exists()


async def test_its_port_is_reached_through_the_helper_and_by_nobody_else(daemon: Daemon) -> None:
    agent = new_id()
    body = (
        "server = socket.create_server(('127.0.0.1', 8000))\n"
        "while True:\n    caller, _ = server.accept()\n    caller.sendall(b'agent'); caller.close()\n"
    )
    await daemon.client.define(agent, spec_of(agent, [PYTHON, "-c", "import socket\n" + body], port=8000))
    assert (await daemon.client.start(agent)).address == dialled(agent)
    client = LinkClient(
        PATHS.sandbox_socket,
        name="helper",
        on_link=lambda link: link.tell(Hello(role="proxy", epoch="p")),
        on_message=lambda *_: None,
    )
    await until(lambda: client.connected)
    async with asyncio.timeout(60):
        while True:
            try:
                descriptor = await client.link.ask_for_descriptor(Dial(agent=agent), Dialled, timeout_s=5)
            except BackendDown:
                await asyncio.sleep(0.01)
            else:
                break
    client.close()
    with socket.socket(fileno=descriptor) as caller:
        caller.settimeout(10)
        assert caller.recv(10) == b"agent"
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", 8000), 1)


# --- bad input -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"command": []}, BadRequest),
        ({"name": "no name"}, BadRequest),
        ({"env": {"A-B": "1"}}, BadRequest),
        ({"env": {"A": "nul\0"}}, BadRequest),
        ({"home": "/etc"}, BadRequest),
        ({"uid": None}, NotPermitted),
        ({"uid": 0}, NotPermitted),
        ({"egress": ["192.0.2.0/24"] * 257}, BadRequest),
    ],
    ids=str,
)
async def test_a_spec_that_cannot_be_a_unit_is_refused_and_leaves_nothing(
    daemon: Daemon, change: dict[str, Any], error: type[HiveError]
) -> None:
    agent = new_id()
    with pytest.raises(error):
        await daemon.client.define(agent, msgspec.structs.replace(spec_of(agent, SLEEP), **change))
    assert not PATHS.home(agent).exists()


async def test_a_home_that_was_removed_by_hand_is_told_and_nothing_is_left(daemon: Daemon) -> None:
    agent = new_id()
    await daemon.client.define(agent, spec_of(agent, SLEEP))
    PATHS.home(agent).rmdir()
    with pytest.raises(HiveError):
        await daemon.client.start(agent)
    assert show(agent, "LoadState") == {"LoadState": "not-found"}
    assert not group_of(agent).exists()
