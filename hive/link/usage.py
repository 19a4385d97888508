"""Messages about usage: events out of the proxy's spool, and the agents that were active."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

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


class SpentRow(NamedTuple):
    """Tokens of one tenant or agent: of the day, of the month, and of the day's requests that left the box."""

    day: int = 0
    month: int = 0
    cloud_day: int = 0


class AskSpent(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Ask, of the proxy. The tokens of these agents (ids) and tenants since the day and the month began (Unix seconds).
    Answer: `SpentIs`."""

    epoch: str
    day_begins: float
    month_begins: float
    agents: list[str] = msgspec.field(default_factory=list)
    tenants: list[str] = msgspec.field(default_factory=list)


class SpentIs(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Answer to `AskSpent`. The events of the asking epoch up to `committed_to` are in it, later ones are not."""

    committed_to: int
    agents: dict[str, SpentRow]
    tenants: dict[str, SpentRow]


class AgentsActive(LinkMessage, tag=True, frozen=True, kw_only=True):
    """Told, at most once a second: agent id → the time of its last request's beginning or end (Unix seconds)."""

    agents: dict[str, float]
