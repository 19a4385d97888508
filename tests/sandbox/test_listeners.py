"""Agents' sockets inside jails, with real users: the users that may connect, and the rights of the jail's user.

The jail is as Firecracker's jailer makes it: `<id>` is root's, `<id>/root` and what is in it the agent's, and the
agent's side sees nothing but `root`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hive.errors import BadRequest, WrongState
from hive.link.helper import Listener, ListenerGone
from hive.link.link import Link
from hive.link.message import LinkMessage
from hive.runtimes.jail import bind_in, unlink_in
from hive.sandbox.listeners import Listeners
from tests.waiting import until

UID, OTHER_UID = 71001, 71002
INSIDE = "run/v.sock_11434"

CONNECT = """
import os, socket, sys
root, uid, gid = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
os.chroot(root)
os.chdir("/")
os.setgroups([])
os.setgid(gid)
os.setuid(uid)
with socket.socket(socket.AF_UNIX) as sock:
    sock.settimeout(5)
    try:
        sock.connect("/run/v.sock_11434")
    except OSError as error:
        print(type(error).__name__)
    else:
        sock.sendall(b"hello\\n")
        print("connected")
"""
"""Firecracker's part for its guest: chroot, another user, connect to the short name."""

MISCHIEF = """
import contextlib, os, random, sys
base, victim, outside, uid = sys.argv[1:4] + [int(sys.argv[4])]
os.chdir(base + "/root")
os.setgroups([])
os.setgid(uid)
os.setuid(uid)
print("ready", flush=True)
chance = random.Random(1)
def moves(name):
    os.rename("image", name)
def points(name):
    os.symlink(victim, name)
def is_directory(name):
    os.mkdir(name)
while True:
    with contextlib.suppress(OSError):
        what = chance.randrange(4)
        if what == 0:
            os.rename("run", "away")
            os.symlink(outside, "run")
        elif what == 1:
            os.unlink("run")
            os.rename("away", "run")
        elif what == 2:
            for name in os.listdir("run"):
                os.rename("image", "run/" + name)
        else:
            with contextlib.suppress(OSError):
                os.unlink("run/v.sock_11434")
            with contextlib.suppress(OSError):
                os.rmdir("run/v.sock_11434")
            chance.choice([moves, points, is_directory])("run/v.sock_11434")
"""
"""The jail's user, doing all he can to have something given to him that is not his, or a socket put elsewhere."""

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root: other users are made up")]


