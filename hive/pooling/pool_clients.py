"""The clients of each model of the pool: who has asked it, who waits for it, who is busy there. No I/O.

Kept from what the proxy tells: each ended request once (its usage), and each second who is in flight and who waits. The
requests make the model's habits (pool/audience.py: its rate, and whether its clients return soon), the rest says where
a client is now. All times are of the caller's monotonic clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import msgspec

from hive.domain import Band, UsageEvent
from hive.link.pool import SlotDemands, SlotFlows
from hive.pool.audience import Interest, LastModel, audience_of
from hive.pool.state import Audience
from hive.settings.table import Settings

NAMELESS = frozenset(("", "operator"))
"""Ids that the proxy gives callers who are no agent: they are one client together."""
FORGET = 10
"""An agent is forgotten after so many times `[pool] audience_s` without a request; it has not returned soon then."""
MOST_MODELS = 1024
"""Models of which habits are kept: names of others than the pool's come from requests too."""
REFUSED = 400
"""A request with this status or a higher one was none of the model's."""


class _Client(msgspec.Struct):
    """One agent. `model`, `used_at`: where it was seen last, in flight or waiting, and its last answer there;
    `asked`, `ended_at`: the model of its last ended request, empty before the first."""

    model: str
    used_at: float
    asked: str = ""
    ended_at: float = 0.0


