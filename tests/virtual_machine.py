"""A Debian with a kernel of its own, booted by QEMU without KVM (which may be there and not boot a stock kernel).

Its system disk is made by mmdebstrap once and kept in HIVE_CI_CACHE; nothing is written to it. A second disk carries
what a test brings in, and what came of it out: the guest finds it at /dev/vdb.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
import tempfile
import tomllib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from tests.host import systemd_machine

REPOSITORY = Path(__file__).parents[1]
TOOLS = ("mmdebstrap", "qemu-system-x86_64", "mke2fs", "debugfs")


def system(name: str, packages: str, *, size_mb: int, prepare: Callable[[Path], None]) -> Path:
    """A directory with the machine's `disk`, `kernel` and `initrd`, made once: `prepare` is given its root before.

    Skips where no such machine can be made or booted.
    """
    if reason := systemd_machine.why_not(TOOLS):
        pytest.skip(reason)
    directory = systemd_machine.ALL_CACHES / name
    with systemd_machine.one_at_a_time(directory):
        if not (directory / "initrd").exists():
            with tempfile.TemporaryDirectory(prefix="new-", dir=directory) as made:
                _make_system(Path(made) / "root", directory, packages, size_mb, prepare)
    return directory


def _make_system(root: Path, directory: Path, packages: str, size_mb: int, prepare: Callable[[Path], None]) -> None:
    """The initrd comes last: where it lies, the rest is whole."""
    systemd_machine.make_debian(root, packages)
    prepare(root)
    _make_disk(root, directory / "disk", size_mb)
    shutil.copy(next(root.glob("boot/vmlinuz-*")), directory / "kernel")
    shutil.copy(next(root.glob("boot/initrd.img-*")), directory / "initrd.new")
    (directory / "initrd.new").rename(directory / "initrd")


def copy_packages(target: Path) -> None:
    """Files that Hive needs to run, from this Python's own packages, and Hive as it is in the working tree."""
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


def run(
    system: Path, content: Path, *, size_mb: int, append: str, limit_s: float, memory_mb: int = 1024, cores: int = 1
) -> tuple[str, str]:
    """The texts of console.txt and results.json on the disk with `content` when the machine has switched itself off.

    `append` is for its kernel. Raises TimeoutExpired, and then the machine is gone as well.
    """
    with tempfile.TemporaryDirectory(prefix="hive-vm-") as name:
        payload = Path(name) / "payload"
        _make_disk(content, payload, size_mb)
        _boot(system, payload, append, limit_s, ["-m", str(memory_mb), "-smp", str(cores)])
        return _read_back(payload, "console.txt"), _read_back(payload, "results.json")


def _make_disk(content: Path, disk: Path, size_mb: int) -> None:
    command = ["/sbin/mke2fs", "-q", "-F", "-t", "ext4", "-d", str(content), str(disk), f"{size_mb}M"]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _boot(system: Path, payload: Path, append: str, limit_s: float, size: list[str]) -> None:
    # It takes what the booted machines of the same suite leave idle. Neither what newer processors can nor what guards
    # against their faults is of any use there, and both are emulated: the small machine took twice the time with them.
    command = ["nice", "-n", "5", "qemu-system-x86_64", "-accel", "tcg", "-cpu", "qemu64"]
    command += [*size, "-nic", "none", "-nographic"]
    command += ["-no-reboot", "-kernel", str(system / "kernel"), "-initrd", str(system / "initrd")]
    command += ["-append", f"console=ttyS0 root=/dev/vda quiet panic=-1 mitigations=off {append}"]
    command += ["-drive", f"file={system / 'disk'},format=raw,if=virtio,snapshot=on"]
    command += ["-drive", f"file={payload},format=raw,if=virtio"]
    subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=True)


def _read_back(payload: Path, name: str) -> str:
    command = ["/sbin/debugfs", "-R", f"cat /{name}", str(payload)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
