"""Settings of the running Hive: what is in force there, and changing it without a restart."""

from __future__ import annotations

from typing import Annotated

import typer

from hive.cli.call import Answer, CommandCall
from hive.cli.text import table
from hive.errors import UsageError


def runtime(
    call: CommandCall,
    changes: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="What to change.", show_default=False),
    ] = None,
    unset: Annotated[
        list[str] | None, typer.Option("--unset", metavar="SECTION.KEY", help="Take a change back; again and again.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Also show what is at its default.")] = False,
) -> None:
    """Shows the settings in force in the running Hive, or changes some of them there, at once and until taken back.

    Such a change goes before hive.conf and outlives restarts; the environment goes before it. All of them happen, or
    none. Where Hive listens and what it starts with cannot be changed so: `hive config set` writes hive.conf.

    Examples:
      hive config runtime
      sudo hive config runtime proxy.queue_depth=32 inference.auto_sleep_idle_seconds=60
      sudo hive config runtime --unset proxy.queue_depth
    """
    wanted: dict[str, str | None] = {}
    for name, value in map(_parsed, changes or []):
        if name in wanted:
            raise UsageError(f"{name} cannot be set twice at once", hint="hive config runtime --help")
        wanted[name] = value
    for name in unset or []:
        if name in wanted:
            raise UsageError(f"{name} cannot be set and taken back at once", hint="hive config runtime --help")
        wanted[name] = None
    answer = call.client.put("/api/config", wanted) if wanted else call.client.get("/api/config")
    shown = [
        setting
        for setting in answer["settings"]
        if (setting["name"] in wanted if wanted else every or setting["source"] != "default")
    ]
    call.show("config.runtime", {"settings": shown}, lambda: _shown(shown))


def _parsed(change: str) -> tuple[str, str]:
    name, found, value = change.partition("=")
    if not found or not name.strip():
        raise UsageError(f"{change!r}: expected SECTION.KEY=VALUE", hint="hive config runtime --help")
    return name.strip(), value.strip()


def _shown(settings: list[Answer]) -> str:
    if not settings:
        return "everything is at its default (--all shows it)"
    rows = [
        [setting["name"], _value(setting), f"{setting['source']} {setting['where']}".strip()] for setting in settings
    ]
    return table(["SETTING", "VALUE", "FROM"], rows)


def _value(setting: Answer) -> str:
    value = setting["value"]
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"{text} {setting['unit']}" if setting["unit"] in ("s", "bytes", "%", "MiB") else text
