"""The processes that listen at local addresses, as far as this user may look at them. Every function blocks."""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from hive.host.process import read_stat

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
"""A process began so much later than its start says, at most."""
_TCP_LISTEN = "0A"
NET_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_CREDENTIALS = struct.Struct("3i")


class ListeningProcess(NamedTuple):
    """`start_ticks`: since boot; `began_at`: the same in Unix seconds by the clock of now."""

    pid: int
    start_ticks: int
    began_at: float


def listener_at(dialled: str) -> ListeningProcess | None:
    """The process that listens at this path, or loopback `host:port`; None where none is to be seen, or several."""
    pids = {_at_path(dialled)} if dialled.startswith("/") else set(_at_port(dialled))
    if len(pids) != 1 or not (pid := pids.pop()) or (found := read_stat(pid)) is None:
        return None
    since_s = time.clock_gettime(time.CLOCK_BOOTTIME) - found.start_ticks * TICK_S
    return ListeningProcess(pid, found.start_ticks, time.time() - since_s)


def _at_path(path: str) -> int:
    with socket.socket(socket.AF_UNIX) as asking, suppress(OSError):
        asking.settimeout(1.0)
        asking.connect(path)
        told = asking.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return int(_CREDENTIALS.unpack(told)[0])
    return 0


def _at_port(dialled: str) -> Iterator[int]:
    port = dialled.rpartition(":")[2]
    return holders_of(listening_inodes().get(int(port), ())) if port.isdigit() else iter(())


def listening_inodes() -> dict[int, list[str]]:
    """Port → inodes of the sockets that listen there, IPv4 and IPv6."""
    found: dict[int, list[str]] = {}
    for table in NET_TABLES:
        with suppress(OSError):
            for port, inode in parse_listening(Path(table).read_text()):
                found.setdefault(port, []).append(inode)
    return found


def parse_listening(text: str) -> list[tuple[int, str]]:
    """(port, inode) of each listening socket in a /proc/net/tcp.

    >>> parse_listening("  sl\\n 0: 0100007F:2CAB 00000000:0000 0A 0:0 00:0 0 0 0 4242 1\\n")
    [(11435, '4242')]
    """
    rows = [line.split() for line in text.splitlines()[1:]]
    return [(int(row[1].rpartition(":")[2], 16), row[9]) for row in rows if len(row) > 9 and row[3] == _TCP_LISTEN]


def listening_addresses(port: int) -> tuple[str, ...]:
    """The addresses at which somebody listens at this port, `0.0.0.0` and `::` for all of the host's."""
    found: dict[str, None] = {}
    for table in NET_TABLES:
        with suppress(OSError):
            found |= dict.fromkeys(parse_addresses(Path(table).read_text(), port))
    return tuple(found)


def parse_addresses(text: str, port: int) -> list[str]:
    r"""
    >>> row = " 0: {}:2049 00000000:0000 0A 0:0 00:0 0 0 0 4242 1"
    >>> parse_addresses("\n" + row.format("0100007F") + "\n" + row.format("0200F50A"), 8265)
    ['127.0.0.1', '10.245.0.2']
    >>> parse_addresses("\n" + row.format("0" * 32), 8265)
    ['::']
    """
    rows = [line.split() for line in text.splitlines()[1:]]
    found = [row[1].partition(":") for row in rows if len(row) > 9 and row[3] == _TCP_LISTEN]
    return [_address(digits) for digits, _, at in found if int(at, 16) == port]


def _address(digits: str) -> str:
    """An address as the kernel writes it: words of 32 bits, each in the order of this machine."""
    words = [int(digits[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(digits), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def holders_of(inodes: Collection[str]) -> Iterator[int]:
    """The pids of processes with such a socket open, among those that this user may look into."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").iterdir() if wanted else ():
        if process.name.isdigit() and _has_open(process / "fd", wanted):
            yield int(process.name)


def _has_open(descriptors: Path, wanted: set[str]) -> bool:
    with suppress(OSError):
        for one in os.listdir(descriptors):
            with suppress(OSError):
                if os.readlink(descriptors / one) in wanted:
                    return True
    return False
