"""Messages by which the daemon's scrape gets the proxy's metrics."""

from __future__ import annotations

from hive.link.message import LinkMessage


class AskMetrics(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, of the daemon. Answer: `MetricsAre`."""


class MetricsAre(LinkMessage, tag=True, frozen=True, kw_only=True):
    """`text`: the proxy's exposition, every family with its HELP and TYPE."""

    text: bytes
