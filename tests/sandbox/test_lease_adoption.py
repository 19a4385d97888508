# ruff: noqa: ASYNC110 - other processes send no asyncio events
"""kill -9 of the helper at each step of a lease's life: the next one knows it, and holds what the kernel holds."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from typing import TypeVar

import pytest

from hive.errors import DependencyDown, TimedOut, WrongState
from hive.host.process import identify
from hive.link.leases import HolderState
from hive.settings.table import Paths
from tests.sandbox.harness import PYTHON, SLEEP, alive
from tests.sandbox.lease_callers import LEASE, Incomer, LeaseDaemon, LeaseHelper, connected, end_incomers, gone

IGNORES = "import signal, time; signal.signal(15, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
STUBBORN = [PYTHON, "-S", "-c", IGNORES]
STEPS = [
    *(f"{when} save {number}" for when in ("before", "after") for number in range(1, 6)),
    "before enter 1",
    "after enter 1",
]
"""A lease has five writes of its record: granted, coming in, in, ending, ended; and one move."""
Answer = TypeVar("Answer")


@pytest.fixture(autouse=True)
def nothing_left(paths: Paths) -> Iterator[None]:
    paths.state.mkdir(mode=0o711, exist_ok=True)
    yield
    end_incomers(paths)
    end_helpers()


def end_helpers() -> None:
    while LeaseHelper.started:
        helper = LeaseHelper.started.pop()
        if helper.process.poll() is None:
            helper.kill()


async def again(ask: Callable[[], Awaitable[Answer]]) -> Answer:
    """As the daemon does: what was not answered is asked anew."""
    async with asyncio.timeout(60):
        while True:
            with suppress(DependencyDown, TimedOut):
                return await ask()
            await asyncio.sleep(0.02)


async def holder_is(daemon: LeaseDaemon, state: HolderState) -> bool:
    return (await again(daemon.client.leases))[LEASE].state is state


async def until_it_is(daemon: LeaseDaemon, state: HolderState) -> None:
    async with asyncio.timeout(60):
        while not await holder_is(daemon, state):
            await asyncio.sleep(0.02)


async def kept_alive(paths: Paths, freezer: str, first: LeaseHelper) -> None:
    """A service manager: another helper follows one that ended."""
    helper = first
    while True:
        await asyncio.to_thread(helper.process.wait)
        helper = LeaseHelper(paths, freezer)


@pytest.mark.breadth(2)
@pytest.mark.parametrize("step", STEPS)
async def test_a_lease_lives_through_a_helper_killed_at_this_step(paths: Paths, freezer: str, step: str) -> None:
    first = LeaseHelper(paths, freezer, die=step)
    manager = asyncio.create_task(kept_alive(paths, freezer, first))
    try:
        async with connected(paths) as daemon:
            grant = daemon.new_grant()
            await again(lambda: daemon.client.lease_expect(grant, wait_s=60))
            incomer = Incomer(paths, grant.nonce, *SLEEP)
            answer = await incomer.answer()
            assert answer["ok"], answer
            await until_it_is(daemon, HolderState.RUNNING)
            running = (await again(daemon.client.leases))[LEASE]
            assert (running.pid, running.pids, running.grant) == (incomer.pid, [incomer.pid], grant)
            late = await Incomer(paths, grant.nonce, *SLEEP).answer()
            assert (late["ok"], late["code"]) == (False, "not_permitted"), "another process"
            await again(lambda: daemon.client.lease_end(LEASE, "over", grace_s=20))
            await until_it_is(daemon, HolderState.ENDED)
            assert (await again(daemon.client.leases))[LEASE].why == "over"
            assert await incomer.ended() == -signal.SIGTERM
            await again(lambda: daemon.client.lease_forget(LEASE))
            assert await again(daemon.client.leases) == {}
            assert list(paths.lease_records.iterdir()) == []
    finally:
        manager.cancel()
        end_helpers()  # the thread that waits for one has to end
        await asyncio.sleep(0)


async def test_a_holder_goes_on_and_its_family_is_known(paths: Paths, freezer: str) -> None:
    family = "import os, time\nif os.fork() == 0:\n os.setsid()\n if os.fork(): os._exit(0)\n"
    family += "os.write(1, b'%d\\n' % os.getpid())\ntime.sleep(99)"  # two write at once, each its line in one piece
    helper = LeaseHelper(paths, freezer)
    async with connected(paths) as daemon:
        incomer = await daemon.holding(PYTHON, "-S", "-c", family)
        pids = sorted([int(await incomer.line()), int(await incomer.line())])
    helper.kill()
    LeaseHelper(paths, freezer)
    async with connected(paths) as daemon:
        found = (await daemon.client.leases())[LEASE]
        assert (found.state, sorted(found.pids), found.pid) == (HolderState.RUNNING, pids, incomer.pid)
        assert found.grant is not None
        assert found.grant.accounts == {"cpu": 700}
        assert found.age_s > 0
        await daemon.client.lease_end(LEASE, "over", grace_s=20)
        await daemon.told(HolderState.ENDED)
        assert not any(alive(pid) for pid in pids)
        await incomer.ended()


async def test_a_holder_that_ended_while_there_was_no_helper_has_ended(paths: Paths, freezer: str) -> None:
    helper = LeaseHelper(paths, freezer)
    async with connected(paths) as daemon:
        incomer = await daemon.holding(*SLEEP)
    helper.kill()
    incomer.process.kill()
    await incomer.ended()
    LeaseHelper(paths, freezer)
    async with connected(paths) as daemon:
        assert (await gone(daemon)).why == ""
        with pytest.raises(WrongState):
            await daemon.grant()
        await daemon.client.lease_forget(LEASE)


async def test_the_grace_goes_on_with_the_next_helper(paths: Paths, freezer: str) -> None:
    helper = LeaseHelper(paths, freezer)
    async with connected(paths) as daemon:
        incomer = await daemon.holding(*STUBBORN)
        await incomer.line()
        await daemon.client.lease_end(LEASE, "over", grace_s=1)
        await daemon.told(HolderState.ENDING)
    helper.kill()
    assert alive(incomer.pid)
    LeaseHelper(paths, freezer)
    async with connected(paths) as daemon:
        assert (await gone(daemon)).why == "over"
        assert await incomer.ended() == -signal.SIGKILL


async def test_a_helper_that_leaves_ends_nobody(paths: Paths, freezer: str) -> None:
    helper = LeaseHelper(paths, freezer)
    async with connected(paths) as daemon:
        incomer = await daemon.holding(*SLEEP)
        grant = await daemon.grant("l-2")
    helper.leave()
    assert not paths.lease_socket.exists()
    assert alive(incomer.pid)
    LeaseHelper(paths, freezer)
    async with connected(paths) as daemon:
        assert (await Incomer(paths, grant.nonce, *SLEEP).answer())["ok"]
        found = await daemon.client.leases()
        assert {id: str(holder.state) for id, holder in found.items()} == {"l-1": "running", "l-2": "running"}


async def test_a_record_of_another_boot_is_of_nobody_that_lives(paths: Paths, freezer: str) -> None:
    helper = LeaseHelper(paths, freezer)
    async with connected(paths) as daemon:
        await daemon.holding(*SLEEP)
    helper.kill()
    (record,) = paths.lease_records.glob("*.json")
    boot = identify(os.getpid())
    assert boot is not None
    record.write_text(record.read_text().replace(boot.boot.partition("+")[0], "another"))
    LeaseHelper(paths, freezer)
    async with connected(paths) as daemon:
        assert (await gone(daemon)).why == "the machine was started anew"


async def test_a_record_that_is_damaged_is_moved_aside(paths: Paths, freezer: str) -> None:
    paths.lease_records.mkdir()
    (paths.lease_records / "l-9.json").write_text("{")
    LeaseHelper(paths, freezer)
    async with connected(paths) as daemon:
        assert await daemon.client.leases() == {}
    assert [path.name for path in paths.lease_records.iterdir()] == ["l-9.damaged"]
