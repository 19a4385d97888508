"""The check of a process that a template has forked, before the helper lets it run: a template is never believed.

Importing packages runs their code, so whatever a template says may be a lie. It hands over a pidfd; `read_child` reads
what the kernel says about that process, and `why_not_release` decides. Between the look and the release nothing can be
gained: capabilities, bounding set, user namespace and `NoNewPrivs` go one way only.

Two things are no proof. `Seccomp: 2` is inherited, so the filters are counted. And a pidfd of another process that is
in order (an older agent of the same template) is told by the helper's own socket, which only the asked-for child has.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import msgspec

from hive.errors import WrongState
from hive.host.cgroup import own_cgroup
from hive.host.process import CLOCK_TICKS, parse_stat, real_uid

NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")
CAPABILITIES = ("CapInh", "CapPrm", "CapEff", "CapAmb")
DESCRIPTORS_READ = 32
"""A child has four. Of one that has very many no more are read: it is refused all the same."""
NULL_DEVICE = os.makedev(1, 3)


class OpenFile(NamedTuple):
    """A file by what the kernel knows it by; `null` for any /dev/null, which has another inode in each /dev."""

    device: int
    inode: int
    null: bool = False

    @classmethod
    def of(cls, found: os.stat_result) -> OpenFile:
        if stat.S_ISCHR(found.st_mode) and found.st_rdev == NULL_DEVICE:
            return cls(0, 0, null=True)
        return cls(found.st_dev, found.st_ino)

    @classmethod
    def of_descriptor(cls, descriptor: int) -> OpenFile:
        """The file behind a descriptor of this process."""
        return cls.of(os.fstat(descriptor))


class ChildFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One process as /proc shows it. Uids and gids are the real, effective, saved one and that of files.

    `owner`: the uid that its files in /proc belong to: root where the process is not dumpable. `filters`: None
    where this kernel does not count them (before 5.9).
    """

    pid: int
    owner: int
    state: str
    parent: int
    tracer: int
    threads: int
    start_ticks: int
    uids: tuple[int, ...]
    gids: tuple[int, ...]
    groups: tuple[int, ...]
    capabilities: dict[str, int]
    bounding: int
    no_new_privs: int
    seccomp: int
    filters: int | None
    group: str
    namespaces: dict[str, int]
    descriptors: dict[int, OpenFile]


class ExpectedChild(msgspec.Struct, frozen=True, kw_only=True):
    """The properties that a released child has to have.

    `uid`, `gid`: as they were asked for. `parent`: who reaps it. `group`: the template's control group (the path in
    the `0::` line), empty where Hive has none. `namespaces`: the template's; `own`: those of which the child has one of
    its own, different from the template's and from `hosts`. `confined`: it can never get a capability again, not even
    by a program it executes; False only where Hive is no root. `filters`: the least number of system call filters, None
    where none is asked for. `socket`: the child's end of the helper's socket pair; `streams`: what was handed over as
    its stdin, stdout and stderr. `since_ticks`: when it was asked for (`now_ticks`).
    """

    uid: int
    gid: int
    parent: int
    group: str
    namespaces: dict[str, int]
    hosts: dict[str, int]
    socket: OpenFile
    streams: frozenset[OpenFile]
    since_ticks: int
    own: frozenset[str] = frozenset()
    confined: bool = True
    filters: int | None = None


def why_not_release(child: ChildFacts, expected: ExpectedChild) -> str:
    """The first reason not to let it run, a sentence that begins with "it"; empty where there is none."""
    looks = (_why_not_this_one, _why_not_this_user, _why_too_many_rights, _why_not_in_its_place, _why_not_its_files)
    return next((why for look in looks if (why := look(child, expected))), "")


def _why_not_this_one(child: ChildFacts, expected: ExpectedChild) -> str:
    if child.state in "ZX":
        return "it has ended"
    if child.start_ticks < expected.since_ticks:
        return "it is older than the request for it"
    if child.parent != expected.parent:
        return f"its parent is process {child.parent}, not {expected.parent}, which would reap it"
    if child.tracer:
        return f"process {child.tracer} traces it"
    return "" if child.threads == 1 else f"it has {child.threads} threads"


def _why_not_this_user(child: ChildFacts, expected: ExpectedChild) -> str:
    for name, ids, wanted in (("uid", child.uids, expected.uid), ("gid", child.gids, expected.gid)):
        if other := sorted({*ids} - {wanted}):
            return f"it runs as {name} {other[0]}, not as {wanted}"
    if expected.confined and (more := sorted({*child.groups} - {expected.gid})):
        return f"it is in the group {more[0]} besides"
    return "" if child.owner == expected.uid else "it is not dumpable: it could not look at itself in /proc"


def _why_too_many_rights(child: ChildFacts, expected: ExpectedChild) -> str:
    if held := [name for name, mask in child.capabilities.items() if mask]:
        return f"it has capabilities: {held[0]} is {child.capabilities[held[0]]:x}"
    if expected.confined and child.bounding:
        return f"it can get capabilities: CapBnd is {child.bounding:x}"
    if child.no_new_privs != 1:
        return "it can get rights by a program it executes: NoNewPrivs is 0"
    if expected.filters is None:
        return ""
    if child.seccomp != 2:
        return f"it has no system call filter: Seccomp is {child.seccomp}"
    if child.filters is not None and child.filters < expected.filters:
        return f"it has {child.filters} system call filters, not {expected.filters}"
    return ""


