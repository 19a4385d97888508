"""Connecting to an agent's port where only the helper gets to: in a network of its own, at its VMM in a jail.

The helper's own record and the kernel say where that is, never the agent: whatever it does inside, a caller reaches the
agent itself and no other. Nothing here waits for an agent but the task that does, and that not long.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from hive.errors import BackendDown, BackendTimeout, NotSupported, Saturated, WrongState
from hive.host import netns
from hive.host.http_call import connect_unix
from hive.link.server import peer_of
from hive.runtimes.jail import found_in
from hive.runtimes.runtime import Dialable, RunningAgent

CONNECT_S = 2.0
"""A connect to a program whose backlog is full is tried again by the caller's proxy, as long as the caller waits."""
AT_ONCE = 64
"""Calls under way to one agent: as many as may be open to it (`ingress_open_max`)."""


class Dialler:
    """Connects callers to one agent, so many at a time."""

    def __init__(self) -> None:
        self._under_way = 0

    def __repr__(self) -> str:
        return f"<Dialler {self._under_way} under way>"

    async def dial(self, running: RunningAgent) -> socket.socket:
        """A connected socket, the caller's. Raises NotSupported, WrongState, Saturated, BackendDown, BackendTimeout."""
        if not isinstance(running, Dialable):
            raise NotSupported("it has no port that only the helper gets to")
        if self._under_way >= AT_ONCE:
            raise Saturated(f"{self._under_way} callers wait for its port already", retry_after_s=1)
        self._under_way += 1
        try:
            async with asyncio.timeout(CONNECT_S):
                return await running.connect()
        except TimeoutError:
            raise BackendTimeout(f"it did not accept in {CONNECT_S:g} s") from None
        except OSError as error:
            why = os.strerror(error.errno) if error.errno else str(error)
            raise BackendDown(f"it does not accept: {why}") from error
        finally:
            self._under_way -= 1


async def to_port(pidfd: int, port: int) -> socket.socket:
    """Connected to 127.0.0.1:`port` in the network of the process `pidfd`, which must not be ours.

    Raises WrongState, BackendDown where nothing listens there, OSError, HiveError.
    """
    sock = netns.socket_inside(pidfd)
    if sock is None:
        raise WrongState("it is in the host's network")
    try:
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
    except ConnectionRefusedError as error:
        sock.close()
        raise BackendDown(f"nothing listens on 127.0.0.1:{port}") from error
    except BaseException:
        sock.close()
        raise
    return sock


async def to_vmm(top: Path, path: Path, *, pid: int) -> socket.socket:
    """Connected to the socket at `path`, at which the process `pid` listens; what is below `top` is not believed.

    Raises WrongState, BadRequest, OSError.
    """
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        with found_in(top, path) as name:
            await connect_unix(sock, name)
        if peer_of(sock)[0] != pid:
            raise WrongState(f"at {path} somebody else listens than its VMM")
    except BaseException:
        sock.close()
        raise
    return sock
