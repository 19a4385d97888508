"""Messages of daemon and helper to systemd: ready when callers are answered, alive while all is well, stopping."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hive.settings.table import Paths
from tests.fakes.systemd import Ear

Start = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture
def paths(short_path: Path) -> Paths:
    return Paths(short_path / "d", short_path / "r")


@pytest.fixture
def ear(short_path: Path) -> Iterator[Ear]:
    ear = Ear(short_path / "notify")
    yield ear
    ear.close()


@pytest.fixture
def start(paths: Paths) -> Iterator[Start]:
    started: list[subprocess.Popen[bytes]] = []

    def start_(service: str, **env: str) -> subprocess.Popen[bytes]:
        for directory in (paths.state, paths.runtime):
            directory.mkdir(exist_ok=True)
        command = [sys.executable, "-P", "-m", "hive", service, "--state-dir", str(paths.state)]
        found = subprocess.Popen([*command, "--runtime-dir", str(paths.runtime)], env={**os.environ, **env})
        started.append(found)
        return found

    yield start_
    for process in started:
        process.kill()
        process.wait()


@pytest.mark.parametrize("service", ["daemon", "sandbox"])
def test_it_is_ready_when_it_is_reached_and_says_that_it_goes(
    service: str, paths: Paths, ear: Ear, start: Start
) -> None:
    process = start(service, **ear.env)
    assert ear.hears() == ["READY=1", "STATUS=serving"]
    with socket.socket(socket.AF_UNIX) as caller:
        caller.connect(str(paths.api_socket if service == "daemon" else paths.sandbox_socket))
    process.send_signal(signal.SIGTERM)
    assert ear.hears() == ["STOPPING=1"]
    assert process.wait(60) == 0


@pytest.mark.parametrize("service", ["daemon", "sandbox"])
def test_it_feeds_its_watchdog(service: str, ear: Ear, start: Start) -> None:
    start(service, **ear.env, WATCHDOG_USEC="600000")
    before: list[list[str]] = []
    while (heard := ear.hears()) != ["READY=1", "STATUS=serving"]:
        before.append(heard)
    assert all(heard == ["WATCHDOG=1"] for heard in before)
    assert [ear.hears() for _ in range(3)] == [["WATCHDOG=1"]] * 3


@pytest.mark.parametrize("service", ["daemon", "sandbox"])
def test_one_that_cannot_begin_is_never_ready(service: str, paths: Paths, ear: Ear, start: Start) -> None:
    first = start(service)
    path = paths.api_socket if service == "daemon" else paths.sandbox_socket
    while not path.exists():
        assert first.poll() is None
    second = start(service, **ear.env)
    assert second.wait(60) == 1, "another one has the state directory"
    assert ear.hears(within_s=0.1) == [""]
