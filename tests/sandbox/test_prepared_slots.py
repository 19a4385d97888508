"""A supervisor that waits for its grant, as the helper keeps it: taken, replaced, forgotten, killed; real processes."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.errors import BadRequest, NotFound, NotPermitted
from hive.host.process import ProcessTable
from hive.link.slots import ProcessState, mark_of
from hive.settings.table import Paths
from tests.sandbox.harness import alive
from tests.sandbox.model_servers import GRANT, A, B, PoolHelper, command, connected, helper, left, pids
from tests.waiting import until


@pytest.fixture(autouse=True)
def nothing_left(paths: Paths) -> Iterator[None]:
    yield
    for pid in [*left(paths), *waiting(paths, A), *waiting(paths, B)]:
        os.kill(pid, signal.SIGKILL)


def waiting(paths: Paths, slot: str) -> list[int]:
    """Supervisor and warden of this slot, whether they wait or work, the supervisor first."""
    socket = os.fsencode(paths.slot_socket(slot))
    found = [stat for stat in ProcessTable().processes.values() if stat.alive and {socket, b"-c"} <= words(stat.pid)]
    return [stat.pid for stat in sorted(found, key=lambda stat: (stat.start_ticks, stat.pid))]


def words(pid: int) -> set[bytes]:
    try:
        return set(Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0"))
    except OSError:  # it has ended meanwhile
        return set()


def traces(paths: Paths, slot: str = A) -> list[Path]:
    """All files that a prepared supervisor of this slot has."""
    places = (paths.slot_grants, paths.slot_sockets, paths.slot_records)
    return [path for place in places if place.exists() for path in place.iterdir() if path.name.startswith(slot)]


async def prepared(paths: Paths, daemon: object, slot: str = A) -> tuple[int, int]:
    """Has one of this slot wait; its supervisor and its warden."""
    await daemon.client.slot_prepare(slot)  # type: ignore[attr-defined]
    await until(lambda: len(waiting(paths, slot)) == 2)
    supervisor, warden = waiting(paths, slot)
    return supervisor, warden


async def gone(paths: Paths, *processes: int) -> None:
    await until(lambda: not any(map(alive, processes)) and not traces(paths))


async def test_a_start_goes_on_with_the_one_that_waits(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        supervisor, warden = await prepared(paths, daemon)
        assert (await daemon.client.slots(), daemon.moved, pids(paths)) == ({}, [], [])
        begun = await daemon.client.slot_start(A, GRANT)
        assert (begun.pid, begun.state, begun.grant) == (supervisor, ProcessState.STARTING, GRANT)
        serving = await daemon.told(ProcessState.SERVING)
        assert (serving.run, serving.pid) == (begun.run, supervisor)
        assert set(serving.pids) == {supervisor, warden, *pids(paths)}
        assert not mark_of(paths.slot_grant(A)).exists()
        assert (await daemon.client.slots())[A].grant == GRANT
        await daemon.client.slot_stop(A, grace_s=20)
        await gone(paths, supervisor, warden, *pids(paths))
        assert daemon.states() == ["serving", "stopping", "ended"]


async def test_its_log_begins_with_its_start_and_the_one_before_is_kept_until_then(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        await daemon.serving()
        await daemon.client.slot_stop(A, grace_s=20)
        await prepared(paths, daemon)
        assert "the supervisor begins" in await daemon.client.slot_log(A, 50)
        daemon.moved.clear()
        await daemon.serving()
        assert (await daemon.client.slot_log(A, 50)).count("the supervisor begins") == 1


async def test_prepared_twice_it_is_the_same_one_that_waits_longer(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        before = await prepared(paths, daemon)
        os.utime(mark_of(paths.slot_grant(A)), (1, 1))
        assert await prepared(paths, daemon) == before
        assert mark_of(paths.slot_grant(A)).stat().st_mtime > 1


async def test_one_waits_at_a_time(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        first = await prepared(paths, daemon, A)
        second = await prepared(paths, daemon, B)
        await gone(paths, *first)
        serving = await daemon.serving(A)  # another one is chosen: it starts as ever, and B waits on
        assert serving.pid not in (*first, *second)
        assert waiting(paths, B) == list(second)
        await daemon.client.slot_prepare("")
        await until(lambda: not waiting(paths, B) and not traces(paths, B))


async def test_never_started_it_ends_by_itself(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer, command=command(paths, waits_s=0.5)), connected(paths) as daemon:
        await daemon.client.slot_prepare(A)
        await until(lambda: not waiting(paths, A) and not traces(paths))
        assert (await daemon.client.slots(), daemon.moved) == ({}, [])
        await daemon.serving()


@pytest.mark.parametrize("killed", ["supervisor", "warden"])
async def test_killed_while_it_waits_it_leaves_nothing_and_the_next_start_works(
    paths: Paths, freezer: str, killed: str
) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        both = await prepared(paths, daemon)
        os.kill(both[killed == "warden"], signal.SIGKILL)
        await gone(paths, *both)
        await daemon.serving()
        await daemon.client.slot_stop(A, grace_s=20)
        assert await prepared(paths, daemon) != both


@pytest.mark.parametrize("killed", ["supervisor", "warden"])
async def test_killed_right_before_the_start_it_does_not_hold_up_the_next(
    paths: Paths, freezer: str, killed: str
) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        both = await prepared(paths, daemon)
        os.kill(both[killed == "warden"], signal.SIGKILL)
        begun = await daemon.client.slot_start(A, GRANT)
        told = [process.state for process in daemon.moved]
        if begun.pid == both[0]:  # its end had not been seen: it is told as any other
            ended = await daemon.told(ProcessState.ENDED)
            assert (ended.run, ProcessState.SERVING in told) == (begun.run, False)
            daemon.moved.clear()
            await daemon.client.slot_start(A, GRANT)
        await daemon.told(ProcessState.SERVING)
        assert len(left(paths)) == 1


async def test_a_killed_helper_takes_it_along(paths: Paths, freezer: str) -> None:
    first = PoolHelper(paths, freezer)
    try:
        async with connected(paths) as daemon:
            both = await prepared(paths, daemon)
    finally:
        first.kill()
    await until(lambda: not any(map(alive, both)))
    async with helper(paths, freezer), connected(paths) as daemon:
        assert (await daemon.client.slots(), traces(paths)) == ({}, [])
        await daemon.serving()


async def test_a_helper_killed_after_the_start_leaves_a_server_that_is_adopted(paths: Paths, freezer: str) -> None:
    first = PoolHelper(paths, freezer)
    try:
        async with connected(paths) as daemon:
            both = await prepared(paths, daemon)
            begun = await daemon.client.slot_start(A, GRANT)
            first.kill()
            assert begun.pid == both[0]
    finally:
        first.kill()
    async with helper(paths, freezer), connected(paths) as daemon:
        found = (await daemon.client.slots())[A]
        assert (found.run, found.pid, found.grant) == (begun.run, begun.pid, GRANT)
        if found.state is ProcessState.STARTING:
            await daemon.told(ProcessState.SERVING)


async def test_a_daemon_killed_meanwhile_leaves_it_to_the_next_one(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer):
        async with connected(paths) as daemon:
            supervisor, _ = await prepared(paths, daemon)
        async with connected(paths) as daemon:
            assert (await daemon.client.slots(), alive(supervisor)) == ({}, True)
            assert (await daemon.serving()).pid == supervisor


async def test_a_helper_that_leaves_ends_it(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer) as found, connected(paths) as daemon:
        both = await prepared(paths, daemon)
        await found.leave()
        await gone(paths, *both)


async def test_it_is_not_prepared_beside_its_own_server(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        serving = await daemon.serving()
        await daemon.client.slot_prepare(A)
        assert waiting(paths, A)[0] == serving.pid
        assert len(waiting(paths, A)) == 2


async def test_a_start_that_comes_while_it_is_being_prepared_has_one_server(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer), connected(paths) as daemon:
        _, begun = await asyncio.gather(daemon.client.slot_prepare(A), daemon.client.slot_start(A, GRANT))
        await daemon.told(ProcessState.SERVING)
        assert waiting(paths, A)[0] == begun.pid
        assert (len(waiting(paths, A)), len(pids(paths))) == (2, 1)


async def test_what_is_not_described_is_not_prepared(paths: Paths) -> None:
    async with helper(paths, "signals"), connected(paths) as daemon, connected(paths, "up") as up:
        with pytest.raises(NotFound, match="describes no model"):
            await daemon.client.slot_prepare("other-00000003")
        with pytest.raises(BadRequest, match="no id of a slot"):
            await daemon.client.slot_prepare("../x")
        with pytest.raises(NotPermitted):
            await up.client.slot_prepare(A)
        assert traces(paths, "") == []


async def test_a_supervisor_that_cannot_be_started_leaves_nothing(paths: Paths, freezer: str) -> None:
    async with helper(paths, freezer, command=lambda slot: ["/nowhere/hive"]), connected(paths) as daemon:
        with pytest.raises(NotFound, match="/nowhere/hive"):
            await daemon.client.slot_prepare(A)
        assert traces(paths) == []
