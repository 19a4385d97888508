"""The daemon's word on adapters: waiting requests follow a name to its new weights, and old ones are waited for."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence

from hive.link.adapters import AdapterDrained, AdapterRoute, DrainAdapter
from hive.link.link import LinkReply
from hive.proxy.datapath import DataPath
from hive.proxy.forward import Exchange
from hive.proxy.under_way import under_way
from hive.tasks import spawn

log = logging.getLogger("hive.proxy")

LOOK_S = 0.02


class AdapterDrains:
    """One for the proxy. Every method is called on the loop."""

    def __init__(self, path: DataPath) -> None:
        self._path = path

    def __repr__(self) -> str:
        return f"<AdapterDrains at {self._path.slots.adapters}>"

    def learn(self, routes: Sequence[AdapterRoute]) -> None:
        """Takes all routes, before the slots they lead to are known."""
        self._path.use_adapters(routes)

    def heard(self, routes: Sequence[AdapterRoute]) -> None:
        """Takes all routes. A request that waits for what a name meant before waits for what it means now."""
        before = self._path.slots.adapters.engines
        self._path.use_adapters(routes)
        now = self._path.slots.adapters.engines
        log.info("adapters_are loaded=%d of=%d", len(now), len(routes))
        if all(now.get(name) == engine for name, engine in before.items()):
            return
        for exchange in under_way(self._path.registry):
            if exchange.has_other_adapter:
                exchange.read_again()

    def drain(self, message: DrainAdapter, reply: LinkReply) -> None:
        spawn(self._drain(message, reply), name=f"drain {message.at_server}")

    async def _drain(self, message: DrainAdapter, reply: LinkReply) -> None:
        until = time.monotonic() + message.drain_s
        await asyncio.sleep(LOOK_S)  # what was sent a moment ago has come there
        while (left := self._left(message)) and time.monotonic() < until:  # noqa: ASYNC110 - requests tell nobody
            await asyncio.sleep(LOOK_S)
        reply(AdapterDrained(left=left))

    def _left(self, message: DrainAdapter) -> int:
        slots = self._path.slots
        slot = slots.pooled.get(message.slot) if message.slot else slots.active
        there = () if slot is None else slot.line.owners
        return sum(isinstance(one, Exchange) and one.engine == message.at_server for one in there)
