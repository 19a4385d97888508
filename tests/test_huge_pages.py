"""The memory of a process is the same in large pages, and is in them."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

PROGRAM = """
import os
from tests import huge_pages

def huge_kb():
    with open("/proc/self/smaps_rollup") as maps:
        return next(int(line.split()[1]) for line in maps if line.startswith("AnonHugePages:"))

kept = [str(number) * 3 for number in range(500_000)]
before = huge_kb()
huge_pages.collapse()
same = kept == [str(number) * 3 for number in range(500_000)]
if not (child := os.fork()):
    os._exit(0 if kept[-1] == "499999" * 3 else 1)
print(same, os.waitpid(child, 0)[1], huge_kb() - before)
"""


def test_what_is_in_large_pages_is_as_it_was_for_a_child_too() -> None:
    ran = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    same, ended, more_kb = ran.stdout.split()
    assert (same, ended) == ("True", "0")
    if not _kernel_knows():
        pytest.skip("this kernel puts no memory into large pages where it is told to (Linux 6.1)")
    assert int(more_kb) >= 2048


def _kernel_knows() -> bool:
    with open("/proc/sys/kernel/osrelease") as release:
        found = re.match(r"(\d+)\.(\d+)", release.read())
    return found is not None and (int(found[1]), int(found[2])) >= (6, 1)
