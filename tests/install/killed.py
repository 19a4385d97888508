"""Runs killed_install.py, which is killed at every place where it changes something."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def killed_everywhere(what: str, directory: Path) -> dict[str, Any]:
    """Its report: `places`, at how many it was killed; `wrong`, after which of them the next call did not end it."""
    ran = subprocess.run(
        [sys.executable, "-m", "tests.install.killed_install", what, directory],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout)
    return found
