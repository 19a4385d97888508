"""Memory of control groups and of processes, as this kernel shows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hive.host.memory_group import held_by_group, held_by_processes, make_below_own, parse_group
from hive.host.process import spawn

MIB = 1 << 20
HOLD = "held = b'x' * (64 << 20); print('held', flush=True); input()"


def test_what_a_process_allocates_is_in_it() -> None:
    child = subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        child.stdout.readline()
        held = held_by_processes([child.pid])
        assert held is not None
        assert 64 * MIB < held < 128 * MIB
    finally:
        child.communicate(b"\n")
    assert held_by_processes([child.pid]) == 0


def test_a_group_has_what_its_processes_allocate_and_not_the_files_they_read(tmp_path: Path) -> None:
    group = make_below_own(f"hive-test-{os.getpid()}")
    if group is None:
        pytest.skip("no group for memory may be made here")
    read, write = os.pipe()
    file = tmp_path / "file"
    file.write_bytes(b"x" * 64 * MIB)
    program = f"open({str(file)!r}, 'rb').read(); held = b'x' * (64 << 20); print('held', flush=True); input()"
    stdin_read, stdin_write = os.pipe()
    child = spawn([sys.executable, "-c", program], env={}, stdin_fd=stdin_read, stdout_fd=write, limit_dirs=[group])
    try:
        os.read(read, 5)
        held = held_by_group(group)
        assert held is not None
        assert 64 * MIB < held < 128 * MIB
    finally:
        os.close(stdin_write)
        child.wait()
        for fd in (read, write, stdin_read):
            os.close(fd)
        group.rmdir()
    assert held_by_group(group) is None


@pytest.mark.parametrize("text", ["", "anon 1\n", "anon x\nshmem 1\n", "rss 1\nshmem 1\n"])
def test_what_is_not_told_is_none(text: str) -> None:
    assert parse_group(text) is None
