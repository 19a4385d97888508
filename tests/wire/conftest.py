"""The event loops on which the tests of this room run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

OwnLoop = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, OwnLoop]:
    """asyncio's own; what depends on how a loop tells of connects and ends on uvloop, too, as in the proxy."""
    if item.path.name in ("test_dial.py", "test_transport.py", "test_vsock.py"):
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
