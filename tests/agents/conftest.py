"""The world of tests/fakes/agent_world.py, and its loop without a clock."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "fakes"))
