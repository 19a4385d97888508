"""Few fixtures, all real: a redis-server on a unix socket, a database in a directory of the test's own."""

from __future__ import annotations

import contextlib
import functools
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import hypothesis
import pytest

from hive.store.database import Database
from tests.examples import examples
from tests.llama import llama_server, llama_server_on_socket
from tests.vllm import vllm_server
from tests.workers import (
    pytest_addoption,
    pytest_collection_finish,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_ignore_collect,
    pytest_make_collect_report,
    pytest_runtest_teardown,
    pytest_xdist_auto_num_workers,
    pytest_xdist_make_scheduler,
)

__all__ = [
    "llama_server",
    "llama_server_on_socket",
    "pytest_addoption",
    "pytest_collection_finish",
    "pytest_collection_modifyitems",
    "pytest_configure",
    "pytest_ignore_collect",
    "pytest_make_collect_report",
    "pytest_runtest_teardown",
    "pytest_xdist_auto_num_workers",
    "pytest_xdist_make_scheduler",
    "vllm_server",
]

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # begun in the background of a script: what is tested inherits it
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What httpx trusts, read once: each of the clients' and the tests' own clients would read it anew, 20 ms of CPU time.
httpx._transports.default.create_ssl_context = functools.cache(httpx.create_ssl_context)  # type: ignore[attr-defined]

hypothesis.settings.register_profile(
    "hive", deadline=None, max_examples=examples(100)
)  # no test is about the machine's load
hypothesis.settings.load_profile("hive")


class RedisServer:
    """A redis-server of the test's own, on a unix socket only, that keeps nothing when it is killed."""

    def __init__(self, directory: Path) -> None:
        self.socket = directory / "redis.sock"
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Returns when it answers."""
        command = ["redis-server", "--port", "0", "--unixsocket", str(self.socket), "--unixsocketperm", "700"]
        command += ["--save", "", "--appendonly", "no", "--dir", str(self._directory), "--loglevel", "warning"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        while not self._answers():
            assert self._process.poll() is None, "redis-server did not start"
            time.sleep(0.005)

    def kill(self, number: int = signal.SIGKILL) -> None:
        """kill -9; everything it held is gone. Does nothing where it is not running."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.send_signal(number)
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """SIGSTOP: it accepts connections and answers nothing, until `go_on`."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)

    def _answers(self) -> bool:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(1)
            sock.connect(str(self.socket))
            sock.sendall(b"PING\r\n")
            return sock.recv(16).startswith(b"+PONG")
        return False


@pytest.fixture
def passable() -> Iterator[Path]:
    """A directory other users may pass through, with a short name: `tmp_path` lets nobody in and is long."""
    directory = Path(tempfile.mkdtemp(prefix="hive-"))
    directory.chmod(0o711)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A directory with a short name: a socket's path has at most 107 bytes."""
    directory = Path(tempfile.mkdtemp(prefix="hive-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def small_disk(short_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "hive-test", str(short_path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted: {mounted.stderr.strip()}")
    yield short_path
    subprocess.run(["umount", "--lazy", str(short_path)], check=True)


@pytest.fixture
def redis_server(short_path: Path) -> Iterator[RedisServer]:
    """A running redis-server, killed at the end of the test."""
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    server = RedisServer(short_path)
    server.start()
    yield server
    server.kill()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    """An open, empty database."""
    database = Database.open(tmp_path / "hive.db")
    yield database
    database.close()
