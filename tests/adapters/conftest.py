from __future__ import annotations

from pathlib import Path

import pytest

from tests.adapters.lora_files import Box


@pytest.fixture
def box(tmp_path: Path) -> Box:
    return Box(tmp_path)
