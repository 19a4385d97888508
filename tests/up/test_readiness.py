"""Time for which `hive up` waits for a process: for one that works longer than for one that does nothing."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from hive.up import readiness
from hive.up.children import ChildFailed

SPIN, SLEEP = "print(1, flush=True)\nwhile True: pass", "import time; print(1, flush=True); time.sleep(60)"
"""CPU time of starting is over when they print: one that does nothing had worked by that, on a busy machine."""


@pytest.fixture(params=[SPIN, SLEEP], ids=["works", "does nothing"])
def child(request: pytest.FixtureRequest) -> Iterator[Any]:
    with subprocess.Popen([sys.executable, "-S", "-c", request.param], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield SimpleNamespace(
            name="daemon", pid=process.pid, failure=None, came_up=lambda: None, works=request.param is SPIN
        )
        process.kill()


async def test_how_much_a_child_works_is_seen(child: Any) -> None:
    before = readiness.cpu_s(child)
    if child.works:
        while readiness.cpu_s(child) <= before + 0.2:  # noqa: ASYNC110 - work sends no signal
            await asyncio.sleep(0.01)
    else:
        await asyncio.sleep(0.3)
        assert readiness.cpu_s(child) <= before + 0.01, "a tick"


Working = Callable[[float], None]


@pytest.fixture
def working(monkeypatch: pytest.MonkeyPatch) -> Working:
    """Says how much of a core the child uses: beside others at work a real one got less than a tenth of it."""

    def use(share: float) -> None:
        monkeypatch.setattr(readiness, "cpu_s", lambda child: share * time.monotonic())

    return use


CHILD: Any = SimpleNamespace(name="daemon", pid=None, failure=None, came_up=lambda: None)


async def test_one_that_works_is_waited_for(working: Working) -> None:
    """In an emulated machine the daemon took more than 30 s to load, and was ended in the middle of it."""
    working(0.5)
    answers_at = time.monotonic() + 0.7

    async def question() -> bool:
        return time.monotonic() >= answers_at

    assert await readiness.answers(CHILD, question, within_s=0.1)


async def test_one_that_does_nothing_is_given_up(working: Working) -> None:
    working(0.05)

    async def question() -> bool:
        return False

    with pytest.raises(ChildFailed, match=r"daemon is not up after \d+ s: no answer"):
        await readiness.answers(CHILD, question, within_s=0.3)


async def test_one_that_works_for_ever_is_given_up_in_the_end(
    working: Working, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(readiness, "WORKING_S", 0.5)
    working(1.0)

    async def question() -> bool:
        return False

    with pytest.raises(ChildFailed, match="is not up after"):
        await readiness.answers(CHILD, question, within_s=0.1)
