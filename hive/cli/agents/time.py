"""Commands about time: the wakes of agents, and keeping them awake."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from hive.cli.call import AgentName, Answer, CommandCall
from hive.cli.terminal import fitted
from hive.cli.text import AT_REST, span, status
from hive.client.client import path_of
from hive.errors import UsageError


def wake_at(
    call: CommandCall,
    name: AgentName,
    when: Annotated[
        str | None, typer.Argument(metavar="[WHEN]", help="07:30, 2026-11-21T07:30 (in this host's zone) or +10m.")
    ] = None,
    every: Annotated[str | None, typer.Option(metavar="N(s|m|h|d)", help="And again, this often.")] = None,
    note: Annotated[str, typer.Option(metavar="TEXT", help="What it is for; shown with it.")] = "",
    show_list: Annotated[bool, typer.Option("--list", "-l", help="List what is scheduled instead.")] = False,
    cancel: Annotated[int | None, typer.Option(metavar="ID", min=1, help="Cancel this one instead.")] = None,
) -> None:
    """Wakes an agent at a time, once or again and again. A stopped agent is not started.

    What passes while Hive is down is made up for once, late. A repetition of whole days keeps its time of day when
    summer time begins and ends.

    Examples:
      hive agent wake-at alice +10m
      hive agent wake-at alice 07:30 --every 1d --note "morning round"
      hive agent wake-at alice --list
      hive agent wake-at alice --cancel 3
    """
    if [when is not None, show_list, cancel is not None].count(True) != 1:
        raise UsageError("say when, or --list, or --cancel ID", hint="hive agent wake-at --help")
    path = path_of(name, "schedules")
    with call.about(name):
        if show_list:
            answer = call.client.get(path)
            call.show("agent.wake-at", answer, lambda: _listed(answer))
        elif cancel is not None:
            answer = call.client.delete(path_of(name, "schedules", str(cancel)))
            call.show("agent.wake-at", answer, lambda: f"schedule {answer['cancelled']} is cancelled")
        else:
            answer = call.client.post(path, {"when": when, "every": every, "note": note})
            call.show("agent.wake-at", answer, lambda: _added(answer))


def keep_awake(
    call: CommandCall,
    name: AgentName,
    length: Annotated[
        str | None, typer.Option("--for", metavar="N(s|m|h|d)", help="From now on for so long, like 10m.")
    ] = None,
    end: Annotated[bool, typer.Option("--end", help="It may sleep again.")] = False,
) -> None:
    """Keeps an agent from being put to sleep for a while, however idle it is. It wakes nobody.

    Examples:
      hive agent keep-awake alice --for 10m
      hive agent keep-awake alice --end
    """
    if (length is None) is not end:
        raise UsageError("say --for, or --end", hint=f"hive agent keep-awake {name} --for 10m")
    with call.about(name):
        view = call.client.post(path_of(name, "keep-awake"), {"for_s": 0 if length is None else length})
    call.show("agent.keep-awake", view, lambda: _kept(view))


def _added(answer: Answer) -> str:
    again = f", then every {span(answer['every_s'])}" if answer["every_s"] is not None else ""
    stopped = f"; {answer['name']} is {status(answer['status'])}, and a schedule starts nobody"
    refused = stopped if answer["status"] in AT_REST else ""
    return f"{answer['name']} is woken at {answer['spoken']}{again} (schedule {answer['id']}){refused}"


def _listed(answer: Answer) -> str:
    if not answer["schedules"]:
        return f"nothing is scheduled for {answer['name']}"
    rows = [
        [
            str(found["id"]),
            found["spoken"],
            "once" if found["every_s"] is None else span(found["every_s"]),
            found["last_outcome"] or "-",
            found["note"],
        ]
        for found in answer["schedules"]
    ]
    return fitted(["ID", "NEXT", "EVERY", "LAST", "NOTE"], rows, drop=("LAST", "NOTE", "EVERY"), prose="NOTE")


def _kept(view: Answer) -> str:
    until = view["kept_awake_until"]
    if until is None:
        return f"{view['name']} may sleep when it is idle"
    asleep = f"; it sleeps, `hive agent resume {view['name']}` wakes it" if view["status"] == "paused" else ""
    return f"{view['name']} is kept awake for {span(round(until - time.time()))}{asleep}"
