"""A paused agent does nothing at all."""

from __future__ import annotations

import time
from pathlib import Path

import psutil
import pytest

from tests.journeys.stack import stack, until


def cpu_of_session(pid: int) -> int:
    """utime + stime, in clock ticks, of every process of the session."""
    ticks = 0
    for process in psutil.process_iter():
        try:
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == pid:
            ticks += int(fields[11]) + int(fields[12])
    return ticks


@pytest.mark.redis
def test_a_paused_agents_cpu_time_does_not_move_for_ten_seconds() -> None:
    with stack() as hive:
        view = hive.create("spinner", "spinner.py")
        pid = view["pid"]
        before = cpu_of_session(pid)
        until(lambda: cpu_of_session(pid) > before + 20, within_s=5, what="it burns a core awake")
        assert hive.post("/api/agents/spinner/pause")["status"] == "paused"
        frozen = cpu_of_session(pid)
        time.sleep(10)
        assert cpu_of_session(pid) == frozen
        assert hive.post("/api/agents/spinner/resume")["status"] == "running"
        until(lambda: cpu_of_session(pid) > frozen, within_s=5, what="it goes on")
