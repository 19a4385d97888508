"""A machine as conf/guest/make-machine makes it, booted over the devices that Firecracker has: virtio-mmio and no PCI.

QEMU's microvm stands for Firecracker, which no package registry has.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.host import systemd_machine

pytestmark = [pytest.mark.vsock, pytest.mark.root]
MAKE = Path(__file__).parents[2] / "conf" / "guest" / "make-machine"
TOOLS = ("mmdebstrap", "mke2fs", "lz4", "qemu-system-x86_64")
BOOT_ARGS = "console=ttyS0 reboot=t panic=-1 root=/dev/vda rw"
CLOCK = "tsc_early_khz=2000000"
"""An emulated processor has none of the clocks that KVM gives a guest."""
UNITS = "/etc/systemd/system"
JOB = """[Unit]
After=hive-forward.service
[Service]
Type=oneshot
StandardOutput=tty
TTYPath=/dev/ttyS0
ExecStart=systemctl is-active hive-forward.service
ExecStart=ls /dev/vsock /sys/bus/virtio/drivers
ExecStart=systemctl reboot --force
"""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    if reason := systemd_machine.why_not(TOOLS):
        pytest.skip(reason)
    environment = {**os.environ, "SOURCES": str(systemd_machine.SOURCES)}
    subprocess.run([MAKE, tmp_path], env=environment, check=True, timeout=600)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["initrd", "root.ext4", "vmlinux"]
    return tmp_path


def give_job(image: Path, unit: Path) -> None:
    """Copies a service into the image and enables it, as the page says."""
    wants = f"{UNITS}/multi-user.target.wants/job.service"
    for order in (f"write {unit} {UNITS}/job.service", f"symlink {wants} ../job.service"):
        subprocess.run(["/sbin/debugfs", "-w", "-R", order, str(image)], check=True, capture_output=True)


@pytest.mark.timeout(900)
def test_a_machine_made_of_debians_packages_boots_and_forwards_to_hive(machine: Path) -> None:
    """Debian's kernel alone has no driver for its disk, and nothing said which kernel a guest needs."""
    job = machine / "job"
    job.write_text(JOB)
    give_job(machine / "root.ext4", job)
    command = ["qemu-system-x86_64", "-M", "microvm,acpi=on,rtc=on", "-accel", "tcg", "-cpu", "qemu64", "-m", "512"]
    command += ["-nodefaults", "-no-user-config", "-nographic", "-no-reboot", "-serial", "stdio"]
    command += ["-kernel", str(machine / "vmlinux"), "-initrd", str(machine / "initrd")]
    command += ["-append", f"{BOOT_ARGS} {CLOCK}"]
    command += ["-drive", f"id=root,file={machine / 'root.ext4'},format=raw,if=none"]
    command += ["-device", "virtio-blk-device,drive=root"]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=600, check=False)
    said = set(ran.stdout.split())
    assert {"active", "/dev/vsock", "virtio_blk", "vmw_vsock_virtio_transport"} <= said, ran.stdout[-6000:]


def test_without_a_directory_it_says_how_it_is_used_and_makes_nothing(tmp_path: Path) -> None:
    ran = subprocess.run([MAKE], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "make-machine DIR [PACKAGE...]" in ran.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("mmdebstrap") is None, reason="no mmdebstrap")
def test_what_it_cannot_finish_leaves_nothing(tmp_path: Path) -> None:
    environment = {**os.environ, "SOURCES": str(tmp_path / "nowhere")}
    target = tmp_path / "machine"
    ran = subprocess.run([MAKE, target], env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert list(target.iterdir()) == []
