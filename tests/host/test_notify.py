"""Messages of a service to systemd, on a real datagram socket in its place."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive.host.notify import Notifier, watchdog_of
from tests.fakes.systemd import Ear


@pytest.fixture(params=["path", "abstract"])
def systemd(request: pytest.FixtureRequest, short_path: Path) -> Iterator[Ear]:
    found = Ear(str(short_path / "notify") if request.param == "path" else f"\0hive-test-{os.getpid()}")
    yield found
    found.close()


def test_each_state_is_one_datagram(systemd: Ear) -> None:
    notifier = Notifier(systemd.env, pid=os.getpid())
    assert notifier.ready("serving 3 agents")
    assert systemd.hears() == ["READY=1", "STATUS=serving 3 agents"]
    assert notifier.ready()
    assert systemd.hears() == ["READY=1"]
    assert notifier.stopping()
    assert systemd.hears() == ["STOPPING=1"]
    assert notifier.alive()
    assert systemd.hears() == ["WATCHDOG=1"]
    notifier.close()


def test_reloading_says_when_so_that_systemd_can_tell_an_old_ready_from_the_new_one(systemd: Ear) -> None:
    notifier = Notifier(systemd.env, pid=os.getpid())
    before = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    assert notifier.reloading()
    state, at = systemd.hears()
    assert state == "RELOADING=1"
    name, _, usec = at.partition("=")
    assert name == "MONOTONIC_USEC"
    assert before <= int(usec) <= time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
    notifier.close()


def test_the_variables_are_taken_away_so_that_no_child_speaks_for_the_service(systemd: Ear) -> None:
    env = {**systemd.env, "PATH": "/bin", "WATCHDOG_USEC": "2000000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier(env, pid=os.getpid())
    assert notifier.watchdog_s == 2.0
    assert env == {"PATH": "/bin"}
    notifier.close()


@pytest.mark.parametrize("address", ["", "relative", "vsock:2:1234"])
def test_without_a_socket_nothing_is_said_and_nothing_fails(address: str) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": address} if address else {}, pid=os.getpid())
    assert not notifier.ready()
    assert not notifier.reloading()
    assert not notifier.alive()
    assert not notifier.stopping()
    notifier.close()


def test_a_systemd_that_is_gone_is_no_failure_of_the_service(short_path: Path) -> None:
    systemd = Ear(short_path / "notify")
    notifier = Notifier(systemd.env, pid=os.getpid())
    systemd.close()
    assert not notifier.ready()
    notifier.close()
    assert not notifier.alive()


def test_a_systemd_that_does_not_read_holds_nobody_up(systemd: Ear) -> None:
    notifier = Notifier(systemd.env, pid=os.getpid())
    sent = 0
    while notifier.alive():  # until its queue is full
        sent += 1
        assert sent < 100_000
    assert systemd.hears() == ["WATCHDOG=1"]
    assert notifier.alive()
    notifier.close()


@pytest.mark.parametrize(
    ("usec", "pid_meant", "expected"),
    [
        ("", "", None),
        ("0", "", None),
        ("-5", "", None),
        ("1e6", "", None),
        ("٣", "", None),
        ("500000", "", 0.5),
        ("500000", "7", 0.5),
        ("500000", "8", None),
    ],
)
def test_the_watchdog_is_this_process_or_none(usec: str, pid_meant: str, expected: float | None) -> None:
    assert watchdog_of(usec, pid_meant, pid=7) == expected
