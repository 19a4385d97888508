"""How long `hive up` waits for a process: for one that works longer than for one that does nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hive.appliance import readiness
from hive.appliance.children import ChildFailed

SPIN, SLEEP = "while True: pass", "import time; time.sleep(60)"


@pytest.fixture(params=[SPIN, SLEEP], ids=["works", "does nothing"])
def child(request: pytest.FixtureRequest) -> Iterator[Any]:
    with subprocess.Popen([sys.executable, "-c", request.param]) as process:
        yield SimpleNamespace(
            name="daemon", pid=process.pid, failure=None, came_up=lambda: None, works=request.param is SPIN
        )
        process.kill()


async def test_one_that_works_is_waited_for_and_one_that_does_nothing_is_given_up(child: Any) -> None:
    """In an emulated machine the daemon took more than 30 s to load, and was ended in the middle of it."""
    answers_at = time.monotonic() + 2.5

    async def question() -> bool:
        return time.monotonic() >= answers_at

    if child.works:
        assert await readiness.answers(child, question, within_s=0.8)
    else:
        with pytest.raises(ChildFailed, match="daemon is not up after 1 s: no answer"):
            await readiness.answers(child, question, within_s=0.8)


async def test_one_that_works_for_ever_is_given_up_in_the_end(child: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "WORKING_S", 1.5)

    async def question() -> bool:
        return False

    with pytest.raises(ChildFailed, match="is not up after"):
        await readiness.answers(child, question, within_s=0.5)
