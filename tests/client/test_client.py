"""The client: what it says when there is no Hive, a deaf one, or something that is none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from hive.client import client
from hive.client.client import Client, find
from hive.errors import DependencyDown, HiveError, TimedOut


@contextmanager
def answering(path: Path, answer: bytes | None) -> Iterator[None]:
    """A server that says `answer` to one connection and closes; None: says nothing until the end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        ended = threading.Event()

        def serve() -> None:
            with listener.accept()[0] as sock:
                sock.recv(65536)
                if answer is None:
                    ended.wait(60)
                else:
                    sock.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield
        ended.set()
        thread.join()


def test_an_installed_hive_that_is_down_is_started_by_systemd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an installed box whose daemon was stopped every command said: start one with `hive up`."""
    unit = tmp_path / "hive.target"
    monkeypatch.setattr(client, "APPLIANCE_RUNTIME", tmp_path / "run")
    monkeypatch.setattr(client, "INSTALLED", unit)
    sockets = [tmp_path / "up/hive.sock", tmp_path / "run/hive.sock"]
    for hint in (client.NOT_RUNNING, client.INSTALLED_NOT_RUNNING):
        with pytest.raises(DependencyDown) as failed:
            find(sockets)
        assert failed.value.hint == hint
        unit.touch()
    with pytest.raises(DependencyDown) as failed:
        Client(sockets[1]).get("/api/health")
    assert failed.value.hint == client.INSTALLED_NOT_RUNNING
    with pytest.raises(DependencyDown) as failed:
        Client(sockets[0]).get("/api/health")
    assert failed.value.hint == client.NOT_RUNNING


def test_no_socket_is_said_with_the_command_that_helps(tmp_path: Path) -> None:
    client = Client(tmp_path / "hive.sock")
    assert not client.answers()
    with pytest.raises(DependencyDown) as caught:
        client.get("/api/health")
    assert str(tmp_path / "hive.sock") in caught.value.message
    assert "hive up" in caught.value.hint
    assert caught.value.exit_code == 5


def test_a_socket_nobody_listens_at_is_said_so(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(tmp_path / "hive.sock"))
    with pytest.raises(DependencyDown, match="no Hive answers"):
        Client(tmp_path / "hive.sock").get("/api/health")


def test_a_path_longer_than_a_socket_may_have_is_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(DependencyDown, match="too long"):
        Client(tmp_path / ("x" * 120)).get("/api/health")


def test_silence_is_a_timeout(tmp_path: Path) -> None:
    path = tmp_path / "hive.sock"
    with answering(path, None), pytest.raises(TimedOut):
        Client(path, timeout_s=0.1).get("/api/health")


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"SSH-2.0-OpenSSH_9.2\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nhey",
        b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n[]",
        b'HTTP/1.1 200 OK\r\nContent-Length: 50\r\n\r\n{"a":',
    ],
)
def test_something_that_is_no_hive_is_no_traceback(tmp_path: Path, answer: bytes) -> None:
    path = tmp_path / "hive.sock"
    with answering(path, answer), pytest.raises(DependencyDown):
        Client(path, timeout_s=5).get("/api/health")


def test_lines_end_with_their_answer_and_not_with_their_daemon(tmp_path: Path) -> None:
    """`hive agent logs -f` and `hive events -f` ended with exit code 0 when the daemon was killed: nothing said why."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    lines = b"7\r\none\ntwo\r\n4\r\n-end\r\n"
    with answering(tmp_path / "whole.sock", head + lines + b"0\r\n\r\n"):
        assert list(Client(tmp_path / "whole.sock").lines("/x")) == [b"one\n", b"two-end"]
    with answering(tmp_path / "cut.sock", head + lines):
        following = Client(tmp_path / "cut.sock").lines("/x")
        assert next(following) == b"one\n"
        with pytest.raises(DependencyDown, match="broke off"):
            list(following)


def test_a_daemon_that_was_killed_is_told_from_none(tmp_path: Path) -> None:
    """Under a living `hive up` the hint was to start one."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.bind(str(tmp_path / "hive.sock"))
    with pytest.raises(DependencyDown) as caught:
        Client(tmp_path / "hive.sock").get("/api/health")
    assert "started again" in caught.value.hint


@pytest.mark.parametrize("body", [b"oops", b"[]", b'{"code": 1}', b'{"code": "x"}'])
def test_an_error_without_a_problem_is_still_an_error(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "hive.sock"
    head = b"HTTP/1.1 500 x\r\nContent-Length: %d\r\n\r\n" % len(body)
    with answering(path, head + body), pytest.raises(HiveError, match="the answer was 500"):
        Client(path, timeout_s=5).get("/api/health")


def test_the_first_socket_that_answers_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "b.sock"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        assert find([tmp_path / "a.sock", path, tmp_path / "c.sock"]).path == path
    with pytest.raises(DependencyDown) as caught:
        find([tmp_path / "a.sock", path])
    assert f"{tmp_path}/a.sock or {path}" in caught.value.message
