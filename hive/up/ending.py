"""The end of `hive up`: agents first, then the processes, each when those that need it are gone. Nothing is left."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Mapping, Sequence

from hive.client.calls import AsyncClient
from hive.errors import HiveError
from hive.host.parent import has_children
from hive.host.process import ProcessTable, identify
from hive.link.slots import ProcessState
from hive.sandbox.client import SandboxClient
from hive.up.children import Child
from hive.up.services import ORDER
from hive.up.signals import Interrupts, unless

log = logging.getLogger("hive.up")

GRACE_S = {"proxy": 3.0, "daemon": 10.0, "sandbox": 10.0, "backend": 3.0, "redis": 5.0}
"""From SIGTERM to SIGKILL: the daemon commits what was used, the helper thaws, the proxy says its last words after
`drain_s`, in which its answers may end."""
MARGIN_S = 15.0
"""More than an agent's own grace: the daemon stops all agents at once and then records it."""
HURRY_S = 1.0
KILL_LOOKS = 50


async def stop_agents(daemon: AsyncClient, helper: SandboxClient, interrupts: Interrupts, *, grace_s: float) -> None:
    """Ingress refuses, agents are thawed, TERM, `grace_s`, KILL: by the daemon, without one by the helper.

    In a hurry they are killed at once. Never raises HiveError: the end goes on.
    """
    try:
        by_daemon = daemon.post("/api/system/shutdown", within_s=grace_s + MARGIN_S)
        stopped = await unless(interrupts.hurry, by_daemon, name="shutdown")
        if stopped is not None and stopped.get("failed"):
            log.warning("agents_not_stopped agents=%s", ",".join(stopped["failed"]))
    except HiveError as error:
        log.warning("agents_not_stopped_by_daemon error=%s", error.message)
        await unless(interrupts.hurry, _stop_by_helper(helper, grace_s=grace_s), name="stop-by-helper")
    if interrupts.hurry.is_set():
        log.info("agents_killed reason=hurry")
        await _kill_agents(helper)


async def _stop_by_helper(helper: SandboxClient, *, grace_s: float) -> None:
    try:
        stats = await helper.stat()
    except HiveError as error:
        log.warning("agents_not_stopped_by_helper error=%s", error.message)
        return
    alive = [agent for agent, stat in stats.items() if stat.state != "gone"]
    ends = await asyncio.gather(*(helper.stop(agent, grace_s=grace_s) for agent in alive), return_exceptions=True)
    for agent, end in zip(alive, ends, strict=True):
        if isinstance(end, BaseException):
            log.warning("agent_not_stopped agent=%s error=%s", agent, end)


async def _kill_agents(helper: SandboxClient) -> None:
    """Without grace; a stop under way may keep the helper from listening, then their main processes are killed here."""
    try:
        stats = await helper.stat()
        async with asyncio.timeout(HURRY_S):
            await _stop_by_helper(helper, grace_s=0.0)
    except HiveError as error:
        log.warning("agents_not_killed error=%s", error.message)
    except TimeoutError:
        for stat in stats.values():
            if stat.pid is not None and (main := identify(stat.pid)) is not None:
                main.send(signal.SIGKILL)


async def stop_slots(helper: SandboxClient, *, grace_s: float) -> None:
    """Ends the servers of the pool: the helper started them, and they would outlive it. Never raises HiveError."""
    try:
        processes = await helper.slots()
    except HiveError as error:
        log.warning("models_not_stopped error=%s", error)
        return
    running = [slot for slot, process in processes.items() if process.state is not ProcessState.ENDED]
    stops = (helper.slot_stop(slot, grace_s=grace_s) for slot in running)
    for slot, done in zip(running, await asyncio.gather(*stops, return_exceptions=True), strict=True):
        if isinstance(done, BaseException):
            log.warning("model_not_stopped slot=%s error=%s", slot, done)


async def stop_children(
    children: Mapping[str, Child], interrupts: Interrupts, *, drain_s: float, models_of: SandboxClient | None
) -> None:
    """Ends the processes one after the other in ORDER; the proxy's answers may go on for `drain_s`.

    `models_of`: the helper whose models end before it does, when nobody asks or starts one any more.
    """
    for name in ORDER:
        if (child := children.get(name)) is not None:
            if name == "sandbox" and models_of is not None:
                await stop_slots(models_of, grace_s=0.0 if interrupts.hurry.is_set() else GRACE_S["backend"])
            grace_s = GRACE_S[name] + (drain_s if name == "proxy" else 0.0)
            await child.stop(grace_s=grace_s, hurry=interrupts.hurry.is_set)


async def kill_descendants() -> None:
    """Kills whatever is still below us. Being the sub-reaper, this process is above everything it ever caused."""
    for _ in range(KILL_LOOKS):
        if not has_children():
            return
        if left := _descendants():
            log.warning("leftovers_killed pids=%s", ",".join(map(str, left)))
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        await asyncio.sleep(0.02)


def _descendants() -> Sequence[int]:
    snapshot = ProcessTable()
    below = snapshot.with_descendants({os.getpid()}) - {os.getpid()}
    return sorted(pid for pid in below if snapshot.processes[pid].alive)
