"""The world of tests/fakes/agent_world.py, and its loop without a clock."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[1] / "fakes"))

from agent_world import MemoryWorld, VirtualLoop
from lives import started


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
