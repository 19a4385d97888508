"""The state a data path holds, to be compared: it must be the same before a fault and after it."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hive.proxy.datapath import DataPath
from hive.proxy.registry import AgentEntry
from tests.proxy.harness import Proxy


def held(proxy: Proxy) -> dict[str, object]:
    """Places, positions in line, parked requests, body bytes, unfinished heads, sockets, deadlines and tasks of
    `proxy`."""
    return {
        **held_by(proxy.path, proxy.alice),
        "connections": len(proxy.connections),
        "alice's connections": len(proxy.alice.connections),
        "half open": repr(proxy.half_open),
        "deadlines": repr(proxy.deadlines),
    }


def held_by(path: DataPath, entry: AgentEntry) -> dict[str, object]:
    """The part of it that every composition of the data path has."""
    gate = entry.gate
    return {
        "gate": (gate.in_flight, gate.ingress, gate.parked),
        **turns(path),
        "budget": path.budget.used,
        "connecting": connecting(path),
        "busy": busy(path),
        "tasks": sorted(task.get_name() for task in asyncio.all_tasks() if not task.get_name().startswith("Task-")),
    }


def turns(path: DataPath) -> dict[str, object]:
    """The requests that have a place, and those that wait for one."""
    queue = path.registry.queue
    return {"running": queue.running, "waiting": queue.waiting}


def connecting(path: DataPath) -> int:
    """Connects to the backend under way."""
    found = re.search(r"(\d+) connecting", repr(path.slot.pool))
    assert found is not None or path.slot.pool is None, repr(path.slot.pool)
    return int(found[1]) if found else 0


def idle(path: DataPath) -> int:
    """Connections to the backend that are kept for the next request."""
    return path.slot.pool.idle if path.slot.pool is not None else 0


def busy(path: DataPath) -> int:
    """Connections to the backend that a request uses."""
    return path.slot.pool.busy if path.slot.pool is not None else 0


class Complaints(logging.Handler):
    """Calls of the loop's exception handler, and logged errors: both mean that something escaped."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        error = f": {record.exc_info[1]!r}" if record.exc_info else ""
        self.found.append(f"{record.name}: {record.getMessage()}{error}")

    def on_loop(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self.found.append(f"loop: {context.get('message')}: {context.get('exception')!r}")


@contextmanager
def complaints() -> Iterator[list[str]]:
    """Collects, while inside, what escaped into the loop or the log of errors. Enter it on a running loop."""
    handler, loop, root = Complaints(), asyncio.get_running_loop(), logging.getLogger()
    before = loop.get_exception_handler()
    loop.set_exception_handler(handler.on_loop)
    root.addHandler(handler)
    try:
        yield handler.found
    finally:
        root.removeHandler(handler)
        loop.set_exception_handler(before)
