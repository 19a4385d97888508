"""An agent's description in the editor of the person at the keyboard."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from hive.agents.spec import check_toml, to_toml
from hive.budgets import BudgetKind
from hive.cli.agents.spec import (
    CPUS,
    DEEPEST,
    IDLE,
    MEMORY,
    MODEL,
    PIDS,
    PORT,
    RESTART,
    START_S,
    TENANT,
    TIER,
    mebibytes,
    of_view,
    plain,
    plan_text,
    read_toml,
)
from hive.cli.call import AgentName, Answer, CommandCall, is_agreed, report
from hive.client.client import path_of
from hive.domain import AgentSpec, CloudUse, RestartPolicy, SleepDepth, Tier
from hive.errors import BadRequest, HiveError, NotConfirmed, UsageError, WrongState

STDERR = 2
EDITORS = ("sensible-editor", "editor", "nano", "vi")
"""Taken where neither VISUAL nor EDITOR names one: the first that is installed."""


def edit(
    call: CommandCall,
    name: AgentName,
    idle: Annotated[float | None, IDLE] = None,
    deepest: Annotated[SleepDepth | None, DEEPEST] = None,
    model: Annotated[str | None, MODEL] = None,
    tier: Annotated[Tier | None, TIER] = None,
    tenant: Annotated[str | None, TENANT] = None,
    restart: Annotated[RestartPolicy | None, RESTART] = None,
    autostart: Annotated[bool | None, typer.Option(help="Started when the host boots, too.")] = None,
    port: Annotated[int | None, PORT] = None,
    memory: Annotated[str | None, MEMORY] = None,
    cpus: Annotated[float | None, CPUS] = None,
    pids: Annotated[int | None, PIDS] = None,
    cloud: Annotated[CloudUse | None, typer.Option(help="Narrows how far its requests may go.")] = None,
    tokens_per_day: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="At most so many tokens a day; 0 takes the limit away.")
    ] = None,
    tokens_per_month: Annotated[int | None, typer.Option(metavar="N", min=0, help="The same for a month.")] = None,
    cloud_tokens_per_day: Annotated[
        int | None, typer.Option(metavar="N", min=0, help="The same of requests that leave the box.")
    ] = None,
) -> None:
    """Opens an agent's description in an editor and applies what was saved; says what that means.

    The editor is VISUAL's or EDITOR's. A description that is refused is opened again, or kept and its place told.
    What its process is started with changes with its next start, all else at once. With a flag no editor is opened:
    that alone is changed. What no flag is for, a script changes with `hive agent export` and `hive agent apply`.

    Examples:
      hive agent edit alice
      hive agent edit alice --idle 3 --memory 512m
      EDITOR="code --wait" hive agent edit alice
      hive agent edit alice --cloud never --tokens-per-day 200000
    """
    with call.about(name):
        before = of_view(call.client.get(path_of(name)))
    limits = zip(BudgetKind, (tokens_per_day, tokens_per_month, cloud_tokens_per_day), strict=True)
    said: dict[str, object] = {str(kind): limit or None for kind, limit in limits if limit is not None}
    flags = {
        "idle_s": idle,
        "deepest": deepest,
        "model": model,
        "tier": tier,
        "tenant": tenant,
        "restart": restart,
        "autostart": autostart,
        "port": port,
        "cloud": cloud,
    }
    said |= {field: value for field, value in flags.items() if value is not None}
    bounds = {"memory_mb": None if memory is None else mebibytes(memory), "cpu": cpus, "pids": pids}
    if within := {field: value for field, value in bounds.items() if value is not None}:
        said["limits"] = {**plain(before)["limits"], **within}
    if said:
        after = {**plain(before), **said}
        answer = call.client.put(path_of(before.name), after, timeout_s=START_S, dry_run=0)
        call.show("agent.edit", answer, lambda: plan_text(before.name, answer))
        return
    command = editor(os.environ, before.name, is_terminal=sys.stdin.isatty())
    file = Path(tempfile.mkdtemp(prefix="hive-edit-"), f"{before.name}.toml")  # for this user alone
    file.write_text(to_toml(before))
    try:
        answer = _edited(call, before, command, file)
    except BaseException:
        if _is_changed(file, before):
            call.say(f"what was written is in {file}")
        else:
            shutil.rmtree(file.parent, ignore_errors=True)
        raise
    shutil.rmtree(file.parent, ignore_errors=True)
    call.show("agent.edit", answer, lambda: plan_text(before.name, answer))


def editor(env: Mapping[str, str], agent: str, *, is_terminal: bool) -> list[str]:
    """The command that opens the description of `agent`. Raises UsageError where there is none, or nobody to use it.

    >>> editor({"EDITOR": "code --wait"}, "alice", is_terminal=False)
    ['code', '--wait']
    """
    if words := shlex.split(env.get("VISUAL") or env.get("EDITOR") or ""):
        return words
    found = next((name for name in EDITORS if shutil.which(name)), None)
    if found is None or not is_terminal:
        why = "no editor is installed" if is_terminal else "no terminal is here, and neither VISUAL nor EDITOR is set"
        raise UsageError(
            why, hint=f"hive agent export {agent} > {agent}.toml, change it, then hive agent apply {agent}.toml"
        )
    return [found]


def _edited(call: CommandCall, before: AgentSpec, command: list[str], file: Path) -> Answer:
    """Raises what is wrong with what was written, unless the person has another go at it."""
    while True:
        _open(command, file)
        try:
            return _applied(call, before, file)
        except HiveError as error:
            if not sys.stdin.isatty() or call.as_json:
                raise
            report(error, as_json=False)
            if not is_agreed("Edit it again?", default=True):
                raise NotConfirmed(f"{before.name} is unchanged") from None


def _open(command: list[str], file: Path) -> None:
    """The result of this command is what goes to stdout, so the editor draws elsewhere where that is no terminal."""
    from hive.host.process import in_foreground

    stdout = None if sys.stdout.isatty() else STDERR
    try:
        code = in_foreground([*command, str(file)], stdout_fd=stdout)
    except OSError as error:
        raise HiveError(f"{command[0]}: {error.strerror}", hint="EDITOR names another editor") from None
    if code:
        raise HiveError(f"{command[0]} ended with {code}: nothing is changed")


def _applied(call: CommandCall, before: AgentSpec, file: Path) -> Answer:
    """Raises BadRequest, WrongState where somebody else changed it meanwhile."""
    if not _is_changed(file, before):
        return {"name": before.name, "created": False, "dry_run": False, "changes": [], "restart_needed": False}
    after = check_toml(read_toml(str(file)))
    if after.name != before.name:
        raise BadRequest(
            f"name: it is {before.name!r}, and stays so",
            hint="hive agent export and hive agent apply make a second one",
        )
    if of_view(call.client.get(path_of(before.name))) != before:
        raise WrongState(f"{before.name} was changed by somebody else meanwhile", hint="edit it anew")
    return call.client.put(path_of(before.name), plain(after), timeout_s=START_S, dry_run=0)


def _is_changed(file: Path, before: AgentSpec) -> bool:
    try:
        return file.read_bytes() != to_toml(before).encode()
    except OSError:
        return False
