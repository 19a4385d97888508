"""The models in a stand-in's memory, loaded and unloaded as Ollama does it (server/sched.go of 2026-08).

A model keeps the `keep_alive` of its load until a request says another one. One is loaded at a time, and `/api/ps`
waits for it. What does not fit, or is one too many, has an idle one unloaded first: by keep_alive, then by name. Other
options (`num_ctx`) load it anew, with Ollama's own time where the request says none.
"""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime
from typing import Any

FOR_EVER_S = 292 * 365.25 * 86400
"""Of a negative `keep_alive`: the largest duration in Go."""
UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0}
OOM = "llama-server process has terminated: exit status 1: cudaMalloc failed: out of memory"


def seconds(keep_alive: Any, default: float) -> float:
    """
    >>> [seconds(told, 300.0) for told in (None, 0, 90, "10m", "0")], seconds(-1, 300.0) == seconds("-1m", 300.0)
    ([300.0, 0.0, 90.0, 600.0, 0.0], True)
    """
    if keep_alive is None:
        return default
    if isinstance(keep_alive, str):
        unit = next((unit for unit in UNITS if keep_alive.endswith(unit)), "")
        told = float(keep_alive.removesuffix(unit)) * UNITS.get(unit, 1.0)
    else:
        told = float(keep_alive)
    return FOR_EVER_S if told < 0 else told


class Runner:
    def __init__(self, name: str, size: int, keep_s: float, num_ctx: int) -> None:
        self.name = name
        self.size = size
        self.keep_s = keep_s
        self.num_ctx = num_ctx
        self.requests = 0
        self.expires_at = time.time() + keep_s

    def is_idle(self) -> bool:
        return self.requests == 0


class Runners:
    """`memory`: bytes for all of them, 0 for any number; `most`: models at once, 0 for any number."""

    def __init__(self, *, memory: int, most: int, load_s: float, keep_s: float) -> None:
        self.memory = memory
        self.most = most
        self.load_s = load_s
        self.keep_s = keep_s
        self.held: dict[str, Runner] = {}
        self.loads: list[str] = []
        """Each load that was done, in their order."""
        self._one_load = threading.Lock()
        self._changed = threading.Condition()

    def listed(self) -> list[Runner]:
        """Those in memory; it waits for a load that is under way."""
        with self._one_load, self._changed:
            self._expire()
            return list(self.held.values())

    def begin(self, name: str, size: int, keep_alive: Any, num_ctx: int) -> str:
        """A request for this model begins; the error where it cannot be loaded."""
        with self._changed:
            self._expire()
            if self._use(name, keep_alive, num_ctx):
                return ""
        with self._one_load:
            with self._changed:
                if self._use(name, keep_alive, num_ctx):
                    return ""
                self.held.pop(name, None)
                if self.memory and size > self.memory:
                    return OOM
                while self._lacks(size):
                    self._unload_one()
            time.sleep(self.load_s)
            with self._changed:
                self.loads.append(name)
                runner = self.held[name] = Runner(name, size, seconds(keep_alive, self.keep_s), num_ctx)
                runner.requests = 1
        return ""

    def _use(self, name: str, keep_alive: Any, num_ctx: int) -> bool:
        runner = self.held.get(name)
        if runner is None or runner.num_ctx != num_ctx:
            return False
        runner.requests += 1
        if keep_alive is not None:
            runner.keep_s = seconds(keep_alive, self.keep_s)
        return True

    def end(self, name: str) -> None:
        """A request for it has ended."""
        with self._changed:
            if (runner := self.held.get(name)) is not None:
                runner.requests = max(0, runner.requests - 1)
                runner.expires_at = time.time() + runner.keep_s
                self._expire()
            self._changed.notify_all()

    def expire(self, name: str) -> None:
        """Has it unloaded once its requests have ended."""
        with self._changed:
            if (runner := self.held.get(name)) is not None:
                runner.keep_s, runner.expires_at = 0.0, time.time()
                self._expire()

    def _expire(self) -> None:
        now = time.time()
        for runner in [one for one in self.held.values() if one.is_idle() and one.expires_at <= now]:
            del self.held[runner.name]

    def _lacks(self, size: int) -> bool:
        used = sum(runner.size for runner in self.held.values())
        return bool(
            (self.most and len(self.held) >= self.most) or (self.memory and self.held and used + size > self.memory)
        )

    def _unload_one(self) -> None:
        self._expire()
        by_time = sorted(self.held.values(), key=lambda runner: (runner.keep_s, runner.name))
        idle = [runner for runner in by_time if runner.is_idle()]
        if idle:
            del self.held[idle[0].name]
            return
        if by_time:
            by_time[0].keep_s = by_time[0].expires_at = 0.0
            self._changed.wait(0.05)


def rfc3339(at: float) -> str:
    """Unix seconds as Go writes them, further than 9999 as far as it goes."""
    return datetime.fromtimestamp(min(at, 253_000_000_000), UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z")
