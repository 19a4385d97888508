"""Programs inside process agents, through the helper alone: what its own promises are. The whole is in journeys."""

from __future__ import annotations

import asyncio
import os
import select
import signal
from collections.abc import Awaitable, Callable

import pytest

from hive.errors import BadRequest, NotFound, Saturated, WrongState
from hive.host.process import identify
from hive.sandbox.client import Execution
from hive.sandbox.executions import AT_ONCE
from hive.settings.table import Paths
from tests.sandbox.harness import SLEEP, A, B, Daemon, alive, running
from tests.waiting import until

Connect = Callable[..., Awaitable[Daemon]]
WAITS = ["sh", "-c", "echo $$; exec sleep 1000"]


async def pid_of(execution: Execution) -> int:
    said = b""
    while not said.endswith(b"\n"):
        said += await asyncio.to_thread(os.read, execution.descriptors[1], 1)
    return int(said)


def close(*executions: Execution) -> None:
    for execution in executions:
        for descriptor in execution.descriptors:
            os.close(descriptor)


async def test_it_ends_with_the_link_it_was_asked_for_on_and_no_other(
    daemon: Daemon, connect: Connect, paths: Paths
) -> None:
    await running(daemon, paths, SLEEP)
    caller = await connect()
    mine = await daemon.client.execute(A, "00000001", WAITS, None)
    other = await caller.client.execute(A, "00000002", WAITS, None)
    stays, goes = await pid_of(mine), await pid_of(other)
    caller.client.close()
    await until(lambda: not alive(goes))
    assert alive(stays)
    await daemon.client.end_execution(mine.run)
    assert not alive(stays)
    assert await mine.ended == 128 + signal.SIGKILL
    close(mine, other)


async def test_one_of_another_agent_is_left_alone_by_a_stop(daemon: Daemon, paths: Paths) -> None:
    """Found by marks where there is no control group: each has its own."""
    await running(daemon, paths, SLEEP)
    await running(daemon, paths, SLEEP, B)
    ends = await daemon.client.execute(A, "00000001", WAITS, None)
    lives = await daemon.client.execute(B, "00000002", WAITS, None)
    first, second = await pid_of(ends), await pid_of(lives)
    await daemon.client.stop(A, grace_s=1)
    await ends.ended
    assert (alive(first), alive(second)) == (False, True)
    await daemon.client.end_execution(lives.run)
    close(ends, lives)


async def test_nobody_is_frozen_while_one_runs_inside_and_none_is_begun_in_a_sleeper(
    daemon: Daemon, paths: Paths
) -> None:
    await running(daemon, paths, SLEEP)
    execution = await daemon.client.execute(A, "00000001", WAITS, None)
    with pytest.raises(WrongState, match="runs a program inside"):
        await daemon.client.freeze(A, 1)
    await daemon.client.end_execution(execution.run)
    close(execution)
    await daemon.client.freeze(A, 2)
    await daemon.client.confirm(A, 2)
    with pytest.raises(WrongState, match="asleep"):
        await daemon.client.execute(A, "00000002", WAITS, None)


async def test_in_an_agent_that_has_ended_nothing_is_begun(daemon: Daemon, paths: Paths) -> None:
    """In the moment before its end was noticed, a program would have been in the host's network."""
    pid = await running(daemon, paths, SLEEP)
    who = identify(pid)
    assert who is not None
    pidfd = os.pidfd_open(pid)
    assert who.send(signal.SIGKILL)
    assert select.select([pidfd], [], [], 30)[0]  # it is dead; the loop, which would hear of it, stood still meanwhile
    os.close(pidfd)
    with pytest.raises(WrongState):
        close(await daemon.client.execute(A, "00000001", WAITS, None))


async def test_there_are_no_more_at_once_than_a_bound_and_wrong_orders_are_refused(
    daemon: Daemon, paths: Paths
) -> None:
    await running(daemon, paths, SLEEP)
    begun = [await daemon.client.execute(A, f"{number:08x}", WAITS, None) for number in range(AT_ONCE)]
    with pytest.raises(Saturated):
        await daemon.client.execute(A, "ffffffff", WAITS, None)
    for execution in begun:
        await daemon.client.end_execution(execution.run)
    close(*begun)
    for wrong, error in (([], BadRequest), (["a\0b"], BadRequest), (["no-such-program"], NotFound)):
        with pytest.raises(error):
            await daemon.client.execute(A, "00000001", wrong, None)
    with pytest.raises(BadRequest):
        await daemon.client.execute(A, "../../x", WAITS, None)
