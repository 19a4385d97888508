"""An agent with turns that use the same fifth of its heap each time, and a swap cache that is emptied by force."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hive.host.charge import read_charge
from tests.sandbox.harness import PYTHON

MIB = 1024 * 1024
PROGRAM = """
import os, random, socket, sys

heap = [os.urandom(2048).hex().encode() for _ in range(int(sys.argv[1]) * 256)]
used = [number for number in range(0, len(heap), 40) for number in range(number, number + 8)]
random.Random(7).shuffle(used)
server = socket.socket(socket.AF_UNIX)
server.bind("s")
server.listen(8)
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    word = connection.recv(16)
    total = sum(heap[number % len(heap)][9] for number in used) if word == b"turn" else 0
    connection.sendall(b"%d" % total)
    connection.close()
"""


def command(mib: int) -> list[str]:
    """It serves `turn` and `ping` at the socket `s` in its home, and prints `ready`."""
    return [PYTHON, "-S", "-c", PROGRAM, str(mib)]


def major_faults(pid: int) -> int:
    """Faults so far that had to wait for a disk."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[9])


def empty_swap_cache(group: Path) -> int:
    """Bytes left in the swap cache of a memory group, by a limit for a moment: what lies there is taken first."""
    name = next(name for name in ("memory.max", "memory.limit_in_bytes") if (group / name).exists())
    before = (group / name).read_text()
    for spare in (2 * MIB, MIB, 0):
        charge = read_charge(group)
        assert charge is not None
        with contextlib.suppress(OSError):  # v1: not all of it can be taken at once
            (group / name).write_text(str(max(MIB, charge.held_bytes - charge.swap_cached_bytes + spare)))
    with open(os.open(group / name, os.O_WRONLY), "w") as file:
        file.write(before)
    charge = read_charge(group)
    assert charge is not None
    return charge.swap_cached_bytes
