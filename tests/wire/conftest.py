"""Which loops the tests of this room run on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

OwnLoop = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, OwnLoop]:
    """asyncio's own; those of the transport that is built on `add_reader` on uvloop, as in the proxy, and on both."""
    if item.path.name in ("test_transport.py", "test_vsock.py"):
        return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
