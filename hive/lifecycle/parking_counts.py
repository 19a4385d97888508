"""Counts of parked slots, and of the first requests of agents after their sleep. Pure bookkeeping."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import StrEnum

from hive.domain import UsageEvent
from hive.exposition import Values
from hive.lifecycle.cache_counts import PromptTokens
from hive.shapes.cache import ParkingView


class Found(StrEnum):
    """Finding of an agent after its sleep. `own`: its slot as it left it; `restored`: from the disk; `cold`: nothing;
    `refused`: what was on the disk was not for that slot, or not as it had been written."""

    OWN = "own"
    RESTORED = "restored"
    COLD = "cold"
    REFUSED = "refused"


class ParkingCounts:
    """Since the daemon started. Only sleeps of agents that had a slot count.

    >>> counts = ParkingCounts()
    >>> counts.slept(), counts.found("a", Found.RESTORED), counts.view(files=0, held_bytes=0)["found_share"]
    (None, None, 1.0)
    """

    def __init__(self) -> None:
        self.sleeps = self.saved = 0
        self.first: Counter[Found] = Counter()
        self.tokens = {found: PromptTokens() for found in Found}
        self._awaited: dict[str, Found] = {}
        """Agents whose first request since is under way, and what it found."""

    def __repr__(self) -> str:
        return f"<ParkingCounts {self.saved} of {self.sleeps} sleeps>"

    def slept(self) -> None:
        self.sleeps += 1

    def found(self, agent: str, found: Found) -> None:
        self.first[found] += 1
        self._awaited[agent] = found

    def forget(self, agent: str) -> None:
        self._awaited.pop(agent, None)

    def used(self, events: Iterable[UsageEvent]) -> None:
        if not self._awaited:
            return
        for event in events:
            found = self._awaited.pop(event.agent_id, None)
            if found is None or event.cached_tokens is None or not event.tokens_in:
                continue
            counted = self.tokens[found]
            counted.requests += 1
            counted.hits += event.cached_tokens > 0
            counted.tokens += event.tokens_in
            counted.reused += min(event.cached_tokens, event.tokens_in)

    def view(self, *, files: int, held_bytes: int) -> ParkingView:
        first, kept = self.first.total(), self.first[Found.OWN] + self.first[Found.RESTORED]
        return {
            "files": files,
            "held_bytes": held_bytes,
            "sleeps": self.sleeps,
            "saved": self.saved,
            "found_share": round(kept / first, 4) if first else None,
            "first_requests": {
                str(found): {
                    "sleeps": self.first[found],
                    "tokens": tokens.tokens,
                    "tokens_reused": tokens.reused,
                    "hit_rate": round(tokens.hit_rate, 4) if tokens.tokens else None,
                }
                for found, tokens in self.tokens.items()
            },
        }

    def metrics(self) -> dict[str, Values | None]:
        """For Prometheus (`hive.control.metrics.TABLE`)."""
        return {
            "parked_sleeps": {(): self.sleeps},
            "parked_slots_saved": {(): self.saved},
            "parked_slots_found": {(str(found),): self.first[found] for found in Found},
            "parked_first_tokens": {(str(found),): one.tokens for found, one in self.tokens.items()},
            "parked_first_tokens_reused": {(str(found),): one.reused for found, one in self.tokens.items()},
        }
