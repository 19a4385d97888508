"""Settings that are changed while Hive runs: text by `section.key`, kept in SQLite, told to the proxy. Pure.

Precedence: flag > environment > runtime setting > file > default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from hive.errors import BadRequest, WrongState, did_you_mean
from hive.settings.file import parse
from hive.settings.rows import SettingRow, rows_of
from hive.settings.table import SECTIONS, Settings


def rows() -> dict[str, SettingRow]:
    """Every setting that may be changed at runtime, by `section.key`.

    >>> "proxy.queue_depth" in rows(), "proxy.port" in rows()
    (True, False)
    """
    found = [row for section, struct in SECTIONS.items() for row in rows_of(section, struct).values()]
    return {f"{row.section}.{row.key}": row for row in found if row.at_runtime}


def with_runtime(settings: Settings, values: Mapping[str, str], env: Mapping[str, str]) -> Settings:
    """`settings` (of flags, environment and file) with these values, but where the environment has its own.

    What another version of Hive left there, unknown here or out of bounds, is as if it were not there.

    >>> with_runtime(Settings(), {"proxy.queue_depth": "7", "proxy.gone": "1"}, {}).proxy.queue_depth
    7
    >>> with_runtime(Settings(), {"proxy.queue_depth": "7"}, {"HIVE_PROXY_QUEUE_DEPTH": "3"}).proxy.queue_depth
    64
    """
    known, changes = rows(), dict[str, dict[str, object]]()
    for name, text in values.items():
        row = known.get(name)
        if row is None or variable_of(row, env):
            continue
        try:
            changes.setdefault(row.section, {})[row.key] = parse(row, text)
        except ValueError:
            continue
    sections = {
        section: msgspec.structs.replace(getattr(settings, section), **keys) for section, keys in changes.items()
    }
    return msgspec.structs.replace(settings, **sections)


def variable_of(row: SettingRow, env: Mapping[str, str]) -> str:
    """The variable of the environment that sets it, empty where none does."""
    return next((name for name in reversed(row.variables) if env.get(name)), "")


def checked(changes: Mapping[str, Any], env: Mapping[str, str]) -> dict[str, str | None]:
    """Checks the changes asked for and returns them as text; None takes one back. Raises BadRequest, WrongState.

    >>> checked({"proxy.queue_depth": 7, "inference.token_tracking": False, "sleep.check_s": None}, {})
    {'proxy.queue_depth': '7', 'inference.token_tracking': 'false', 'sleep.check_s': None}
    >>> checked({"proxy.queue_depth": -1}, {})
    Traceback (most recent call last):
    hive.errors.BadRequest: proxy.queue_depth: expected a whole number at least 0, found -1
    """
    known, wrong, texts = rows(), [], dict[str, str | None]()
    hint = ""
    for name, value in changes.items():
        row = known.get(name)
        if row is None:
            wrong.append(_unknown(name))
            hint = hint or did_you_mean(name, known) or "hive config runtime says which may be changed"
            continue
        try:
            texts[name] = None if value is None else _text(row, value)
        except ValueError:
            wrong.append(f"{name}: expected {row.expected}, found {str(value)[:40]}")
    if wrong:
        raise BadRequest("\n".join(wrong), hint=hint)
    for name in texts:
        if variable := variable_of(known[name], env):
            raise WrongState(
                f"{name} is set by {variable} in the environment, which goes before it",
                hint=f"unset {variable} and restart Hive's services, or change it there",
            )
    return texts


def _text(row: SettingRow, value: Any) -> str:
    """The value as hive.conf would have it. Raises ValueError."""
    if isinstance(value, bool) is not (row.kind is bool) and not isinstance(value, str):
        raise ValueError(row.expected)
    if row.kind is str and not isinstance(value, str):
        raise ValueError(row.expected)
    if row.kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    text = str(value).lower() if isinstance(value, bool) else str(value)
    if not text.replace("\t", " ").isprintable():
        raise ValueError(row.expected)
    parse(row, text)
    return text


def _unknown(name: str) -> str:
    section, _, key = name.partition(".")
    if section in SECTIONS and key in rows_of(section, SECTIONS[section]):
        return f"{name} is read at a start: it cannot be changed while Hive runs"
    return f"there is no setting {name[:80]!r}"
