"""Addresses of servers of tests: ports that are free, and socket files that answer."""

from __future__ import annotations

import itertools
import os
import socket
from pathlib import Path

FIRST, COUNT = 12_000, 20_000
"""Below the ports that Linux gives to sockets that name none (32768 up): none is taken before its server has it."""
_offsets = itertools.count(os.getpid() * 211)


def free_port() -> int:
    """A port of 127.0.0.1 that nobody listens at; every process of a test run begins to look somewhere else."""
    for offset in itertools.islice(_offsets, COUNT):
        port = FIRST + offset % COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"no port of {FIRST} to {FIRST + COUNT} is free")


def is_healthy(path: Path) -> bool:
    """Whether `GET /health` at this socket is answered with 200; httpx (0.28) leaves open what it cannot connect."""
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
            connection.sendall(b"GET /health HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n")
            return connection.recv(64).startswith(b"HTTP/1.1 200")
        except OSError:
            return False
