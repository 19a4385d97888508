"""Keeping what a Hive knows, and putting it back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hive.cli.call import Answer, CommandCall, Prefix, StateDir
from hive.cli.text import harmless, size
from hive.errors import UsageError


def backup(
    call: CommandCall,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="What is written, a tar.", show_default=False)],
    with_secrets: Annotated[bool, typer.Option("--with-secrets", help="Also keys, tokens and passwords.")] = False,
    with_responses: Annotated[
        bool, typer.Option("--with-responses", help="Also the responses that agents had kept.")
    ] = False,
    state_dir: StateDir = None,
    prefix: Prefix = Path("/"),
) -> None:
    """Writes what a Hive knows into one file: its database and its configuration. It may run meanwhile.

    The file is its user's alone (0600). Without --with-secrets agents get other tokens where it is restored on another
    box. Responses that agents had kept are prompts and answers: they are in it with --with-responses only. Homes of
    agents, images and models are not in it.

    Examples:
      sudo hive backup /srv/hive-2026-11-20.tar
      hive backup --state-dir /srv/hive ./hive.tar --with-secrets
    """
    from hive.backup.backup import backup as do

    place = _place(state_dir, prefix)
    manifest = do(place, file.absolute(), with_secrets=with_secrets, with_responses=with_responses)
    answer: Answer = {
        "file": str(file),
        "kind": manifest.kind,
        "source": manifest.source,
        "schema_version": manifest.schema,
        "secrets": manifest.secrets,
        "files": [{"name": one.name, "bytes": one.bytes, "sha256": one.sha256} for one in manifest.files],
    }
    lines = [f"{one.name} ({size(one.bytes)})" for one in manifest.files]
    secrets = "" if manifest.secrets else "; without secrets"
    call.show("backup", answer, lambda: harmless(f"{file}: {', '.join(lines)} of {manifest.source}{secrets}"))


def restore(
    call: CommandCall,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="A backup.", show_default=False)] = None,
    finish: Annotated[bool, typer.Option("--finish", help="Bring one that was cut short to its end.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Only check it and say what would change.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    state_dir: StateDir = None,
    prefix: Prefix = Path("/"),
) -> None:
    """Puts a backup in place of what is there. Hive must not run on it.

    Everything is checked before anything is touched. What was there stays beside it, as NAME.before-restore-TIME. One
    that was cut short, by a power cut too, leaves the old state or says that it has to be finished.

    Examples:
      sudo systemctl stop hive.target && sudo hive restore /srv/hive-2026-11-20.tar
      hive restore ./hive.tar --state-dir /srv/hive --dry-run
    """
    from hive.backup import restore as restoring

    if (file is None) != finish:
        raise UsageError("a FILE or --finish, one of them", hint="hive restore --help")
    place = _place(state_dir, prefix)
    if dry_run and file is not None:
        return _show(call, restoring.look(place, file.absolute()), place, dry_run=True)
    if file is not None:
        if not yes:
            restoring.look(place, file.absolute())  # nobody is asked about what cannot be done
        call.confirm(f"Replace what is in {place.paths.state} by {file}?", yes=yes)
    done = restoring.restore(place, None if file is None else file.absolute())
    return _show(call, done, place, dry_run=False)


def _place(state_dir: Path | None, prefix: Path) -> Any:
    from hive.files.backup_contents import place_of

    return place_of(state_dir=state_dir, prefix=prefix.resolve(), uid=os.geteuid(), env=os.environ)


def _show(call: CommandCall, done: Any, place: Any, *, dry_run: bool) -> None:
    answer: Answer = {
        "dry_run": dry_run,
        "made_at": None if done.manifest is None else done.manifest.made_at,
        "replaced": {name: str(path) for name, path in done.replaced.items()},
        "kept": [str(path) for path in done.kept],
        "left_out": done.left_out,
        "finished": [str(path) for path in done.finished],
    }
    call.show("restore", answer, lambda: harmless(_said(done, place, dry_run=dry_run)))


def _said(done: Any, place: Any, *, dry_run: bool) -> str:
    said = [f"finished what was cut short: {path}" for path in done.finished]
    if done.manifest is None:
        return "\n".join(said) or "nothing was cut short"
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(done.manifest.made_at))
    said.append(f"{'would be' if dry_run else 'is'} as it was at {moment}, of {done.manifest.source}:")
    said += [f"    {path}" for path in done.replaced.values()]
    said += [f"    kept: {path}" for path in done.kept]
    said += [f"    left out, has no place here: {name}" for name in done.left_out]
    if not dry_run:
        said.append("start it: systemctl start hive.target" if place.layout is not None else "start it: hive up")
    return "\n".join(said)
