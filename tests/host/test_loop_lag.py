"""The pulse of an event loop, and what systemd's watchdog hears of it."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from hive.host.loop_lag import SAMPLE_S, STALL_S, Pulse, watched
from hive.host.notify import Notifier
from tests.fakes.systemd import Ear
from tests.waiting import until


class Beats:
    """A pulse with all it says."""

    def __init__(self, env: dict[str, str]) -> None:
        self.lags: list[float] = []
        self.wrong = ""
        self.notifier = Notifier(env, pid=os.getpid())
        self.pulse = Pulse(self.notifier, on_lag=self.lags.append, what_is_wrong=lambda: self.wrong)

    def close(self) -> None:
        self.pulse.close()
        self.notifier.close()


async def test_a_blocked_loop_is_seen_and_an_idle_one_is_not_late() -> None:
    beats = Beats({})
    await until(lambda: len(beats.lags) >= 3)
    time.sleep(0.3)  # noqa: ASYNC251 - this is what it looks for
    count = len(beats.lags)
    await until(lambda: len(beats.lags) > count)
    assert beats.lags[count] >= 0.3 - SAMPLE_S - 0.01
    assert repr(beats.pulse).startswith("<Pulse ")
    beats.close()


async def test_the_watchdog_is_fed_while_all_is_well_and_not_while_it_is_not(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ear = Ear(short_path / "notify")
    beats = Beats({**ear.env, "WATCHDOG_USEC": "200000"})
    hears = asyncio.get_running_loop().run_in_executor
    assert await hears(None, ear.hears) == ["WATCHDOG=1"]
    beats.wrong = "a listener is dead"
    await until(lambda: "watchdog_not_fed reason='a listener is dead'" in caplog.text)
    beats.notifier.ready("marks this place")
    await until(lambda: caplog.text.count("watchdog_not_fed") >= 3)
    beats.wrong = ""
    heard = [await hears(None, ear.hears) for _ in range(3)]
    assert ["READY=1", "STATUS=marks this place"] in heard[:2]
    assert heard[-1] == ["WATCHDOG=1"]
    beats.close()
    ear.close()


async def test_a_loop_that_stood_still_does_not_feed_at_once(
    short_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ear = Ear(short_path / "notify")
    beats = Beats({**ear.env, "WATCHDOG_USEC": "100000"})
    await asyncio.get_running_loop().run_in_executor(None, ear.hears)
    time.sleep(STALL_S + SAMPLE_S + 0.1)  # noqa: ASYNC251 - this is what it looks for
    await until(lambda: "watchdog_not_fed reason='the loop is 1." in caplog.text)
    beats.close()
    ear.close()


async def test_without_a_watchdog_nothing_is_fed(short_path: Path) -> None:
    ear = Ear(short_path / "notify")
    beats = Beats(dict(ear.env))
    await until(lambda: len(beats.lags) >= 4)
    beats.notifier.stopping()
    assert ear.hears() == ["STOPPING=1"]
    beats.close()
    ear.close()


async def test_what_nobody_measures_is_watched_all_the_same(short_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ear = Ear(short_path / "notify")
    notifier = Notifier({**ear.env, "WATCHDOG_USEC": "100000"}, pid=os.getpid())
    wrong = ""
    hears = asyncio.get_running_loop().run_in_executor
    with watched(notifier, lambda: wrong):
        assert await hears(None, ear.hears) == ["WATCHDOG=1"]
        wrong = "its socket takes nobody"
        await until(lambda: "watchdog_not_fed reason='its socket takes nobody'" in caplog.text)
        time.sleep(STALL_S + 0.1)  # noqa: ASYNC251 - this is what it looks for
        await until(lambda: "watchdog_not_fed reason='the loop is" in caplog.text)
    said = caplog.text
    notifier.close()
    await asyncio.sleep(0.1)
    assert caplog.text == said, "it went on after its end"
    ear.close()


async def test_without_a_watchdog_no_timer_runs() -> None:
    notifier = Notifier({}, pid=os.getpid())
    looks: list[int] = []
    with watched(notifier, lambda: looks.append(1) or ""):  # type: ignore[func-returns-value]
        await asyncio.sleep(0.05)
    assert looks == []
