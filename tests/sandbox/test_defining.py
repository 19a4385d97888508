"""Making and removing agents, handing out their sockets, and the users that may ask the helper for that."""

# ruff: noqa: ASYNC220, ASYNC240 - as in harness.py
from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from hive.errors import BadRequest, LinkLost, NotFound, NotPermitted, StoreFull, WrongState
from hive.link.client import LinkClient
from hive.link.helper import AskListeners, Freeze
from hive.link.messages import Done, Hello
from hive.settings.table import Paths
from tests.sandbox.harness import (
    PYTHON,
    SLEEP,
    A,
    B,
    Daemon,
    OpenHelper,
    alive,
    kill_all_under,
    read_when_written,
    running,
    spec,
    uid_of,
)
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]

ROOT = os.geteuid() == 0


# --- define, remove, rights --------------------------------------------------------------------------------------


async def test_the_agents_socket_belongs_to_the_agent_and_to_nobody_else(paths: Paths, daemon: Daemon) -> None:
    path = await daemon.client.define(A, spec(paths, A, SLEEP))
    assert path == paths.agent_socket(A)
    found = path.stat()
    assert stat.S_IMODE(found.st_mode) == 0o600
    assert found.st_uid == (uid_of(A) or os.geteuid())
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o711


async def test_files_are_copied_into_the_home_again_only_when_they_changed(
    paths: Paths, daemon: Daemon, tmp_path: Path
) -> None:
    source = tmp_path / "agent.py"
    source.write_text("one")
    what = spec(paths, A, SLEEP, files={str(source): "agent.py"})
    await daemon.client.define(A, what)
    copied = paths.home(A) / "agent.py"
    inode = copied.stat().st_ino
    await daemon.client.define(A, what)
    assert (copied.read_text(), copied.stat().st_ino) == ("one", inode)
    source.write_text("two")
    await daemon.client.define(A, what)
    assert copied.read_text() == "two"
    assert copied.stat().st_uid == (uid_of(A) or os.geteuid())


