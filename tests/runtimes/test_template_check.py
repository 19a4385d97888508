"""Checks of a template's child before it is let run: real processes, one in order, the others with a lie."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from hive.errors import WrongState
from hive.host.cgroup import own_cgroup
from hive.runtimes.template_check import (
    ChildFacts,
    ExpectedChild,
    OpenFile,
    namespaces_of,
    now_ticks,
    pid_of,
    read_child,
    strays,
    why_not_release,
)

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="a template's user namespace takes root")]

FIRST = 1_870_000
LIAR = Path(__file__).parents[1] / "fakes/lying_template.py"


class Liar:
    """A running stand-in for a template."""

    def __init__(self, lie: str) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        become = f'exec "$0" "$@" 3<&{theirs.fileno()}'
        command = ["bash", "-c", become, sys.executable, "-I", str(LIAR), str(FIRST), lie]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        theirs.close()
        assert self._control.recv(10) == b"made"
        if lie != "user":
            for name in ("gid_map", "uid_map"):
                Path(f"/proc/{self.process.pid}/{name}").write_text(f"{FIRST} {FIRST} 256\n")
        self.namespaces = namespaces_of(self.process.pid)
        self._held: list[socket.socket] = [self._control]

    def fork(self) -> tuple[int, ExpectedChild]:
        """The pidfd that came, and what a child has to be that was asked for now."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        since = now_ticks()
        with open(os.devnull, "wb") as null, theirs:
            expected = ExpectedChild(
                uid=FIRST + 7,
                gid=FIRST + 7,
                parent=self.process.pid,
                group=own_cgroup(Path("/proc/self/cgroup").read_text()),
                namespaces=self.namespaces,
                hosts=namespaces_of("self"),
                socket=OpenFile.of_descriptor(theirs.fileno()),
                streams=frozenset({OpenFile.of_descriptor(0), OpenFile.of_descriptor(null.fileno())}),
                since_ticks=since,
                own=frozenset({"net", "mnt", "ipc", "uts"}),
                filters=1,
            )
            socket.send_fds(self._control, [b"fork"], [null.fileno(), theirs.fileno()])
        self._held.append(ours)
        ours.settimeout(60)
        _, descriptors, _, _ = socket.recv_fds(ours, 100, 4)
        assert ours.recv(10) == b"there"
        return descriptors[0], expected

    def close(self) -> None:
        for held in self._held:
            held.close()
        self.process.wait()


@contextlib.contextmanager
def template(lie: str = "") -> Iterator[Liar]:
    liar = Liar(lie)
    try:
        yield liar
    finally:
        liar.close()


def test_a_child_in_order_is_released() -> None:
    with template() as honest:
        pidfd, expected = honest.fork()
        found = read_child(pidfd)
        assert why_not_release(found, expected) == ""
        assert found.pid == pid_of(pidfd)
        assert strays(FIRST + 7, [honest.process.pid, found.pid], child=found.pid) == []
        os.close(pidfd)


@pytest.mark.parametrize(
    ("lie", "why"),
    [
        ("uid", f"it runs as uid {FIRST + 8}, not as {FIRST + 7}"),
        ("saved uid", f"it runs as uid {FIRST}, not as {FIRST + 7}"),
        ("gid", f"it runs as gid {FIRST + 8}, not as {FIRST + 7}"),
        ("groups", f"it is in the group {FIRST + 9} besides"),
        ("capabilities", "it has capabilities: CapPrm is "),
        ("bounding", "it can get capabilities: CapBnd is "),
        ("privileges", "it can get rights by a program it executes: NoNewPrivs is 0"),
        ("seccomp", "it has no system call filter: Seccomp is 0"),
        ("dumpable", "it is not dumpable: "),
        ("thread", "it has 2 threads"),
        ("net", "it has no net namespace of its own"),
        ("mnt", "it has no mnt namespace of its own"),
        ("descriptor", "its descriptor 3 was not handed over to it"),
        ("its own pid", "it is older than the request for it"),
        ("traced", "process "),
    ],
)
def test_a_lie_is_found_out(lie: str, why: str) -> None:
    with template(lie) as liar:
        pidfd, expected = liar.fork()
        # A child without its rights dropped, or in doubt otherwise, is refused for that alone.
        assert why_not_release(read_child(pidfd), expected).startswith(why)
        os.close(pidfd)


