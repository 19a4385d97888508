"""The address of the TCP ports: the one that is asked for, and no other."""

from __future__ import annotations

import socket

import pytest

from hive.errors import ConfigError
from hive.settings.file import load_text
from hive.wire.listeners import listen_tcp


@pytest.mark.parametrize(
    ("address", "reached", "not_reached"),
    [
        ("127.0.0.1", ["127.0.0.1"], ["127.0.0.2"]),
        ("127.0.0.2", ["127.0.0.2"], ["127.0.0.1"]),
        ("0.0.0.0", ["127.0.0.1", "127.0.0.2"], []),
        ("::1", ["::1"], ["127.0.0.1"]),
    ],
)
def test_a_port_is_on_the_address_that_is_asked_for(address: str, reached: list[str], not_reached: list[str]) -> None:
    try:
        listening = listen_tcp(0, move=False, address=address)
    except OSError as error:
        if ":" not in address:
            raise
        pytest.skip(f"no IPv6 here: {error}")
    with listening:
        port = listening.getsockname()[1]
        for where in reached:
            socket.create_connection((where, port), timeout=5).close()
        for where in not_reached:
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection((where, port), timeout=5)


@pytest.mark.parametrize("text", ["localhost", "eth0", "0.0.0.0:80", "10.0.0", "hive.example"])
def test_a_name_is_no_address_to_listen_at(text: str) -> None:
    with pytest.raises(ConfigError, match=r"\[proxy\] listen: expected an IP address"):
        load_text(f"[proxy]\nlisten = {text}\n", env={})


@pytest.mark.parametrize("text", ["0.0.0.0", "::", "fd00::1", "10.1.2.3"])
def test_an_address_is_taken_as_it_is(text: str) -> None:
    assert load_text("", env={"HIVE_PROXY_LISTEN": text}).settings.proxy.listen == text
