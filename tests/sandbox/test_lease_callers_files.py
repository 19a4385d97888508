"""Descriptors that a caller of lease.sock passes: refused, and where the kernel takes them nobody waits for that."""

from __future__ import annotations

import array
import asyncio
import os
import pty
import signal
import socket
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from hive.holders.lease_socket import CALLERS_OF_USER
from hive.holders.terminals import open_terminal, tell_terminal
from hive.host.process import Identity, identify
from hive.settings.table import Paths
from tests.sandbox.harness import SLEEP
from tests.sandbox.lease_callers import LEASE, connected, end_incomers, helper
from tests.waiting import until

LINGER_S = 60


@pytest.fixture(autouse=True)
def nothing_left(paths: Paths) -> Iterator[None]:
    yield
    end_incomers(paths)


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def lingering(opened: ExitStack) -> socket.socket:
    """A socket whose last close waits: its peer reads nothing."""
    listens = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
    sock = socket.create_connection(listens.getsockname())
    peer = opened.enter_context(listens.accept()[0])
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its close resets the connection
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, LINGER_S))
    sock.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            sock.send(b"x" * 65536)
    return sock


def pass_it(paths: Paths, opened: ExitStack, line: bytes) -> socket.socket:
    """A caller that says this line with such a socket, and holds no other reference to it."""
    caller = opened.enter_context(socket.socket(socket.AF_UNIX))
    caller.connect(str(paths.lease_socket))
    with lingering(opened) as passed:
        caller.sendmsg([line], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [passed.fileno()]))])
    return caller


@pytest.fixture
def old_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hive.link.server.SO_PASSRIGHTS", 9999)  # no kernel has that option


@pytest.mark.usefixtures("old_kernel")
async def test_where_the_kernel_takes_a_socket_that_lingers_it_holds_up_nobody(
    paths: Paths, freezer: str, opened: ExitStack
) -> None:
    async with helper(paths, freezer) as found, connected(paths) as daemon:
        assert found._leases is not None
        callers = found._leases._socket._callers
        pass_it(paths, opened, b"{}\n")
        incomer = await daemon.holding(*SLEEP)
        assert (await daemon.client.leases())[LEASE].pids == [incomer.pid]
        await until(lambda: callers.total() == 1)
        await asyncio.sleep(0.2)
        assert callers.total() == 1, "its connection is not closed yet, and all the rest went on"
        opened.close()


@pytest.mark.usefixtures("old_kernel")
async def test_one_that_is_turned_away_with_such_a_socket_holds_up_nobody(
    paths: Paths, freezer: str, opened: ExitStack
) -> None:
    async with helper(paths, freezer) as found, connected(paths) as daemon:
        assert found._leases is not None
        turned_away = found._leases._socket._turned_away
        with ExitStack() as silent:
            for _ in range(CALLERS_OF_USER):
                silent.enter_context(socket.socket(socket.AF_UNIX)).connect(str(paths.lease_socket))
            pass_it(paths, opened, b"{}\n")
            pass_it(paths, opened, b"{}\n")
            await until(lambda: turned_away.behind == 1)
        incomer = await daemon.holding(*SLEEP)
        assert (await daemon.client.leases())[LEASE].pids == [incomer.pid]
        assert turned_away.behind == 1, "the first of them is not closed yet"
        opened.close()


async def test_this_kernel_passes_no_descriptor_to_the_helper(paths: Paths, freezer: str) -> None:
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.setsockopt(socket.SOL_SOCKET, 83, 0)
        except OSError:
            pytest.skip("this kernel cannot refuse descriptors")
    async with helper(paths, freezer):
        with socket.socket(socket.AF_UNIX) as caller:
            caller.connect(str(paths.lease_socket))
            with pytest.raises(PermissionError):
                socket.send_fds(caller, [b"{}\n"], [0])


def test_the_terminal_of_a_process_is_found_and_opened_for_its_user_alone() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("sh", ["sh", "-c", "echo ready; exec sleep 1000"])
    assert os.read(terminal, 100).startswith(b"ready")  # only now it surely is its terminal
    try:
        main = identify(pid)
        assert main is not None
        tell_terminal(main, os.geteuid(), "hive: it ends")
        assert os.read(terminal, 100).strip() == b"hive: it ends"
        assert open_terminal(main, os.geteuid() + 1) is None, "it is another user's"
        assert open_terminal(Identity(pid, main.start_ticks + 1, main.boot), os.geteuid()) is None, "another process"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(terminal)


def test_a_process_without_a_terminal_has_none() -> None:
    with subprocess.Popen(SLEEP, start_new_session=True) as process:
        main = identify(process.pid)
        assert main is not None
        assert open_terminal(main, os.geteuid()) is None
        process.kill()
