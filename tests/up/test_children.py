"""Real processes: started, shown, started again, ended."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from hive.errors import NotFound
from hive.up.children import Child, ChildFailed
from hive.up.reaper import Reaper
from tests.descriptors import open_descriptors
from tests.waiting import until

SHELL = "/bin/sh"


class Heard:
    """Words of children, and which strangers were reaped."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.strangers: list[tuple[int, int]] = []

    def say(self, name: str, line: str) -> None:
        self.lines.append((name, line))


@pytest.fixture
def heard() -> Heard:
    return Heard()


@pytest.fixture
async def reaper(heard: Heard) -> AsyncIterator[Reaper]:
    reaper = Reaper(lambda pid, code: heard.strangers.append((pid, code)))
    yield reaper
    reaper.close()


def shell(name: str, script: str, reaper: Reaper, heard: Heard, *inherit: int) -> Child:
    return Child(name, lambda: [SHELL, "-c", script], reaper=reaper, say=heard.say, inherit=inherit)


@pytest.mark.wide
async def test_what_a_child_writes_to_both_streams_is_heard_line_by_line(reaper: Reaper, heard: Heard) -> None:
    child = shell("one", "echo out; echo err >&2; printf 'no newline'; exec sleep 60", reaper, heard)
    child.start()
    await until(lambda: len(heard.lines) == 2)
    await child.stop(grace_s=5)
    await until(lambda: len(heard.lines) == 3)
    assert heard.lines == [("one", "out"), ("one", "err"), ("one", "no newline")]


async def test_a_child_that_dies_is_started_again_with_a_growing_delay_and_reported(
    reaper: Reaper, heard: Heard, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hive.up")
    child = shell("one", f"echo x >> {tmp_path}/starts; exec sleep 60", reaper, heard)
    child.start()
    child.came_up()
    starts = tmp_path / "starts"
    for number in range(1, 3):
        await until(lambda number=number: starts.exists() and starts.read_text() == "x\n" * number)  # type: ignore[misc]
        assert child.pid is not None
        os.kill(child.pid, signal.SIGKILL)
    await until(lambda: starts.read_text() == "x\n" * 3)
    await child.stop(grace_s=5)
    ends = [record.getMessage() for record in caplog.records if "again_in_s" in record.getMessage()]
    assert [line.split()[2] for line in ends] == ["exit=137", "exit=137"]
    assert [line.split()[-1] for line in ends] == ["again_in_s=0.2", "again_in_s=0.4"]


async def test_a_stopped_child_is_not_started_again(reaper: Reaper, heard: Heard) -> None:
    child = shell("one", "exec sleep 60", reaper, heard)
    child.start()
    child.came_up()
    await child.stop(grace_s=5)
    await asyncio.sleep(0.3)  # longer than the first back-off
    assert child.pid is None


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(reaper: Reaper, heard: Heard) -> None:
    child = shell("one", "trap '' TERM; echo ready; while :; do sleep 0.05; done", reaper, heard)
    child.start()
    await until(lambda: heard.lines != [])
    pid = child.pid
    await child.stop(grace_s=0.2)
    assert child.pid is None
    assert pid is not None
    assert not psutil.pid_exists(pid)


async def test_a_hurry_cuts_the_grace(reaper: Reaper, heard: Heard) -> None:
    child = shell("one", "trap '' TERM; echo ready; while :; do sleep 0.05; done", reaper, heard)
    child.start()
    await until(lambda: heard.lines != [])
    async with asyncio.timeout(60):
        await child.stop(grace_s=3600, hurry=lambda: True)
    assert child.pid is None


async def test_an_end_before_it_came_up_is_a_failure_with_its_last_words_and_exit_code(
    reaper: Reaper, heard: Heard
) -> None:
    child = shell("one", "echo no such key >&2; exit 2", reaper, heard)
    child.start()
    await until(lambda: child.failure is not None)
    assert isinstance(child.failure, ChildFailed)
    assert "one ended with exit code 2" in child.failure.message
    assert "no such key" in child.failure.message
    assert child.failure.exit_code == 2
    assert child.pid is None


async def test_a_program_that_is_not_there_raises_and_leaks_no_descriptor(reaper: Reaper, heard: Heard) -> None:
    child = Child("one", lambda: ["/nonexistent/program"], reaper=reaper, say=heard.say)
    before = open_descriptors()
    with pytest.raises(NotFound):
        child.start()
    assert open_descriptors() == before


async def test_an_orphan_of_a_child_is_reaped_as_a_stranger_of_the_subreaper(heard: Heard, tmp_path: Path) -> None:
    """The sub-reaper is a process of its own here: the flag would stay with the test runner."""
    program = tmp_path / "up.py"
    program.write_text(
        "import asyncio, os\n"
        "from hive.up.reaper import Reaper\n"
        "from hive.host.parent import become_subreaper\n"
        "from hive.host.process import spawn\n"
        "async def main():\n"
        "    become_subreaper()\n"
        "    done = asyncio.Event()\n"
        "    def stranger(pid, code):\n"
        "        print('stranger', code, flush=True)\n"
        "        done.set()\n"
        "    reaper = Reaper(stranger)\n"
        "    child = spawn(['/bin/sh', '-c', '(sleep 0.3; exit 7) & exit 3'], env=os.environ)\n"
        "    def on_end(code):\n"
        "        child.returncode = code\n"
        "        print('child', code, flush=True)\n"
        "    reaper.expect(child.pid, on_end)\n"
        "    await done.wait()\n"
        "asyncio.run(main())\n"
    )
    runner = await asyncio.create_subprocess_exec(sys.executable, program, stdout=asyncio.subprocess.PIPE)
    out, _ = await runner.communicate()
    assert out.decode().split("\n") == ["child 3", "stranger 7", ""]


async def test_the_inherited_descriptors_are_open_in_the_child_and_no_others(reaper: Reaper, heard: Heard) -> None:
    reading, writing = os.pipe()
    other_reading, other_writing = os.pipe()
    os.set_inheritable(other_writing, True)
    child = shell("one", "set -- /proc/$$/fd/*; echo $#; exec sleep 60", reaper, heard, reading)
    try:
        child.start()
        await until(lambda: heard.lines != [])
        # stdin, stdout, stderr, the one inherited, and the directory while it is read. No pipe: the shell had that too.
        assert heard.lines == [("one", "5")]
    finally:
        await child.stop(grace_s=5)
        for descriptor in (reading, writing, other_reading, other_writing):
            os.close(descriptor)


async def test_a_line_of_a_megabyte_is_cut(reaper: Reaper, heard: Heard) -> None:
    child = shell("one", "head -c 1000000 /dev/zero | tr '\\0' x; echo; echo end; exec sleep 60", reaper, heard)
    child.start()
    await until(lambda: len(heard.lines) == 2)
    await child.stop(grace_s=5)
    assert len(heard.lines[0][1]) < 10_000
    assert heard.lines[0][1].endswith("bytes more")
    assert heard.lines[1] == ("one", "end")
