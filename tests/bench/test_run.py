"""A density run with a few real agents: to its end, killed in the middle, interrupted, and refused."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hive.bench.leftovers import RECORD
from hive.cli.main import main
from hive.host.memory import read_swaps, read_zrams
from tests.journeys.stack import until
from tests.swapspace import alone

PROGRAM = """
import json, sys
from pathlib import Path
from hive.bench.density import DensityOrder, measured
from hive.bench.driver import BurstPace
box, swap, ways, most, way_s = sys.argv[1:]
pace = BurstPace(1, 1, 1.5, float(way_s))
order = DensityOrder(
    int(box), swap, "own", 0.5, True, Path("/usr/bin/python3"), ways.split(","), pace, int(most)
)
print(json.dumps(measured(order, say=lambda text: print(text, file=sys.stderr, flush=True))))
"""
"""A run of seconds: fewer turns than any of the command's."""
pytestmark = [pytest.mark.root, pytest.mark.redis]


@pytest.fixture(autouse=True)
def nobody_else_swaps() -> Iterator[None]:
    """Nothing of a run is left at the end, whatever it was."""
    with alone():
        before = (read_swaps(), read_zrams(), boxes(), directories())
        yield
        assert (read_swaps(), read_zrams(), boxes(), directories()) == before
        assert not RECORD.exists()


def boxes() -> set[Path]:
    return set(Path("/sys/fs/cgroup").glob("hive-bench-*")) | set(Path("/sys/fs/cgroup/memory").glob("hive-bench-*"))


def directories() -> set[Path]:
    return set(Path("/var/tmp").glob("hive-bench-*"))


def begin(box_mib: int, swap: str, ways: str, most: int, log: Path, *, way_s: float = 30.0) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", PROGRAM, str(box_mib), swap, ways, str(most), str(way_s)]
    with log.open("wb") as file:
        return subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)


def result_of(process: subprocess.Popen[bytes], log: Path) -> Any:
    assert process.wait(110) == 0, log.read_text()
    return json.loads(log.read_text().splitlines()[-1])


@pytest.mark.wide
def test_the_kernel_alone_holds_some_agents_and_the_run_says_how_many(tmp_path: Path) -> None:
    log = tmp_path / "log"
    found = result_of(begin(200, "zram", "kernel", 3, log), log)
    (way,) = found["ways"]
    assert way["skipped"] == ""
    assert way["edge"]["fits"] <= 3
    assert way["agent_mib"] > 30  # random data: nothing compresses it
    assert sum(one["turns"] for step in way["steps"] for one in step["series"]) > 0
    assert found["asked"]["swap"] == "zram"


@pytest.mark.wide
def test_each_way_has_its_first_step_however_long_those_before_it_took(tmp_path: Path) -> None:
    log = tmp_path / "log"
    found = result_of(begin(200, "zram", "none,kernel", 2, log, way_s=0.1), log)
    assert [(way["way"], len(way["steps"])) for way in found["ways"]] == [("none", 1), ("kernel", 1)]
    assert [way["skipped"] for way in found["ways"]] == ["", ""]


@pytest.mark.wide
def test_hive_and_its_agents_are_in_the_box_together(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = begin(400, "zram", "hive", 3, log)
    try:
        until(lambda: b"one more agent" in log.read_bytes(), within_s=100, what="three agents run under Hive")
        (box,) = boxes()
        words = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids_below(box)]
        assert sum(b"own_agent.py" in each for each in words) == 3
        for name in (b"\0daemon\0", b"\0proxy\0", b"\0sandbox\0", b"redis-server"):
            assert any(name in each for each in words), name
        assert not any(b"stub.py" in each for each in words)
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(100)


def pids_below(box: Path) -> list[int]:
    found = []
    for procs in box.rglob("cgroup.procs"):
        found += [int(line) for line in procs.read_text().split()]
    return found


@pytest.mark.parametrize("swap", ["zram", pytest.param("file", marks=pytest.mark.wide)])
def test_what_a_killed_run_left_the_next_one_cleans(swap: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = begin(200, swap, "kernel", 3, log)
    until(lambda: any(map(pids_below, boxes())), within_s=60, what="agents are in the box")
    process.kill()
    process.wait()
    left = boxes()
    assert left
    assert RECORD.exists()
    assert read_swaps()
    assert directories()
    next_log = tmp_path / "next"
    # Another box, swap and directory: what is there afterwards is neither of them.
    result_of(begin(200, "zram", "kernel", 2, next_log), next_log)


@pytest.mark.wide
def test_what_a_run_left_that_was_killed_with_its_hive_the_next_one_cleans(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = begin(400, "zram", "hive", 2, log)
    until(lambda: any(agents_of(box) for box in boxes()), within_s=100, what="an agent runs under Hive")
    (box,) = boxes()
    process.kill()
    process.wait()
    next_log = tmp_path / "next"
    result_of(begin(200, "zram", "none", 2, next_log), next_log)
    assert not box.exists()


def agents_of(box: Path) -> list[int]:
    return [pid for pid in pids_below(box) if b"own_agent.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_leaves_nothing(signum: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = begin(200, "zram", "kernel", 3, log)
    until(lambda: any(map(pids_below, boxes())), within_s=60, what="agents are in the box")
    process.send_signal(signum)
    assert process.wait(60) != 0


@pytest.mark.wide
def test_two_runs_at_once_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "log"
    process = begin(200, "zram", "kernel", 2, log)
    until(boxes, within_s=60, what="the first run has its box")
    assert main(["bench", "density", "--quick", "--agents", "own", "--python", "/usr/bin/python3"]) != 0
    assert "another density run is going on here" in capsys.readouterr().err
    result_of(process, log)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--box", "12M"], "a number of MiB, 128 or more"),
        (["--box", "much"], "a number of MiB"),
        (["--burst", "0%"], "from 1% to 100%"),
        (["--agents", "ruby"], "no 'ruby'"),
        (["--swap", "tape"], "no 'tape'"),
        (["--ways", "kernel,magic"], "no 'magic'"),
        (["--picture", "/nowhere/x.svg"], "--picture /nowhere/x.svg"),
        (["--agents", "langgraph", "--python", "/usr/bin/python3"], "pip install langgraph"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_made(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "density", *words]) != 0
    assert said in capsys.readouterr().err
    assert not boxes()


def test_who_is_not_root_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(["bench", "density"]) == 4
    assert "only root may" in capsys.readouterr().err
