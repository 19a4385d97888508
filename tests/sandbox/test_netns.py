"""Agents with a network of their own: the addresses they reach there, their identity for Hive, and their lifetimes."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

import pytest

from hive.domain import INNER_PORT
from hive.errors import HiveError, NotPermitted, NotSupported, WrongState
from hive.host import netns
from hive.host.process import spawn
from hive.link.client import LinkClient
from hive.link.helper import AskListeners, Listener, ListenerGone
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import Done, Hello
from hive.sandbox.listeners import INNER_PATH
from hive.settings.table import Paths
from hive.tasks import spawn as spawn_task
from tests.descriptors import open_descriptors
from tests.sandbox.harness import PYTHON, SLEEP, A, B, Daemon, HelperProcess, OpenHelper, runtime, spec
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]
pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own takes root")]

ASK = f"""
import socket, sys
sock = socket.create_connection(("127.0.0.1", {INNER_PORT}))
sock.sendall(b"who am I?")
print(sock.recv(100).decode(), flush=True)
"""
ASK_ALWAYS = f"""
import socket, time
while True:
    with socket.create_connection(("127.0.0.1", {INNER_PORT})) as sock:
        sock.sendall(b"who am I?")
        print(sock.recv(100).decode(), flush=True)
    time.sleep(0.01)