def test_the_template_itself_is_not_released_as_its_child() -> None:
    with template() as liar:
        _, expected = liar.fork()
        pidfd = os.pidfd_open(liar.process.pid)
        assert why_not_release(read_child(pidfd), msgspec.structs.replace(expected, since_ticks=0)) != ""
        os.close(pidfd)


def test_an_older_child_of_the_same_template_is_not_released_again() -> None:
    """It is in order in every way: it is the helper's own socket that tells."""
    with template() as liar:
        older, first = liar.fork()
        newer, expected = liar.fork()
        assert why_not_release(read_child(older), first) == ""
        again = msgspec.structs.replace(expected, since_ticks=first.since_ticks)
        assert why_not_release(read_child(older), again) == "its descriptor 100 was not handed over to it"
        assert why_not_release(read_child(newer), expected) == ""
        for pidfd in (older, newer):
            os.close(pidfd)


def test_a_process_in_another_group_or_of_another_parent_is_not_released() -> None:
    with template() as liar:
        pidfd, expected = liar.fork()
        found = read_child(pidfd)
        elsewhere = msgspec.structs.replace(expected, group="/elsewhere")
        assert why_not_release(found, elsewhere) == f"its control group is {found.group}, not the template's"
        adopted = msgspec.structs.replace(expected, parent=1)
        assert why_not_release(found, adopted).startswith(f"its parent is process {liar.process.pid}, not 1")
        others = msgspec.structs.replace(expected, namespaces={**liar.namespaces, "user": 1})
        assert why_not_release(found, others) == "its user namespace is not the template's"
        more = msgspec.structs.replace(expected, filters=2)
        assert why_not_release(found, more) == "it has 1 system call filters, not 2"
        os.close(pidfd)


def test_a_second_child_as_the_same_user_is_found() -> None:
    with template("second child") as liar:
        pidfd, _ = liar.fork()
        child = pid_of(pidfd)
        below = [int(each) for each in Path(f"/proc/{child}/task/{child}/children").read_text().split()]
        assert strays(FIRST + 7, [liar.process.pid, child, *below], child=child) == below
        for pid in below:
            os.kill(pid, signal.SIGKILL)
        os.close(pidfd)


def test_what_is_no_pidfd_is_refused() -> None:
    with template("a file") as liar:
        descriptor, _ = liar.fork()
        with pytest.raises(WrongState, match="no living process"):
            read_child(descriptor)
        os.close(descriptor)


def test_a_child_that_has_ended_is_refused() -> None:
    """As a zombie, or gone already."""
    with template("dead") as liar:
        pidfd, expected = liar.fork()
        signal.pidfd_send_signal(pidfd, 0)
        liar.process.kill()
        liar.process.wait()
        with contextlib.suppress(WrongState):
            assert why_not_release(read_child(pidfd), expected) != ""
        os.close(pidfd)


def test_as_a_user_nothing_is_asked_that_only_root_can_give() -> None:
    """There a template is a plain fork: no user namespace, no bounding set that anybody could empty."""
    facts = ChildFacts(
        pid=7, owner=1000, state="S", parent=1, tracer=0, threads=1, start_ticks=50, uids=(1000,) * 4,
        gids=(1000,) * 4, groups=(27, 1000), capabilities={"CapEff": 0}, bounding=0x1FF, no_new_privs=1, seccomp=0,
        filters=0, group="/u", namespaces={"net": 4}, descriptors={0: OpenFile(0, 0, null=True), 5: OpenFile(8, 9)},
    )  # fmt: skip
    expected = ExpectedChild(
        uid=1000, gid=1000, parent=1, group="/u", namespaces={"net": 4}, hosts={"net": 4}, socket=OpenFile(8, 9),
        streams=frozenset(), since_ticks=50, confined=False,
    )  # fmt: skip
    assert why_not_release(facts, expected) == ""
    assert why_not_release(facts, msgspec.structs.replace(expected, confined=True)) != ""
