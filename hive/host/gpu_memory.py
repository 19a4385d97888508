"""The state of the GPUs now, asked in a thread: a driver that hangs keeps only that thread waiting."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from hive.host.gpu import PROC
from hive.host.nvml import Nvml, SeenGpus

log = logging.getLogger("hive.gpu")

ANSWER_S = 2.0
"""A look takes milliseconds, and some 100 ms the first time."""
FRESH_S = 1.0
"""Calls within this time get the same answer: `hive top`, a scrape and a switch may all look at once."""
NO_DRIVER = "no NVIDIA driver is loaded"
NO_ANSWER = "NVIDIA's driver does not answer"


class GpuMemory(Protocol):
    """The questions of a switch of the inference server."""

    @property
    def has_gpu(self) -> bool:
        """Whether there is memory to wait for."""

    async def is_free(self) -> bool | None:
        """True if no process holds any of it; None where that is unknown."""


class GpuMemoryReader:
    """All GPUs of this host. Without NVIDIA's driver nothing is imported, and no thread begun.

    Linux frees the memory of a process with its last reference to the device, a moment after systemd has seen it end.
    """

    def __init__(
        self,
        proc: Path = PROC,
        *,
        look: Callable[[], SeenGpus] | None = None,
        answer_s: float = ANSWER_S,
        fresh_s: float = FRESH_S,
    ) -> None:
        """`look` blocks; it is called in one thread at a time. Without one it is NVIDIA's library."""
        self._gpus = proc / "gpus"
        self._look = look or Nvml().look
        self._answer_s = answer_s
        self._fresh_s = fresh_s
        self._seen = SeenGpus(why_not=NO_ANSWER)
        self._seen_from = -float("inf")
        """Monotonic time at which that look began, in seconds."""
        self._asking: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return f"<GpuMemoryReader {'a GPU' if self.has_gpu else 'no GPU'}>"

    @property
    def has_gpu(self) -> bool:
        try:
            return any(self._gpus.iterdir())
        except OSError:
            return False

    async def is_free(self) -> bool | None:
        """True if all are free now, looked at anew; None where that is unknown."""
        return (await self.seen_now()).is_free()

    async def seen(self) -> SeenGpus:
        """Every GPU, as it was at most `fresh_s` ago."""
        return await self._asked(time.monotonic() - self._fresh_s)

    async def seen_now(self) -> SeenGpus:
        """Every GPU, by a look that begins now: what happened before the call is in it."""
        return await self._asked(time.monotonic())

    async def _asked(self, since: float) -> SeenGpus:
        """The answer of a look that began at `since` or later. One that is under way may have begun before."""
        if not self.has_gpu:
            return SeenGpus(why_not=NO_DRIVER)
        loop, until = asyncio.get_running_loop(), time.monotonic() + self._answer_s
        while self._seen_from < since:
            if self._asking is None:
                self._asking = asking = loop.create_future()
                # A daemon: neither the loop's executor nor the interpreter waits for it at the end.
                threading.Thread(target=self._ask, args=(loop, asking), name="hive-nvml", daemon=True).start()
            done, _ = await asyncio.wait([self._asking], timeout=max(0.0, until - time.monotonic()))
            if not done:
                return SeenGpus(why_not=NO_ANSWER)
        return self._seen

    def _ask(self, loop: asyncio.AbstractEventLoop, asking: asyncio.Future[None]) -> None:
        began = time.monotonic()
        try:
            seen = self._look()
        except Exception as error:
            log.exception("gpu_look_failed")
            seen = SeenGpus(why_not=str(error))
        with contextlib.suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(self._told, began, seen, asking)

    def _told(self, began: float, seen: SeenGpus, asking: asyncio.Future[None]) -> None:
        self._seen, self._seen_from, self._asking = seen, began, None
        if not asking.done():
            asking.set_result(None)
