"""What all requests on the data path share: who is known, which backend answers, what is held and spent."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Protocol

from hive.domain import BackendInfo, ModelInfo, UsageEvent
from hive.proxy.limits import Budget
from hive.proxy.registry import Registry
from hive.settings import Settings
from hive.wire.deadlines import Deadlines
from hive.wire.upstream import Pool


class UsageLog(Protocol):
    """Where a request's cost goes. Durable against a killed process when it returns; never raises."""

    def record(self, event: UsageEvent) -> None: ...


class DataPath:
    """What all requests share."""

    def __init__(
        self,
        *,
        registry: Registry,
        settings: Settings,
        deadlines: Deadlines,
        usage: UsageLog,
        epoch: str,
        on_activity: Callable[[str], None],
    ) -> None:
        self.registry = registry
        self.settings = settings
        self.deadlines = deadlines
        self.usage = usage
        self.epoch = epoch
        self.on_activity = on_activity
        self.budget = Budget(settings.proxy.body_budget_bytes)
        self.backend: BackendInfo | None = None
        self.models: list[ModelInfo] = []
        self.pool: Pool | None = None
        self.mean_duration_s = 1.0
        self._seq = itertools.count(1)

    def next_id(self) -> str:
        return f"{self.epoch}-{next(self._seq)}"

    def use_backend(self, backend: BackendInfo | None, models: list[ModelInfo]) -> None:
        """The daemon's word on who answers. Requests under way end where they began."""
        self.models = models
        if backend is None or self.backend is None or backend.address != self.backend.address:
            if self.pool is not None:
                self.pool.close()
            proxy = self.settings.proxy
            self.pool = (
                None
                if backend is None
                else Pool(
                    backend.address,
                    connect_s=proxy.connect_s,
                    idle_s=proxy.upstream_idle_s,
                    deadlines=self.deadlines,
                )
            )
        self.backend = backend

    def learn_duration(self, duration_s: float) -> None:
        """Moving average of how long a slot is held, for Retry-After."""
        self.mean_duration_s += 0.1 * (duration_s - self.mean_duration_s)
