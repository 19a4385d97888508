"""hive.conf: what is in force and where it comes from."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from hive.cli.call import Answer, Call
from hive.cli.text import table

File = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Instead of /etc/hive/hive.conf.")]
MASK = "****"


def show(
    call: Call,
    config: File = None,
    origin: Annotated[bool, typer.Option("--origin", help="Also say where each value comes from.")] = False,
) -> None:
    """Shows every setting as it is in force here: environment over file over default. Secrets are masked.

    Examples:
      hive config show
      hive config show --origin | grep -v default
      hive config show --json | jq '.settings[] | select(.in_effect | not) | .key'
    """
    from hive.settings_file import load

    loaded = load(config, env=os.environ)
    settings = [*_settings(loaded), *_variables()]
    answer: Answer = {"file": str(loaded.file) if loaded.file else None, "settings": settings}
    call.show("config.show", answer, lambda: _shown(settings, origin=origin))


def check(
    call: Call,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Instead of /etc/hive/hive.conf.")] = None,
) -> None:
    """Checks a file without starting anything, and the environment with it.

    Exit code 2 and one line for each mistake.

    Examples:
      hive config check
      hive config check ./hive.conf
    """
    from hive.settings_file import load

    loaded = load(file, env=os.environ)
    answer = {"file": str(loaded.file) if loaded.file else None, "ok": True}
    call.show("config.check", answer, lambda: f"{loaded.file or 'no file, defaults'}: ok")


def path(call: Call, config: File = None) -> None:
    """Prints which file is read; nothing and exit code 3 where there is none.

    Examples:
      hive config path
    """
    from hive.errors import NotFound
    from hive.settings_file import DEFAULT_FILE

    file = config or DEFAULT_FILE
    if not file.exists():
        raise NotFound(f"there is no {file}; defaults are in force")
    call.show("config.path", {"path": str(file)}, lambda: str(file))


def _settings(loaded: Any) -> list[Answer]:
    from hive.settings import SECTIONS, TenantRow, rows_of
    from hive.settings_file import DEFAULT

    sections = [(name, getattr(loaded.settings, name), rows_of(name, struct)) for name, struct in SECTIONS.items()]
    for tenant, values in loaded.settings.tenants.items():
        sections.append((f"tenant {tenant}", values, rows_of(f"tenant {tenant}", TenantRow)))
    return [
        {
            "section": name,
            "key": row.key,
            "value": getattr(values, row.key),
            "default": row.default,
            "unit": row.unit,
            "origin": str(loaded.origins.get(f"{name}.{row.key}", DEFAULT)),
            "in_effect": row.in_effect,
            "help": row.sentence,
        }
        for name, values, rows in sections
        for row in rows.values()
    ] + [
        {
            "section": f"fields {target}",
            "key": field,
            "value": line,
            "default": "",
            "unit": "",
            "origin": str(loaded.origins.get(f"fields {target}.{field}", DEFAULT)),
            "in_effect": True,
            "help": "What becomes of this field of a request's body.",
        }
        for target, lines in loaded.settings.fields.items()
        for field, line in lines.items()
    ]


def _variables() -> list[Answer]:
    """The environment names that belong to no section; what is set is masked."""
    from hive.settings import VARIABLES

    return [
        {
            "section": "environment",
            "key": variable.name,
            "value": _masked(os.environ[variable.name]) if os.environ.get(variable.name) else "",
            "default": "",
            "unit": "",
            "origin": f"environment {variable.name}" if os.environ.get(variable.name) else "default",
            "in_effect": variable.in_effect,
            "help": variable.sentence,
        }
        for variable in VARIABLES
    ]


def _masked(value: str) -> str:
    """A URL without user, password and query (redis-py takes a password there too), anything else not at all.

    >>> _masked("redis://:open@sesame@redis:6379"), _masked("http://h:3000"), _masked("sesame")
    ('redis://****@redis:6379', 'http://h:3000', '****')
    """
    if "://" not in value:
        return MASK
    return re.sub(r"\?.*", f"?{MASK}", re.sub(r"://.*@", f"://{MASK}@", value))


def _shown(settings: list[Answer], *, origin: bool) -> str:
    rows = []
    for setting in settings:
        value = setting["value"]
        text = str(value).lower() if isinstance(value, bool) else str(value)
        unit = f" {setting['unit']}" if setting["unit"] in ("s", "bytes", "%") else ""
        note = "" if setting["in_effect"] else "not in effect yet"
        row = [f"{setting['section']}.{setting['key']}", text + unit, note]
        rows.append([*row[:2], setting["origin"], note] if origin else row)
    return table(["SETTING", "VALUE", *(["ORIGIN"] if origin else []), ""], rows)
