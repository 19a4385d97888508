"""AF_VSOCK that leads somewhere: Debian's own kernel in a virtual machine whose loopback (CID 1) calls Hive's proxy.

The machine is QEMU without KVM (which may be there and not boot a stock kernel). Its system disk is made by mmdebstrap
once and kept in HIVE_CI_CACHE; nothing is written to it. A second disk carries Hive, the packages it needs and the
guest's program (vsock_guest.py) in, and the results out.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
CACHE = Path(os.environ.get("HIVE_CI_CACHE", "/var/cache/hive-ci")) / "vsock"
SOURCES = Path("/etc/apt/sources.list.d/debian.sources")
PACKAGES = "python3,python3-async-timeout,linux-image-cloud-amd64,kmod"
"""async-timeout: redis-py wants it from Pythons before 3.11.3, and the guest's is older than that."""
TOOLS = ("mmdebstrap", "qemu-system-x86_64", "mke2fs", "debugfs")
BOOTS_WITHIN_S = 200

INIT = """#!/bin/sh
mount -t tmpfs tmpfs /tmp
mount /dev/vdb /mnt
/bin/sh /mnt/go >/mnt/console.txt 2>&1
umount /mnt
echo o >/proc/sysrq-trigger
sleep 60
"""
"""The guest's first and only service. `o`: power off."""
GO = """
modprobe vsock_loopback
cat /proc/uptime
PYTHONPATH=/mnt/packages timeout 150 python3 /mnt/vsock_guest.py /mnt/results.json
cat /proc/uptime
"""

pytestmark = [pytest.mark.vsock, pytest.mark.root, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def system() -> Path:
    """A directory with the guest's `disk`, `kernel` and `initrd`, made once."""
    if os.getuid() != 0:
        pytest.skip("needs root")
    if missing := [tool for tool in TOOLS if shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None]:
        pytest.skip(f"needs {', '.join(missing)}")
    if not SOURCES.exists():
        pytest.skip(f"needs {SOURCES}")
    if sys.version_info[:2] != (3, 11):
        pytest.skip("the guest's Python is 3.11, this one's packages are for another")
    if not (CACHE / "initrd").exists():
        _make_system()
    return CACHE


def _make_system() -> None:
    CACHE.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="hive-vsock-") as name:
        root = Path(name) / "root"
        made = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}", "bookworm", root, SOURCES]
        subprocess.run(made, check=True)
        (root / "sbin/hive-test-init").write_text(INIT)
        (root / "sbin/hive-test-init").chmod(0o755)
        _make_disk(root, CACHE / "disk", 900)
        shutil.copy(next(root.glob("boot/vmlinuz-*")), CACHE / "kernel")
        shutil.copy(next(root.glob("boot/initrd.img-*")), CACHE / "initrd.new")
    (CACHE / "initrd.new").rename(CACHE / "initrd")


def _make_disk(content: Path, disk: Path, size_mb: int) -> None:
    command = ["/sbin/mke2fs", "-q", "-F", "-t", "ext4", "-d", content, disk, f"{size_mb}M"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _copy_packages(target: Path) -> None:
    """What Hive needs to run, from this Python's own packages, and Hive as it is in the working tree."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    wanted, here = list(project["dependencies"]), Path(sysconfig.get_path("purelib"))
    taken: set[str] = set()
    while wanted:
        requirement = wanted.pop()
        name = re.split(r"[^A-Za-z0-9._-]", requirement)[0]
        if name in taken or "extra ==" in requirement:
            continue
        taken.add(name)
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # for another system or another Python
        wanted += distribution.requires or []
        for file in distribution.files or []:
            if ".." not in file.parts:
                (target / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(here / file, target / file)
    shutil.copytree(REPOSITORY / "hive", target / "hive", ignore=shutil.ignore_patterns("__pycache__"))


def _boot(system: Path, payload: Path) -> None:
    """Returns when the machine has switched itself off. Raises TimeoutExpired, and then it is gone as well."""
    disks = [f"file={system / 'disk'},format=raw,if=virtio,snapshot=on", f"file={payload},format=raw,if=virtio"]
    machine = ["-accel", "tcg", "-cpu", "max", "-m", "1024", "-nic", "none", "-nographic", "-no-reboot"]
    kernel = ["-kernel", system / "kernel", "-initrd", system / "initrd"]
    append = "console=ttyS0 root=/dev/vda ro init=/sbin/hive-test-init quiet panic=-1"
    command = ["qemu-system-x86_64", *machine, *kernel, "-append", append]
    for disk in disks:
        command += ["-drive", disk]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=BOOTS_WITHIN_S, check=True)


def _read_back(payload: Path, name: str) -> str:
    return subprocess.run(
        ["/sbin/debugfs", "-R", f"cat /{name}", payload], capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture(scope="module")
def results(system: Path) -> dict[str, Any]:
    """What the guest's callers were answered."""
    with tempfile.TemporaryDirectory(prefix="hive-vsock-") as name:
        content, payload = Path(name) / "content", Path(name) / "payload"
        _copy_packages(content / "packages")
        shutil.copy(Path(__file__).with_name("vsock_guest.py"), content)
        (content / "go").write_text(GO)
        _make_disk(content, payload, 300)
        _boot(system, payload)
        console = _read_back(payload, "console.txt")
        print(console)
        found = _read_back(payload, "results.json")
    assert found, console
    told: dict[str, Any] = json.loads(found)
    assert "failed" not in told, f"{told['failed']}\n{console}"
    return told


def test_the_agent_of_a_cid_can_chat(results: dict[str, Any]) -> None:
    for what in ("chat", "with a key", "large", "its cid again"):
        answer = results[what]
        assert answer.get("status") == "HTTP/1.1 200 OK", (what, answer)
        assert json.loads(answer["text"])["choices"][0]["message"]["content"], what
        assert answer["backend got"] > 0
    assert results["large"]["backend got"] > 4_000_000
    assert results["uvloop"], "the loop whose own transports do not work here"


def test_the_agent_of_a_cid_can_stream_alone_and_with_others(results: dict[str, Any]) -> None:
    answer = results["stream"]
    assert answer.get("status") == "HTTP/1.1 200 OK", answer
    assert '"content":"' in answer["text"].replace(" ", "")
    assert "data: [DONE]" in answer["text"]
    assert answer["text"].endswith("0\r\n\r\n")
    assert results["together"] == ["HTTP/1.1 200 OK"] * 10


def test_a_guest_that_leaves_in_the_middle_stops_the_backend(results: dict[str, Any]) -> None:
    assert results["cut"] == [0, 1]
    assert results["proxy still runs"]
    assert results["exit codes"][0] == 0


@pytest.mark.parametrize("what", ["another cid", "removed"])
def test_a_cid_that_is_no_agents_is_refused_and_the_backend_gets_nothing(results: dict[str, Any], what: str) -> None:
    answer = results[what]
    refused = "error" in answer or answer["bytes"] == 0 or answer["status"].startswith("HTTP/1.1 403")
    assert refused, answer
    assert answer["backend got"] == 0
