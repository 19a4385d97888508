"""The command line in this process, talking to the real API in another."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from hive.cli.main import main

FAKE = Path(__file__).parents[1] / "fakes" / "memory_daemon.py"


class Said(NamedTuple):
    """How one call ended."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        return json.loads(self.err)


class Hive:
    """`hive("agent", "list")` calls the command line; `socket` is where the daemon listens."""

    def __init__(self, socket: Path, capture: pytest.CaptureFixture[str]) -> None:
        self.socket = socket
        self._capture = capture

    def __call__(self, *words: str) -> Said:
        self._capture.readouterr()
        code = main(words)
        out, err = self._capture.readouterr()
        return Said(code, out, err)


@pytest.fixture
def no_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hive:
    """A command line that is told of a socket nobody listens at."""
    monkeypatch.setenv("HIVE_SOCKET", str(tmp_path / "hive.sock"))
    return Hive(tmp_path / "hive.sock", capsys)


@pytest.fixture
def hive(no_daemon: Hive) -> Iterator[Hive]:
    """A command line beside a daemon in memory with the agents `alice` and `busy-bob`."""
    with _daemon(no_daemon.socket):
        yield no_daemon


@pytest.fixture(scope="module")
def shared_socket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of one such daemon for all tests of a module, which do not mind what the others have done."""
    with _daemon(tmp_path_factory.mktemp("d") / "hive.sock") as socket:
        yield socket


@pytest.fixture
def shared_hive(shared_socket: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hive:
    monkeypatch.setenv("HIVE_SOCKET", str(shared_socket))
    return Hive(shared_socket, capsys)


@contextmanager
def _daemon(socket: Path) -> Iterator[Path]:
    with subprocess.Popen(
        [sys.executable, str(FAKE), str(socket), os.environ.get("HIVE_TEST_PROXY_PORT", "1")],
        stdout=subprocess.PIPE,
    ) as daemon:
        assert daemon.stdout is not None
        assert daemon.stdout.readline() == b"ready\n"
        try:
            yield socket
        finally:
            daemon.kill()  # how the API ends is tested in tests/control
            daemon.communicate(timeout=20)
