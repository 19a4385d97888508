"""`hive proxy` on asyncio's own loop, with a fuse: `killed_proxy.py ORDER STATE RUNTIME`, see tests/fakes/fuse.py.

Lit by the name of a message of the daemon's, or by `wake`: a gate asks for one. The composition is the proxy's own,
but for the workers that read large bodies: no request here needs one.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop
from fakes.fuse import Fuse, bear

from hive.domain import WakeCause
from hive.link.link import Link, Reply
from hive.link.message import Message
from hive.proxy import server
from hive.proxy.links import Links
from hive.settings import Paths, Proxy, Settings

SETTINGS = Settings(proxy=Proxy(window_requests=1_000_000))


def main(order: str, state: str, runtime: str) -> None:
    def program(fuse: Fuse, watch_fd: int) -> None:
        take, wake = Links._from_daemon, Links.wake

        def taken(self: Links, link: Link, message: Message, reply: Reply | None) -> None:
            fuse.meet(type(message).__name__)
            take(self, link, message, reply)

        def woken(self: Links, agent: str, cause: WakeCause) -> None:
            fuse.meet("wake")
            wake(self, agent, cause)

        Links._from_daemon = taken  # type: ignore[method-assign]
        Links.wake = woken  # type: ignore[method-assign]
        server.DeepReaders.start = lambda self: None  # type: ignore[method-assign]
        uvloop.run = asyncio.run
        server.main(Paths(Path(state), Path(runtime)), SETTINGS, port=0, ingress_port=0, watch_fd=watch_fd)

    bear(program, Path(order))


if __name__ == "__main__":
    main(*sys.argv[1:])