def _why_not_in_its_place(child: ChildFacts, expected: ExpectedChild) -> str:
    if expected.group and child.group != expected.group:
        return f"its control group is {child.group}, not the template's"
    for name in NAMESPACES:
        own, of_template = child.namespaces.get(name), expected.namespaces.get(name)
        if name not in expected.own:
            if own != of_template:
                return f"its {name} namespace is not the template's"
        elif own is None or own in (of_template, expected.hosts.get(name)):
            return f"it has no {name} namespace of its own"
    return ""


def _why_not_its_files(child: ChildFacts, expected: ExpectedChild) -> str:
    streams = {*expected.streams, OpenFile(0, 0, null=True)}
    for number, file in child.descriptors.items():
        if file != expected.socket and (number > 2 or file not in streams):
            return f"its descriptor {number} was not handed over to it"
    return "" if expected.socket in child.descriptors.values() else "it does not have its end of the socket"


# --- reading -------------------------------------------------------------------------------------------------------


def now_ticks() -> int:
    """Now, as `start_ticks` counts: of what is started from now on none is less."""
    return int(time.clock_gettime(time.CLOCK_BOOTTIME) * CLOCK_TICKS)


def namespaces_of(pid: int | str) -> dict[str, int]:
    """The inodes of a process's namespaces, `self` for one's own. Raises OSError."""
    found = {name: _inode_of(f"/proc/{pid}/ns/{name}", None) for name in NAMESPACES}
    return {name: inode for name, inode in found.items() if inode is not None}


def _inode_of(path: str, directory: int | None) -> int | None:
    """None where this kernel has no such kind."""
    try:
        return os.stat(path, dir_fd=directory).st_ino
    except FileNotFoundError:
        return None


def filters_of(pid: int) -> int | None:
    """The number of system call filters of a process; None where this kernel does not count them. Raises OSError."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next((int(line.split()[1]) for line in lines if line.startswith("Seccomp_filters:")), None)


def pid_of(pidfd: int) -> int:
    """The pid that a pidfd stands for, here. Raises WrongState where it is none, or its process has ended."""
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    pid = next((int(line.split()[1]) for line in lines if line.startswith("Pid:")), 0)
    if pid <= 0:
        raise WrongState("what was handed over is no living process")
    return pid


def read_child(pidfd: int) -> ChildFacts:
    """Reads what the kernel says of exactly the process of this pidfd. Raises WrongState where it has ended.

    Everything is read through one descriptor of its directory, which stands for one process; that it is this one is
    looked up once it is open.
    """
    pid = pid_of(pidfd)
    try:
        directory = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            if pid_of(pidfd) != pid:
                raise WrongState("it has ended")
            return _read(pid, directory)
        finally:
            os.close(directory)
    except (OSError, KeyError, IndexError, ValueError) as error:
        raise WrongState(f"it has ended, or cannot be looked at: {error}") from None


def _read(pid: int, directory: int) -> ChildFacts:
    line = parse_stat(pid, _content("stat", directory))
    status = dict(each.split(":", 1) for each in _content("status", directory).decode().splitlines() if ":" in each)
    numbers = {name: tuple(int(word) for word in status[name].split()) for name in ("Uid", "Gid", "Groups")}
    kinds = {name: _inode_of(f"ns/{name}", directory) for name in NAMESPACES}
    filters = status.get("Seccomp_filters")
    return ChildFacts(
        pid=pid,
        owner=os.stat("status", dir_fd=directory).st_uid,
        state=line.state,
        parent=line.parent,
        tracer=int(status["TracerPid"]),
        threads=line.threads,
        start_ticks=line.start_ticks,
        uids=numbers["Uid"],
        gids=numbers["Gid"],
        groups=numbers["Groups"],
        capabilities={name: int(status[name], 16) for name in CAPABILITIES},
        bounding=int(status["CapBnd"], 16),
        no_new_privs=int(status["NoNewPrivs"]),
        seccomp=int(status.get("Seccomp", "0")),
        filters=None if filters is None else int(filters),
        group=own_cgroup(_content("cgroup", directory).decode()),
        namespaces={name: inode for name, inode in kinds.items() if inode is not None},
        descriptors=_descriptors(directory),
    )


def _content(name: str, directory: int) -> bytes:
    descriptor = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=directory)
    with open(descriptor, "rb") as file:
        return file.read()


def _descriptors(directory: int) -> dict[int, OpenFile]:
    names = os.open("fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=directory)
    try:
        with os.scandir(names) as entries:
            numbers = sorted(int(entry.name) for entry in islice(entries, DESCRIPTORS_READ))
        found = {}
        for number in numbers:
            with contextlib.suppress(FileNotFoundError):  # it was closed since; a dead process has none at all
                found[number] = OpenFile.of(os.stat(str(number), dir_fd=names))
        return found
    finally:
        os.close(names)


def strays(uid: int, pids: Iterable[int], *, child: int) -> list[int]:
    """The other processes among `pids` that run as the agent's uid already: a second child that nobody asked for."""
    return [pid for pid in pids if pid != child and real_uid(pid) == uid]
