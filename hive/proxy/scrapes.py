"""The proxy's metrics for the scrapes of the daemon: written a piece at a time, so that requests do not wait."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from hive.errors import HiveError
from hive.link.figures import MetricsAre
from hive.link.link import LinkReply, failed
from hive.proxy.metrics import Metrics


class Scrapes:
    """Answers the questions that are open all at once: a proxy that stood still has one of each scrape meanwhile."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._open: list[LinkReply] = []
        self._written: list[bytes] = []

    def __repr__(self) -> str:
        return f"<Scrapes {len(self._open)} open>"

    def ask(self, reply: LinkReply) -> None:
        """Answers within some rounds of the loop; each of them is held up by some 1 ms."""
        self._open.append(reply)
        if len(self._open) == 1:
            self._written = []
            self._go_on(self._metrics.exposition())

    def _go_on(self, pieces: Iterator[bytes]) -> None:
        try:
            piece = next(pieces, None)
        except Exception as error:
            told, self._open = self._open, []
            for reply in told:
                reply(failed(HiveError(f"the metrics cannot be told: {error!r}")))
            raise
        if piece is not None:
            self._written.append(piece)
            asyncio.get_running_loop().call_soon(self._go_on, pieces)
            return
        told, self._open = self._open, []
        text = b"".join(self._written)
        for reply in told:
            reply(MetricsAre(text=text))
