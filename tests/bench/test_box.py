"""The box of a density run, on a real memory cgroup, and the swap that it is measured with."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.bench import swapping
from hive.bench.box import MIB, RESERVE_BYTES, MemoryBox, place
from hive.bench.leftovers import Left, RunRecord
from hive.errors import NotSupported
from hive.host.memory import read_swaps, read_zrams
from hive.host.process import spawn
from tests.journeys.stack import until
from tests.swapspace import alone, zram_swap

pytestmark = pytest.mark.root
EATS = "import sys, time; heap = bytearray(int(sys.argv[1]) << 20); print('has it', flush=True); time.sleep(600)"
"""MIB of zeros that are written, so that they are charged."""
TOUCHES = (
    "import os, sys, time; heap = os.urandom(int(sys.argv[1]) << 20); print('has it', flush=True); time.sleep(600)"
)


@contextlib.contextmanager
def made(mib: int, **more: object) -> Iterator[MemoryBox]:
    with contextlib.ExitStack() as stack:
        try:
            box = MemoryBox.make(f"test-{os.getpid()}", mib * MIB, **more)  # type: ignore[arg-type]
        except NotSupported as error:
            pytest.skip(error.message)
        stack.callback(reap)
        stack.callback(box.remove)
        yield box


CHILDREN: list[subprocess.Popen[bytes]] = []


def start(box: MemoryBox, program: str, mib: int) -> subprocess.Popen[bytes]:
    child = spawn([sys.executable, "-S", "-c", program, str(mib)], env={}, limit_dirs=[box.plain], stdout_fd=2)
    CHILDREN.append(child)
    return child


def reap() -> None:
    """They ended with their box."""
    while CHILDREN:
        CHILDREN.pop().wait(60)


def test_what_takes_more_than_the_box_is_killed_and_counted() -> None:
    with made(64, swaps=False) as box:
        eater = start(box, TOUCHES, 200)
        assert eater.wait(60) == -9
        assert box.killed() == 1
        assert box.charged_bytes() <= 64 * MIB


def test_nothing_of_a_box_without_swap_is_swapped_where_the_host_has_some() -> None:
    with zram_swap(256), made(64, swaps=False) as box:
        assert start(box, TOUCHES, 100).wait(60) == -9
        assert box.killed() == 1


def test_what_zram_takes_is_taken_off_the_box_again_and_again() -> None:
    """The kernel charges nobody for it."""
    with zram_swap(512) as device, made(128, device=device) as box:
        start(box, TOUCHES, 60)
        until(lambda: box.used_bytes() > 60 * MIB, within_s=30, what="it has its memory")
        limit = Path(box.path, "memory.limit_in_bytes" if box.is_v1 else "memory.max")
        before = int(limit.read_text())
        box.empty()
        box.fit()
        taken = box.zram_bytes()
        assert taken > 30 * MIB
        assert 0 <= 128 * MIB - RESERVE_BYTES - before < MIB  # an empty device takes some KiB
        assert abs(int(limit.read_text()) - (128 * MIB - taken - RESERVE_BYTES)) < 4 * MIB
        assert not box.was_overrun()


def test_a_box_that_holds_more_than_it_has_says_so_once() -> None:
    """As where a kernel cannot swap so fast as zram grows."""
    with made(64, swaps=False) as box:
        start(box, TOUCHES, 40)
        until(lambda: box.used_bytes() > 40 * MIB, within_s=30, what="it has its memory")
        box.size_bytes = 32 * MIB
        box.fit()
        assert box.was_overrun()
        box.size_bytes = 64 * MIB
        box.fit()
        assert not box.was_overrun()


def test_what_agents_hold_is_told_although_others_in_the_box_give_back_more() -> None:
    """So it is while Hive's own memory goes to swap: with more agents the box may hold less."""
    with zram_swap(256) as device, made(200, device=device) as box:
        other, agents = start(box, TOUCHES, 60), [start(box, TOUCHES, 10)]
        held, used = [], []
        for _ in range(2):
            pids = [agent.pid for agent in agents]
            until(lambda: box.held_by([pids[-1]]) > 10 * MIB, within_s=30, what="it has its memory")  # noqa: B023
            box.empty()
            held.append(box.held_by(pids))
            used.append(box.used_bytes() + box.zram_bytes())
            agents.append(start(box, TOUCHES, 10))
            other.kill()
            other.wait()
        assert used[1] < used[0]
        assert 9 * MIB < held[1] - held[0] < 14 * MIB


def test_a_program_inside_sees_the_box_as_the_root_of_memory_cgroups() -> None:
    """A group that it makes at the root is in the box, and goes with it."""
    with made(64, swaps=False) as box:
        script = f"mkdir {box.path.parent}/below && ls {box.path.parent} && cat /proc/self/cgroup"
        reading, writing = os.pipe()
        child = spawn(
            box.inside(["sh", "-c", script]), env={"PATH": os.defpath}, limit_dirs=[box.path], stdout_fd=writing
        )
        os.close(writing)
        with open(reading) as output:
            said = output.read()
        assert child.wait(60) == 0, said
        assert (box.path / "below").is_dir()
        assert "hive-bench-" not in said
    assert not box.path.exists()


def test_a_removed_box_has_killed_who_was_in_it_stopped_ones_too() -> None:
    with made(64, swaps=False) as box:
        child = start(box, EATS, 1)
        until(lambda: child.pid in box.pids(), within_s=20, what="it is in the box")
        child.send_signal(19)
        box.remove()
        assert child.wait(60) == -9
        assert not box.path.exists()


def test_a_host_without_memory_cgroups_is_refused_in_words() -> None:
    with pytest.raises(NotSupported, match="no memory cgroups"):
        place("x", "proc /proc proc rw 0 0\n")


@pytest.mark.parametrize("kind", swapping.KINDS)
def test_swap_is_noted_before_it_is_made_and_gone_afterwards(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hive.bench.leftovers.RECORD", tmp_path / "record.json")
    record = RunRecord(Left())
    with alone():
        devices = [device.device for device in read_zrams()]
        try:
            path = swapping.turn_on(kind, 64 * MIB, tmp_path, record.note)
        except NotSupported as error:
            pytest.skip(error.message)
        assert record.left.swap == path
        assert path in [swap.path for swap in read_swaps() or ()]
        record.clean()
        assert path not in [swap.path for swap in read_swaps() or ()]
        assert [device.device for device in read_zrams()] == devices
        assert not (tmp_path / "swap").exists()
        assert not (tmp_path / "record.json").exists()


def test_a_device_that_was_being_made_when_the_run_was_killed_is_found_by_its_size(tmp_path: Path) -> None:
    with alone():
        before = [device.device for device in read_zrams()]
        with contextlib.suppress(NotSupported):
            device = swapping.turn_on("zram", 65 * MIB, tmp_path, lambda **noted: None)
            swapping.drop_zram([*before, device], 65 * MIB)
            assert device in [found.device for found in read_zrams()]
            swapping.drop_zram(before, 65 * MIB)
        assert [device.device for device in read_zrams()] == before
