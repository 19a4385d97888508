"""Fixtures of the helper's tests for the tests of runtimes, and a floor of containers."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from hive.settings.table import Paths
from tests.docker_engine import DockerEngine
from tests.runtimes.benches import Floor
from tests.runtimes.containers import open_floor
from tests.sandbox.conftest import connect, daemon, engine, freezer, helper_process, open_helper, paths

__all__ = ["connect", "daemon", "engine", "freezer", "helper_process", "open_helper", "paths"]


@pytest.fixture
async def floor(paths: Paths, engine: DockerEngine) -> AsyncIterator[Floor]:
    """Of containers."""
    async with open_floor(paths, engine) as floor:
        yield floor
