"""Counters of usage and of the cost of sleep, in memory, from SQLite's figures at the start. Pure bookkeeping."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from hive.agents.wake import WakeDurations
from hive.domain import Agent, SleepDepth, UsageEvent, WakeCause
from hive.exposition import Histogram, Values
from hive.shapes.usage import Percentiles, Stats, WakesFrom
from hive.store.usage import CostSums

WAKE_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Buckets of a wake: light sleep ends in milliseconds, deep sleep in a second and more."""


class Used(msgspec.Struct):
    """One agent's totals. `last_active_at` Unix seconds, None where it never was."""

    requests: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    last_active_at: float | None = None


class Counters:
    """Totals of every agent and of all (removed ones too), and what happened since this daemon started."""

    def __init__(self, agents: Iterable[Agent], all_time: CostSums) -> None:
        self._used = {
            agent.id: Used(agent.requests, agent.tokens_in, agent.tokens_out, agent.last_active_at) for agent in agents
        }
        self._requests = all_time.requests
        self._tokens_in = all_time.tokens_in
        self._tokens_out = all_time.tokens_out
        self._work = {
            "audio_s": all_time.audio_ms / 1000,
            "images": float(all_time.images),
            "pixel_steps": float(all_time.pixel_steps),
        }
        self._wakes = WakeDurations()
        self._wake_s = {cause: Histogram(WAKE_SECONDS) for cause in WakeCause}
        self._woken = {(cause, depth): 0 for cause in WakeCause for depth in (SleepDepth.LIGHT, SleepDepth.DEEP)}
        self._wakes_from = {SleepDepth.LIGHT: WakeDurations(), SleepDepth.DEEP: WakeDurations()}
        self._pauses = 0
        self._deep_sleeps = 0
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
            if event.unit in self._work:
                self._work[event.unit] += event.amount or 0.0
                self._work["pixel_steps"] += event.work or 0.0

    def woke(self, cause: WakeCause, took_ms: float, depth: SleepDepth) -> None:
        """`depth`: where it slept."""
        self._wakes.add(cause, took_ms)
        self._wake_s[cause].observe(took_ms / 1000)
        self._woken[cause, depth] = self._woken.get((cause, depth), 0) + 1
        if (times := self._wakes_from.get(depth)) is not None:
            times.add(cause, took_ms)

    def fell_asleep(self) -> None:
        self._pauses += 1

    def fell_deep(self) -> None:
        self._deep_sleeps += 1

    def failed(self) -> None:
        self._errors += 1

    def forget(self, agent: str) -> None:
        self._used.pop(agent, None)

    def answer(self, agents: int) -> Stats:
        """`GET /api/stats`. Requests and tokens of all time; pauses, wakes and errors (ends nobody asked for, failed
        starts) since the daemon started. Wake times are milliseconds from the first ask to the open gate, waiting for
        memory included; `wake_ms_from` has them by the depth the agent slept at."""
        return {
            "agents": agents,
            "requests": self._requests,
            "tokens_in": self._tokens_in,
            "tokens_out": self._tokens_out,
            "pauses": self._pauses,
            "wakes": self._wakes.count,
            "deep_sleeps": self._deep_sleeps,
            "wake_ms": _percentiles(self._wakes),
            "wake_ms_from": {
                "light": _from(self._wakes_from[SleepDepth.LIGHT]),
                "deep": _from(self._wakes_from[SleepDepth.DEEP]),
            },
            "wake_causes": self._wakes.causes,
            "errors": self._errors,
        }

    def metrics(self) -> dict[str, Values | None]:
        """The same for Prometheus (`hive.control.metrics.TABLE`)."""
        return {
            "requests": {(): self._requests},
            "tokens": {("in",): self._tokens_in, ("out",): self._tokens_out},
            "work": {(unit,): amount for unit, amount in self._work.items()},
            "wakes": {(str(cause), str(depth)): count for (cause, depth), count in self._woken.items()},
            "wake_duration_seconds": {(str(cause),): times for cause, times in self._wake_s.items()},
            "pauses": {(): self._pauses},
            "deep_sleeps": {(): self._deep_sleeps},
            "agent_errors": {(): self._errors},
        }


def _from(times: WakeDurations) -> WakesFrom:
    return {**_percentiles(times), "wakes": times.count}


def _percentiles(times: WakeDurations) -> Percentiles:
    return {"p50": times.percentile(50), "p99": times.percentile(99)}
