"""Sockets handed over as systemd does it: descriptors from 3 on, and three variables, to a real child."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hive.errors import ConfigError
from hive.host.sockets import TCP, UNIX, VSOCK, is_listening, take_sockets
from tests.fakes import systemd
from tests.fakes.systemd import HasDescriptor

KINDS = {"model": TCP, "ingress": TCP, "admin": UNIX, "vsock": VSOCK}
CHILD = """
import json, os, socket, sys
from hive.errors import HiveError
from hive.host.sockets import TCP, UNIX, VSOCK, take_sockets
kinds = {"model": TCP, "ingress": TCP, "admin": UNIX, "vsock": VSOCK}
try:
    taken = take_sockets(os.environ, kinds, pid=os.getpid())
except HiveError as error:
    print(json.dumps({"error": error.message, "hint": error.hint}))
    sys.exit()
told = {name: [[sock.fileno(), sock.getsockname()] for sock in socks] for name, socks in taken.items()}
inherited = [sock.fileno() for socks in taken.values() for sock in socks if sock.get_inheritable()]
left = [name for name in os.environ if name.startswith("LISTEN_")]
print(json.dumps({"taken": told, "inherited": inherited, "left": left}))
"""


def listening(family: socket.AddressFamily = socket.AF_INET, where: Any = ("127.0.0.1", 0)) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.bind(where)
    sock.listen(8)
    return sock


def hand(socks: list[tuple[str, HasDescriptor]], **env: str) -> Any:
    """Output of a child that got these; `env` wins over the variables that go with them."""
    process = systemd.start([sys.executable, "-c", CHILD], socks, env=env, stdout=subprocess.PIPE)
    said, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    return json.loads(said)


def test_a_child_gets_its_sockets_by_name() -> None:
    with listening() as model, listening() as ingress, listening() as other:
        said = hand([("model", model), ("ingress", ingress), ("model", other)])
        assert said == {
            "taken": {
                "model": [[3, list(model.getsockname())], [5, list(other.getsockname())]],
                "ingress": [[4, list(ingress.getsockname())]],
            },
            "inherited": [],
            "left": [],
        }


def test_sockets_meant_for_another_process_are_left_alone() -> None:
    with listening() as model:
        said = hand([("model", model)], LISTEN_PID="1")
    assert said == {"taken": {}, "inherited": [], "left": []}


def test_without_systemd_there_are_none() -> None:
    assert hand([]) == {"taken": {}, "inherited": [], "left": []}


@pytest.mark.parametrize(
    ("env", "said"),
    [
        ({"LISTEN_FDNAMES": "modell"}, "'modell': no such socket; known are model, ingress, admin"),
        ({"LISTEN_FDNAMES": "admin"}, "expected AF_UNIX, found AF_INET"),
        ({"LISTEN_FDS": "2"}, "LISTEN_FDS=2 sockets and 1 names"),
        ({"LISTEN_FDNAMES": ""}, "LISTEN_FDS=1 sockets and 0 names"),
        ({"LISTEN_FDS": "x"}, "LISTEN_FDS=x"),
    ],
)
def test_what_does_not_fit_is_said(env: dict[str, str], said: str) -> None:
    with listening() as model:
        answer = hand([("model", model)], **env)
    assert said in answer["error"]
    assert "FileDescriptorName=" in answer["hint"]


def test_a_socket_that_does_not_listen_is_refused() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as bare:
        bare.bind(("127.0.0.1", 0))
        answer = hand([("model", bare)])
    assert answer["error"].endswith("'model': it does not listen (Accept=no?)")


def test_a_datagram_socket_is_refused(short_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind(str(short_path / "d.sock"))
        answer = hand([("admin", datagrams)])
    assert "expected SOCK_STREAM" in answer["error"]


def test_a_file_is_no_socket(tmp_path: Path) -> None:
    with (tmp_path / "f").open("w") as file:
        answer = hand([("model", file)])
    assert "'model' is no socket" in answer["error"]


def test_the_variables_are_gone_even_where_they_were_wrong() -> None:
    env = {"LISTEN_PID": "7", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "model:x", "PATH": "/bin"}
    with pytest.raises(ConfigError):
        take_sockets(env, KINDS, pid=7)
    assert env == {"PATH": "/bin"}


def test_a_listener_is_alive_until_it_is_closed() -> None:
    sock = listening()
    assert is_listening(sock)
    sock.close()
    assert not is_listening(sock)
    with socket.socket() as bare:
        assert not is_listening(bare)
