"""The host itself: systemd, control groups, descriptors, the clock."""

from __future__ import annotations

import os
import platform
import resource
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import hive
from hive.doctor.checks.check import Check, CheckVerdict, passed, skipped, wrong
from hive.doctor.checks.target import Subject
from hive.errors import HiveError
from hive.host import clock, program, python_build, systemd
from hive.host.cgroup import choose_parents, find_mount, mount_of_v1, own_cgroup

"""Debian 12 has it; what Hive asks of systemd is tested with it."""
SYSTEMCTL_S = 5.0
LIMITED = ("memory", "cpu", "pids")
"""Controllers that hold agents' limits."""
DESCRIPTORS_WANTED = 8192
"""Hard limit of open files: an agent's connection takes two, so some 4,000 at once."""
DESCRIPTORS_LEAST = 1024
AHEAD_S = 60.0
"""A file may be newer than now by this much: network disks have clocks of their own."""


# --- systemd -----------------------------------------------------------------------------------------------------


def look_at_systemd(subject: Subject) -> CheckVerdict:
    try:
        version = systemd.parse_systemd_version(program.run(["systemctl", "--version"], limit_s=SYSTEMCTL_S).text)
    except HiveError:
        version = None
    first = Path("/proc/1/comm").read_text().strip()
    return judge_systemd(version, first, is_booted=systemd.is_booted(), is_needed=subject.is_appliance)


def judge_systemd(version: int | None, first: str, *, is_booted: bool, is_needed: bool) -> CheckVerdict:
    """`first`: the name of PID 1.

    >>> judge_systemd(249, "systemd", is_booted=True, is_needed=False).reason
    'systemd 249; an installed Hive needs 252 or later'
    """
    if not is_booted:
        return (
            wrong("no_systemd", first=first)
            if is_needed
            else skipped(f"PID 1 is {first}, not systemd: hive up needs none")
        )
    if version is None:
        return wrong("systemd_unknown")
    if version < systemd.OLDEST:
        return wrong("systemd_old", up=not is_needed, version=version, oldest=systemd.OLDEST)
    return passed(f"systemd {version} is PID 1")


# --- control groups ----------------------------------------------------------------------------------------------


class Groups(NamedTuple):
    """`mount`: of cgroup v2. `controllers`: what v2 has; `v1`: those of LIMITED that are in v1 hierarchies.
    `parent`: where Hive may make groups; None where it may not."""

    mount: Path | None
    has_freezer: bool = False
    controllers: Sequence[str] = ()
    v1: Sequence[str] = ()
    parent: Path | None = None


def look_at_cgroup(subject: Subject) -> CheckVerdict:
    return judge_cgroup(
        _groups(), is_appliance=subject.is_appliance, user_systemd=not subject.is_root and systemd.is_booted()
    )


def _groups() -> Groups:
    mounts = Path("/proc/self/mounts").read_text()
    mount = find_mount(mounts)
    if mount is None:
        return Groups(None)
    parents = choose_parents(mount, own_cgroup(Path("/proc/self/cgroup").read_text()))
    return Groups(
        mount=mount,
        # The root has no freezer of its own; without any group below it the kernel's version has to do (5.2).
        has_freezer=any(mount.glob("*/cgroup.freeze")) or not any(entry.is_dir() for entry in mount.iterdir()),
        controllers=(mount / "cgroup.controllers").read_text().split(),
        v1=[controller for controller in LIMITED if mount_of_v1(controller, mounts) is not None],
        parent=next((parent for parent in parents if _takes_groups(parent)), None),
    )


def _takes_groups(parent: Path) -> bool:
    """Whether this user may make groups in it and move processes there."""
    return os.access(parent, os.W_OK) and os.access(parent / "cgroup.procs", os.W_OK)


def judge_cgroup(groups: Groups, *, is_appliance: bool, user_systemd: bool) -> CheckVerdict:
    """`user_systemd`: this user is not root, and may have a systemd of its own.

    >>> judge_cgroup(Groups(Path("/c"), True, LIMITED, (), Path("/c")), is_appliance=True, user_systemd=False).reason
    'v2 at /c: freezer, memory, cpu, pids'
    """
    if groups.mount is None or not groups.has_freezer:
        what = "cgroup v2 is not mounted" if groups.mount is None else "cgroup v2 has no freezer (Linux before 5.2)"
        return wrong("no_freezer", up=not is_appliance, what=what)
    if groups.parent is None and not is_appliance:
        return wrong("no_cgroup_allowed", mount=groups.mount, user_systemd=user_systemd)
    lacking = [name for name in LIMITED if name not in groups.controllers and name not in groups.v1]
    if lacking:
        return wrong("cgroup_controllers", mount=groups.mount, lacking=lacking)
    in_v1 = [name for name in LIMITED if name not in groups.controllers]
    if not in_v1:
        return passed(f"v2 at {groups.mount}: freezer, {', '.join(LIMITED)}")
    if is_appliance:
        return wrong("cgroup_hybrid", mount=groups.mount, in_v1=in_v1)
    return passed(f"freezer in v2 at {groups.mount}; {', '.join(in_v1)} in v1")


