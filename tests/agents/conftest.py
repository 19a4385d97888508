"""The world of tests/fakes/agent_world.py, and its loop without a clock."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fakes.agent_world import MemoryWorld, VirtualLoop
from tests.fakes.lives import started


@pytest.fixture
def loop() -> Iterator[VirtualLoop]:
    loop = VirtualLoop()
    yield loop
    loop.kill_tasks()
    loop.close()


@pytest.fixture
def world(loop: VirtualLoop) -> MemoryWorld:
    """One agent that runs, past its minimum awake time."""
    return started(loop)
