"""Loads the models of an Ollama anew, for a flush: what it keeps of prompts goes with a model's process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable
from contextlib import suppress

from hive.agents.transition_lock import outcome_of
from hive.backends.backend import BackendControl
from hive.control.active_backend import Active
from hive.errors import BackendDown, BackendTimeout, DependencyDown, HiveError, LinkLost
from hive.link.messages import OpenBackend
from hive.link.proxy_link import ProxyGates
from hive.pool.state import SlotState
from hive.pooling.pooled_slot import PooledSlot
from hive.pooling.pooling import ModelPool

log = logging.getLogger("hive.daemon")

FLUSHING = "an empty prompt cache"
"""The words of a closed gate for it."""
LONGEST_S = 3600.0
"""Requests under way are waited for so long, by a flush and by the requests that come meanwhile."""
PROXY_S = 30.0
"""A proxy that restarts is waited for so long."""
DOWN_S = 20.0
"""A server that does not answer is asked again for so long."""
AGAIN_S = 5.0
"""A model that is still there is ordered to go again: somebody asks that server past Hive."""
GONE_S = 60.0
LOOK_S = 0.1
HOLD = (SlotState.READY, SlotState.DRAINING)
"""States of a slot whose server may keep something, and goes on. One that sleeps has dropped it."""


class ActiveLoader:
    """Loads models of the active backend anew. Its gate is closed meanwhile: requests wait, and none is cut."""

    def __init__(self, *, active: Active, proxy_link: ProxyGates) -> None:
        self._active = active
        self._proxy_link = proxy_link

    def __repr__(self) -> str:
        return f"<ActiveLoader of {self._active}>"

    async def load_anew(self, control: BackendControl, models: Iterable[str]) -> None:
        """Returns once these have been unloaded and loaded again, as far as they are in memory when nothing is in
        flight. Does nothing where another server has been switched to meanwhile. Raises HiveError."""
        active = self._active
        async with active.gate:
            if active.control is None or active.control.address != control.address:
                return
            active.closed_for = FLUSHING
            try:
                await self._close()
                for model in models:
                    await self._load_anew(control, model)
            finally:
                active.closed_for = ""
                info, offered = active.seen
                self._proxy_link.say(OpenBackend(backend=info, models=offered))

    async def _close(self) -> None:
        """Returns once nothing is in flight, however long that takes. Raises DependencyDown."""
        until = time.monotonic() + PROXY_S
        while True:
            was_there = self._proxy_link.session is not None
            try:
                await self._proxy_link.close_backend(FLUSHING, drain_s=2 * LONGEST_S, wait_s=LONGEST_S)
            except LinkLost:
                if was_there:
                    until = time.monotonic() + PROXY_S
                elif time.monotonic() >= until:
                    raise DependencyDown("the proxy is not there to hold requests", hint="hive status") from None
                await asyncio.sleep(LOOK_S)
            else:
                return

    async def _load_anew(self, control: BackendControl, model: str) -> None:
        if not await has_loaded(control, model):
            return
        until, ordered_at = time.monotonic() + GONE_S, float("-inf")
        while await has_loaded(control, model):
            now = time.monotonic()
            if now >= until:
                raise BackendTimeout(f"{model} is not unloaded within {GONE_S:g} s: is it used past Hive?")
            if now - ordered_at >= AGAIN_S:
                ordered_at = now
                await control.unload(model)
            else:
                await asyncio.sleep(LOOK_S)
        if isinstance(error := await outcome_of(control.load(model)), HiveError):  # the next request loads it
            log.warning("not_loaded_after_flush model=%s error=%s", model, error.message)


class SlotLoader:
    """Loads the models of slots of the pool anew. Requests that are there are never cut for it, later ones wait."""

    def __init__(self, pool: ModelPool) -> None:
        self._pool = pool

    def __repr__(self) -> str:
        return f"<SlotLoader of {self._pool}>"

    async def load_anew(self, slot: PooledSlot) -> None:
        """Returns once its server of now has dropped the model. It is loaded again, unless it left for another reason:
        an operator's order, or room for another model."""
        generation, pool = slot.generation, self._pool
        try:
            while slot.generation == generation and slot.state in (SlotState.LOADING, *HOLD, SlotState.STOPPING):
                if slot.state in HOLD and not (slot.unload_ordered or slot.renewing):
                    slot.renewing = True
                    pool.wake()
                with suppress(TimeoutError):
                    async with asyncio.timeout(1.0):
                        await pool.passed()
            is_renewed = slot.renewing and slot.generation == generation and slot.state is not SlotState.ASLEEP
        finally:
            slot.renewing = False
            pool.wake()
        if is_renewed:
            pool.load_again([slot.id])


async def has_loaded(control: BackendControl, model: str) -> bool:
    """Whether the model is in the server's memory; nothing is in that of a server that is gone. Raises BackendDown."""
    until = time.monotonic() + DOWN_S
    while (loaded := await control.loaded()) is None:
        if await is_gone(control.address):
            return False
        if time.monotonic() >= until:
            raise BackendDown(f"{control} does not say what is in its memory")
        await asyncio.sleep(LOOK_S)
    return model in loaded


async def is_gone(address: str) -> bool:
    """Whether nothing listens there: then there is no such process."""
    try:
        if address.startswith("/"):
            _, writer = await asyncio.open_unix_connection(address)
        else:
            host, _, port = address.rpartition(":")
            _, writer = await asyncio.open_connection(host, int(port))
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except (OSError, ValueError):
        return False
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()
    return False
