"""The fake jailer does to the host what its docstring says the real one does."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.firecracker_programs import Programs, make_programs
from tests.fakes.raw_vmm import Answer, connected, listens, read_answer, request_of, until

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="a jailer needs root")
UID = 71999


@pytest.fixture
def top() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="hive-"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


def jail(programs: Programs, base: Path, *, exec_file: Path | None = None) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [
            *(programs.jailer, "--id", "j-1", "--exec-file", exec_file or programs.firecracker),
            *("--uid", str(UID), "--gid", str(UID), "--chroot-base-dir", base, "--", "--api-sock", "/run/api.sock"),
        ],
        env={"SECRET": "1", "PATH": os.defpath},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def base(top: Path) -> Path:
    path = top / "jails"
    path.mkdir()
    return path


@pytest.mark.root
@ROOT
def test_a_jail_is_where_and_what_the_jailers_is(top: Path, base: Path) -> None:
    programs = make_programs(top / "programs")
    process = jail(programs, base)
    root = base / "firecracker" / "j-1" / "root"
    try:
        until(lambda: listens(root / "run" / "api.sock"))
        assert (root.stat().st_uid, stat.S_IMODE(root.stat().st_mode)) == (UID, 0o700)
        assert (root / "firecracker.pid").read_text() == str(process.pid)
        assert (root / "firecracker").read_bytes() == programs.firecracker.read_bytes()
        assert Path(f"/proc/{process.pid}/environ").read_bytes() == b""
        assert os.stat(f"/proc/{process.pid}/root/").st_ino == root.stat().st_ino
        status = Path(f"/proc/{process.pid}/status").read_text()
        assert f"Uid:\t{UID}\t{UID}\t{UID}\t{UID}" in status
        with connected(root / "run" / "api.sock") as sock:
            sock.sendall(request_of("GET", "/", None))
            assert Answer(read_answer(sock)).said["id"] == "j-1"
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.mark.root
@ROOT
@pytest.mark.parametrize("left", ["firecracker.pid", "old_root/"])
def test_what_an_earlier_jail_left_is_in_the_way(top: Path, base: Path, left: str) -> None:
    programs = make_programs(top / "programs")
    root = base / "firecracker" / "j-1" / "root"
    root.mkdir(parents=True)
    (root / left).mkdir() if left.endswith("/") else (root / left).touch()
    process = jail(programs, base)
    said, _ = process.communicate(timeout=60)
    if not said and left == "old_root/":
        pytest.skip("here the fake may not pivot its root")
    assert process.returncode == 1
    assert "File exists (os error 17)" in said


@pytest.mark.root
@ROOT
def test_a_jail_has_the_name_of_the_real_file_and_an_older_copy_is_not_cut_back(top: Path, base: Path) -> None:
    programs = make_programs(top / "programs")
    versioned = programs.firecracker.rename(programs.firecracker.with_name("firecracker-v1.15.1"))
    programs.firecracker.symlink_to(versioned)
    root = base / "firecracker-v1.15.1" / "j-1" / "root"
    root.mkdir(parents=True)
    (root / "firecracker-v1.15.1").write_text("#" * 10_000)
    process = jail(programs, base)
    try:
        until((root / "run" / "api.sock").exists)
        assert (root / "firecracker-v1.15.1").stat().st_size == 10_000
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()


@pytest.mark.root
@ROOT
def test_a_chroot_base_that_is_not_there_ends_the_jailer(top: Path) -> None:
    process = jail(make_programs(top / "programs"), top / "nowhere")
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert said == f"Failed to canonicalize path {top}/nowhere: No such file or directory (os error 2)\n"
