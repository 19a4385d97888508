"""Hive's code run by an ordinary user, from a test that runs as root."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

NOBODY = 65534


def run_as_nobody(program: str) -> str:
    """The output of `program`. By the system's Python: the tests' own may be in a home no other user may enter.

    Skipped where that cannot be done.
    """
    if os.geteuid() != 0:
        pytest.skip("only root can become somebody else")
    python, version = os.path.realpath("/usr/bin/python3"), "import sys; print(*sys.version_info[:2])"
    if subprocess.check_output([python, "-c", version], text=True).split() != [str(n) for n in sys.version_info[:2]]:
        pytest.skip("the system's python is of another version than the tests'")
    packages = os.path.dirname(os.path.dirname(msgspec.__file__))
    ran = subprocess.run(
        [python, "-c", program],
        env={"PYTHONPATH": f"{packages}:{os.getcwd()}"},
        user=NOBODY,
        group=NOBODY,
        extra_groups=[],
        capture_output=True,
        text=True,
    )
    if "No module named 'hive'" in ran.stderr:
        pytest.skip("another user may not read this checkout")
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
