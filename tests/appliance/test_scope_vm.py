"""Deep sleep without root: a user with a systemd of his own, in a virtual machine with unified control groups.

The machine is QEMU without KVM, with Debian's kernel (6.1: `memory.reclaim`, not yet `swappiness=max`). Its system disk
is made by mmdebstrap once and kept in HIVE_CI_CACHE; nothing is written to it. A second disk carries Hive and the
guest's program (scope_guest.py) in and what that printed out.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest

REPOSITORY = Path(__file__).parents[2]
CACHE = Path(os.environ.get("HIVE_CI_CACHE", "/var/cache/hive-ci")) / "user-systemd"
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
PACKAGES = "systemd,systemd-sysv,dbus,dbus-user-session,libpam-systemd,python3,linux-image-cloud-amd64,kmod"
TOOLS = ("mmdebstrap", "qemu-system-x86_64", "mke2fs", "debugfs")
ENDS_WITHIN_S = 300
MIB = 1024 * 1024

UNIT = """[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStartPre=/bin/mount /dev/vdb /mnt
ExecStart=/bin/sh -c 'sh /mnt/job >/mnt/console.txt 2>&1'
ExecStopPost=-+/bin/umount /mnt
ExecStopPost=+/bin/systemctl --no-block --force poweroff
[Install]
WantedBy=multi-user.target
"""
JOB = """
useradd -m u
dd if=/dev/zero of=/swap bs=1M count=160 status=none
chmod 600 /swap
mkswap /swap
swapon /swap
systemctl start user@1000.service
cd /home/u
export XDG_RUNTIME_DIR=/run/user/1000 PYTHONPATH=/mnt/packages HOME=/home/u
setpriv --reuid u --regid u --clear-groups python3 /mnt/scope_guest.py /home/u/state >/mnt/results.json
"""

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.timeout(600)]


def make_disk(content: Path, disk: Path, size_mb: int) -> None:
    command = ["/sbin/mke2fs", "-q", "-F", "-t", "ext4", "-d", str(content), str(disk), f"{size_mb}M"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


@pytest.fixture(scope="module")
def system() -> Path:
    """A directory with the machine's `disk`, `kernel` and `initrd`, made once."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    if not SOURCES.exists():
        pytest.skip(f"needs {SOURCES}")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the machine's Python is 3.11, this one's msgspec is for another")
    if not (CACHE / "initrd").exists():
        make_system()
    return CACHE


def make_system() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hive-vm-", dir=CACHE) as name:
        root = Path(name) / "root"
        made = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(root)]
        subprocess.run([*made, str(SOURCES)], check=True)
        units = root / "etc/systemd/system"
        (units / "hive-test.service").write_text(UNIT)
        (units / "multi-user.target.wants").mkdir(exist_ok=True)
        (units / "multi-user.target.wants/hive-test.service").symlink_to("../hive-test.service")
        make_disk(root, CACHE / "disk", 1200)
        shutil.copy(next(root.glob("boot/vmlinuz-*")), CACHE / "kernel")
        shutil.copy(next(root.glob("boot/initrd.img-*")), CACHE / "initrd.new")
    (CACHE / "initrd.new").rename(CACHE / "initrd")


def boot(system: Path, payload: Path) -> None:
    """Returns when the machine has switched itself off. Raises TimeoutExpired, and then it is gone as well."""
    command = ["qemu-system-x86_64", "-accel", "tcg", "-cpu", "max", "-m", "1024", "-nic", "none", "-nographic"]
    command += ["-no-reboot", "-kernel", str(system / "kernel"), "-initrd", str(system / "initrd")]
    command += ["-append", "console=ttyS0 root=/dev/vda rw quiet panic=-1"]
    command += ["-drive", f"file={system / 'disk'},format=raw,if=virtio,snapshot=on"]
    command += ["-drive", f"file={payload},format=raw,if=virtio"]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ENDS_WITHIN_S, check=True)


def read_back(payload: Path, name: str) -> str:
    command = ["/sbin/debugfs", "-R", f"cat /{name}", str(payload)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def results(system: Path) -> dict[str, Any]:
    """What the guest's program printed."""
    with tempfile.TemporaryDirectory(prefix="hive-vm-") as name:
        content, payload = Path(name) / "content", Path(name) / "payload"
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / "hive", content / "packages/hive", ignore=no_caches)
        shutil.copytree(Path(msgspec.__file__).parent, content / "packages/msgspec", ignore=no_caches)
        shutil.copy(Path(__file__).with_name("scope_guest.py"), content)
        (content / "job").write_text(JOB)
        make_disk(content, payload, 100)
        boot(system, payload)
        console, found = read_back(payload, "console.txt"), read_back(payload, "results.json")
    assert found, console
    told: dict[str, Any] = json.loads(found)
    return told


def test_a_user_who_may_not_page_out_is_executed_anew_in_a_scope_and_then_may(results: dict[str, Any]) -> None:
    assert results["first"]["why_not"].startswith("deep sleep: not permitted here (it takes CAP_SYS_PTRACE")
    assert results["is_first"] is False
    assert results["cgroup"].rstrip().endswith(".scope")
    assert "/user@1000.service/" in results["cgroup"]
    assert (results["why_not"], results["why_not_page_out"]) == ("", "")


def test_the_second_execution_has_the_first_ones_pid_and_hands_down_no_mark(results: dict[str, Any]) -> None:
    assert results["pid"] == results["first"]["pid"]
    assert results["mark"] is None


def test_a_users_agent_sleeps_deep_by_reclaim_of_its_cgroup(results: dict[str, Any]) -> None:
    """This kernel knows no `swappiness=max`, so mapped files may go along; the user may do nothing else."""
    assert (results["how"], results["arguments"]) == ("reclaim", "")
    assert results["rss_bytes"] > 48 * MIB
    assert results["swap_bytes"] > 40 * MIB
    assert results["kept_bytes"] < 0.4 * results["rss_bytes"]
    assert results["is_whole"]
