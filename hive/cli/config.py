"""hive.conf: what is in force and where it comes from."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer

from hive.cli.call import Answer, CommandCall
from hive.cli.text import table
from hive.errors import HiveError
from hive.terminal_text import MASK

File = Annotated[Path | None, typer.Option("--config", metavar="FILE", help="Instead of /etc/hive/hive.conf.")]
ASKED_S = 2.0
"""A Hive that hangs keeps nobody from the settings of the file."""
DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Only show what would change.")]


def setting_names(incomplete: str) -> list[str]:
    """Completion of SECTION.KEY."""
    from hive.settings.rows import rows_of
    from hive.settings.table import SECTIONS

    names = [f"{section}.{key}" for section, struct in SECTIONS.items() for key in rows_of(section, struct)]
    return [name for name in names if name.startswith(incomplete)]


Setting = Annotated[
    str,
    typer.Argument(metavar="SECTION.KEY", help="Which one.", autocompletion=setting_names, show_default=False),
]


def show(
    call: CommandCall,
    config: File = None,
    origin: Annotated[bool, typer.Option("--origin", help="Also say where each value comes from.")] = False,
) -> None:
    """Shows every setting as the file, this environment and the defaults have it.

    Secrets are masked. What a Hive that runs has in force, with changes made in it: hive config runtime.

    Examples:
      hive config show
      hive config show --origin | grep -v default
      hive config show --json | jq '.settings[] | select(.in_effect | not) | .key'
    """
    from hive.settings.file import load

    loaded = load(config, env=os.environ)
    settings = [*_settings(loaded), *_variables()]
    answer: Answer = {"file": str(loaded.file) if loaded.file else None, "settings": settings}
    call.show("config.show", answer, lambda: _shown(settings, origin=origin))
    if loaded.file is None and not call.as_json:
        _say_if_a_hive_has_others(call)


def _say_if_a_hive_has_others(call: CommandCall) -> None:
    """A `hive up` may have been given a file that this command does not know of."""
    with suppress(HiveError):
        told = call.client.get("/api/config", timeout_s=ASKED_S)["settings"]
        if any(setting["source"] not in ("default", "environment") for setting in told):
            call.say("a Hive runs here with other settings: hive config runtime shows what is in force in it")


def check(
    call: CommandCall,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="Instead of /etc/hive/hive.conf.")] = None,
    config: Annotated[Path | None, typer.Option("--config", metavar="FILE", help="The same, as elsewhere.")] = None,
) -> None:
    """Checks a file without starting anything, and the environment with it.

    Exit code 2 and one line for each mistake. What is right and has no effect is told, too. By root also what the
    services of an installed Hive could not read.

    Examples:
      hive config check
      hive config check ./hive.conf
      hive config check --config ./hive.conf
    """
    from hive.settings.file import DEFAULT_FILE, load

    if file is not None and config is not None and file != config:
        from hive.errors import UsageError

        raise UsageError(f"two files are named, {file} and {config}", hint="one is checked at a time")
    loaded = load(file or config, env=os.environ)
    if loaded.file == DEFAULT_FILE and os.geteuid() == 0:
        from hive.errors import ConfigError
        from hive.files.config_readers import unreadable

        if closed := unreadable(loaded.file):
            raise ConfigError("\n".join(closed))
    from hive.doctor.vain_settings import settings_in_vain
    from hive.files.layout import TARGET, UNITS, Layout

    is_installed = loaded.file == DEFAULT_FILE and Layout().at(f"{UNITS}/{TARGET}").exists()
    vain = settings_in_vain(loaded.settings, loaded.origins, is_installed=is_installed)
    answer = {"file": str(loaded.file) if loaded.file else None, "ok": True, "without_effect": vain}
    call.show("config.check", answer, lambda: "\n".join([f"{loaded.file or 'no file, defaults'}: ok", *vain]))


def path(call: CommandCall, config: File = None) -> None:
    """Prints which file is read; nothing and exit code 3 where there is none.

    Examples:
      hive config path
    """
    from hive.errors import NotFound
    from hive.settings.file import DEFAULT_FILE

    file = config or DEFAULT_FILE
    if not file.exists():
        raise NotFound(f"there is no {file}; defaults are in force")
    call.show("config.path", {"path": str(file)}, lambda: str(file))


def set_(
    call: CommandCall,
    setting: Setting,
    value: Annotated[str, typer.Argument(metavar="VALUE", help="As the file has it.", show_default=False)],
    config: File = None,
    dry_run: DryRun = False,
) -> None:
    """Changes a setting in the file: its line, and no other.

    Comments and order stay. The whole file is checked first, and put in place of the old one at once, with its mode
    and owner. A service reads it at its start; the proxy when it is reloaded, too. The environment goes before it.

    Examples:
      sudo hive config set sleep.deep_after_s 60
      sudo hive config set 'tenant acme.rate_limit' 100/min
      hive config set proxy.queue_depth 32 --config ./hive.conf --dry-run
    """
    from hive.files.conf_edit import set_value
    from hive.settings.file import DEFAULT_FILE

    change = set_value(config or DEFAULT_FILE, setting, value, dry_run=dry_run)
    _show_change(call, "config.set", change, dry_run=dry_run)


def unset(call: CommandCall, setting: Setting, config: File = None, dry_run: DryRun = False) -> None:
    """Takes a setting out of the file: its default is in force again.

    Examples:
      sudo hive config unset sleep.deep_after_s
      hive config unset proxy.queue_depth --config ./hive.conf --dry-run
    """
    from hive.files.conf_edit import unset_value
    from hive.settings.file import DEFAULT_FILE

    change = unset_value(config or DEFAULT_FILE, setting, dry_run=dry_run)
    _show_change(call, "config.unset", change, dry_run=dry_run)


def _show_change(call: CommandCall, schema: str, change: Any, *, dry_run: bool) -> None:
    answer: Answer = {
        "file": str(change.file),
        "setting": str(change.name),
        "before": change.before,
        "after": change.after,
        "changed": change.before != change.after,
        "diff": change.diff,
        "apply": change.apply,
        "dry_run": dry_run,
        "overridden_by": _overridden_by(change.name),
    }
    call.show(schema, answer, lambda: _changed(answer))


def _overridden_by(name: Any) -> str | None:
    """The variable of this environment that goes before the file."""
    from hive.settings.edit import row_of

    row = row_of(name)
    return next((variable for variable in row.variables if os.environ.get(variable)), None) if row is not None else None


def _changed(answer: Answer) -> str:
    from hive.settings.file import DEFAULT_FILE

    if not answer["changed"]:
        return f"{answer['setting']} is so already in {answer['file']}"
    if answer["dry_run"]:
        return str(answer["diff"]).rstrip("\n")
    was = "default" if answer["before"] is None else repr(answer["before"])
    now = "default" if answer["after"] is None else repr(answer["after"])
    said = [f"{answer['setting']}: {was} -> {now} in {answer['file']}"]
    is_installed = answer["file"] == str(DEFAULT_FILE)
    said.append(f"in effect after: {' && '.join(answer['apply']) if is_installed else 'a new start of what reads it'}")
    if answer["overridden_by"]:
        said.append(f"but {answer['overridden_by']} is set in this environment and goes before the file")
    return "\n".join(said)


def _settings(loaded: Any) -> list[Answer]:
    from hive.settings.file import DEFAULT, NAMED
    from hive.settings.rows import rows_of
    from hive.settings.table import SECTIONS

    sections = [(name, getattr(loaded.settings, name), rows_of(name, struct)) for name, struct in SECTIONS.items()]
    for kind, named in (
        ("tenant", loaded.settings.tenants),
        ("model", loaded.settings.models),
        ("task", loaded.settings.tasks),
        ("template", loaded.settings.templates),
    ):
        for name, values in named.items():
            sections.append((f"{kind} {name}", values, rows_of(f"{kind} {name}", NAMED[kind].row)))
    return [
        {
            "section": name,
            "key": row.key,
            "value": getattr(values, row.key),
            "default": row.default,
            "unit": row.unit,
            "origin": str(loaded.origins.get(f"{name}.{row.key}", DEFAULT)),
            "variables": row.variables,
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
            "variables": [],
            "in_effect": True,
            "help": "What becomes of this field of a request's body.",
        }
        for target, lines in loaded.settings.fields.items()
        for field, line in lines.items()
    ]


def _variables() -> list[Answer]:
    """The environment names that belong to no section; what is set is masked."""
    from hive.settings.table import VARIABLES

    return [
        {
            "section": "environment",
            "key": variable.name,
            "value": _masked(os.environ[variable.name]) if os.environ.get(variable.name) else "",
            "default": "",
            "unit": "",
            "origin": f"environment {variable.name}" if os.environ.get(variable.name) else "default",
            "variables": [variable.name],
            "in_effect": variable.in_effect,
            "help": variable.sentence,
        }
        for variable in VARIABLES
    ]


def _masked(value: str) -> str:
    """A URL without user, password and query (clients of Redis take a password there too), anything else not at all.

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
