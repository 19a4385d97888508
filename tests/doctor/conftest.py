from __future__ import annotations

import os
from pathlib import Path

import pytest

from hive.doctor.checks.target import Subject, TargetKind
from hive.files.layout import Layout
from hive.settings.table import Paths


@pytest.fixture
def up(short_path: Path) -> Subject:
    """A Hive started by hand that does not run; its directories are this test's own."""
    paths = Paths(short_path / "state", short_path / "run")
    for directory in (paths.state, paths.runtime, paths.runtime / "a"):
        directory.mkdir(mode=0o700)
    return Subject(kind=TargetKind.UP, paths=paths, uid=os.geteuid(), limit_s=5.0)


@pytest.fixture
def appliance(short_path: Path) -> Subject:
    """An installed Hive in a root of its own."""
    layout = Layout(short_path)
    paths = Paths(layout.at("/var/lib/hive"), layout.at("/run/hive"), apart=True)
    return Subject(kind=TargetKind.APPLIANCE, paths=paths, layout=layout, uid=os.geteuid(), limit_s=5.0)
