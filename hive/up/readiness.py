"""Waits until the processes of `hive up` really answer, or says which one does not and why."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from hive.backends.kinds import spec_of
from hive.backends.recognise import recognise
from hive.client.calls import Answer, AsyncClient
from hive.errors import HiveError
from hive.host.process import TICK_US, read_stat
from hive.sandbox.client import SandboxClient
from hive.up.children import Child, ChildFailed

READY_S = 30.0
"""A process that neither answers nor works for so long is broken; a second is usual."""
WORKING_S = 300.0
"""One that works all the while is given so long: an emulated machine, or one under load, takes minutes."""
WORKS = 0.1
"""Of a core: one that uses more is at work, and not only waiting for what does not come."""
LOOK_S = 0.03
CONTROL_S = 2.0
Question = Callable[[], Awaitable[Any]]


async def answers(child: Child, question: Question, *, within_s: float = READY_S) -> Any:
    """The first answer of `question()` that is not empty; None, False and the usual errors mean: not yet.

    Raises the child's own failure where it ended, else ChildFailed when it has not worked for `within_s`, or has
    worked for WORKING_S without an answer.
    """
    clock = asyncio.get_running_loop().time
    began, used_s, why = clock(), cpu_s(child), "no answer"
    until, end = began + within_s, began + max(within_s, WORKING_S)
    while clock() < min(until, end):
        if child.failure is not None:
            raise child.failure
        try:
            if answer := await question():
                child.came_up()
                return answer
        except (OSError, TimeoutError, HiveError) as error:
            why = str(error)
        await asyncio.sleep(LOOK_S)
        if clock() >= until and (now_s := cpu_s(child)) - used_s > WORKS * within_s:
            until, used_s = clock() + within_s, now_s
    raise ChildFailed(f"{child.name} is not up after {clock() - began:.0f} s: {why}")


def cpu_s(child: Child) -> float:
    """CPU seconds it has used; 0 for one that is not there."""
    found = read_stat(child.pid) if child.pid is not None else None
    return 0.0 if found is None else found.cpu_ticks * TICK_US / 1e6


async def redis_answers(socket: Path) -> bool:
    """Whether Redis says PONG."""
    reader, writer = await asyncio.open_unix_connection(str(socket))
    try:
        async with asyncio.timeout(CONTROL_S):
            writer.write(b"PING\r\n")
            return await reader.readline() == b"+PONG\r\n"
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


async def helper_answers(helper: SandboxClient) -> bool:
    """Whether the helper tells what runs."""
    await helper.stat()
    return True


async def demo_backend_answers(socket: Path) -> bool:
    found = await recognise(str(socket))
    return found is not None and spec_of(found.kind).is_canned


async def daemon_answers(daemon: AsyncClient) -> Answer:
    """The daemon's answer about its health."""
    return await daemon.get("/api/health", within_s=CONTROL_S)


async def proxy_answers(daemon: AsyncClient) -> Answer | None:
    """The daemon's health once the proxy is connected and its ports are known."""
    health = await daemon.get("/api/health", within_s=CONTROL_S)
    proxy = health["proxy"]
    return health if proxy["connected"] and proxy["port"] and proxy["ingress_port"] else None
