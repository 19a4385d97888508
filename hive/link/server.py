"""The listening side of a link: a private AF_UNIX socket that admits only trusted peers."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path

from hive.link.link import Link, OnLost, OnMessage

PATH_MAX_BYTES = 107
"""Longest path that fits into `sun_path`."""
SO_PEERGROUPS = 59
SO_PASSRIGHTS = 83
"""asm-generic/socket.h; Python 3.11 has no name for it."""
PEERGROUPS_BYTES = 1024
"""The largest buffer that socket.getsockopt takes; the kernel refuses (ERANGE) one that is too small for all groups."""


def peer_of(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process at the other end of a unix socket, as the kernel recorded it at connect."""
    pid, uid, gid = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, uid, gid


def groups_of(sock: socket.socket) -> frozenset[int]:
    """Every gid of the process at the other end of a unix socket; SO_PEERCRED has the primary one only.

    Of a peer that is in more than 256 groups only that one: Python asks for 1024 bytes at most.
    """
    _, _, primary = peer_of(sock)
    try:
        answer = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, PEERGROUPS_BYTES)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise
        answer = b""
    return frozenset({primary, *struct.unpack(f"{len(answer) // 4}I", answer)})


def bind_private(
    path: Path, *, owner: tuple[int, int] | None = None, group: int | None = None, takes_files: bool = True
) -> socket.socket:
    """A listening socket at `path`, mode 0600; made under a temporary name and renamed, so no moment is without one.

    `owner`: uid and gid it is given to before anyone can connect. `group`: a gid whose members may connect too.
    `takes_files`: whether those who connect may pass descriptors; Linux refuses them from 6.16 on, an older one goes on
    to take them. Raises OSError, also for a path of more than `PATH_MAX_BYTES`, to which no process could connect.
    """
    if len(os.fsencode(path)) > PATH_MAX_BYTES:
        raise OSError(errno.ENAMETOOLONG, "a socket's path is too long", str(path))
    temporary = path.with_name(f".{os.getpid()}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        sock.bind(str(temporary))
        temporary.chmod(0o600)
        if owner is not None:
            os.chown(temporary, *owner)
        if group is not None:
            os.chown(temporary, -1, group)
            temporary.chmod(0o660)
        if not takes_files:
            with contextlib.suppress(OSError):  # an older kernel
                sock.setsockopt(socket.SOL_SOCKET, SO_PASSRIGHTS, 0)  # each accepted socket inherits it
        sock.listen(1024)
        temporary.rename(path)
    except OSError:
        sock.close()
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise
    return sock


class LinkServer:
    """Accepts links at `path` from root and from `uids`; closes those of any other user.

    `group`: its members can reach the socket, but only `uids` among them are accepted. `on_link(link)` is called for
    each new link before any message of it.
    """

    def __init__(
        self,
        path: Path,
        *,
        name: str,
        uids: frozenset[int],
        on_link: Callable[[Link], None],
        on_message: OnMessage,
        on_lost: OnLost,
        group: int | None = None,
    ) -> None:
        self.path = path
        self._name = name
        self._uids = uids | {0}
        self._on_link = on_link
        self._on_message = on_message
        self._on_lost = on_lost
        self.links: set[Link] = set()
        self._loop = asyncio.get_running_loop()
        self._sock = bind_private(path, group=group)
        self._inode = os.stat(path).st_ino
        self._loop.add_reader(self._sock.fileno(), self._accept)

    @property
    def is_listening(self) -> bool:
        """Whether the kernel still takes connections for it; False once it is closed."""
        try:
            return self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
        except OSError:
            return False

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._sock.accept()
            except OSError:
                return
            pid, uid, _ = peer_of(sock)
            if uid not in self._uids:
                sock.close()
                continue
            link = Link(sock, name=f"{self._name}#{pid}", on_message=self._on_message, on_lost=self._gone)
            self.links.add(link)
            self._on_link(link)

    def _gone(self, link: Link) -> None:
        self.links.discard(link)
        self._on_lost(link)

    def close(self) -> None:
        """Stops listening, removes the socket file if it is still ours, closes every link."""
        self._loop.remove_reader(self._sock.fileno())
        self._sock.close()
        with contextlib.suppress(OSError):
            if os.stat(self.path).st_ino == self._inode:
                self.path.unlink()
        for link in list(self.links):
            link.close()
