"""Callers of agents whose port only the helper gets to: it connects, and the proxy is handed the connection."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from hive.domain import RuntimeKind
from hive.errors import (
    BackendDown,
    BackendTimeout,
    BadRequest,
    HiveError,
    NotFound,
    NotPermitted,
    NotSupported,
    Saturated,
    WrongState,
)
from hive.host import http_call, netns
from hive.host.process import spawn
from hive.link.client import LinkClient
from hive.link.helper import Dial, Dialled, dialled
from hive.link.messages import Hello
from hive.link.server import bind_private
from hive.runtimes import dialling
from hive.sandbox.server import HelperServer
from hive.settings.table import Paths
from tests.descriptors import open_descriptors
from tests.runtimes.bench_firecracker import FirecrackerBench, open_bench, open_direct
from tests.sandbox.harness import PYTHON, SLEEP, A, B, Daemon, HelperProcess, spec
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]
pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own takes root")]

PORT = 8080
ECHO = [
    PYTHON,
    "-S",
    "-c",
    f"""
import socket
server = socket.create_server(("127.0.0.1", {PORT}))
while True:
    caller, _ = server.accept()
    caller.sendall(b"agent: " + caller.recv(100))
    caller.close()
""",
]
DEAF = [PYTHON, "-S", "-c", f"import socket, time\nserver = socket.create_server(('127.0.0.1', {PORT}), backlog=0)\n"]
DEAF[-1] += "print(1, flush=True)\ntime.sleep(1000)"


class Proxy:
    """The proxy's end of its link to the helper."""

    def __init__(self, paths: Paths, role: str = "proxy") -> None:
        self.client = LinkClient(
            paths.sandbox_socket,
            name="helper",
            on_link=lambda link: link.tell(Hello(role=role, epoch="p")),
            on_message=lambda *_: None,
        )

    async def dial(self, agent: str) -> socket.socket:
        descriptor = await self.client.link.ask_for_descriptor(Dial(agent=agent), Dialled, timeout_s=10)
        return socket.socket(fileno=descriptor)

    async def call(self, agent: str, said: bytes = b"hello") -> bytes:
        """The agent's answer. A connection its program does not take yet is tried again."""
        async with asyncio.timeout(60):
            while True:
                try:
                    sock = await self.dial(agent)
                except BackendDown:
                    await asyncio.sleep(0.005)
                else:
                    return await spoken(sock, said)


async def spoken(sock: socket.socket, said: bytes) -> bytes:
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    with sock:
        await loop.sock_sendall(sock, said)
        return await asyncio.wait_for(loop.sock_recv(sock, 100), 10)


@pytest.fixture
async def proxy(paths: Paths) -> AsyncIterator[Proxy]:
    found = Proxy(paths)
    yield found
    found.client.close()
    await asyncio.sleep(0)


async def started(daemon: Daemon, paths: Paths, command: list[str], agent: str = A, **more: Any) -> str:
    """Defines and starts it; its address."""
    fields = {"egress": [], "port": PORT, **more}
    await daemon.client.define(agent, spec(paths, agent, command, **fields))
    return (await daemon.client.start(agent)).address


# --- a network of its own ----------------------------------------------------------------------------------------


async def test_an_agent_that_may_go_nowhere_is_called_through_the_helper(
    paths: Paths, daemon: Daemon, proxy: Proxy
) -> None:
    assert await started(daemon, paths, ECHO) == dialled(A) == f"helper:/{A}"
    assert (await daemon.client.stat([A]))[A].address == dialled(A)
    assert await proxy.call(A) == b"agent: hello"


async def test_each_agent_is_called_where_it_is_though_all_listen_at_the_same_port(
    paths: Paths, daemon: Daemon, proxy: Proxy
) -> None:
    named = {agent: [*ECHO[:-1], ECHO[-1].replace("agent", agent)] for agent in (A, B)}
    for agent, command in named.items():
        await started(daemon, paths, command, agent)
    with socket.create_server(("127.0.0.1", 0)) as host:  # nor is it the host's
        await started(daemon, paths, SLEEP, "c1b2c3d4e5f6", port=host.getsockname()[1])
        with pytest.raises(BackendDown, match=f"^nothing listens on 127.0.0.1:{host.getsockname()[1]}$"):
            await proxy.dial("c1b2c3d4e5f6")
    for agent in (B, A, B):
        assert await proxy.call(agent) == f"{agent}: hello".encode()


async def test_who_sleeps_or_does_not_run_is_not_connected_to(paths: Paths, daemon: Daemon, proxy: Proxy) -> None:
    """A connect to a frozen program would succeed, and nobody would answer."""
    await started(daemon, paths, ECHO)
    assert await proxy.call(A) == b"agent: hello"
    await daemon.client.freeze(A, 1)
    with pytest.raises(WrongState, match="is asleep"):
        await proxy.dial(A)
    await daemon.client.thaw(A)
    assert await proxy.call(A) == b"agent: hello"
    await daemon.client.stop(A, grace_s=1)
    with pytest.raises(WrongState, match="is not running"):
        await proxy.dial(A)
    with pytest.raises(NotFound):
        await proxy.dial(B)


