"""Installing Hive on this box, and taking it away again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Protocol

import typer

from hive.cli.call import Answer, CommandCall
from hive.cli.text import fields
from hive.errors import HiveError

DryRun = Annotated[bool, typer.Option("--dry-run", "-n", help="Only say what would be done.")]
Prefix = Annotated[
    Path,
    typer.Option("--prefix", metavar="DIR", help="The root of an image instead of this system; nothing is started."),
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")]


class StepShown(Protocol):
    """The act of one step, to be done or done (hive.install.install.StepDone)."""

    @property
    def step(self) -> str: ...
    @property
    def changes(self) -> list[str]: ...
    @property
    def notices(self) -> list[str]: ...


def install(call: CommandCall, dry_run: DryRun = False, prefix: Prefix = Path("/"), yes: Yes = False) -> None:
    """Installs this version of Hive as services.

    An installation that was interrupted is finished. It is what install.sh runs once there is an environment below
    /opt/hive/versions. Where an earlier version is installed, that goes on until this one has passed its self-check,
    and comes back where this one does not come up: then the exit code is 6.

    Examples:
      hive install --dry-run
      hive install --yes
    """
    from hive.files.backup_contents import installed
    from hive.files.layout import Layout
    from hive.files.offline_audit import noted
    from hive.install.install import install as do
    from hive.install.install import next_version, open_box, plan

    place = Layout(prefix.resolve())
    box = open_box(place, say=call.say, otherwise=next_version if dry_run else None)
    planned = plan(box)
    if dry_run:
        return _show(call, "install", planned, version=box.version, dry_run=True)
    if not yes:
        call.say(_text(planned) or "nothing is left to do")
    call.confirm(f"Install Hive {box.version} into {place.root}?", yes=yes)
    with noted(installed(place).database, "install", version=box.version):
        done = do(box)
    _show(call, "install", done, version=box.version, dry_run=False)
    if place.live and not call.as_json:
        _show_status(call)
    return None


def uninstall(
    call: CommandCall,
    purge: Annotated[bool, typer.Option("--purge", help="Configuration, secrets and state, too.")] = False,
    dry_run: DryRun = False,
    prefix: Prefix = Path("/"),
    yes: Yes = False,
) -> None:
    """Removes the installed Hive.

    Its services, users and files go. Every agent is stopped. Configuration, secrets and state stay, unless --purge
    says otherwise: then agents are removed as well, and nothing is left of what was installed.

    Examples:
      hive uninstall --dry-run
      hive uninstall --purge --yes
    """
    from hive.files.backup_contents import installed
    from hive.files.layout import Layout
    from hive.files.offline_audit import noted
    from hive.install.install import current_version, open_box, plan_removal, refuse_nothing
    from hive.install.install import uninstall as do

    place = Layout(prefix.resolve())
    box = open_box(place, say=call.say, otherwise=current_version)
    refuse_nothing(box, purge=purge)
    planned = plan_removal(box, purge=purge)
    if dry_run:
        return _show(call, "uninstall", planned, version=box.version, dry_run=True)
    lost = " with its configuration, its secrets and everything the agents have" if purge else ""
    call.confirm(f"Remove Hive from {place.root}{lost}?", yes=yes)
    with noted(installed(place).database, "uninstall", version=box.version, purge=purge):
        done = do(box, purge=purge)
    _show(call, "uninstall", done, version=box.version, dry_run=False)
    return None


def _show(call: CommandCall, command: str, done: Sequence[StepShown], *, version: str, dry_run: bool) -> None:
    steps = [{"step": one.step, "changes": one.changes, "notices": one.notices} for one in done]
    answer: Answer = {"hive": version, "dry_run": dry_run, "steps": steps}
    if dry_run or call.as_json:
        call.show(command, answer, lambda: _text(done) or "nothing is left to do")


def _text(done: Sequence[StepShown]) -> str:
    """A line for each change, under the name of its step."""
    lines = []
    for one in done:
        if one.changes or one.notices:
            lines.append(one.step)
            lines.extend(f"    {line}" for line in one.changes)
            lines.extend(f"    note: {line}" for line in one.notices)
    return "\n".join(lines)


def _show_status(call: CommandCall) -> None:
    """The new Hive's own, whatever HIVE_SOCKET names."""
    from hive.cli.status import status
    from hive.install.running import API

    call.socket = API
    try:
        status(call)
    except HiveError as error:
        call.say(fields([("status", error.message)]))