async def test_a_home_that_is_a_link_is_refused_and_nothing_is_left(
    paths: Paths, daemon: Daemon, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    paths.home(A).symlink_to(tmp_path)
    with pytest.raises(NotPermitted, match=A):
        await daemon.client.define(A, spec(paths, A, SLEEP))
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert not paths.agent_socket(A).exists()
    assert await daemon.client.stat() == {}


@pytest.mark.parametrize(
    ("agent", "more"),
    [
        ("../../etc", {}),
        (A, {"home": "/root"}),
        (A, {"log": "/etc/passwd"}),
        (A, {"uid": 0}),
        (A, {"files": {"/etc/hostname": "../x"}}),
        (A, {"files": {"/no/such/file": "x"}}),
    ],
)
async def test_a_spec_that_reaches_out_of_its_home_is_refused_and_leaves_nothing(
    paths: Paths, daemon: Daemon, agent: str, more: dict[str, object]
) -> None:
    with pytest.raises((BadRequest, NotPermitted, NotFound)):
        await daemon.client.define(agent, spec(paths, agent, SLEEP, **more))
    assert await daemon.client.stat() == {}
    assert list(paths.home(A).parent.iterdir()) == []
    assert list(paths.agent_socket(A).parent.iterdir()) == []


async def test_two_agents_never_share_a_socket(paths: Paths, daemon: Daemon) -> None:
    await daemon.client.define("aaaaaaaa-1", spec(paths, "aaaaaaaa-1", SLEEP))
    with pytest.raises(WrongState):
        await daemon.client.define("aaaaaaaa-2", spec(paths, "aaaaaaaa-2", SLEEP))
    assert list(await daemon.client.stat()) == ["aaaaaaaa-1"]
    assert not paths.home("aaaaaaaa-2").exists()
    assert paths.agent_socket("aaaaaaaa-1").exists()


async def test_remove_leaves_nothing(paths: Paths, daemon: Daemon) -> None:
    pid = await running(daemon, paths, ["sh", "-c", "mkdir -p x/y; ln -s / x/root; echo 1; sleep 1000"])
    await read_when_written(paths.log(A))
    await daemon.client.freeze(A, 1)
    await daemon.client.remove(A)
    assert not alive(pid)
    assert not paths.home(A).exists()
    assert not paths.log(A).exists()
    assert not paths.agent_socket(A).exists()
    assert not list(paths.sandbox_table.iterdir())
    assert await daemon.client.stat() == {}
    await daemon.client.remove(A)


async def test_a_log_is_cut_back_while_its_agent_goes_on_writing(paths: Paths, daemon: Daemon) -> None:
    await running(daemon, paths, ["sh", "-c", "i=0; while :; do i=$((i+1)); echo line $i of many; sleep 0.001; done"])

    def was_cut() -> bool:
        lines = paths.log(A).read_text().splitlines()
        return bool(lines) and lines[0] != "line 1 of many"

    await until(was_cut)
    await daemon.client.freeze(A, 1)
    lines = paths.log(A).read_text().splitlines()
    numbers = [int(line.split()[1]) for line in lines]
    assert numbers == sorted(numbers)
    assert all(line == f"line {number} of many" for line, number in zip(lines, numbers, strict=True))


async def test_a_proxy_may_not_steer_agents(paths: Paths, open_helper: OpenHelper, connect: Connect) -> None:
    await open_helper()
    daemon, proxy = await connect(), await connect(role="proxy")
    await running(daemon, paths, SLEEP)
    with pytest.raises(NotPermitted):
        await proxy.client.freeze(A, 1)


async def test_a_peer_that_does_not_say_who_it_is_may_ask_nothing(paths: Paths, open_helper: OpenHelper) -> None:
    await open_helper()
    client = LinkClient(paths.sandbox_socket, name="t", on_link=lambda _: None, on_message=lambda *_: None)
    await until(lambda: client.connected)
    with pytest.raises(NotPermitted):
        await client.link.ask(Freeze(agent=A, generation=1), Done, timeout_s=5)
    client.close()
    await asyncio.sleep(0)


async def test_a_peer_of_another_protocol_is_hung_up_on(paths: Paths, open_helper: OpenHelper) -> None:
    await open_helper()
    client = LinkClient(paths.sandbox_socket, name="t", on_link=lambda _: None, on_message=lambda *_: None)
    await until(lambda: client.connected)
    link = client.link
    link.tell(Hello(role="daemon", epoch="e", protocol=99))
    with pytest.raises(LinkLost):
        await link.ask(AskListeners(), Done, timeout_s=5)
    client.close()
    await asyncio.sleep(0)


@pytest.mark.root
@pytest.mark.skipif(not ROOT, reason="only root can speak as somebody else")
async def test_a_peer_of_another_uid_is_hung_up_on(paths: Paths, open_helper: OpenHelper) -> None:
    await open_helper()
    paths.sandbox_socket.chmod(0o666)
    program = "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.exit(len(s.recv(100)))"
    stranger = await asyncio.create_subprocess_exec(
        PYTHON, "-c", program, str(paths.sandbox_socket), user=65534, group=65534, extra_groups=[]
    )
    assert await stranger.wait() == 0
    friend = await asyncio.create_subprocess_exec(PYTHON, "-c", program, str(paths.sandbox_socket))
    assert await friend.wait() > 0


# --- listeners ---------------------------------------------------------------------------------------------------


async def test_a_handed_over_listener_accepts_in_another_process(paths: Paths, daemon: Daemon) -> None:
    path = await daemon.client.define(A, spec(paths, A, SLEEP))
    proxy = subprocess.Popen([sys.executable, "-c", PROXY, str(paths.sandbox_socket)], stdout=subprocess.PIPE)
    said = await asyncio.to_thread(lambda: [proxy.stdout.readline() for _ in range(2)] if proxy.stdout else [])
    assert said == [f"listener {A} {path}\n".encode(), b"done\n"]
    assert await asyncio.to_thread(call, path) == b"I am the proxy"
    later = await daemon.client.define(B, spec(paths, B, SLEEP))
    assert await asyncio.to_thread(call, later) == b"I am the proxy"
    await daemon.client.remove(B)
    out, _ = await asyncio.to_thread(proxy.communicate)
    assert out == f"listener {B} {later}\ngone {B}\n".encode()
    assert proxy.returncode == 0


def call(path: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(path))
        return sock.recv(100)


PROXY = """
import asyncio, socket, sys
from pathlib import Path
from hive.link.client import LinkClient
from hive.link.helper import AskListeners, Listener, ListenerGone
from hive.link.messages import Done, Hello

async def main():
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    socks = []
    def accept(sock):
        connection, _ = sock.accept()
        connection.sendall(b"I am the proxy")
        connection.close()
    def told(link, message, reply):
        if isinstance(message, Listener):
            print("listener", message.agent, message.path, flush=True)
            socks.append(socket.socket(fileno=link.take_descriptors()[0]))
            loop.add_reader(socks[-1], accept, socks[-1])
        if isinstance(message, ListenerGone):
            print("gone", message.agent, flush=True)
            gone.set()
    async def ask(link):
        link.tell(Hello(role="proxy", epoch="p"))
        await link.ask(AskListeners(), Done, timeout_s=10)
        print("done", flush=True)
    tasks = []
    client = LinkClient(Path(sys.argv[1]), name="p", on_message=told,
                        on_link=lambda link: tasks.append(loop.create_task(ask(link))))
    await gone.wait()

asyncio.run(main())
"""


async def test_callers_wait_in_the_backlog_while_there_is_no_proxy(paths: Paths, daemon: Daemon) -> None:
    path = await daemon.client.define(A, spec(paths, A, SLEEP))
    caller = asyncio.create_task(asyncio.to_thread(call, path))
    proxy = subprocess.Popen([sys.executable, "-c", PROXY, str(paths.sandbox_socket)], stdout=subprocess.DEVNULL)
    assert await caller == b"I am the proxy"
    await daemon.client.remove(A)
    await asyncio.to_thread(proxy.wait)


@pytest.fixture
def full_disk(paths: Paths) -> Iterator[Callable[[bool], None]]:
    """The state directory on a disk of its own; called with True that disk is full, with False it is not."""
    paths.state.mkdir(mode=0o711)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m,mode=711", "tmpfs", str(paths.state)], capture_output=True, check=False
    )
    if mounted.returncode != 0:
        pytest.skip(f"no mount here: {mounted.stderr.decode()}")
    filler = paths.state / "filler"

    def fill(full: bool) -> None:
        if not full:
            filler.unlink()
            return
        with contextlib.suppress(OSError), filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))

    yield fill
    kill_all_under(paths)
    subprocess.run(["umount", str(paths.state)], check=True)


@pytest.mark.root
async def test_a_full_disk_is_said_and_nothing_is_left(
    full_disk: Callable[[bool], None], paths: Paths, open_helper: OpenHelper, connect: Connect
) -> None:
    helper = await open_helper()
    daemon = await connect()
    await daemon.client.define(A, spec(paths, A, SLEEP))
    full_disk(True)
    with pytest.raises(StoreFull):
        await daemon.client.start(A)
    with pytest.raises(StoreFull):
        await daemon.client.define(B, spec(paths, B, SLEEP))
    assert {agent: found.state for agent, found in (await daemon.client.stat()).items()} == {A: "gone"}
    assert not paths.home(B).exists()
    assert not paths.agent_socket(B).exists()
    full_disk(False)
    await daemon.client.start(A)
    await daemon.client.remove(A)
    await helper.leave()
