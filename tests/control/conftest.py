"""A box for a real daemon, and one with everything in it: daemon, helper, the proxy's end of the link."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from hive.client.client import Client
from hive.link.requests import QueueIs, QueueView
from tests.control.box import AWAKE, PAUSE_TIMEOUT_S, Box, HeldStops
from tests.waiting import until


@pytest.fixture
async def box(short_path: Path) -> AsyncIterator[Box]:
    box = Box(short_path)
    box.paths.state.mkdir()
    box.paths.runtime.mkdir()
    yield box
    await box.end()


@pytest.fixture
async def live(box: Box) -> Box:
    """The box with everything in it, and no agent."""
    await box.everything(
        msgspec.structs.replace(AWAKE, sleep=msgspec.structs.replace(AWAKE.sleep, pause_timeout_s=PAUSE_TIMEOUT_S))
    )
    box.proxy.queue = QueueIs(queue=QueueView(0, 0, None, None, []), requests=[])
    await until(lambda: box.followers == 0)
    return box


@pytest.fixture
def client(live: Box) -> Client:
    """Blocking: to be called in a thread, beside the loop the API runs in."""
    return Client(live.paths.api_socket, timeout_s=20)


@pytest.fixture
async def held_stops(live: Box, monkeypatch: pytest.MonkeyPatch) -> HeldStops:
    return HeldStops(monkeypatch)
