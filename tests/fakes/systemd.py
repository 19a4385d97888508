"""The part of systemd for a service, played by the test: sockets handed over by name, and a listener for `READY=1`."""

from __future__ import annotations

import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

LAUNCHER = """
import os, sys
descriptors, command = [int(word) for word in sys.argv[1].split(",") if word], sys.argv[2:]
for number, descriptor in enumerate(descriptors, start=3):
    os.dup2(descriptor, number)
    os.close(descriptor)
os.environ["LISTEN_PID"] = os.environ.get("LISTEN_PID", str(os.getpid()))
os.execv(command[0], command)
"""
"""LISTEN_PID is the pid of the very process that is executed, so a process on its way there writes it."""
FIRST_FREE = 200
"""Descriptors on their way: none of them is where another one has to go."""


class HasDescriptor(Protocol):
    def fileno(self) -> int: ...


def start(
    command: Sequence[str],
    handed: Sequence[tuple[str, HasDescriptor]],
    *,
    env: Mapping[str, str] | None = None,
    **more: Any,
) -> subprocess.Popen[Any]:
    """Starts `command` with these as descriptors 3, 4 …; they stay open here too, as systemd keeps them.

    `env` is added to this process's own, and wins over the variables that go with the sockets.
    """
    variables = {"LISTEN_FDS": str(len(handed)), "LISTEN_FDNAMES": ":".join(name for name, _ in handed)}
    high = [fcntl.fcntl(held.fileno(), fcntl.F_DUPFD, FIRST_FREE) for _, held in handed]
    try:
        return subprocess.Popen(
            [sys.executable, "-c", LAUNCHER, ",".join(map(str, high)), *command],
            pass_fds=high,
            env={**os.environ, **variables, **(env or {})},
            **more,
        )
    finally:
        for descriptor in high:
            os.close(descriptor)


class Ear:
    """Listens where NOTIFY_SOCKET points; `address` begins with NUL for an abstract name."""

    def __init__(self, address: str | Path) -> None:
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._sock.bind(str(address))
        self.env = {"NOTIFY_SOCKET": str(address).replace("\0", "@")}

    def hears(self, within_s: float = 20.0) -> list[str]:
        """The lines of the next datagram; one empty line where none comes in time."""
        self._sock.settimeout(within_s)
        try:
            return self._sock.recv(4096).decode().split("\n")
        except TimeoutError:
            return [""]

    def close(self) -> None:
        self._sock.close()
