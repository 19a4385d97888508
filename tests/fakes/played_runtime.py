"""A runtime of real processes whose figures are the same on every host: memory, swap, and limits that do not hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from hive.host.process import ProcessTable
from hive.link.helper import PagedOut, Stat
from hive.link.specs import RuntimeCapabilities, SandboxSpec
from hive.runtimes.process import ProcessRuntime
from hive.runtimes.runtime import RunningAgent

AWAKE_BYTES = 90 << 20
KEPT_BYTES = 9 << 20
SWAP_BYTES = AWAKE_BYTES - KEPT_BYTES
NO_LIMITS = "no memory controller"
SLEEP = ["/bin/sleep", "1000"]


class PlayedProcess:
    """A real process; what it holds and how far it is paged out is played."""

    def __init__(self, running: RunningAgent, limits: str) -> None:
        self._running = running
        self._limits = limits
        self._is_deep = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._running, name)

    async def page_out(self, *, give_up: Callable[[], bool]) -> PagedOut:
        self._is_deep = True
        return PagedOut(took_ms=1.0, kept_bytes=KEPT_BYTES, swap_bytes=SWAP_BYTES, how="madvise")

    async def thaw(self, *, deadline_s: float) -> None:
        self._is_deep = False
        await self._running.thaw(deadline_s=deadline_s)

    def stat(self, snapshot: ProcessTable) -> Stat:
        rss, swap = (KEPT_BYTES, SWAP_BYTES) if self._is_deep else (AWAKE_BYTES, 0)
        found = self._running.stat(snapshot)
        return msgspec.structs.replace(found, held_bytes=rss, swap_bytes=swap, limits=self._limits)


class PlayedRuntime(ProcessRuntime):
    """As ProcessRuntime, and for agents of other kinds too: each of those is a process that sleeps."""

    async def capabilities(self) -> RuntimeCapabilities:
        return RuntimeCapabilities(why_not_egress="it takes root")

    async def prepare(self, agent: str, spec: SandboxSpec) -> bool:
        return await super().prepare(agent, _as_process(spec))

    async def start(self, agent: str, spec: SandboxSpec, *, mark: str) -> Any:
        running = await super().start(agent, _as_process(spec), mark=mark)
        return PlayedProcess(running, NO_LIMITS if spec.limits.memory_mb else "")


def _as_process(spec: SandboxSpec) -> SandboxSpec:
    return msgspec.structs.replace(spec, command=spec.command or SLEEP, egress=None)