# --- descriptors -------------------------------------------------------------------------------------------------


def look_at_descriptors(subject: Subject) -> CheckVerdict:
    """Of the daemon that runs; else of this shell, which is what `hive up` would get."""
    pid = (subject.health or {}).get("pid")
    if isinstance(pid, int):
        hard = parse_limit(Path(f"/proc/{pid}/limits").read_text())
        return judge_descriptors(hard, whose=f"the daemon (pid {pid})", is_appliance=subject.is_appliance)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return judge_descriptors(hard, whose="this shell", is_appliance=subject.is_appliance)


def parse_limit(text: str) -> int | None:
    """The hard limit of open files in a /proc/<pid>/limits; -1 for none, None where it does not say.

    >>> parse_limit("Limit  Soft Limit  Hard Limit  Units\\nMax open files            1024       20000      files\\n")
    20000
    """
    for line in text.splitlines():
        if line.startswith("Max open files"):
            hard = line.split()[4]
            return -1 if hard == "unlimited" else int(hard)
    return None


def judge_descriptors(hard: int | None, *, whose: str, is_appliance: bool) -> CheckVerdict:
    """`hard`: -1 where there is no limit."""
    if hard is None:
        return skipped(f"{whose} does not say how many files it may open")
    if hard != -1 and hard < DESCRIPTORS_LEAST:
        return wrong("descriptors_few", up=not is_appliance, whose=whose, files=hard)
    if hard != -1 and hard < DESCRIPTORS_WANTED:
        return wrong("descriptors_low", up=not is_appliance, whose=whose, files=hard, connections=hard // 2)
    return passed(f"{whose} may open {'any number of' if hard == -1 else f'{hard:,}'} files")


# --- the clock ---------------------------------------------------------------------------------------------------


def look_at_clock(subject: Subject) -> CheckVerdict:  # noqa: ARG001 - the same for all
    try:
        return judge_clock(is_synchronised=clock.is_synchronised(), has_systemd=systemd.is_booted())
    except OSError as error:
        return skipped(f"the kernel does not say: {error.strerror}")


def judge_clock(*, is_synchronised: bool, has_systemd: bool) -> CheckVerdict:
    if is_synchronised:
        return passed("synchronised")
    return wrong("clock_adrift" if has_systemd else "clock_adrift_unmanaged")


def look_at_boot(subject: Subject) -> CheckVerdict:
    """The clock at boot: a machine without a battery begins in the past, and what was written before is ahead."""
    stamped = [Path(hive.__file__)]
    if subject.database is not None:
        stamped += [subject.database, subject.database.with_name(subject.database.name + "-wal")]
    newest = (0.0, Path())
    for path in stamped:
        try:
            newest = max(newest, (path.stat().st_mtime, path))
        except OSError:
            continue
    return judge_boot(*newest, booted_at=clock.booted_at(), now=time.time())


def judge_boot(newest: float, path: Path, *, booted_at: float, now: float) -> CheckVerdict:
    """`newest`: when the youngest file of Hive's was written, Unix seconds like all of these.

    >>> judge_boot(90.0, Path("/x"), booted_at=40.0, now=100.0).reason
    'up since 1970-01-01 00:00 UTC; nothing of Hive is from the future'
    """
    if newest > now + AHEAD_S:
        return wrong("clock_behind", path=path, ahead_h=(newest - now) / 3600)
    since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(booted_at))
    return passed(f"up since {since}; nothing of Hive is from the future")


# --- Python ------------------------------------------------------------------------------------------------------


def look_at_python(subject: Subject) -> CheckVerdict:  # noqa: ARG001 - the same for all
    return judge_python(platform.python_version(), has_profile=python_build.has_profile(sysconfig.get_config_vars()))


def judge_python(version: str, *, has_profile: bool) -> CheckVerdict:
    """Tells, and never warns: it is slower, and nothing is wrong.

    >>> judge_python("3.11.2", has_profile=True).reason
    'Python 3.11.2, built with PGO'
    """
    if has_profile:
        return passed(f"Python {version}, built with PGO")
    return passed(f"Python {version}, built without PGO: a proxied request takes a sixth more CPU than with it")


CHECKS = (
    Check("host.systemd", "systemd is PID 1, and recent enough to install Hive.", look_at_systemd),
    Check("host.cgroup", "cgroup v2 with a freezer, controllers for limits, and leave to use them.", look_at_cgroup),
    Check("host.descriptors", "Open files (ulimit -Hn) are enough for many connections.", look_at_descriptors),
    Check("host.clock", "Something keeps the clock right.", look_at_clock),
    Check("host.boot", "The clock was right at boot: nothing is from the future.", look_at_boot),
    Check("host.python", "The Python that runs Hive, and if it was built with PGO.", look_at_python),
)
