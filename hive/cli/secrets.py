"""The secrets of the installed Hive: what there is and since when, never a value."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from hive.cli.call import Answer, CommandCall, Prefix
from hive.cli.terminal import fitted
from hive.cli.text import ago


def generate(call: CommandCall, prefix: Prefix = Path("/")) -> None:
    """Makes the secrets that are missing; those that are there stay.

    hive-first-boot.service does it at every boot. It also finishes a rotation that was cut short.

    Examples:
      hive secrets generate
    """
    from hive.files.layout import Layout
    from hive.files.secrets import generate as do

    made = do(Layout(prefix.resolve()))
    call.show("secrets.generate", {"made": made}, lambda: "\n".join(f"made {name}" for name in made) or "all are there")


def list_secrets(call: CommandCall, prefix: Prefix = Path("/")) -> None:
    """Lists the secrets: how old each is and what reads it. Values are never shown.

    Examples:
      hive secrets list
      hive secrets list --json | jq -r '.secrets[] | select(.problem != "") | .name'
    """
    from hive.files.layout import Layout
    from hive.files.secrets import listed

    found = listed(Layout(prefix.resolve()))
    now = time.time()
    secrets: list[Answer] = [
        {
            "name": one.secret.name,
            "changed_at": one.changed_at,
            "readers": list(one.secret.readers),
            "help": one.secret.sentence,
            "problem": one.problem,
        }
        for one in found
    ]
    rows = [
        [one.secret.name, one.problem or ago(one.changed_at, now), ", ".join(one.secret.readers), one.secret.sentence]
        for one in found
    ]
    call.show("secrets.list", {"secrets": secrets}, lambda: _listed(rows))


def _listed(rows: list[list[str]]) -> str:
    return fitted(["NAME", "CHANGED", "READ BY", "WHAT"], rows, drop=("READ BY",), prose="WHAT")


def secret_names(incomplete: str) -> list[str]:
    """Completion of a secret's name."""
    from hive.files.secrets import SECRETS

    return [name for name in SECRETS if name.startswith(incomplete)]


def rotate(
    call: CommandCall,
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Which one.", autocompletion=secret_names, show_default=False)
    ],
    prefix: Prefix = Path("/"),
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Puts a new secret in place of an old one and restarts what reads it.

    It asks first: what reads the secret answers nobody while it is restarted, and agents' requests wait.

    Examples:
      hive secrets rotate redis-daemon
      hive secrets rotate box-key --yes
    """
    from hive.files.layout import Layout
    from hive.files.secrets import rotate as do
    from hive.files.secrets import what_it_takes

    place = Layout(prefix.resolve())
    if takes := what_it_takes(place, name):
        call.confirm(f"{takes}. Change {name}?", yes=yes)
    restarted = do(place, name)
    call.show(
        "secrets.rotate",
        {"name": name, "restarted": restarted},
        lambda: f"{name} is changed; restarted: {', '.join(restarted) or 'nothing'}",
    )
