"""Logs of Hive's own services, in words for people."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from hive.cli.call import Answer, CommandCall, Tail
from hive.cli.text import harmless
from hive.errors import DependencyDown, HiveError, UsageError, did_you_mean
from hive.log_lines import in_words
from hive.paths import APPLIANCE_RUNTIME, api_sockets, default_state_dir, refuse_missing

Said = Any
"""`hive.files.logs.ServiceLine`, which only the call itself imports."""
NAME_WIDTH = 10
SHOWN_LEVELS = ("warning", "error", "critical")


def logs(
    call: CommandCall,
    component: Annotated[
        str | None,
        typer.Argument(
            metavar="[proxy|daemon|sandbox|redis|backend|jobs|first-boot|up]", help="Of one only.", show_default=False
        ),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as they write.")] = False,
    tail: Tail = 100,
) -> None:
    """Prints what the services of Hive say: from the journal where Hive is installed, else from the file of hive up.

    An installed Hive's lines take root or the group systemd-journal. What agents write is in hive agent logs.

    Examples:
      hive logs
      hive logs proxy -f
      hive logs --tail 1000 --json | jq 'select(.event == "agent_ended")'
    """
    for said in _found(call, component, lines=tail, follow=follow):
        answer: Answer = {
            "at": said.at,
            "component": said.component,
            "level": said.entry.level,
            "event": said.entry.event,
            "fields": said.entry.fields,
            "text": said.entry.text,
        }
        call.line("log", answer, lambda said=said: _shown(said))  # type: ignore[misc]


def _found(call: CommandCall, component: str | None, *, lines: int, follow: bool) -> Iterator[Said]:
    """Raises UsageError, DependencyDown, NotPermitted."""
    from hive.files.log_file import NAME
    from hive.files.logs import COMPONENTS, IN_FILE, file_lines, journal_lines

    known = tuple(dict.fromkeys((*COMPONENTS, *IN_FILE)))
    if component is not None and component not in known:
        near = did_you_mean(component, known) or f"known are {', '.join(known)}"
        raise UsageError(f"no such component: {component}", hint=f"{near}; an agent's output: hive agent logs NAME")
    components = [] if component is None else [component]
    state = _state_dir(call)
    there = COMPONENTS if state is None else IN_FILE
    if component is not None and component not in there:
        whose = "an installed Hive" if state is None else "hive up"
        raise UsageError(f"{component} is no part of {whose}", hint=f"it has {', '.join(there)}")
    if state is None:
        return journal_lines(components, lines=lines, follow=follow)
    return file_lines(state / NAME, components, lines=lines, follow=follow)


def _state_dir(call: CommandCall) -> Path | None:
    """The state directory of the `hive up` that is meant, None for the installed Hive.

    The one that answers; where none does, the installed one, or the last `hive up` of this user: lines are wanted most
    when nothing runs. Raises DependencyDown.
    """
    from hive.files.layout import TARGET, UNITS

    if call.state_dir is not None:
        refuse_missing(call.state_dir, [])
        return call.state_dir
    try:
        health = call.client.get("/api/health")
    except HiveError as error:
        if call.socket is not None or os.environ.get("HIVE_SOCKET"):
            raise
        if Path(UNITS, TARGET).exists():
            return None
        state = default_state_dir(os.geteuid(), os.environ)
        if state.exists():
            return state
        tried = " or ".join(map(str, api_sockets(uid=os.geteuid(), env=os.environ)))
        raise DependencyDown(f"no Hive is installed here, and none answers at {tried}", hint=error.hint) from None
    return None if Path(health["runtime_dir"]) == APPLIANCE_RUNTIME else Path(health["state_dir"])


def _shown(said: Said) -> str:
    moment = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(said.at))
    level = f"{said.entry.level}: " if said.entry.level in SHOWN_LEVELS else ""
    words = "\n    ".join(harmless(in_words(said.entry)).split("\n"))
    return f"{moment}.{int(said.at * 1000) % 1000:03} {said.component:<{NAME_WIDTH}} {level}{words}"
