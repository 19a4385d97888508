from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def passable() -> Iterator[Path]:
    """A directory other users may pass through, with a short name: `tmp_path` lets nobody in and is long."""
    directory = Path(tempfile.mkdtemp(prefix="hive-"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)
