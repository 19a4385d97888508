"""The two ends of the way of usage, each a process that may kill itself at one step: `proxy|daemon DIRECTORY STEP …`.

The real spool, link, consumer and database. Both print `.`: the proxy after each record, the daemon once it listens.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from hive.control import usage as control
from hive.control.usage import UsageConsumer
from hive.domain import UsageEvent
from hive.link.client import LinkClient
from hive.link.link import Link, LinkReply
from hive.link.message import LinkMessage
from hive.link.messages import Hello, Marks
from hive.link.server import LinkServer
from hive.link.usage import UsageBatch
from hive.metering import usage_spool
from hive.metering.usage_spool import UsageSpool
from hive.store import usage
from hive.store.database import Database
from hive.store.live import Live
from hive.tasks import spawn

usage_spool.GATHER_S = 0.01
usage_spool.TICK_S = 0.05
control.RETRY_S = (0.01, 0.05)

LIVES = 3
"""A step is met so many times before it is the last."""


class Ends:
    """Kills this process the LIVES-th time it meets its step."""

    def __init__(self, step: str) -> None:
        self._step = step
        self._left = LIVES

    def meet(self, step: str) -> None:
        self._left -= step == self._step
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)


async def proxy(directory: Path, step: str, epoch: str, event: UsageEvent) -> None:
    ends = Ends(step)
    spool = UsageSpool(directory / "spool", epoch, bound=50)
    spawn(spool.run(), name="usage")

    def heard(link: Link, message: LinkMessage, _: LinkReply | None) -> None:
        def tell(batch: UsageBatch) -> None:
            link.tell(batch)
            ends.meet("sent")

        assert isinstance(message, Marks)
        ends.meet("acknowledged")
        spool.marks(message.marks)
        ends.meet("forgotten")
        spool.attach(tell)

    LinkClient(
        directory / "link",
        name="daemon",
        on_link=lambda link: link.tell(Hello(role="proxy", epoch=epoch)),
        on_message=heard,
        on_lost=lambda _: spool.detach(),
    )
    no = 0
    while True:
        no += 1
        spool.record(msgspec.structs.replace(event, id=f"{epoch}-{no}", tokens_in=no))
        os.write(1, b".")
        await asyncio.sleep(0.001)


async def daemon(directory: Path, step: str, redis: str) -> None:
    ends = Ends(step)
    links: list[Link] = []
    insert = usage.insert

    def inserted(conn: Any, events: Iterable[UsageEvent]) -> list[UsageEvent]:
        added = insert(conn, events)
        ends.meet("inserted")
        return added

    def committed(marks: dict[str, int]) -> None:
        ends.meet("committed")
        for link in links:
            link.tell(Marks(marks=marks))
        ends.meet("told")

    def heard(link: Link, message: LinkMessage, _: LinkReply | None) -> None:
        if isinstance(message, UsageBatch):
            consumer.take(message)
            ends.meet("taken")
        else:
            consumer.proxy_here({})
            links[:] = [link]
            link.tell(Marks(marks=consumer.marks))

    usage.insert = inserted
    database = Database.open(directory / "hive.db")
    live = Live(Path(redis))
    consumer = UsageConsumer(live, database, on_marks=committed, on_usage=lambda _: None)
    await consumer.load()
    for work in (live.run(), consumer.run(), consumer.take_over()):
        spawn(work, name="work")
    LinkServer(
        directory / "link",
        name="proxy",
        uids=frozenset({os.geteuid()}),
        on_link=lambda _: None,
        on_message=heard,
        on_lost=lambda _: None,
    )
    os.write(1, b".")
    await asyncio.Event().wait()


if __name__ == "__main__":
    end, where, at, *more = sys.argv[1:]
    if end == "proxy":
        asyncio.run(proxy(Path(where), at, more[0], msgspec.json.decode(more[1], type=UsageEvent)))
    else:
        asyncio.run(daemon(Path(where), at, more[0]))
