"""Ports of sample agents, each claimed before its agent listens there: two demos may begin together, as two users."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Collection

from hive.client.calls import Answer
from hive.domain import ALIVE
from hive.errors import DependencyDown

FIRST_PORT, LAST_PORT = 18_101, 32_000
"""Below the ephemeral range (32768 and up), so that no outgoing connection sits on one."""


class PortClaims:
    """Ports of 127.0.0.1 that no other demo and no tour takes until `close`, or the end of this process.

    From the look whether a port is free to an agent that listens there seconds pass. So a name among the abstract unix
    sockets goes with each: it has one owner in all of the network that the port is in, and nothing is left of it on a
    disk (unix(7)).
    """

    def __init__(self) -> None:
        self._names: dict[int, socket.socket] = {}

    def __repr__(self) -> str:
        return f"<PortClaims {', '.join(map(str, self._names))}>"

    def take(self, view: Answer | None = None, others: Collection[int | None] = ()) -> int:
        """A port for a sample agent: as before while it lives, or if that is free; else the next that is.

        `view`: of the agent, where it has been made. `others`: the ports of other agents of its Hive. Raises
        DependencyDown where none is free.
        """
        before = None if view is None or view["port"] is None else int(view["port"])
        if view is not None and before is not None and view["status"] in ALIVE:
            self._claim(before)
            return before
        wanted = [] if before is None else [before]
        for port in itertools.chain(wanted, range(FIRST_PORT, LAST_PORT)):
            if port not in others and self._claim(port):
                if is_free(port):
                    return port
                self._names.pop(port).close()
        raise DependencyDown(f"no port from {FIRST_PORT} to {LAST_PORT} is free")

    def _claim(self, port: int) -> bool:
        """Whether it is ours from now on, and was not before."""
        name = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            name.bind(f"\0hive-demo-port-{port}")
        except OSError:
            name.close()
            return False
        self._names[port] = name
        return True

    def close(self) -> None:
        """Gives all of them up."""
        for name in self._names.values():
            name.close()
        self._names.clear()


def is_free(port: int) -> bool:
    """Whether a process could listen on 127.0.0.1:`port` now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
