"""The commands that start something: what they refuse before they start, and that the real thing starts and ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from hive.client.client import Client

Hive = Any
"""conftest.Hive: test modules import no siblings."""

HIVE = [sys.executable, "-m", "hive"]


@pytest.mark.parametrize("service", ["proxy", "daemon", "sandbox"])
def test_a_bad_file_is_refused_before_anything_starts(no_daemon: Hive, tmp_path: Path, service: str) -> None:
    conf = tmp_path / "hive.conf"
    conf.write_text("[proxy]\nprot = 1\n")
    where = ("--state-dir", str(tmp_path / "s"), "--runtime-dir", str(tmp_path / "r"), "--config", str(conf))
    said = no_daemon(service, *where)
    assert said.code == 2
    assert f"{conf}:2: [proxy] prot: no such key" in said.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["hive.conf"]


@pytest.mark.parametrize("service", ["proxy", "daemon", "sandbox"])
def test_a_service_wants_to_know_its_directories(no_daemon: Hive, service: str) -> None:
    said = no_daemon(service)
    assert said.code == 2
    assert "--state-dir" in said.err


@pytest.mark.parametrize("ending", ["signal", "parent"])
def test_the_demo_backend_runs_until_it_is_told_or_left_alone(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "demo.sock"
    mine, theirs = os.pipe()
    command = [*HIVE, "demo-backend", "--socket", str(path), "--watch-fd", str(mine)]
    with subprocess.Popen(command, pass_fds=[mine], stderr=subprocess.DEVNULL) as process:
        os.close(mine)
        try:
            while not Client(path).answers():
                assert process.poll() is None
                time.sleep(0.01)
            with socket.socket(socket.AF_UNIX) as sock:
                sock.connect(str(path))
                sock.sendall(b"GET /api/version HTTP/1.1\r\nHost: x\r\n\r\n")
                assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            if ending == "signal":
                process.send_signal(signal.SIGTERM)
                assert process.wait(60) == 0
        finally:
            os.close(theirs)
        assert process.wait(60) == 0
