"""The host itself: systemd, control groups, descriptors, the clock."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import hive
from hive.appliance.checks.check import Check, Verdict, failed, passed, skipped, warned
from hive.appliance.checks.subject import Subject
from hive.errors import HiveError
from hive.host import clock, program, systemd
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
ADJUST = "timedatectl set-ntp true"


# --- systemd -----------------------------------------------------------------------------------------------------


def look_at_systemd(subject: Subject) -> Verdict:
    try:
        version = systemd.parse_systemd_version(program.run(["systemctl", "--version"], limit_s=SYSTEMCTL_S).text)
    except HiveError:
        version = None
    first = Path("/proc/1/comm").read_text().strip()
    return judge_systemd(version, first, is_booted=systemd.is_booted(), is_needed=subject.is_appliance)


def judge_systemd(version: int | None, first: str, *, is_booted: bool, is_needed: bool) -> Verdict:
    """`first`: the name of PID 1.

    >>> judge_systemd(249, "systemd", is_booted=True, is_needed=False).reason
    'systemd 249; an installed Hive needs 252 or later'
    """
    if not is_booted:
        reason = f"PID 1 is {first}, not systemd"
        return failed(f"{reason}: no service can be started") if is_needed else skipped(f"{reason}: hive up needs none")
    if version is None:
        return warned("systemd is PID 1, but systemctl does not say which version")
    if version < systemd.OLDEST:
        reason = f"systemd {version}; an installed Hive needs {systemd.OLDEST} or later"
        return (failed if is_needed else warned)(reason)
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


def look_at_cgroup(subject: Subject) -> Verdict:
    return judge_cgroup(_groups(), is_appliance=subject.is_appliance, is_root=subject.is_root)


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


def judge_cgroup(groups: Groups, *, is_appliance: bool, is_root: bool) -> Verdict:
    """
    >>> judge_cgroup(Groups(Path("/c"), True, LIMITED, (), Path("/c")), is_appliance=True, is_root=True).reason
    'v2 at /c: freezer, memory, cpu, pids'
    """
    if groups.mount is None or not groups.has_freezer:
        what = "cgroup v2 is not mounted" if groups.mount is None else "cgroup v2 has no freezer (Linux before 5.2)"
        return (failed if is_appliance else warned)(f"{what}: agents are stopped by signals, which they can notice")
    if groups.parent is None and not is_appliance:
        return warned(
            f"no group may be made below {groups.mount}: agents are stopped by signals",
            "" if is_root else "systemd-run --user --scope -p Delegate=yes hive up",
        )
    lacking = [name for name in LIMITED if name not in groups.controllers and name not in groups.v1]
    if lacking:
        return warned(f"v2 at {groups.mount}, without {', '.join(lacking)}: such limits of agents are not enforced")
    in_v1 = [name for name in LIMITED if name not in groups.controllers]
    if not in_v1:
        return passed(f"v2 at {groups.mount}: freezer, {', '.join(LIMITED)}")
    reason = f"freezer in v2 at {groups.mount}; {', '.join(in_v1)} in v1"
    return warned(reason, "boot with systemd.unified_cgroup_hierarchy=1") if is_appliance else passed(reason)


# --- descriptors -------------------------------------------------------------------------------------------------


def look_at_descriptors(subject: Subject) -> Verdict:
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


def judge_descriptors(hard: int | None, *, whose: str, is_appliance: bool) -> Verdict:
    """`hard`: -1 where there is no limit."""
    fix = "systemctl edit hive-proxy hive-daemon  # LimitNOFILE=65536" if is_appliance else "ulimit -Hn 65536  # root"
    if hard is None:
        return skipped(f"{whose} does not say how many files it may open")
    if hard != -1 and hard < DESCRIPTORS_LEAST:
        return failed(f"{whose} may open {hard:,} files: too few for a Hive", fix)
    if hard != -1 and hard < DESCRIPTORS_WANTED:
        return warned(f"{whose} may open {hard:,} files: room for some {hard // 2:,} connections", fix)
    return passed(f"{whose} may open {'any number of' if hard == -1 else f'{hard:,}'} files")


# --- the clock ---------------------------------------------------------------------------------------------------


def look_at_clock(subject: Subject) -> Verdict:
    fix = subject.may_fix + (ADJUST if systemd.is_booted() else "apt-get install chrony")
    try:
        return judge_clock(is_synchronised=clock.is_synchronised(), fix=fix)
    except OSError as error:
        return skipped(f"the kernel does not say: {error.strerror}")


def judge_clock(*, is_synchronised: bool, fix: str) -> Verdict:
    if is_synchronised:
        return passed("synchronised")
    return warned("nothing keeps it right (adjtimex): schedules drift", fix)


def look_at_boot(subject: Subject) -> Verdict:
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


def judge_boot(newest: float, path: Path, *, booted_at: float, now: float) -> Verdict:
    """`newest`: when the youngest file of Hive's was written, Unix seconds like all of these.

    >>> judge_boot(90.0, Path("/x"), booted_at=40.0, now=100.0).reason
    'up since 1970-01-01 00:00 UTC; nothing of Hive is from the future'
    """
    if newest > now + AHEAD_S:
        ahead_h = (newest - now) / 3600
        return warned(
            f"{path} is {ahead_h:.1f} h ahead of the clock: that was set back, or was wrong at boot; "
            "schedules wait until it has caught up",
            ADJUST,
        )
    since = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(booted_at))
    return passed(f"up since {since}; nothing of Hive is from the future")


CHECKS = (
    Check("host.systemd", "systemd is PID 1, and recent enough to install Hive.", look_at_systemd),
    Check("host.cgroup", "cgroup v2 with a freezer, controllers for limits, and leave to use them.", look_at_cgroup),
    Check("host.descriptors", "Open files (ulimit -Hn) are enough for many connections.", look_at_descriptors),
    Check("host.clock", "Something keeps the clock right.", look_at_clock),
    Check("host.boot", "The clock was right at boot: nothing is from the future.", look_at_boot),
)
