"""`hive proxy` on asyncio's own loop, with a fuse: `killed_proxy.py ORDER STATE RUNTIME`, see tests/fakes/fuse.py.

Lit by the name of a message of the daemon's, or by `wake`: a gate asks for one. The composition is the proxy's own,
but for the workers that read large bodies: no request here needs one.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from hive.bodies.body_workers import DeepReaders
from hive.domain import WakeCause
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.proxy import server
from hive.proxy.links import ProxyLinks
from hive.settings.table import Paths, Proxy, Settings
from tests.fakes.fuse import Fuse, bear

SETTINGS = Settings(proxy=Proxy(window_requests=1_000_000))


def main(order: str, state: str, runtime: str) -> None:
    def program(fuse: Fuse, watch_fd: int) -> None:
        take, wake = ProxyLinks._from_daemon, ProxyLinks.wake

        def taken(self: ProxyLinks, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
            fuse.meet(type(message).__name__)
            take(self, link, message, reply)

        def woken(self: ProxyLinks, agent: str, cause: WakeCause) -> None:
            fuse.meet("wake")
            wake(self, agent, cause)

        ProxyLinks._from_daemon = taken  # type: ignore[method-assign]
        ProxyLinks.wake = woken  # type: ignore[method-assign]
        DeepReaders.start = lambda self: None  # type: ignore[method-assign]
        uvloop.run = asyncio.run  # type: ignore[assignment]
        server.main(Paths(Path(state), Path(runtime)), SETTINGS, port=0, ingress_port=0, watch_fd=watch_fd)

    bear(program, Path(order))


if __name__ == "__main__":
    main(*sys.argv[1:])
