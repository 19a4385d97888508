"""A `firecracker` and a `jailer` for tests: the fakes, or the real ones `HIVE_FIRECRACKER` and `HIVE_JAILER` name."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

FAKES = Path(__file__).parent
MODULES = ("fake_firecracker", "fake_vmm_api", "fake_vsock", "fake_guest", "fake_jailer")
PYTHON = "/usr/bin/python3" if os.access("/usr/bin/python3", os.X_OK) else sys.executable
"""One that agents of any uid may run: a virtual environment may lie in somebody's home."""
REAL, REAL_JAILER, REAL_GUESTS = "HIVE_FIRECRACKER", "HIVE_JAILER", "HIVE_FIRECRACKER_GUESTS"
"""With the first one set, the same tests run on a real VMM: then the third names a directory with a kernel `vmlinux`
and a root file system `<kind>.ext4` for each kind of agent (`idle.ext4`, `http-8080.ext4`, `client+http-8080.ext4`)
whose programs do what those of fake_guest.py do. Tests of kinds that are not there, and of faults, are skipped; without
KVM, or without that directory, all tests that start a guest."""
VERSION = "1.15.1"

PROGRAM = """#!{python} -IS
import os, sys
sys.path.insert(0, {fakes!r})
import {module}
sys.exit({call})
"""
CALLS = {
    "firecracker": (
        "fake_firecracker",
        "fake_firecracker.run(sys.argv[1:], version={version!r}, faults=os.open({faults!r}, os.O_RDONLY))",
    ),
    "jailer": ("fake_jailer", "fake_jailer.run(sys.argv[1:], version={version!r}, faults={faults!r})"),
}


class Programs(NamedTuple):
    """Paths. `faults`: the directory whose files change what the fakes do; `kvm`: what stands for /dev/kvm."""

    firecracker: Path
    jailer: Path
    kernel: Path
    guests: Path
    faults: Path
    kvm: Path
    is_real: bool

    def fault(self, name: str, text: str = "") -> Path:
        """From now on so; until the file is deleted. A real VMM has none: the test is skipped."""
        if self.is_real:
            pytest.skip(f"a real Firecracker cannot be told to do so: {name}")
        path = self.faults / name
        path.write_text(text)
        return path

    def need_kvm(self) -> None:
        """Skips the test where a real VMM cannot start a guest; all before InstanceStart it does without KVM."""
        if self.is_real and not os.access(self.kvm, os.R_OK | os.W_OK):
            pytest.skip(f"a real Firecracker starts no guest without {self.kvm}")

    def guest(self, kind: str) -> Path:
        """A root file system. With the fakes `kind` is what it runs: a line for each program."""
        path = self.guests / f"{kind.replace(chr(10), '+').replace(' ', '-')}.ext4"
        if self.is_real:
            self.need_kvm()
            if not path.exists():
                pytest.skip(f"no guest at {path}")
            return path
        path.write_text(f"{kind}\n")
        path.chmod(0o644)
        return path


def make_programs(directory: Path, *, version: str = VERSION) -> Programs:
    """The programs in `directory`, which any user may enter. `version`: a real one is what it is, and skips others."""
    for name in ("bin", "guests", "faults"):
        (directory / name).mkdir(parents=True, exist_ok=True)
        (directory / name).chmod(0o755)
    kernel = directory / "guests" / "vmlinux"
    kernel.write_text("a kernel\n")
    kernel.chmod(0o644)
    if real := os.environ.get(REAL):
        if version != VERSION:
            pytest.skip(f"{REAL} is not told to be {version}")
        return _real(directory, Path(real))
    for module in MODULES:
        shutil.copyfile(FAKES / f"{module}.py", directory / "bin" / f"{module}.py")
    paths = {name: directory / "bin" / name for name in CALLS}
    for name, (module, call) in CALLS.items():
        filled = call.format(version=version, faults=str(directory / "faults"))
        paths[name].write_text(PROGRAM.format(python=PYTHON, fakes=str(directory / "bin"), module=module, call=filled))
        paths[name].chmod(0o755)
    return Programs(
        paths["firecracker"],
        paths["jailer"],
        kernel,
        directory / "guests",
        directory / "faults",
        Path("/dev/null"),
        is_real=False,
    )


def _real(directory: Path, firecracker: Path) -> Programs:
    """Copies, for some tests take them away or break them."""
    guests = Path(os.environ.get(REAL_GUESTS) or directory / "guests")
    jailer = Path(os.environ.get(REAL_JAILER, firecracker.with_name("jailer")))
    for name, real in (("firecracker", firecracker), ("jailer", jailer)):
        if real.exists():
            shutil.copy2(real, directory / "bin" / name)
    return Programs(
        directory / "bin" / "firecracker",
        directory / "bin" / "jailer",
        guests / "vmlinux",
        guests,
        directory / "faults",
        Path("/dev/kvm"),
        is_real=True,
    )