@pytest.mark.parametrize("more", [{"port": None}, {"egress": None}, {"egress": None, "port": None}], ids=str)
async def test_one_without_a_port_of_that_kind_has_none_for_the_helper_either(
    paths: Paths, daemon: Daemon, proxy: Proxy, more: dict[str, Any]
) -> None:
    assert await started(daemon, paths, SLEEP, **more) == ""
    with pytest.raises(NotSupported, match="no port that only the helper gets to"):
        await proxy.dial(A)


async def test_only_the_proxy_may_ask_for_it(paths: Paths, daemon: Daemon, proxy: Proxy) -> None:
    await started(daemon, paths, ECHO)
    assert await proxy.call(A) == b"agent: hello"
    for role in ("daemon", "up"):
        other = Proxy(paths, role)
        await until(lambda other=other: other.client.connected)  # type: ignore[misc]
        with pytest.raises(NotPermitted, match=f"{role} may not ask Dial"):
            await other.dial(A)
        other.client.close()


async def test_a_program_that_does_not_take_its_callers_holds_up_nobody_else(
    paths: Paths, daemon: Daemon, proxy: Proxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its backlog is full: the kernel drops connects to it, for as long as it likes."""
    monkeypatch.setattr(dialling, "CONNECT_S", 1.0)
    monkeypatch.setattr(dialling, "AT_ONCE", 3)
    await started(daemon, paths, DEAF)
    await started(daemon, paths, ECHO, B)
    assert await proxy.call(B) == b"agent: hello"
    await until(lambda: paths.log(A).read_text())
    connected = [await proxy.dial(A)]  # a backlog of 0 takes one
    hanging = [asyncio.ensure_future(proxy.dial(A)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(Saturated, match="3 callers wait for its port already"):
        await proxy.dial(A)
    for _ in range(5):
        assert await proxy.call(B) == b"agent: hello"
        await daemon.client.stat([B])
    assert not any(one.done() for one in hanging)
    for one in hanging:
        with pytest.raises(BackendTimeout, match="did not accept in 1 s"):
            await one
    connected[0].close()
    with pytest.raises(BackendTimeout):
        await proxy.dial(A)  # and there is room for callers again


async def test_a_caller_that_left_leaves_no_connection_behind(paths: Paths, daemon: Daemon, proxy: Proxy) -> None:
    await started(daemon, paths, ECHO)
    assert await proxy.call(A) == b"agent: hello"
    before = open_descriptors()
    for turns in range(8):
        asking = asyncio.ensure_future(proxy.dial(A))
        for _ in range(turns):
            await asyncio.sleep(0)
        if asking.done():
            asking.result().close()
        else:
            asking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asking
    assert await proxy.call(A) == b"agent: hello"
    assert open_descriptors() <= before


async def test_after_a_kill_of_the_helper_the_next_one_connects_too(
    paths: Paths, helper_process: Callable[..., HelperProcess], connect: Connect, proxy: Proxy
) -> None:
    helper = helper_process()
    daemon = await connect()
    await started(daemon, paths, ECHO)
    assert await proxy.call(A) == b"agent: hello"
    helper.end(signal.SIGKILL)
    helper_process()
    await until(lambda: daemon.connected == 2 and proxy.client.connected)
    assert (await daemon.client.stat([A]))[A].address == dialled(A)
    assert await proxy.call(A) == b"agent: hello"


async def test_the_network_of_the_host_is_never_connected_in() -> None:
    """Looks at the process that is taken for the agent's, not at what any record says of it."""
    with socket.create_server(("127.0.0.1", 0)) as host, spawn(SLEEP, env={"PATH": os.defpath}) as child:
        fd = os.pidfd_open(child.pid)
        with pytest.raises(WrongState, match="it is in the host's network"):
            await dialling.to_port(fd, host.getsockname()[1])
        child.kill()
        child.wait()
        with pytest.raises(WrongState, match="cannot connect in its network: No such process"):
            await dialling.to_port(fd, host.getsockname()[1])
        os.close(fd)


async def test_without_the_right_to_enter_it_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *arguments: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(netns, "_call", refuse)
    with pytest.raises(NotPermitted, match="cannot connect in its network: Operation not permitted"):
        await dialling.to_port(0, PORT)


async def test_one_that_made_itself_another_network_is_called_in_that_one_or_not_at_all(
    paths: Paths, daemon: Daemon, proxy: Proxy
) -> None:
    """A program may unshare into a user namespace with a network of its own: it can lead callers to itself only."""
    away = (
        "import ctypes, time\n"
        "assert ctypes.CDLL(None).unshare(0x10000000 | 0x40000000) == 0\n"  # CLONE_NEWUSER | CLONE_NEWNET
        "print(1, flush=True)\ntime.sleep(1000)"
    )
    await started(daemon, paths, [PYTHON, "-S", "-c", away])
    with socket.socket() as host:
        host.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        host.bind(("127.0.0.1", PORT))
        host.listen()
        host.setblocking(False)
        await until(lambda: paths.log(A).exists() and paths.log(A).read_text())
        with pytest.raises(HiveError):
            await proxy.dial(A)
        with pytest.raises(BlockingIOError):
            host.accept()


# --- behind a VMM ------------------------------------------------------------------------------------------------


@pytest.fixture(params=[open_bench, open_direct], ids=["jailed", "direct"])
async def bench(request: pytest.FixtureRequest, paths: Paths) -> AsyncIterator[FirecrackerBench]:
    async with request.param(paths) as opened:
        yield opened


@pytest.fixture
async def machines(bench: FirecrackerBench, connect: Connect, paths: Paths) -> AsyncIterator[Daemon]:
    helper = HelperServer(paths, {RuntimeKind.FIRECRACKER: bench.runtime})
    await helper.open()
    daemon = await connect()
    yield daemon
    for agent in await daemon.client.stat():
        await daemon.client.stop(agent, grace_s=0)
    await helper.leave()


async def machine(bench: FirecrackerBench, daemon: Daemon, agent: str = A) -> Path:
    """A machine whose guest answers at 8080; the socket of its VMM."""
    await daemon.client.define(agent, bench.spec(agent, f"http {PORT}", port=PORT))
    assert (await daemon.client.start(agent)).address == dialled(agent, PORT)
    return bench.top(agent) / "root/run/v.sock"


async def test_a_guest_is_called_at_its_vmm_which_the_helper_connects_to(
    bench: FirecrackerBench, machines: Daemon, proxy: Proxy
) -> None:
    await machine(bench, machines)
    await until(lambda: "http" in bench.console(A))
    assert (await proxy.call(A, b"CONNECT 8080\n")).startswith(b"OK ")


async def test_a_link_that_breaks_out_of_a_jail_is_not_followed(
    bench: FirecrackerBench, machines: Daemon, proxy: Proxy, paths: Paths
) -> None:
    """The user of the VMM owns its directory: the helper, as root, could be led to any socket of the host."""
    path = await machine(bench, machines)
    secret = paths.runtime / "engine.sock"
    with bind_private(secret) as listening:
        path.unlink()
        path.symlink_to(secret)
        with pytest.raises(BadRequest, match="is no socket"):
            await proxy.dial(A)
        path.unlink()
        os.link(secret, path)
        with pytest.raises(WrongState, match="somebody else listens than its VMM"):
            await proxy.dial(A)
        path.unlink()
        path.parent.rename(path.parent.with_name("away"))
        path.parent.symlink_to(secret.parent)
        with pytest.raises(HiveError):
            await proxy.dial(A)
        connection, _ = listening.accept()  # by the hard link: it was hung up on before a byte was sent
        with connection:
            assert connection.recv(10) == b""
        with pytest.raises(BlockingIOError):
            listening.accept()
        path.parent.unlink()
        path.parent.with_name("away").rename(path.parent)


async def test_where_another_user_puts_his_own_socket_it_is_not_the_vmms(
    bench: FirecrackerBench, machines: Daemon, proxy: Proxy
) -> None:
    path = await machine(bench, machines)
    path.unlink()
    with bind_private(path), pytest.raises(WrongState, match="somebody else listens than its VMM"):
        await proxy.dial(A)
    path.unlink()
    with pytest.raises(BackendDown, match="No such file"):
        await proxy.dial(A)


async def test_a_vmm_whose_backlog_is_full_is_waited_for(paths: Paths) -> None:
    """The kernel answers such a connect with EAGAIN, which the loops take for a connection under way."""
    top = paths.state / "vm"
    top.mkdir(parents=True)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(top / "v.sock"))
        listening.listen(0)
        first = await dialling.to_vmm(top, top / "v.sock", pid=os.getpid())
        waiting = asyncio.ensure_future(dialling.to_vmm(top, top / "v.sock", pid=os.getpid()))
        await asyncio.sleep(3 * http_call.AGAIN_S)
        assert not waiting.done()
        accepted, _ = listening.accept()
        second = await waiting
        third = asyncio.ensure_future(dialling.to_vmm(top, top / "v.sock", pid=os.getpid()))
        await asyncio.sleep(0)
        third.cancel()
        with pytest.raises(asyncio.CancelledError):
            await third
        for sock in (first, second, accepted):
            sock.close()
