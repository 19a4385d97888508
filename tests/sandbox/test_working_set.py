"""The working set of a real agent: what is recorded, and what of it is read beside the next wake from a real swap."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from hive.domain import Limits
from hive.host.memory import advise_willneed
from hive.link.helper import PagedOut
from hive.sandbox import working_set
from hive.sandbox.server import HelperServer
from hive.settings.table import Paths
from tests.sandbox import heavy, turns
from tests.sandbox.harness import A, Daemon, OpenHelper, spec
from tests.sandbox.turns import MIB
from tests.swapspace import file_swap, is_only_swap, zram_swap
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]

HEAP_MIB = 48
USED_MIB = HEAP_MIB / 5


class Sleeper:
    """One agent with a memory group of its own."""

    def __init__(self, daemon: Daemon, pid: int, address: str, group: Path) -> None:
        self.daemon = daemon
        self.pid = pid
        self.address = address
        self.group = group
        self.generation = 0

    async def ask(self, word: bytes) -> int:
        """Major faults of the answer."""
        before = turns.major_faults(self.pid)
        await asyncio.to_thread(heavy.ask, self.address, word)
        return turns.major_faults(self.pid) - before

    async def sleep(self) -> PagedOut:
        self.generation += 1
        await self.daemon.client.freeze(A, self.generation)
        await self.daemon.client.confirm(A, self.generation)
        return await self.daemon.client.page_out(A, self.generation)

    async def wake(self) -> None:
        await self.daemon.client.thaw(A)
        await asyncio.to_thread(working_set._thread.submit(int).result)


@pytest.fixture
def on_file() -> Iterator[str]:
    with file_swap(128) as path:
        if not is_only_swap(path):
            pytest.skip("this host has swap of its own")
        yield path


async def sleeper(paths: Paths, daemon: Daemon, helper: HelperServer) -> Sleeper:
    await daemon.client.define(A, spec(paths, A, turns.command(HEAP_MIB), limits=Limits(memory_mb=256)))
    pid = (await daemon.client.start(A)).pid
    await until(lambda: "ready" in paths.log(A).read_text())
    group = helper._held[A]._running.memory_group()  # type: ignore[union-attr]
    if group is None:
        pytest.skip("no memory controller here")
    return Sleeper(daemon, pid, f"{paths.home(A)}/s", group)


@pytest.fixture
async def helper(open_helper: OpenHelper) -> HelperServer:
    return await open_helper()


@pytest.mark.root
async def test_what_a_turn_used_is_the_working_set_of_the_next_sleep(
    paths: Paths, helper: HelperServer, connect: Connect, on_file: str
) -> None:
    one = await sleeper(paths, await connect(), helper)
    assert (await one.sleep()).working_set_bytes is None
    await one.wake()
    await one.ask(b"turn")
    assert (await one.sleep()).working_set_bytes in range(int(USED_MIB * MIB), int(2.5 * USED_MIB * MIB))
    again = await one.daemon.client.page_out(A, one.generation)
    assert again.working_set_bytes is not None
    assert again.working_set_bytes > USED_MIB * MIB


@pytest.mark.root
async def test_the_pages_that_a_turn_needs_are_read_beside_the_wake_from_a_swap_file(
    paths: Paths, helper: HelperServer, connect: Connect, on_file: str
) -> None:
    one = await sleeper(paths, await connect(), helper)
    faults = []
    for _ in range(3):
        await one.sleep()
        if turns.empty_swap_cache(one.group) > 4 * MIB:
            pytest.skip("the swap cache of a group cannot be emptied here")
        await one.wake()
        faults.append(await one.ask(b"turn"))
    assert faults[0] > 0.5 * USED_MIB * MIB / working_set.PAGE_BYTES / 8  # eight pages are read at once
    assert faults[1] < 0.2 * faults[0]
    assert faults[2] < 0.2 * faults[0]


@pytest.mark.root
async def test_nothing_is_read_beside_a_wake_from_zram(
    paths: Paths, helper: HelperServer, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = []
    monkeypatch.setattr(working_set, "_read", lambda ranges, _: read.append(ranges))
    with zram_swap(128):
        one = await sleeper(paths, await connect(), helper)
        for _ in range(2):
            await one.sleep()
            await one.wake()
            await one.ask(b"turn")
    assert read == []


@pytest.mark.root
@pytest.mark.parametrize("how", ["sleep", "stop", "kill"])
async def test_reading_ends_with_the_next_sleep_and_with_the_agent(
    paths: Paths,
    helper: HelperServer,
    connect: Connect,
    on_file: str,
    monkeypatch: pytest.MonkeyPatch,
    how: str,
) -> None:
    one = await sleeper(paths, await connect(), helper)
    asked: list[int] = []
    halted = threading.Event()

    def after_the_first(pidfd: int, ranges: list[tuple[int, int]]) -> bool:
        asked.append(len(ranges))
        is_advised = advise_willneed(pidfd, ranges)
        until = time.monotonic() + 30
        while not halted.wait(0.01) and time.monotonic() < until:
            pass  # its event becomes known to the test only while this waits
        return is_advised

    await one.sleep()
    await one.wake()
    await one.ask(b"turn")
    await one.sleep()
    memory = helper._held[A]._memory
    assert memory._working_set is not None
    monkeypatch.setattr(working_set, "advise_willneed", after_the_first)
    await one.daemon.client.thaw(A)
    halted = memory._working_set._halted
    await until(lambda: len(asked) == 1)
    match how:
        case "sleep":
            await one.daemon.client.freeze(A, one.generation + 1)
        case "stop":
            await one.daemon.client.stop(A, grace_s=0)
        case _:
            os.kill(one.pid, signal.SIGKILL)
    await asyncio.to_thread(working_set._thread.submit(int).result)
    assert len(asked) == 1


def test_ranges_that_are_not_mapped_are_passed_over_and_a_process_that_is_gone_ends_it() -> None:
    own = os.pidfd_open(os.getpid())
    try:
        if not advise_willneed(own, []) or not advise_willneed(own, [(1 << 40, 4096), (1 << 41, 4096)]):
            pytest.skip("not permitted here")
    finally:
        os.close(own)
    child = os.posix_spawn("/bin/true", ["true"], {})
    gone = os.pidfd_open(child)
    os.waitpid(child, 0)
    assert not advise_willneed(gone, [(1 << 40, 4096)])
    os.close(gone)
