"""Agents of a real Hive in a box: all of it is inside, and what an agent takes is charged there."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from hive.bench import agent_programs
from hive.bench.agent_programs import PROGRAMS, SYSTEM_PYTHON, Chosen
from hive.bench.box import MIB, MemoryBox, end_group
from hive.bench.driver import turn
from hive.bench.villages import HiveVillage, VillageGround
from hive.errors import NotSupported
from hive.host.cgroup import find_mount
from hive.host.process import children_of, spawn

pytestmark = [pytest.mark.root, pytest.mark.redis]
OWN_MIB = 30
"""Random data of each agent's own."""
STUB = Path(agent_programs.__file__).parent / "stub.py"


@pytest.fixture
def ground() -> Iterator[VillageGround]:
    """A box without swap and a model's stand-in outside it; the directory is one that agents of any user may enter."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(dir="/var/tmp")))
        directory.chmod(0o711)
        agent_programs.copy_to(directory / "programs")
        try:
            box = MemoryBox.make(f"test-{os.getpid()}", 800 * MIB, swaps=False)
        except NotSupported as error:
            pytest.skip(error.message)
        stack.callback(box.remove)
        yield VillageGround(box, directory, stack.enter_context(stand_in(directory)))


@pytest.fixture
def unified(ground: VillageGround) -> Iterator[VillageGround]:
    """The same with a box in the v2 hierarchy, where on this host memory is v1's: it counts no memory."""
    mount = find_mount(Path("/proc/self/mounts").read_text())
    if mount is None or not ground.box.is_v1:
        pytest.skip("the other tests ran in a box of v2, or there is no such hierarchy")
    path = mount / f"hive-bench-test-{os.getpid()}"
    path.mkdir()
    yield ground._replace(box=MemoryBox(path, 800 * MIB, is_v1=False))
    end_group(path)


@contextlib.contextmanager
def stand_in(directory: Path) -> Iterator[int]:
    told = directory / "port"
    stub = spawn([sys.executable, str(STUB), str(told), "0.05"], env={"PATH": os.defpath}, pdeathsig=signal.SIGKILL)
    try:
        while not told.exists():
            assert stub.poll() is None
        yield int(told.read_text())
    finally:
        stub.kill()
        stub.wait()


@contextlib.asynccontextmanager
async def village(ground: VillageGround, *, template: bool) -> AsyncIterator[HiveVillage]:
    """Of the control's agents, which need no packages."""
    own = Chosen(PROGRAMS["own"], SYSTEM_PYTHON, {"BENCH_OWN_MIB": str(OWN_MIB)})
    made = HiveVillage(ground, own, template="packages" if template else "")
    try:
        await made.open()
        yield made
    finally:
        await made.close()


def descendants(pid: int) -> set[int]:
    found, fresh = set[int](), [pid]
    while fresh:
        found |= set(fresh)
        fresh = [child for parent in fresh for child in children_of(parent)]
    return found


def commands(pids: set[int]) -> list[bytes]:
    return [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids]


@pytest.mark.wide
@pytest.mark.parametrize("template", [False, True])
async def test_each_process_of_hive_and_of_its_agents_is_in_the_box_and_so_is_their_memory(
    ground: VillageGround, template: bool
) -> None:
    box = ground.box
    async with village(ground, template=template) as made:
        assert await made.grow(1) == ""
        before, held_before = box.used_bytes(), box.held_by(set(box.pids()) - set(made.serving))
        assert await made.grow(3) == ""
        assert await made.why_not_as_meant() == ""
        inside = set(box.pids())
        assert descendants(made.serving[0]) <= inside
        others = commands(inside - set(made.serving))
        assert sum(b"own_agent.py" in each for each in others) == 3
        assert sum(b"fork_server.py" in each for each in others) == int(template)
        assert not any(b"own_agent.py" in each for each in commands(set(made.serving)))
        for rose in (box.used_bytes() - before, box.held_by(inside - set(made.serving)) - held_before):
            assert 2 * OWN_MIB * MIB < rose < 2 * (OWN_MIB + 20) * MIB
        assert [await turn(target) is not None for target in made.targets] == [True] * 3


@pytest.mark.wide
async def test_a_hive_after_another_of_the_same_run_has_no_agents_yet(ground: VillageGround) -> None:
    for template in (False, True):
        async with village(ground, template=template) as made:
            assert await made.grow(1) == ""
            assert len(made.targets) == 1


@pytest.mark.wide
async def test_in_a_box_of_v2_each_process_of_hive_its_template_and_its_agents_is_inside(
    unified: VillageGround,
) -> None:
    async with village(unified, template=True) as made:
        assert await made.grow(2) == ""
        assert await made.why_not_as_meant() == ""
        inside = set(unified.box.pids())
        assert descendants(made.serving[0]) <= inside
        others = commands(inside - set(made.serving))
        assert sum(b"own_agent.py" in each for each in others) == 2
        assert sum(b"fork_server.py" in each for each in others) == 1