"""


class Proxy:
    """Serves every listener it is handed: tells each caller which listener it came by."""

    def __init__(self, paths: Paths) -> None:
        self.listeners: dict[tuple[str, str], socket.socket] = {}
        self.gone: list[tuple[str, str]] = []
        self.asked = 0
        self._loop = asyncio.get_running_loop()
        self._client = LinkClient(paths.sandbox_socket, name="p", on_link=self._linked, on_message=self._told)

    def _linked(self, link: Link) -> None:
        link.tell(Hello(role="proxy", epoch="p"))
        spawn_task(self._ask(link), name="ask")

    async def _ask(self, link: Link) -> None:
        await link.ask(AskListeners(), Done, timeout_s=10)
        self.asked += 1

    def _told(self, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
        if isinstance(message, Listener):
            self._take((message.agent, message.path), socket.socket(fileno=link.take_descriptors()[0]))
        elif isinstance(message, ListenerGone):
            self.gone.append((message.agent, message.path))
            for key in [key for key in self.listeners if key[0] == message.agent and message.path in ("", key[1])]:
                self._close(key)

    def _take(self, key: tuple[str, str], sock: socket.socket) -> None:
        sock.setblocking(False)
        if key in self.listeners:
            self._accept(key, self.listeners[key])
            self._close(key)
        self.listeners[key] = sock
        self._loop.add_reader(sock, self._accept, key, sock)

    def _accept(self, key: tuple[str, str], sock: socket.socket) -> None:
        while True:
            try:
                connection, _ = sock.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(10)
                connection.recv(100)
                connection.sendall(f"{key[0]} by {key[1]}".encode())

    def _close(self, key: tuple[str, str]) -> None:
        sock = self.listeners.pop(key)
        self._loop.remove_reader(sock)
        sock.close()

    def close(self) -> None:
        self._client.close()
        for key in list(self.listeners):
            self._close(key)


@pytest.fixture
async def proxy(paths: Paths) -> AsyncIterator[Proxy]:
    found = Proxy(paths)
    yield found
    found.close()
    await asyncio.sleep(0)


# --- through the helper ------------------------------------------------------------------------------------------


async def test_from_its_first_instruction_on_an_agent_finds_hive_and_hive_knows_who_asks(
    paths: Paths, daemon: Daemon, proxy: Proxy
) -> None:
    for agent in (A, B):
        await daemon.client.define(agent, spec(paths, agent, [PYTHON, "-S", "-c", ASK], egress=[]))
        await daemon.client.start(agent)
    await until(lambda: len(daemon.ended) == 2)
    assert paths.log(A).read_text() == f"{A} by {INNER_PATH}\n"
    assert paths.log(B).read_text() == f"{B} by {INNER_PATH}\n"
    assert {end.exit_code for end in daemon.ended} == {0}


async def test_its_own_unix_socket_is_handed_over_beside_it(paths: Paths, daemon: Daemon, proxy: Proxy) -> None:
    path = await daemon.client.define(A, spec(paths, A, SLEEP, egress=[]))
    await daemon.client.start(A)
    await until(lambda: len(proxy.listeners) == 2)
    assert set(proxy.listeners) == {(A, str(path)), (A, INNER_PATH)}
    await daemon.client.stop(A, grace_s=1)
    await until(lambda: proxy.gone)
    assert proxy.gone == [(A, INNER_PATH)]
    assert set(proxy.listeners) == {(A, str(path))}
    await daemon.client.remove(A)
    await until(lambda: not proxy.listeners)
    assert proxy.gone == [(A, INNER_PATH), (A, "")]


async def test_an_agent_on_the_hosts_network_has_no_listener_there(paths: Paths, daemon: Daemon, proxy: Proxy) -> None:
    path = await daemon.client.define(A, spec(paths, A, SLEEP))
    pid = (await daemon.client.start(A)).pid
    await until(lambda: proxy.listeners)
    assert not netns.differs(pid)
    assert set(proxy.listeners) == {(A, str(path))}


async def test_a_restarted_agent_has_a_new_network_and_a_new_listener(
    paths: Paths, daemon: Daemon, proxy: Proxy
) -> None:
    await daemon.client.define(A, spec(paths, A, [PYTHON, "-S", "-c", ASK], egress=[]))
    for _ in range(3):
        await daemon.client.start(A)
        ends = len(daemon.ended)
        await until(lambda ends=ends: len(daemon.ended) > ends)  # type: ignore[misc]
    assert paths.log(A).read_text() == f"{A} by {INNER_PATH}\n" * 3
    await until(lambda: proxy.gone.count((A, INNER_PATH)) == 3)


async def test_a_frozen_agent_keeps_its_listener_and_asks_on_when_it_is_thawed(
    paths: Paths, daemon: Daemon, proxy: Proxy
) -> None:
    await daemon.client.define(A, spec(paths, A, [PYTHON, "-S", "-c", ASK_ALWAYS], egress=[]))
    await daemon.client.start(A)
    await until(lambda: "\n" in paths.log(A).read_text())
    await daemon.client.freeze(A, 1)
    assert (A, INNER_PATH) in proxy.listeners
    before = len(paths.log(A).read_text())
    await daemon.client.thaw(A)
    await until(lambda: len(paths.log(A).read_text()) > before)


async def test_over_a_kill_of_the_helper_an_agent_asks_on_and_the_next_helper_listens_too(
    paths: Paths, helper_process: Callable[..., HelperProcess], connect: Connect, proxy: Proxy
) -> None:
    """The old socket is still open at the proxy when the next helper listens at the same place."""
    helper = helper_process()
    daemon = await connect()
    await daemon.client.define(A, spec(paths, A, [PYTHON, "-S", "-c", ASK_ALWAYS], egress=[]))
    await daemon.client.start(A)
    await until(lambda: (A, INNER_PATH) in proxy.listeners)
    first = proxy.listeners[A, INNER_PATH]
    await until(lambda: paths.log(A).read_text())
    helper.end(signal.SIGKILL)
    for _ in range(2):
        before = len(paths.log(A).read_text())
        await until(lambda before=before: len(paths.log(A).read_text()) > before)  # type: ignore[misc]
    helper_process()
    await until(lambda: proxy.listeners.get((A, INNER_PATH)) not in (None, first))
    before = len(paths.log(A).read_text())
    await until(lambda: len(paths.log(A).read_text()) > before)
    assert set(paths.log(A).read_text().split("\n")[:-1]) == {f"{A} by {INNER_PATH}"}
    assert daemon.ended == []


async def test_as_a_user_a_network_of_its_own_is_refused_with_the_reason(
    paths: Paths, freezer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = runtime(paths, freezer)
    monkeypatch.setattr("hive.runtimes.process.os.geteuid", lambda: 1000)
    with pytest.raises(NotSupported, match="takes root"):
        await found.prepare(A, spec(paths, A, SLEEP, egress=[], uid=None))


async def test_a_start_that_fails_leaves_no_group_and_no_network(paths: Paths, daemon: Daemon, proxy: Proxy) -> None:
    await daemon.client.define(A, spec(paths, A, ["/etc/passwd"], egress=[]))
    await until(lambda: proxy.listeners and proxy.asked)
    before = open_descriptors()
    for _ in range(3):
        with pytest.raises(NotPermitted):
            await daemon.client.start(A)
    await until(lambda: open_descriptors() <= before)  # a reader of logs ends a moment later
    assert INNER_PATH not in {path for _, path in proxy.listeners}


async def test_a_network_that_takes_its_time_keeps_no_other_waiting(
    paths: Paths, open_helper: OpenHelper, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While others are taken down the kernel lets a new one wait, 40 ms were seen: not on the helper's loop."""
    making, goes_on, make = threading.Event(), threading.Event(), netns.make

    def make_slowly(port: int) -> netns.Private:
        making.set()
        assert goes_on.wait(60)
        return make(port)

    monkeypatch.setattr(netns, "make", make_slowly)
    await open_helper()
    daemon = await connect()
    await daemon.client.define(A, spec(paths, A, SLEEP, egress=[]))
    await daemon.client.define(B, spec(paths, B, SLEEP))
    await daemon.client.start(B)
    starting = asyncio.ensure_future(daemon.client.start(A))
    try:
        await until(making.is_set)
        await daemon.client.freeze(B, 1)
        await daemon.client.thaw(B)
        assert not starting.done()
    finally:
        goes_on.set()
    await starting
    pid = (await daemon.client.stat([A]))[A].pid
    assert pid is not None
    assert netns.differs(pid)


