"""A desk in memory with the real API on top of it, and a box for a real daemon."""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from hive.api.server import ApiServer, serve
from hive.client.client import Client
from tests.control.box import Box

ON_UVLOOP = ("test_api_tcp.py",)
"""As in the daemon: connections end, stall and are cut in ways of their own there."""
OwnLoop = Callable[[], asyncio.AbstractEventLoop]


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, OwnLoop]:
    if item.path.name in ON_UVLOOP:
        return {"uvloop": uvloop.new_event_loop}
    return {"asyncio": asyncio.new_event_loop}


FAKE = Path(__file__).parents[1] / "fakes" / "memory_daemon.py"


@pytest.fixture
def desk(tmp_path: Path) -> Any:
    spec = importlib.util.spec_from_file_location("memory_daemon", FAKE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MemoryDesk(tmp_path)


@pytest.fixture
async def api(desk: Any, tmp_path: Path) -> AsyncIterator[ApiServer]:
    server = await serve(desk, tmp_path / "hive.sock", pause_timeout_s=12.0)
    yield server
    await server.close()


@pytest.fixture
def client(api: ApiServer, tmp_path: Path) -> Client:
    """Blocking: to be called in a thread, beside the loop the API runs in."""
    return Client(tmp_path / "hive.sock", timeout_s=20)


@pytest.fixture
async def box(short_path: Path) -> AsyncIterator[Box]:
    box = Box(short_path)
    box.paths.state.mkdir()
    box.paths.runtime.mkdir()
    yield box
    await box.end()
