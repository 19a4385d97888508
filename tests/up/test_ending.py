"""The end of `hive up`: nothing below it is left, though a walk of /proc may miss a process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from hive.host.process import read_stat

PROGRAM = """
import asyncio, subprocess, sys
from hive.host.parent import become_subreaper, has_children
from hive.up import ending
from hive.up.reaper import Reaper
looks = []
look = ending._descendants
ending._descendants = lambda: looks.append(1) or ([] if len(looks) == 1 else look())

async def main():
    reaper = Reaper(lambda pid, code: None)
    assert not has_children()
    subprocess.Popen(["/bin/sh", "-c", "setsid sleep 1000 & echo $! >$1", "sh", sys.argv[1]]).wait()
    assert has_children()
    await ending.kill_descendants()
    assert not has_children()
    assert len(looks) >= 2

become_subreaper()
asyncio.run(main())
"""


def test_what_one_look_missed_is_killed_all_the_same(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    subprocess.run([sys.executable, "-c", PROGRAM, str(told)], check=True, timeout=60)
    assert read_stat(int(told.read_text())) is None
