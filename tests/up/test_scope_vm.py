"""Deep sleep without root: a user with a systemd of his own, in a virtual machine with unified control groups.

The machine has Debian's kernel (6.1: `memory.reclaim`, not yet `swappiness=max`). Hive and the guest's program
(scope_guest.py) are carried in, and what that printed out.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import httptools
import msgspec
import pytest

from tests import virtual_machine
from tests.host import systemd_machine

REPOSITORY = Path(__file__).parents[2]
PACKAGES = "systemd,systemd-sysv,dbus,dbus-user-session,libpam-systemd,python3,linux-image-cloud-amd64,kmod"
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


@pytest.fixture(scope="module")
def system() -> Path:
    return virtual_machine.system(
        "user-systemd", PACKAGES, size_mb=1200, prepare=lambda root: systemd_machine.add_job(root, UNIT)
    )


@pytest.fixture(scope="module")
def results(system: Path) -> dict[str, Any]:
    """The output of the guest's program."""
    with tempfile.TemporaryDirectory(prefix="hive-vm-") as name:
        content = Path(name) / "content"
        no_caches = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / "hive", content / "packages/hive", ignore=no_caches)
        for package in (msgspec, httptools):
            assert package.__file__ is not None
            place = Path(package.__file__).parent
            shutil.copytree(place, content / "packages" / place.name, ignore=no_caches)
        shutil.copy(Path(__file__).with_name("scope_guest.py"), content)
        (content / "job").write_text(JOB)
        console, found = virtual_machine.run(system, content, size_mb=100, append="rw", limit_s=ENDS_WITHIN_S)
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
