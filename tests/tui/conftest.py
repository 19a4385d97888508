"""A box for a real daemon, and a screen before it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.control.box import Box


@pytest.fixture
async def box(short_path: Path) -> AsyncIterator[Box]:
    box = Box(short_path)
    box.paths.state.mkdir()
    box.paths.runtime.mkdir()
    await box.everything()
    yield box
    await box.end()
