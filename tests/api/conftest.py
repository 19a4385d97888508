"""The box of tests/control with everything in it: here it is asked through the API."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

from tests.control.conftest import box, client, held_stops, live

__all__ = ["box", "client", "held_stops", "live"]

ON_UVLOOP = ("test_tcp.py",)
"""As in the daemon: connections end, stall and are cut in ways of their own there."""
OwnLoop = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, OwnLoop]:
    if item.path.name in ON_UVLOOP:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}
