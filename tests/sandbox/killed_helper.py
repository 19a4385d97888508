"""`hive sandbox` on asyncio's own loop, with a fuse: `killed_helper.py ORDER STATE RUNTIME FREEZER`, see fuse.py.

Lit by the name of a message it takes: the composition is the helper's own, from the link to the kernel.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import uvloop

from hive.host.cgroup import Subtree
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.sandbox import server
from hive.sandbox.supervised_agent import FreezeLimits
from hive.settings.table import Paths, Settings
from tests.fakes.fuse import Fuse, bear


def main(order: str, state: str, runtime: str, freezer: str) -> None:
    def program(fuse: Fuse, watch_fd: int) -> None:
        take = server.HelperServer._on_message

        def taken(self: server.HelperServer, link: Link, message: LinkMessage, reply: LinkReply | None) -> None:
            fuse.meet(type(message).__name__)
            take(self, link, message, reply)

        server.HelperServer._on_message = taken  # type: ignore[method-assign]
        # No `hive up` reaps anybody here.
        server.FreezeLimits = lambda: FreezeLimits(report_s=0.02)  # type: ignore[misc,assignment,attr-defined]
        uvloop.run = asyncio.run  # type: ignore[assignment]
        if freezer == "signals":
            Subtree.find = lambda state: None  # type: ignore[method-assign]
        server.main(Paths(Path(state), Path(runtime)), Settings(), watch_fd)

    bear(program, Path(order))


if __name__ == "__main__":
    main(*sys.argv[1:])
