"""What was used and what sleeping cost, counted in memory from what SQLite had at the start. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from hive.agents.wake import WakeTimes
from hive.domain import Agent, UsageEvent, WakeCause
from hive.store.usage import Cost


class Used(msgspec.Struct):
    """One agent's totals. `last_active_at` Unix seconds, None where it never was."""

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    last_active_at: float | None = None


class Counters:
    """Totals of every agent and of all (removed ones too), and what happened since this daemon started."""

    def __init__(self, agents: Iterable[Agent], all_time: Cost) -> None:
        self._used = {
            agent.id: Used(agent.requests, agent.tokens_in, agent.tokens_out, agent.last_active_at) for agent in agents
        }
        self._requests = all_time.requests
        self._tokens_in = all_time.tokens_in
        self._tokens_out = all_time.tokens_out
        self._wakes = WakeTimes()
        self._pauses = 0
        self._errors = 0

    def used(self, agent: str) -> Used:
        return self._used.get(agent) or Used()

    def add(self, events: Iterable[UsageEvent]) -> None:
        """Rows that were really added."""
        for event in events:
            used = self._used.setdefault(event.agent_id, Used())
            used.requests += 1
            used.tokens_in += event.tokens_in or 0
            used.tokens_out += event.tokens_out or 0
            used.last_active_at = max(used.last_active_at or 0.0, event.created_at)
            self._requests += 1
            self._tokens_in += event.tokens_in or 0
            self._tokens_out += event.tokens_out or 0

    def woke(self, cause: WakeCause, took_ms: float) -> None:
        self._wakes.add(cause, took_ms)

    def fell_asleep(self) -> None:
        self._pauses += 1

    def failed(self) -> None:
        self._errors += 1

    def forget(self, agent: str) -> None:
        self._used.pop(agent, None)

    def answer(self, agents: int) -> dict[str, Any]:
        """`GET /api/stats`. Requests and tokens of all time; pauses, wakes and errors (ends nobody asked for, failed
        starts) since the daemon started."""
        return {
            "agents": agents,
            "requests": self._requests,
            "tokens_in": self._tokens_in,
            "tokens_out": self._tokens_out,
            "pauses": self._pauses,
            "wakes": self._wakes.count,
            "wake_ms": {"p50": self._wakes.percentile(50), "p99": self._wakes.percentile(99)},
            "wake_causes": self._wakes.causes,
            "errors": self._errors,
        }
