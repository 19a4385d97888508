"""Listening sockets a service was given by systemd (sd_listen_fds(3)), by the names its units gave them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, MutableMapping

from hive.errors import ConfigError

FIRST = 3
"""The descriptor of the first one."""
HINT = "FileDescriptorName= of the socket unit names it, Service= says whose it is"

Families = frozenset[socket.AddressFamily]
TCP: Families = frozenset({socket.AF_INET, socket.AF_INET6})
UNIX: Families = frozenset({socket.AF_UNIX})
VSOCK: Families = frozenset({socket.AF_VSOCK})


def take_sockets(
    env: MutableMapping[str, str], kinds: Mapping[str, Families], *, pid: int
) -> dict[str, list[socket.socket]]:
    """The sockets this process was handed, by name; empty where it was handed none.

    `kinds`: each name there may be, and of which families a socket of that name is. The variables are taken out of
    `env`, and no child inherits the descriptors. Raises ConfigError that names the descriptor and what is wrong with
    it: an unknown name, another family or type, one that does not listen.
    """
    meant, count, names = (env.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if meant != str(pid) or not count:
        return {}
    handed = names.split(":") if names else []
    if not count.isascii() or not count.isdigit() or len(handed) != int(count):
        raise ConfigError(f"systemd handed LISTEN_FDS={count[:20]} sockets and {len(handed)} names", hint=HINT)
    taken: dict[str, list[socket.socket]] = {}
    for descriptor, name in enumerate(handed, start=FIRST):
        taken.setdefault(name, []).append(_take(descriptor, name, kinds))
    return taken


def _take(descriptor: int, name: str, kinds: Mapping[str, Families]) -> socket.socket:
    what = f"descriptor {descriptor} handed by systemd as {name!r}"
    families = kinds.get(name)
    if families is None:
        raise ConfigError(f"{what}: no such socket; known are {', '.join(kinds)}", hint=HINT)
    try:
        os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=descriptor)
    except OSError as error:
        raise ConfigError(f"{what} is no socket: {error.strerror}", hint=HINT) from None
    wrong = _what_is_wrong(sock, families)
    if wrong:
        sock.detach()  # not ours: its giver decides about it
        raise ConfigError(f"{what}: {wrong}", hint=HINT)
    sock.setblocking(False)
    return sock


def _what_is_wrong(sock: socket.socket, families: Families) -> str:
    """The reason that this is no listening stream socket of one of `families`; empty where it is."""
    if sock.family not in families:
        expected = " or ".join(sorted(family.name for family in families))
        return f"expected {expected}, found {getattr(sock.family, 'name', sock.family)}"
    if sock.type != socket.SOCK_STREAM:
        return f"expected SOCK_STREAM (ListenStream=), found {getattr(sock.type, 'name', sock.type)}"
    if not is_listening(sock):
        return "it does not listen (Accept=no?)"
    return ""


def is_listening(sock: socket.socket) -> bool:
    """Whether the kernel still takes connections for it; False for a closed one."""
    try:
        return sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
    except OSError:
        return False
