"""The list of agents: once, or again and again on a terminal."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import typer

from hive.cli.call import Answer, CommandCall
from hive.cli.terminal import drawn_again, fitted, legend
from hive.cli.text import STATES, look_of, milliseconds, number, ram, span, state_of
from hive.errors import UsageError, did_you_mean
from hive.terminal_text import counted

ON_A_TERMINAL = 100
"""Agents in a table for a person."""
LOOK_S = 2.0
"""Between two looks of --watch: a thousand agents cost the daemon some 100 ms."""
HEADERS = ("NAME", "STATUS", "SINCE", "REQUESTS", "TOKENS IN / OUT", "RAM", "WAKES", "LAST WAKE", "WHY")
DROPPED = ("LAST WAKE", "TOKENS IN / OUT", "WAKES", "REQUESTS", "SINCE", "RAM", "WHY", "STATUS")
"""Columns in the order in which they give way on a narrow terminal. The name stays: the next command needs it."""
BEGINNINGS = {"Hive was started": ("WAKES",), "the agent was created": ("REQUESTS", "TOKENS")}
"""Beginning of a count → its columns: what is in the daemon's memory alone, and what is in SQLite."""
COLOURS = {"running": "32", "paused": "36", "error": "1;31", "stopped": "2", "created": "2"}
"""Of a state; any other one is on its way from one to another: yellow."""


class AgentFilter(NamedTuple):
    """The agents listed: of these states, where there are any, and of this tenant."""

    states: Sequence[str] = ()
    tenant: str | None = None

    def has(self, agent: Answer) -> bool:
        is_state = not self.states or agent["status"] in self.states
        return is_state and self.tenant in (None, agent["tenant"])

    def __str__(self) -> str:
        of = f" of tenant {self.tenant}" if self.tenant is not None else ""
        return of + (f" is {' or '.join(self.states)}" if self.states else "")


EVERY = AgentFilter()


def list_agents(
    call: CommandCall,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Names only, one a line.")] = False,
    every: Annotated[bool, typer.Option("--all", "-a", help="On a terminal too, each of them.")] = False,
    state: Annotated[
        list[str] | None,
        typer.Option("--state", metavar="STATE", help=f"Only those that are {', '.join(STATES)}; may be repeated."),
    ] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Of this tenant alone.")] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="On a terminal: again every 2 s, until Ctrl-C.")] = False,
) -> None:
    """Lists the agents: what they do, what they cost, why they are awake.

    WAKES and LAST WAKE are since Hive was started, REQUESTS and TOKENS since the agent was created. A table on a
    terminal leaves out columns for which it is too narrow, has the first 100 agents and says how many there are; what
    goes into a file or a pipe, --quiet and --json are always complete. Aliases: ls, and `hive ps`.

    Examples:
      hive agent list
      hive ps --all
      hive ps --state paused --state error --tenant acme
      hive ps --watch
      hive ps -q | xargs hive agent stop
      hive agent list --json | jq '.agents[] | select(.status == "paused") | .name'
    """
    chosen = AgentFilter(_known(state or []), tenant)
    if watch:
        if quiet or every or call.as_json or not sys.stdout.isatty():
            raise UsageError(
                "--watch draws on a terminal: without --json, --quiet and --all",
                hint="hive events --follow --json goes into a pipe",
            )
        drawn_again(lambda: _screen(call, chosen), every_s=LOOK_S)
        return
    if quiet and not call.as_json:
        names = [agent["name"] for agent in call.client.agents_in_short() if chosen.has(agent)]
        call.show("agent.list", {}, lambda: "\n".join(names))
        return
    is_cut = not (every or call.as_json) and sys.stdout.isatty()
    agents, total = _found(call, chosen, limit=ON_A_TERMINAL if is_cut else None)
    text = "" if call.as_json else listed(agents)
    call.show("agent.list", {"agents": agents}, lambda: text)
    if not agents:
        call.say(_none(call, chosen))
    else:
        legend(call, counted_since(text))
    if left := total - len(agents):
        call.say(f"… and {number(left)} more of {number(total)}: --all shows each of them, -q the names")


def _known(states: list[str]) -> list[str]:
    for state in states:
        if state not in STATES:
            near = did_you_mean(state, STATES)
            raise UsageError(f"--state {state}: no agent is ever that", hint=near or f"known are {', '.join(STATES)}")
    return states


def _found(call: CommandCall, chosen: AgentFilter, *, limit: int | None) -> tuple[list[Answer], int]:
    """The agents, at most `limit`, and how many there are. Asks for no more of them than are told."""
    if limit is not None and chosen == EVERY:
        page = next(call.client.agents(limit=limit))
        return page["agents"], page["total"]
    agents = [agent for page in call.client.agents() for agent in page["agents"] if chosen.has(agent)]
    return agents[:limit], len(agents)


def _none(call: CommandCall, chosen: AgentFilter) -> str:
    if chosen != EVERY and (total := next(call.client.agents(limit=1, short=True))["total"]):
        return f"no agent{chosen}; there are {number(total)} in all"
    return "there is no agent yet: hive agent create NAME -- COMMAND makes one (hive agent create --help)"


def listed(agents: list[Answer]) -> str:
    """The table: complete for a file or a pipe, on a terminal as wide as that is and with its states in colour."""
    now = time.time()
    rows = [
        [
            agent["name"],
            state_of(agent),
            span(now - agent["since"]),
            number(agent["requests"]),
            f"{number(agent['tokens_in'])} / {number(agent['tokens_out'])}",
            ram(agent, now),
            number(agent["wakes"]),
            milliseconds(agent["last_wake_ms"]),
            _why(agent),
        ]
        for agent in agents
    ]
    return fitted(HEADERS, rows, drop=DROPPED, prose="WHY", colour=colour_of)


def _why(agent: Answer) -> str:
    """
    >>> _why({"name": "bob", "status": "error", "reason": "exited with 1", "brief": "exited with 1"})
    'exited with 1: hive agent logs bob'
    """
    look = look_of(agent)
    return f"{agent['brief']}: {look}" if look else agent["brief"]


def counted_since(text: str) -> str:
    """The beginning of the counts in a table, as far as they are among its columns.

    >>> counted_since("NAME  STATUS  REQUESTS  TOKENS IN / OUT  RAM  WAKES  WHY")
    'since Hive was started: WAKES; since the agent was created: REQUESTS, TOKENS'
    >>> counted_since("NAME  STATUS  REQUESTS  RAM"), counted_since("NAME")
    ('since the agent was created: REQUESTS', '')
    """
    heads = text.partition("\n")[0].split()
    return "; ".join(
        f"since {beginning}: {', '.join(found)}"
        for beginning, names in BEGINNINGS.items()
        if (found := [name for name in names if name in heads])
    )


def colour_of(header: str, cell: str) -> str:
    """SGR codes of a cell.

    >>> colour_of("STATUS", "paused (deep)"), colour_of("STATUS", "starting"), colour_of("NAME", "running")
    ('36', '33', '')
    """
    return COLOURS.get(cell.partition(" ")[0], "33") if header == "STATUS" else ""


def _screen(call: CommandCall, chosen: AgentFilter) -> str:
    width, height = shutil.get_terminal_size()
    room = max(1, height - 3)
    agents, total = _found(call, chosen, limit=room)
    left = f", {number(total - len(agents))} more below" if total > len(agents) else ""
    title = f"{time.strftime('%H:%M:%S')}  {counted(total, 'agent')}{left}; Ctrl-C ends this"
    text = listed(agents)
    return f"{title[:width]}\n{counted_since(text)[:width]}\n{text}"
