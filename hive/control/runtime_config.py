"""The settings in force, and changing them while Hive runs: recorded, taken over here, told to the proxy and Redis."""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from hive.control.effects import DaemonEffects
from hive.link.messages import RuntimeSettings
from hive.link.proxy_link import ProxyGates
from hive.settings.file import DEFAULT, SettingOrigin
from hive.settings.rows import SettingRow, rows_of
from hive.settings.runtime import checked, variable_of, with_runtime
from hive.settings.table import SECTIONS, Settings
from hive.shapes.system import Setting
from hive.store import runtime_settings
from hive.store.database import Database
from hive.store.live import Live

READ_AGAIN = ("tenants", "tasks", "budget")
"""Sections of hive.conf that the daemon takes over on SIGHUP: the proxy does too, and the daemon tells of them."""
PREFIX = "setting "
"""Of its keys among the runtime settings: others keep what Hive has learned."""


def read_values(conn: sqlite3.Connection) -> dict[str, str]:
    """The settings that were changed at runtime and recorded: text by `section.key`."""
    return runtime_settings.below(conn, PREFIX)


class RuntimeConfig:
    """`configured`: by flags, environment and file, with where each value comes from; `values`: set at runtime."""

    def __init__(
        self,
        configured: Settings,
        origins: Mapping[str, SettingOrigin],
        values: Mapping[str, str],
        *,
        database: Database,
        effects: DaemonEffects,
        proxy_link: ProxyGates,
        live: Live,
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_change = on_change
        self._configured = configured
        self._origins = origins
        self.values = dict(values)
        self._database = database
        self._effects = effects
        self._proxy_link = proxy_link
        self._live = live
        self._take_over()

    def __repr__(self) -> str:
        return f"<RuntimeConfig {self.values}>"

    def view(self) -> list[Setting]:
        """Every setting of every section, as it is in force here."""
        return [
            _view(row, getattr(getattr(self._effects.settings, section), row.key), self._origin(row))
            for section, struct in SECTIONS.items()
            for row in rows_of(section, struct).values()
        ]

    async def change(self, changes: Mapping[str, Any], actor: str) -> None:
        """All of them or none; None takes one back. Raises BadRequest, WrongState, StoreFull."""
        texts, now = checked(changes, os.environ), time.time()

        def work(conn: sqlite3.Connection) -> None:
            for name, text in texts.items():
                if text is None:
                    runtime_settings.drop(conn, PREFIX + name)
                else:
                    runtime_settings.put(conn, PREFIX + name, text, actor=actor, now=now)

        await self._database.write(work)
        for name, text in texts.items():
            if text is None:
                self.values.pop(name, None)
            else:
                self.values[name] = text
        self._take_over()
        self._proxy_link.say(RuntimeSettings(values=self.values))
        self.say_to_redis()
        self._on_change()

    def read_again(self, settings: Settings, origins: Mapping[str, SettingOrigin]) -> list[str]:
        """Takes over what hive.conf says now of tenants, tasks and budgets; returns the sections that have changed. All
        else waits for the daemon's restart."""
        found = {section: getattr(settings, section) for section in READ_AGAIN}
        changed = [section for section, value in found.items() if value != getattr(self._configured, section)]
        self._configured = msgspec.structs.replace(self._configured, **found)
        kept = {name: origin for name, origin in self._origins.items() if not name.startswith("budget.")}
        self._origins = {**kept, **{name: where for name, where in origins.items() if name.startswith("budget.")}}
        self._take_over()
        self._on_change()
        return changed

    def say_to_redis(self) -> None:
        self._live.set_config(self.values)

    def _take_over(self) -> None:
        self._effects.settings = with_runtime(self._configured, self.values, os.environ)

    def _origin(self, row: SettingRow) -> SettingOrigin:
        name = f"{row.section}.{row.key}"
        if name in self.values and row.at_runtime and not variable_of(row, os.environ):
            return SettingOrigin("runtime")
        return self._origins.get(name, DEFAULT)


def _view(row: SettingRow, value: Any, origin: SettingOrigin) -> Setting:
    return {
        "name": f"{row.section}.{row.key}",
        "value": value,
        "default": row.default,
        "unit": row.unit,
        "source": origin.source,
        "where": origin.where,
        "at_runtime": row.at_runtime,
        "expected": row.expected,
        "sentence": row.sentence,
    }
