"""An agent with a heap that is worth paging out, and what the kernel says of it."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import NamedTuple

from hive.link.helper import PagedOut
from tests.sandbox.harness import PYTHON, A, Daemon

MIB = 1024 * 1024

PROGRAM = """
import ctypes, hashlib, mmap, os, random, socket, sys

def grow(mib, seed):
    chance = random.Random(seed)
    return [chance.randbytes(32768).hex().encode() for _ in range(mib * 16)]

mib, children, locked = (int(word) for word in sys.argv[1:4])
if locked:
    held = mmap.mmap(-1, locked << 20, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    held.write(b"l" * (locked << 20))
    address = ctypes.addressof(ctypes.c_char.from_buffer(held))
    if ctypes.CDLL(None, use_errno=True).mlock(ctypes.c_void_p(address), ctypes.c_size_t(locked << 20)):
        sys.exit("mlock: " + os.strerror(ctypes.get_errno()))
for child in range(children):
    if os.fork() == 0:
        break
name = f"heavy{os.getpid()}"
heap = grow(mib, os.getpid())
server = socket.socket(socket.AF_UNIX)
server.bind(name)
server.listen(8)
print(os.getpid(), os.getcwd() + "/" + name, flush=True)
while True:
    connection, _ = server.accept()
    if connection.recv(16) == b"sum":
        connection.sendall(hashlib.sha256(b"".join(heap)).hexdigest().encode())
    else:
        connection.sendall(b"pong")
    connection.close()
"""


def command(mib: int, *, children: int = 0, locked_mib: int = 0) -> list[str]:
    """Each of its processes fills a heap, prints `PID SOCKET` and answers `sum` and `ping` there."""
    return [PYTHON, "-S", "-c", PROGRAM, str(mib), str(children), str(locked_mib)]


def ask(address: str, word: bytes) -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(address)
        sock.sendall(word)
        return sock.recv(256)


class Mapping(NamedTuple):
    """One entry of smaps, sizes in bytes."""

    name: str
    is_file: bool
    rss_bytes: int
    locked_bytes: int
    swap_bytes: int


def mappings(pid: int) -> list[Mapping]:
    text = Path(f"/proc/{pid}/smaps").read_text()
    entries = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", text, flags=re.MULTILINE)[1:]
    return [_mapping(entry) for entry in entries]


def _mapping(entry: str) -> Mapping:
    head, *lines = entry.splitlines()
    fields = head.split(maxsplit=5)
    sizes = {line.split(":")[0]: line.split() for line in lines}
    rss, locked, swap = (int(sizes[name][1]) * 1024 for name in ("Rss", "Locked", "Swap"))
    return Mapping(fields[5] if len(fields) > 5 else "", fields[4] != "0", rss, locked, swap)


async def paged_out_keeping(daemon: Daemon, at_least_bytes: float) -> PagedOut:
    """Pages the agent out, which is awake, until that leaves so much in RAM; the last of four tries is returned anyway.

    Without a control group it is told by the swap cache of the whole host, which others fill and empty meanwhile.
    """
    for generation in (1, 2, 3, 4):
        if generation > 1:
            await daemon.client.thaw(A)
        await daemon.client.freeze(A, generation)
        await daemon.client.confirm(A, generation)
        paged = await daemon.client.page_out(A, generation)
        if paged.kept_bytes > at_least_bytes:
            break
    return paged