# --- by itself ---------------------------------------------------------------------------------------------------


@pytest.fixture
def inside() -> Iterator[tuple[netns.Private, subprocess.Popen[bytes]]]:
    """A network, and a process in it."""
    private = netns.make(INNER_PORT)
    child = spawn(["sleep", "1000"], env={"PATH": os.defpath}, network_fd=private.fd)
    yield private, child
    child.kill()
    child.wait()
    os.close(private.fd)
    private.sock.close()


def own() -> int:
    return os.stat("/proc/self/ns/net").st_ino


def test_a_network_of_its_own_has_lo_and_nothing_else_and_ours_stays_ours() -> None:
    before = own()
    reads, writes = os.pipe()
    private = netns.make(INNER_PORT)
    with (
        private.sock,
        spawn(["cat", "/proc/net/dev"], env={"PATH": os.defpath}, stdout_fd=writes, network_fd=private.fd),
        os.fdopen(reads) as said,
    ):
        os.close(writes)
        devices = [line.split(":")[0].strip() for line in said.read().splitlines() if ":" in line]
    os.close(private.fd)
    assert devices == ["lo"]
    assert own() == before


def test_who_is_elsewhere_is_seen(inside: tuple[netns.Private, subprocess.Popen[bytes]]) -> None:
    _, child = inside
    assert netns.differs(child.pid)
    assert not netns.differs(os.getpid())
    assert not netns.differs(2**22 + 1)


def test_listening_inside_happens_there_and_nowhere_else(
    inside: tuple[netns.Private, subprocess.Popen[bytes]],
) -> None:
    private, child = inside
    private.sock.close()
    before, fd = own(), os.pidfd_open(child.pid)
    sock = netns.listen_inside(fd, INNER_PORT)
    os.close(fd)
    assert sock is not None
    assert own() == before
    with sock:
        sock.setblocking(True)
        sock.settimeout(10)
        with spawn([PYTHON, "-S", "-c", ASK], env={"PATH": os.defpath}, network_fd=private.fd) as caller:
            connection, _ = sock.accept()
            with connection:
                assert connection.recv(100) == b"who am I?"
                connection.sendall(b"you")
            assert caller.wait() == 0


def test_in_our_own_network_nothing_is_made() -> None:
    fd = os.pidfd_open(os.getpid())
    assert netns.listen_inside(fd, INNER_PORT) is None
    os.close(fd)


def test_a_port_somebody_inside_has_is_said() -> None:
    private = netns.make(INNER_PORT)
    private.sock.close()
    program = f"""
import socket
sock = socket.socket(); sock.bind(("127.0.0.1", {INNER_PORT})); sock.listen(); print(1, flush=True)
sock.accept()
"""
    reads, writes = os.pipe()
    with (
        os.fdopen(reads) as said,
        spawn([PYTHON, "-S", "-c", program], env={}, stdout_fd=writes, network_fd=private.fd) as child,
    ):
        os.close(writes)
        said.readline()
        fd = os.pidfd_open(child.pid)
        with pytest.raises(WrongState, match="Address already in use"):
            netns.listen_inside(fd, INNER_PORT)
        child.kill()
        child.wait()
        with pytest.raises(HiveError, match="cannot listen in its network"):
            netns.listen_inside(fd, INNER_PORT)
        os.close(fd)
    os.close(private.fd)


@pytest.mark.parametrize("call", ["make", "listen_inside"])
def test_without_the_right_it_is_said(monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    def refuse(name: str, *arguments: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(netns, "_call", refuse)
    with pytest.raises(NotPermitted, match="Operation not permitted"):
        netns.make(INNER_PORT) if call == "make" else netns.listen_inside(0, INNER_PORT)