class Jail:
    """`base` is root's; `root` below it is all the agent sees, and the agent's."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.root = base / "root"
        self.path = self.root / INSIDE
        base.mkdir(parents=True)
        for directory in (self.root, self.root / "run"):
            directory.mkdir()
            os.chown(directory, UID, UID)

    def bind(self) -> socket.socket:
        return bind_in(self.base, self.path, owner=(UID, UID))

    def connect(self, uid: int, gid: int | None = None) -> str:
        """The result of it inside the jail."""
        command = [sys.executable, "-S", "-c", CONNECT, str(self.root), str(uid), str(uid if gid is None else gid)]
        return subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True).stdout.strip()


@pytest.fixture
def top() -> Iterator[Path]:
    """A directory others may pass through: pytest's own may be entered by root only."""
    directory = Path(tempfile.mkdtemp(prefix="hive-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def jail(top: Path) -> Jail:
    return Jail(top / "firecracker" / "id")


# rights to connect ----------------------------------------------------------------------------------------------------


def test_only_the_jails_user_can_connect(jail: Jail) -> None:
    with jail.bind() as sock:
        found = jail.path.lstat()
        assert (stat.S_ISSOCK(found.st_mode), found.st_mode & 0o777) == (True, 0o600)
        assert (found.st_uid, found.st_gid) == (UID, UID)
        assert jail.connect(OTHER_UID) == "PermissionError"
        assert jail.connect(OTHER_UID, gid=UID) == "PermissionError"
        with pytest.raises(BlockingIOError):
            sock.accept()
        assert jail.connect(UID) == "connected"
        accepted, _ = sock.accept()
        with accepted:
            assert accepted.recv(100) == b"hello\n"


def test_more_than_a_thousand_may_wait_before_anyone_accepts(jail: Jail) -> None:
    """Firecracker connects on its one thread: a full backlog would stop the machine."""
    most = min(1024, int(Path("/proc/sys/net/core/somaxconn").read_text()))
    waiting: list[socket.socket] = []
    with jail.bind():
        for _ in range(most):
            sock = socket.socket(socket.AF_UNIX)
            waiting.append(sock)
            sock.setblocking(False)
            sock.connect(str(jail.path))
    for sock in waiting:
        sock.close()


def test_a_path_too_long_for_a_socket_is_reached_from_inside(top: Path) -> None:
    jail = Jail(top / ("a" * 100) / ("b" * 200) / "firecracker" / "id")
    assert len(os.fsencode(jail.path)) > 300
    with jail.bind():
        assert jail.connect(UID) == "connected"
    unlink_in(jail.base, jail.path)
    assert not jail.path.exists()


# what lies at its name ------------------------------------------------------------------------------------------------


def test_a_socket_of_an_earlier_run_is_replaced(jail: Jail) -> None:
    jail.bind().close()
    assert jail.connect(UID) == "ConnectionRefusedError"
    (jail.base / f".{os.getpid()}").touch()
    with jail.bind():
        assert jail.connect(UID) == "connected"
    assert os.listdir(jail.base) == ["root"]


def test_a_link_at_its_name_is_replaced_and_not_followed(jail: Jail, top: Path) -> None:
    victim = top / "victim"
    victim.write_text("root's")
    jail.path.symlink_to(victim)
    with jail.bind():
        assert jail.connect(UID) == "connected"
    assert (victim.read_text(), victim.stat().st_uid) == ("root's", 0)
    jail.path.unlink()
    jail.path.symlink_to(victim)
    unlink_in(jail.base, jail.path)
    assert victim.exists()


def test_a_directory_at_its_name_is_refused_and_nothing_is_left(jail: Jail) -> None:
    jail.path.mkdir()
    with pytest.raises(BadRequest, match="is a directory"):
        jail.bind()
    assert os.listdir(jail.base) == ["root"]


# what lies on the way -------------------------------------------------------------------------------------------------


def into_link(jail: Jail, outside: Path) -> None:
    (jail.root / "run").rmdir()
    (jail.root / "run").symlink_to(outside)


def into_root_link(jail: Jail, outside: Path) -> None:
    jail.root.rename(jail.base / "elsewhere")
    jail.root.symlink_to(outside)


def into_file(jail: Jail, outside: Path) -> None:
    (jail.root / "run").rmdir()
    (jail.root / "run").touch()


def into_others(jail: Jail, outside: Path) -> None:
    os.chown(jail.base, UID, UID)


def into_everybodys(jail: Jail, outside: Path) -> None:
    jail.base.chmod(0o777)


def into_base_link(jail: Jail, outside: Path) -> None:
    jail.base.rename(jail.base.with_name("elsewhere"))
    jail.base.symlink_to("elsewhere")


@pytest.mark.parametrize("change", [into_link, into_root_link, into_file, into_others, into_everybodys, into_base_link])
def test_a_way_that_cannot_be_trusted_is_refused(jail: Jail, top: Path, change: Callable[[Jail, Path], None]) -> None:
    outside = top / "outside"
    (outside / "run").mkdir(parents=True)
    change(jail, outside)
    with pytest.raises(BadRequest):
        jail.bind()
    assert [path.name for path in outside.rglob("*")] == ["run"]
    assert not list(jail.base.glob(".*"))


@pytest.mark.parametrize("inside", ["../run/v.sock", "root/../../v.sock", ""])
def test_a_path_that_leaves_the_jail_is_refused(jail: Jail, inside: str) -> None:
    with pytest.raises(BadRequest, match="is not inside"):
        bind_in(jail.base, jail.base / inside)
    with pytest.raises(BadRequest, match="is not inside"):
        unlink_in(jail.base, jail.base / inside)


def test_whatever_the_jails_user_does_meanwhile_nothing_else_becomes_his(jail: Jail, top: Path) -> None:
    """`image` is root's, in a directory of his: he may not write it, but move it to where the helper is at work."""
    victim, outside = top / "victim", top / "outside"
    outside.mkdir()
    victim.write_text("root's")
    command = [sys.executable, "-S", "-c", MISCHIEF, str(jail.base), str(victim), str(outside), str(UID)]
    bound = refused = 0
    with subprocess.Popen(command, stdout=subprocess.PIPE) as mischief:
        assert mischief.stdout is not None
        mischief.stdout.readline()
        try:
            for _ in range(100_000):
                if bound >= 1000 and refused >= 200:
                    break
                with contextlib.suppress(OSError):
                    os.link(victim, jail.root / "image")  # as a kernel is shared by many jails
                try:
                    jail.bind().close()
                    bound += 1
                except (BadRequest, OSError):
                    refused += 1
                if random.random() < 0.2:
                    try:
                        unlink_in(jail.base, jail.path)
                    except (BadRequest, OSError):
                        refused += 1
        finally:
            mischief.kill()
    assert bound >= 1000, "the socket is made where nobody interferes"
    assert refused >= 200, "he did interfere"
    assert (victim.stat().st_uid, victim.stat().st_mode & 0o777) == (0, 0o644)
    assert os.listdir(outside) == []
    assert os.listdir(jail.base) == ["root"]


# an agent's listener --------------------------------------------------------------------------------------------------


class Follower:
    """The proxy's news, and the sockets it is handed; `link` is the helper's end."""

    def __init__(self) -> None:
        here, there = socket.socketpair()
        self.told: list[str] = []
        self.sockets: list[socket.socket] = []
        self.link = Link(there, name="proxy", on_message=lambda *_: None, on_lost=lambda _: None)
        self._here = Link(here, name="helper", on_message=self._on_message, on_lost=lambda _: None)

    def _on_message(self, link: Link, message: LinkMessage, _: object) -> None:
        assert isinstance(message, Listener | ListenerGone)
        self.told.append(f"{type(message).__name__} {message.agent}")
        self.sockets += [socket.socket(fileno=descriptor) for descriptor in link.take_descriptors()]

    def close(self) -> None:
        self._here.close()
        self.link.close()
        for sock in self.sockets:
            sock.close()


async def test_a_listener_in_a_jail_is_the_agents_and_is_handed_over_as_any_other(jail: Jail) -> None:
    listeners, proxy = Listeners(), Follower()
    listeners.follow(proxy.link)
    listeners.bind("bob", jail.path, uid=UID, gid=None, jail=jail.base)
    await until(lambda: proxy.told == ["Listener bob"])
    assert await asyncio.to_thread(jail.connect, UID) == "connected"
    accepted, _ = proxy.sockets[0].accept()
    with accepted:
        assert accepted.recv(100) == b"hello\n"
    with pytest.raises(WrongState, match="the socket of eve would be that of bob"):
        listeners.bind("eve", jail.path, uid=UID, gid=None, jail=jail.base)
    listeners.drop("bob")
    await until(lambda: proxy.told[1:] == ["ListenerGone bob"])
    assert not jail.path.exists()
    listeners.close()
    proxy.close()


async def test_a_jail_that_was_made_again_gets_a_new_socket_and_the_proxy_with_it(jail: Jail) -> None:
    listeners, proxy = Listeners(), Follower()
    listeners.follow(proxy.link)
    listeners.bind("bob", jail.path, uid=UID, gid=None, jail=jail.base)
    shutil.rmtree(jail.base)
    again = Jail(jail.base)
    listeners.bind("bob", again.path, uid=UID, gid=None, jail=again.base)
    await until(lambda: len(proxy.sockets) == 2)
    assert again.connect(UID) == "connected"
    proxy.sockets[1].accept()[0].close()
    assert repr(listeners) == "<Listeners 1 bound, 1 followers>"
    listeners.close()
    assert not again.path.exists()
    proxy.close()


async def test_an_agent_may_move_into_a_jail_and_its_old_socket_goes(jail: Jail, top: Path) -> None:
    listeners, outside = Listeners(), top / "bob.sock"
    listeners.bind("bob", outside, uid=UID, gid=None)
    listeners.bind("bob", outside, uid=OTHER_UID, gid=None)
    assert outside.stat().st_uid == OTHER_UID
    listeners.bind("bob", jail.path, uid=UID, gid=None, jail=jail.base)
    assert not outside.exists()
    assert jail.connect(UID) == "connected"
    shutil.rmtree(jail.base)
    listeners.drop("bob")
    listeners.drop("bob")
    assert repr(listeners) == "<Listeners 0 bound, 0 followers>"
