"""The event loops on which the tests of this room run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

OwnLoop = Callable[[], asyncio.AbstractEventLoop]
ON_UVLOOP = ("test_cancel.py", "test_clock.py", "test_faults.py", "test_resource_limits.py")
"""Tests of a peer that leaves, stalls or resets run on uvloop, as the proxy does: each loop reports that in its own
way."""
ON_BOTH = ("test_addresses.py", "test_websocket.py")
"""Tests that take a loop's transports from one protocol to another."""


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, OwnLoop]:
    if item.path.name in ON_BOTH:
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"uvloop": uvloop.new_event_loop} if item.path.name in ON_UVLOOP else {"asyncio": asyncio.new_event_loop}