class PoolClients:
    """One for the daemon; to be told of everything in the order it comes in."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        is_awake: Callable[[str], bool] = lambda agent: True,  # noqa: ARG005 - where nobody sleeps
        between_turns: Callable[[], Iterable[tuple[str, str]]] = tuple,
    ) -> None:
        """`is_awake`: whether the processes of the agent of this id run. `between_turns`: (client, model) of each model
        job whose tools are at work: it asks the model again with their results."""
        self._settings = settings
        self._is_awake = is_awake
        self._between_turns = between_turns
        self._clients: dict[str, _Client] = {}
        self._last_at: dict[str, set[str]] = {}
        """Model → the agents seen there last."""
        self._interest: dict[str, Interest] = {}
        self._bands: dict[str, Band] = {}
        self._used_at: dict[str, float] = {}
        self._in_flight: dict[str, set[str]] = {}
        self._waiting: dict[str, set[str]] = {}
        self._busy_at: dict[str, set[str]] = {}
        """Agent → the models where it is in flight or waits."""
        self._pruned_at = 0.0

    def __repr__(self) -> str:
        return f"<PoolClients {len(self._clients)} agents, {len(self._interest)} models>"

    # what is told ---------------------------------------------------------------------------------------------------

    def used(self, events: Iterable[UsageEvent], now: float, wall: float | None = None) -> None:
        """Requests that ended, each told once. `wall`: Unix time now; without it they have ended now."""
        for event in events:
            if not event.model or event.status >= REFUSED:
                continue
            ended = now if wall is None else now - max(0.0, wall - event.created_at)
            began = ended - max(0.0, event.duration_ms) / 1e3
            if event.agent_id in NAMELESS:
                self._asked_by_caller(event.model, began)
            else:
                self._asked_by_agent(event.agent_id, event.model, began, ended)
            self._used_at[event.model] = max(ended, self._used_at.get(event.model, 0.0))
        self._prune(now)

    def flows(self, flows: SlotFlows, model_of: Mapping[str, str], now: float) -> None:
        """Requests in flight now, at every slot there is; `model_of`: slot id → model."""
        in_flight: dict[str, set[str]] = {}
        for slot, flow in flows.slots.items():
            model = model_of.get(slot)
            if model is None:
                continue
            if flow.in_flight or flow.begun:
                self._used_at[model] = now
            if flow.begun:
                self._bands[model] = flow.band
            in_flight.setdefault(model, set()).update(agent for agent in flow.agents if agent not in NAMELESS)
        before, self._in_flight = self._in_flight, in_flight
        for model in before.keys() | in_flight.keys():
            for agent in before.get(model, set()) | in_flight.get(model, set()):
                self._seen(agent, model, now)
        self._note_busy()
        self._prune(now)

    def waiting(self, demands: SlotDemands, model_of: Mapping[str, str], now: float) -> None:
        """Requests that wait now, at every slot for which one does."""
        self._waiting = {}
        for slot, demand in demands.slots.items():
            model = model_of.get(slot)
            agents = {one.agent for one in demand.waiting} - NAMELESS
            if model is None or not agents:
                continue
            self._waiting.setdefault(model, set()).update(agents)
            for agent in agents:
                self._seen(agent, model, now)
        self._note_busy()

    def link_lost(self) -> None:
        """Nothing is known of who is in flight or waits, until the proxy tells it again."""
        self._in_flight, self._waiting = {}, {}
        self._note_busy()

    def gone(self, agent: str) -> None:
        """The agent was removed."""
        self._forget(agent)
        for agents in (*self._in_flight.values(), *self._waiting.values()):
            agents.discard(agent)
        self._note_busy()

    # what is asked --------------------------------------------------------------------------------------------------

    def audience(self, model: str, now: float) -> Audience:
        """The clients that will probably ask the model again soon."""
        jobs = {client for client, asked in self._between_turns() if asked == model}
        here = (self._in_flight.get(model, set()) | self._waiting.get(model, set())) - jobs
        uses = [LastModel(client, model, now, is_here=True) for client in jobs]
        uses += [LastModel(agent, model, now, is_here=True, is_awake=self._is_awake(agent)) for agent in here]
        for agent in self._last_at.get(model, set()) - here - jobs:
            used_at, is_elsewhere = self._clients[agent].used_at, agent in self._busy_at
            awake = not is_elsewhere and self._is_awake(agent)
            uses.append(LastModel(agent, model, used_at, is_elsewhere=is_elsewhere, is_awake=awake))
        interest = self._interest.get(model, Interest())
        return audience_of(model, uses, interest, now, self._settings().pool.audience_s)

    def band(self, model: str) -> Band:
        """The band of its newest request; the normal one before the first."""
        return self._bands.get(model, Band.NORMAL)

    def used_at(self, model: str) -> float:
        """The last time a request of it was in flight; 0 if none was."""
        return self._used_at.get(model, 0.0)

    # the books ------------------------------------------------------------------------------------------------------

    def _asked_by_caller(self, model: str, began: float) -> None:
        interest = self._interest_in(model)
        at = max(began, interest.rate.at)  # they are told as they end, and need not have begun in that order
        self._interest[model] = interest.after_caller(at, self._settings().pool.audience_s)

    def _asked_by_agent(self, agent: str, model: str, began: float, ended: float) -> None:
        interest = self._interest_in(model)
        self._interest[model] = interest.after_agent(max(began, interest.rate.at))
        last = self._clients.get(agent)
        if last is not None and last.asked:
            soon = last.asked == model and began - last.ended_at <= self._settings().pool.audience_s
            self._interest[last.asked] = self._interest_in(last.asked).left_by_agent(soon_again=soon)
        self._seen(agent, model, ended)
        client = self._clients[agent]
        client.asked, client.ended_at = model, ended

    def _interest_in(self, model: str) -> Interest:
        """The model's habits, with room for one more model."""
        if model not in self._interest and len(self._interest) >= MOST_MODELS:
            oldest = min(self._interest, key=lambda name: self._interest[name].rate.at)
            del self._interest[oldest]
            self._bands.pop(oldest, None)
            self._used_at.pop(oldest, None)
        return self._interest.setdefault(model, Interest())

    def _seen(self, agent: str, model: str, at: float) -> None:
        """The agent was there at this time; an answer that is told late does not take it back from where it went."""
        client = self._clients.get(agent)
        if client is None:
            self._clients[agent] = _Client(model, at)
        elif at < client.used_at:
            return
        else:
            if client.model != model:
                self._leave(agent, client.model)
            client.model, client.used_at = model, at
        self._last_at.setdefault(model, set()).add(agent)

    def _leave(self, agent: str, model: str) -> None:
        agents = self._last_at[model]
        agents.discard(agent)
        if not agents:
            del self._last_at[model]

    def _forget(self, agent: str) -> None:
        client = self._clients.pop(agent, None)
        if client is not None:
            self._leave(agent, client.model)

    def _note_busy(self) -> None:
        self._busy_at = {}
        for place in (self._in_flight, self._waiting):
            for model, agents in place.items():
                for agent in agents:
                    self._busy_at.setdefault(agent, set()).add(model)

    def _prune(self, now: float) -> None:
        audience_s = self._settings().pool.audience_s
        if now - self._pruned_at < audience_s:
            return
        self._pruned_at = now
        last = now - FORGET * audience_s
        for agent, one in list(self._clients.items()):
            if one.used_at < last and agent not in self._busy_at:
                if one.asked in self._interest:
                    self._interest[one.asked] = self._interest[one.asked].left_by_agent(soon_again=False)
                self._forget(agent)
