"""Run by a user with a systemd of his own: enters a scope as `hive up` does, then an agent sleeps deep. Prints JSON.

It is executed anew by its command line, as `hive up` is, so `main` runs twice.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

from hive.host import paging
from hive.host.cgroup import Subtree
from hive.host.memory import held_by
from hive.link.specs import SandboxSpec
from hive.runtimes.process import ProcessRuntime
from hive.settings.table import Paths
from hive.up import scope

AGENT = """
import hashlib, random, socket
chance = random.Random(1)
heap = [chance.randbytes(32768).hex().encode() for _ in range(48 * 16)]
server = socket.socket(socket.AF_UNIX)
server.bind("s")
server.listen(8)
print("ready", flush=True)
while True:
    connection, _ = server.accept()
    connection.sendall(hashlib.sha256(b"".join(heap)).hexdigest().encode())
"""
"""48 MiB that compress to about a half."""


def ask(address: Path) -> bytes:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(str(address))
        return sock.recv(256)


async def sleep_deep(state: Path, subtree: Subtree) -> dict[str, object]:
    paths = Paths(state=state, runtime=state / "r")
    runtime = ProcessRuntime(paths, subtree=subtree, log_max_bytes=65536)
    home, log = paths.home("a"), paths.log("a")
    for directory in (home.parent, log.parent):
        directory.mkdir(parents=True)
    command = ["/usr/bin/python3", "-S", "-c", AGENT]
    spec = SandboxSpec(name="a", command=command, env={}, home=str(home), log=str(log), uid=None)
    await runtime.prepare("a", spec)
    running = await runtime.start("a", spec, mark="HIVE_AGENT=a")
    while "ready" not in log.read_text():  # noqa: ASYNC110 - another process sends no asyncio events
        await asyncio.sleep(0.05)
    before, rss_bytes = ask(home / "s"), held_by([running.run.main.pid]).rss_bytes
    await running.freeze(deadline_s=10, give_up=lambda: False)
    paged = await running.page_out(give_up=lambda: False)
    await running.thaw(deadline_s=10)
    is_whole = ask(home / "s") == before
    await running.kill()
    running.close()
    return {
        "how": paged.how,
        "rss_bytes": rss_bytes,
        "kept_bytes": paged.kept_bytes,
        "swap_bytes": paged.swap_bytes,
        "is_whole": is_whole,
        "why_not_page_out": (await runtime.capabilities()).why_not_page_out,
    }


def main() -> None:
    state = Path(sys.argv[1])
    is_first, notes = scope.MARK not in os.environ, Path(f"{state}.first")
    if is_first:
        notes.write_text(json.dumps({"why_not": scope.look(state).why_not, "pid": os.getpid()}))
    why_not = scope.enter(state)
    told = {"first": json.loads(notes.read_text()), "is_first": is_first, "why_not": why_not, "pid": os.getpid()}
    told |= {"cgroup": Path("/proc/self/cgroup").read_text(), "mark": os.environ.get(scope.MARK)}
    subtree = Subtree.find(state)
    if subtree is not None and not why_not:
        told |= {"arguments": paging.choose(subtree.path).arguments, **asyncio.run(sleep_deep(state, subtree))}
    print(json.dumps(told))


if __name__ == "__main__":
    main()
