from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from hive.runtimes.process import ProcessRuntime
from hive.sandbox.server import make_directories
from hive.settings.table import Paths
from tests.sandbox.harness import kill_all_under, runtime, sub_reaper

collect_ignore = ["facts.py"]  # a program: it prints what it finds


@pytest.fixture
def paths() -> Iterator[Paths]:
    top = Path(tempfile.mkdtemp(prefix="hive-"))
    top.chmod(0o711)
    found = Paths(state=top / "d", runtime=top / "r")
    make_directories(found)
    yield found
    kill_all_under(found)
    shutil.rmtree(top)


@pytest.fixture
async def processes(paths: Paths) -> AsyncIterator[ProcessRuntime]:
    with sub_reaper():
        found = runtime(paths, "cgroup", log_max_bytes=1 << 20)
        yield found
        await found.templates.leave()
