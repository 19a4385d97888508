"""A Debian with systemd as PID 1, booted by systemd-nspawn in a root of its own, for one job at a time.

The root is made by mmdebstrap once and kept in HIVE_CI_CACHE (`python tests/host/systemd_machine.py` does just that);
what a job writes goes to RAM and is gone with it. Neither / nor /tmp of this machine is ever shared: the tmpfiles step
of a booting systemd empties /tmp. Hive and the packages of this Python are mounted read-only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
ALL_CACHES = Path(os.environ.get("HIVE_CI_CACHE", "/var/cache/hive-ci"))
CACHE = ALL_CACHES / "systemd"
ONLINE = CACHE / "online"
"""Its lock is held by a machine that has this machine's network: the ports of the settings are one Hive's at a time."""
ROOT = CACHE / "root"
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
TOOLS = ("mmdebstrap", "systemd-nspawn")
PACKAGES = "systemd,systemd-sysv,dbus,python3"
JOB = """[Unit]
Description=What the test brought
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/sh /in/job
ExecStopPost=+/bin/systemctl --no-block poweroff
StandardOutput=file:/out/console.txt
StandardError=inherit
[Install]
WantedBy=multi-user.target
"""
WRITABLE_GROUPS = """
for group in /sys/fs/cgroup/*; do mount -o remount,bind,rw $group; done
exec /sbin/init
"""
"""Before systemd is process 1 there: nspawn mounts v1's controllers read-only, and no unit would have a limit."""
HIVE_THERE, PACKAGES_THERE = "/srv/hive", "/srv/packages"


def why_not(tools: tuple[str, ...] = TOOLS) -> str:
    """The reason why no machine that takes these can be made and booted here, empty where one can."""
    if os.getuid() != 0:
        return "needs root"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    if missing := [tool for tool in tools if shutil.which(tool, path=path) is None]:
        return f"needs {', '.join(missing)}"
    if not SOURCES.exists():
        return f"needs {SOURCES}"
    if sys.version_info[:2] != (3, 11):
        return "the machine's Python is 3.11, this one's packages are for another"
    return ""


def make_debian(root: Path, packages: str) -> None:
    command = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={packages}", "bookworm"]
    subprocess.run([*command, str(root), str(SOURCES)], check=True)


def add_job(root: Path, unit: str) -> None:
    """`unit` is what the machine runs when it is up."""
    units = root / "etc/systemd/system"
    (units / "hive-test.service").write_text(unit)
    (units / "multi-user.target.wants").mkdir(exist_ok=True)
    (units / "multi-user.target.wants/hive-test.service").symlink_to("../hive-test.service")


@contextlib.contextmanager
def one_at_a_time(directory: Path) -> Iterator[None]:
    """Holds this directory's lock: of several processes one makes what is kept there, the others find it made."""
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make_root() -> None:
    """Makes the root where it is not there yet: 15 s, 300 MB."""
    with one_at_a_time(CACHE):
        if ROOT.exists():
            return
        made = Path(tempfile.mkdtemp(prefix="new-", dir=CACHE))
        try:
            make_debian(made / "root", PACKAGES)
            add_job(made / "root", JOB)
            for there in (HIVE_THERE, PACKAGES_THERE):
                (made / "root" / there.lstrip("/")).mkdir()
            (made / "root").rename(ROOT)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def run(job: str, out: Path, *options: str, limit_s: float, hybrid: bool = False) -> str:
    """Boots, runs the shell script `job` as root when multi-user.target is reached, and returns what it printed.

    `options`: of systemd-nspawn besides. What it writes into /out is in `out` afterwards. `hybrid`: with control groups
    of v1 beside v2's, of which this machine has both. Raises TimeoutExpired, and then the machine is gone as well.
    """
    binds = [f"--bind-ro={REPOSITORY}:{HIVE_THERE}", f"--bind-ro={sysconfig.get_path('purelib')}:{PACKAGES_THERE}"]
    return boot(
        ROOT, job, out, "--volatile=overlay", "--private-network", *binds, *options, limit_s=limit_s, hybrid=hybrid
    )


def why_not_hybrid() -> str:
    """The reason why no machine here has both kinds of control groups, empty where one can."""
    kinds = {line.split()[2] for line in Path("/proc/self/mounts").read_text().splitlines()}
    return "" if {"cgroup", "cgroup2"} <= kinds else "this machine has control groups of v2 only"


def boot(root: Path, job: str, out: Path, *options: str, limit_s: float, hybrid: bool = False) -> str:
    """`run` in this root, with these options of systemd-nspawn besides."""
    with tempfile.TemporaryDirectory(prefix="hive-systemd-") as name, _own_group(hybrid=hybrid) as enter:
        brought = Path(name)
        (brought / "job").write_text(job)
        nspawn = ["systemd-nspawn", "--quiet", f"--directory={root}", *options]
        nspawn += ["--register=no", "--keep-unit", "--kill-signal=SIGRTMIN+3"]
        # For IPAddressDeny=, which is a BPF program.
        nspawn += ["--capability=all", "--system-call-filter=bpf"]
        nspawn += [f"--bind-ro={brought}:/in", f"--bind={out}:/out"]
        nspawn += ["sh", "-c", WRITABLE_GROUPS] if hybrid else ["--boot"]
        booted = subprocess.run(
            ["bash", "-c", f'{enter}exec "$@"', "nspawn", *nspawn],
            env=os.environ | ({} if hybrid else {"SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=limit_s,
            check=False,
        )
    console = out / "console.txt"
    return console.read_text() if console.exists() else booted.stdout.decode(errors="replace")


@contextlib.contextmanager
def _own_group(*, hybrid: bool) -> Iterator[str]:
    """Shell commands that enter control groups made for this machine alone; they are removed with it.

    The machine's systemd makes its groups where nspawn is, a hybrid one in every hierarchy. Only where this machine has
    no systemd, which would have given nspawn a scope.
    """
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    found = [m for m in mounts if m[2] == "cgroup2" or (m[2] == "cgroup" and (hybrid or "name=systemd" in m[3]))]
    groups = [Path(mount[1]) / f"hive-test-{os.getpid()}" for mount in found]
    for group in groups:
        group.mkdir()
        for name in ("cpuset.cpus", "cpuset.mems"):  # without both nobody enters a new group of v1's
            if (group / name).exists() and (group.parent / "cpuset.cpus").exists():
                (group / name).write_text((group.parent / name).read_text())
    try:
        yield "".join(f"echo $$ >{group}/cgroup.procs; " for group in groups)
    finally:
        _remove(groups)


def _remove(groups: list[Path]) -> None:
    """Kills first what is left of a machine whose nspawn was killed."""
    until = time.monotonic() + 10
    while any(group.exists() for group in groups):
        for group in groups:
            with contextlib.suppress(OSError):
                (group / "cgroup.kill").write_text("1")
        for directory in [path for group in groups for path, _, _ in os.walk(group, topdown=False)]:
            with contextlib.suppress(OSError):
                os.rmdir(directory)
        if time.monotonic() > until:
            raise TimeoutError(f"{groups} cannot be removed")
        time.sleep(0.01)


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    make_root()
