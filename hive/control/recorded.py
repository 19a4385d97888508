"""The state that an earlier daemon left in SQLite, read at once when the next one opens it."""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from hive.backends.switch import Target
from hive.control import cloud
from hive.control.runtime_config import read_values
from hive.control.switching import read_chosen
from hive.domain import Agent
from hive.store import (
    adapters,
    agents,
    cache_epochs,
    deployments,
    jobs,
    leases,
    load_tasks,
    messages,
    pool,
    runtime_settings,
    schedules,
    usage,
)
from hive.store.adapters import StoredAdapter
from hive.store.deployments import StoredDeployment
from hive.store.jobs import StoredJob
from hive.store.leases import StoredLease
from hive.store.load_tasks import StoredLoad
from hive.store.schedules import StoredSchedule

PROXY_PORT = "proxy.port"
"""Runtime setting: the port of the proxy that living agents have in their environment."""


class RecordedState(NamedTuple):
    """State of an earlier daemon. `footprints`: of models, by key; `pins`: what operators pinned or unpinned, by
    model; `epochs`: of what was flushed. `is_first_start`: no Hive that knows `[inference] cloud` has run on it."""

    agents: list[Agent]
    used: usage.CostSums
    proxy_port: int | None
    with_messages: list[str]
    schedules: list[StoredSchedule]
    chosen: Target | None
    jobs: list[StoredJob]
    runtime_settings: dict[str, str]
    footprints: dict[str, str]
    pins: dict[str, bool]
    leases: list[StoredLease]
    deployments: list[StoredDeployment]
    deployed_adapters: list[StoredDeployment]
    loads: list[StoredLoad]
    is_first_start: bool
    epochs: list[cache_epochs.RaisedEpoch]
    adapters: list[StoredAdapter]


def read_recorded(conn: sqlite3.Connection, run: str) -> RecordedState:
    """`run`: the `hive up` that this daemon is a part of, empty for a service."""
    port = runtime_settings.get(conn, PROXY_PORT)
    used = usage.used_in_all(conn)
    return RecordedState(
        agents.all(conn),
        used,
        int(port) if port is not None else None,
        list(messages.waiting(conn)),
        schedules.all(conn),
        read_chosen(conn, run),
        jobs.running(conn),
        read_values(conn),
        pool.footprints(conn),
        {model: pinned for model, (pinned, _) in pool.pins(conn).items()},
        leases.living(conn),
        deployments.living(conn),
        deployments.living(conn, deployments.ADAPTER),
        load_tasks.under_way(conn),
        not cloud.is_seeded(conn),
        cache_epochs.epochs(conn),
        adapters.loaded(conn),
    )
