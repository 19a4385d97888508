"""One daemon, asked again and again: of agents only what changed, and what has no reason to have changed only now and
then. Blocking."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import msgspec

from hive.client.client import Client
from hive.errors import NotFound
from hive.tui.snapshot import Answer, Answers, View

INFERENCE, MEMORY, GPUS, STATS = "/api/system/inference", "/api/system/memory", "/api/system/gpus", "/api/stats"
POOL = "/api/pool"
ANSWER_S = 5.0
EVENTS = 50
SELDOM_S = 5.0
"""Longest delay for showing a change without a visible reason."""
SHOWN_MAX = 250
"""The daemon takes no more names at once; a terminal has fewer lines."""


class ChangedAgents(msgspec.Struct, frozen=True):
    """The answer of `GET /api/agents?since=`."""

    agents: list[View]
    gone: list[str]
    cursor: str
    is_whole: bool


class News(NamedTuple):
    """The news of a look: `has_moved`: an agent came, went or changed its state; `has_used`: one has used something."""

    has_moved: bool
    has_used: bool


class Watch:
    """All that one daemon has said so far."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self._cursor = ""
        self._views: dict[str, View] = {}
        self._health: Answer = {}
        self._kept: dict[str, tuple[Any, float]] = {}
        """Question → the answer, and its time."""

    def __repr__(self) -> str:
        return f"<Watch {self.client.path}, {len(self._views)} agents>"

    def ask(self, shown: Collection[str] | None) -> Answers:
        """Everything as it is now. `shown`: ids of the agents on the screen, None for all.

        Of the others the sentence why is as old as their last change, and their memory as old as the daemon lets it be.
        Raises what `Client` raises, MsgspecError and ValueError for answers that are not understood.
        """
        client, news = self.client, self._look_at_agents(shown)
        before, health = self._health, client.get("/api/health")
        self._health = health
        is_switching = self._answered(INFERENCE).get("switch") is not None
        is_other = any(before.get(name) != health.get(name) for name in ("backend", "problems"))
        return Answers(
            health=health,
            agents=[*self._views.values()],
            inference=self._asked(INFERENCE, lambda: client.get(INFERENCE), anew=is_switching or is_other),
            memory=self._asked(MEMORY, lambda: client.get(MEMORY)),
            stats=self._asked(STATS, lambda: client.get(STATS), anew=news.has_moved or news.has_used),
            events=self._asked("events", lambda: [*client.events(tail=EVENTS)], anew=news.has_moved),
            queue=None,
            gpus=self._asked(GPUS, lambda: self._newer(GPUS), anew=bool(self._answered(GPUS).get("gpus"))),
            pool=self._asked(POOL, lambda: self._newer(POOL), anew=bool(self._answered(POOL).get("enabled"))),
        )

    def _look_at_agents(self, shown: Collection[str] | None) -> News:
        named = [] if shown is None else [*shown][:SHOWN_MAX]
        changes = self._changes("" if shown is None else self._cursor, named)
        before = {} if changes.is_whole else self._views
        after = before | {view.id: view for view in changes.agents}
        for agent in changes.gone:
            after.pop(agent, None)
        is_other = after.keys() != before.keys()
        if is_other:
            after = {view.id: view for view in sorted(after.values(), key=lambda view: view.name)}
        self._views, self._cursor = after, changes.cursor
        if changes.is_whole or is_other:
            return News(has_moved=True, has_used=True)
        return News(
            has_moved=any(_state(before[view.id]) != _state(view) for view in changes.agents),
            has_used=any(before[view.id].requests != view.requests for view in changes.agents),
        )

    def _changes(self, since: str, fresh: Sequence[str]) -> ChangedAgents:
        """Asks as `Client.get` does, in a fifth of its time: with a thousand agents the first answer is a megabyte."""
        found = self.client.lines("/api/agents", silence_s=ANSWER_S, since=since, fresh=",".join(fresh))
        return _decode_changes(b"".join(found))

    def _newer(self, path: str) -> Answer:
        """The answer to a question that not every daemon knows; empty from one that does not."""
        try:
            return self.client.get(path)
        except NotFound:  # an older daemon, for as long as it was not started anew
            return {}

    def _asked(self, what: str, ask: Callable[[], Any], *, anew: bool = False) -> Any:
        """The answer of `ask`: of now where there is reason to ask `anew`, else of SELDOM_S ago at most."""
        _, at = self._kept.get(what, (None, float("-inf")))
        if anew or time.monotonic() - at >= SELDOM_S:
            self._kept[what] = ask(), time.monotonic()
        return self._kept[what][0]

    def _answered(self, what: str) -> Answer:
        """Last time; empty before the first."""
        answer: Answer = self._kept[what][0] if what in self._kept else {}
        return answer


def _state(view: View) -> tuple[str, str, float]:
    return view.status, view.depth, view.since


_decode_changes = msgspec.json.Decoder(ChangedAgents).decode
