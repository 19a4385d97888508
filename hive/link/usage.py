"""Messages about usage: events out of the proxy's spool, and the agents that were active."""

from __future__ import annotations

from typing import NamedTuple

from hive.link.message import LinkMessage


class UsageItem(NamedTuple):
    """Event numbers `first` to `last`: a line each with their line ends between, or (None) their events are lost."""

    first: int
    last: int
    lines: bytes | None

    @property
    def events(self) -> int:
        """The number of events it holds."""
        return self.last - self.first + 1 if self.lines is not None else 0


class UsageBatch(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Told. Events of one proxy epoch, in the order of their numbers; `Marks` acknowledges them once they are rows.

    `committed_to`: the highest mark that the proxy has heard of this epoch. Events up to there have left the spool: a
    daemon that does not have them, because its database was replaced, counts them as lost.
    """

    epoch: str
    committed_to: int
    items: list[UsageItem]


class AgentsActive(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Told, at most once a second: agent id → the time of its last request's beginning or end (Unix seconds)."""

    agents: dict[str, float]
