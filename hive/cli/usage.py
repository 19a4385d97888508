"""The command for usage: tokens and requests, by agent, tenant, model, backend or hour."""

from __future__ import annotations

import csv
import io
import shutil
import sys
import time
from typing import Annotated

import typer

from hive.cli.call import Answer, CommandCall, out
from hive.cli.text import number, one_line, span, table
from hive.errors import UsageError

COSTS = ("requests", "tokens_in", "tokens_out", "cached_tokens", "unknown", "cut", "far")
HEADERS = ("REQUESTS", "TOKENS IN", "TOKENS OUT", "CACHED", "UNKNOWN", "CUT", "FAR")
UNITS = {"audio_s": "AUDIO", "images": "IMAGES", "pixel_steps": "MPIXEL-STEPS"}
"""Units that are no tokens, with their columns, which are there where anything was used of them."""
GROUPS = ("agent", "tenant", "model", "backend", "hour")
ID_SHOWN = 8
"""Digits of an id."""
BAR = (8, 24)
"""A bar has so many columns at least, or is left out, and at most."""


def usage(
    call: CommandCall,
    since: Annotated[str, typer.Option(metavar="N(s|m|h|d)", help="How far back.")] = "24h",
    by: Annotated[str, typer.Option(metavar="WHAT", help=f"Add up by {', '.join(GROUPS[:-1])} or hour.")] = "agent",
    agent: Annotated[
        str | None, typer.Option(metavar="NAME", help="Of this agent alone, or a removed one's id.")
    ] = None,
    tenant: Annotated[str | None, typer.Option(metavar="NAME", help="Of this tenant alone.")] = None,
    model: Annotated[str | None, typer.Option(metavar="NAME", help="Of this model alone.")] = None,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
    budgets: Annotated[bool, typer.Option("--budgets", help="Show the budgets of tokens, and what is left.")] = False,
) -> None:
    """Shows what was used, by agent, tenant, model, backend or hour.

    What a backend did not report is counted as unknown, not as 0. A cut request is one whose client did not get a whole
    answer; a far one left the box. AUDIO is what was heard, MPIXEL-STEPS are the millions of pixels of all steps of the
    IMAGES; these columns are there where they are used. On a terminal a bar shows each line's tokens.

    Examples:
      hive usage
      hive usage --by hour --since 7d --agent alice
      hive usage --by model --csv > models.csv
      hive usage --since 7d --json | jq .totals
      hive usage --budgets
    """
    if budgets:
        told = call.client.get("/api/budgets")
        call.show("usage.budgets", told, lambda: _budgets(told, time.time()))
        return
    if as_csv and call.as_json:
        raise UsageError("--csv and --json: one of them", hint="hive usage --help")
    answer = call.client.get("/api/usage", since=since, by=by, agent=agent, tenant=tenant, model=model)
    if as_csv:
        out(_csv(answer))
    else:
        call.show("usage", answer, lambda: _table(answer, since, columns=_columns()))


BUDGETS = {"tokens_per_day": "day", "tokens_per_month": "month", "cloud_tokens_per_day": "cloud, day"}


def _budgets(told: Answer, now: float) -> str:
    """The budgets, what ends first before the others.

    >>> print(_budgets({"budgets": [{"scope": "agent", "name": "bob", "budget": "tokens_per_day", "limit": 200,
    ...     "used": 170, "left": 30, "state": "soft", "resets_at": 7200.0}]}, 0.0))
    OF         BUDGET  LIMIT  USED  SHARE  LEFT  STATE  BEGINS ANEW
    agent bob  day     200    170   85 %   30    soft   in 2h
    """
    if not told["budgets"]:
        return "nobody has a budget of tokens: tokens_per_day of [tenant NAME], [budget] or hive agent create"
    rows = [
        [
            f"{row['scope']} {one_line(row['name'])}",
            BUDGETS[row["budget"]],
            number(row["limit"]),
            number(row["used"]),
            f"{100 * row['used'] // row['limit']} %",
            number(row["left"]),
            "" if row["state"] == "ok" else row["state"],
            f"in {span(max(0.0, row['resets_at'] - now))}",
        ]
        for row in told["budgets"]
    ]
    return table(["OF", "BUDGET", "LIMIT", "USED", "SHARE", "LEFT", "STATE", "BEGINS ANEW"], rows)


def _columns() -> int:
    """Width of the terminal; 0 where there is none, or where it cannot show a bar."""
    is_looked_at = sys.stdout.isatty() and "utf" in (sys.stdout.encoding or "").lower()
    return shutil.get_terminal_size().columns if is_looked_at else 0


def _table(answer: Answer, since: str, *, columns: int) -> str:
    if not answer["token_tracking"]:
        return "nothing is metered: token_tracking = false"
    rows = answer[f"{answer['by']}s"]
    units = [unit for unit in UNITS if answer["totals"][unit]]
    lines = [[_name(answer["by"], row), *_cells(row, units)] for row in rows]
    lines.append([f"all in {since}", *_cells(answer["totals"], units)])
    text = table([answer["by"].upper(), *HEADERS, *(UNITS[unit] for unit in units)], lines)
    return with_bars(text, [row["tokens_in"] + row["tokens_out"] for row in rows], columns)


def _cells(row: Answer, units: list[str]) -> list[str]:
    """
    >>> row = dict.fromkeys(COSTS, 0) | {"audio_s": 90.5, "images": 2, "pixel_steps": 13107200}
    >>> _cells(row, list(UNITS))[-3:]
    ['1m 30s', '2', '13.1']
    """
    told = {
        "audio_s": lambda: span(row["audio_s"]),
        "images": lambda: number(row["images"]),
        "pixel_steps": lambda: f"{row['pixel_steps'] / 1e6:.1f}",
    }
    return [*(number(row[cost]) for cost in COSTS), *(told[unit]() for unit in units)]


def _name(by: str, row: Answer) -> str:
    if by == "hour":
        return time.strftime("%Y-%m-%d %H:%M", time.localtime(row["hour"]))
    return agent_named(row) if by == "agent" else str(row[by])


def agent_named(row: Answer) -> str:
    """The agent of a row; a removed one by the name it had, else the beginning of its id, which is 32 digits.

    >>> agent_named({"agent_id": "0f" * 16, "name": None, "removed_name": "poet"})
    'poet (removed)'
    >>> agent_named({"agent_id": "0f" * 16, "name": None, "removed_name": None})
    '0f0f0f0f (removed)'
    >>> agent_named({"agent_id": "operator", "name": None, "removed_name": None})
    'operator'
    """
    if row["name"]:
        return str(row["name"])
    agent = str(row["agent_id"])
    shown = row["removed_name"] or (agent[:ID_SHOWN] if len(agent) > ID_SHOWN else "")
    return f"{shown} (removed)" if shown else agent


def with_bars(text: str, tokens: list[int], columns: int) -> str:
    """The table with a bar behind each line that has tokens, as long as there is room on a terminal of `columns`.

    >>> print(with_bars("NAME\\na\\nb\\nall", [8, 1], 80))
    NAME
    a     ████████████████████████
    b     ███
    all
    >>> with_bars("NAME\\na\\nall", [8], 12)
    'NAME\\na\\nall'
    """
    lines = text.split("\n")
    begin = max(len(line) for line in lines) + 2
    room, most = min(BAR[1], columns - begin), max(tokens, default=0)
    if room < BAR[0] or not most:
        return text
    bars = ["", *("█" * max(1, round(room * count / most)) if count else "" for count in tokens), ""]
    return "\n".join(f"{line:<{begin}}{bar}".rstrip() for line, bar in zip(lines, bars, strict=True))


def _csv(answer: Answer) -> str:
    """With its header; an hour as Unix seconds. What a spreadsheet would take for a formula gets a quote before it."""
    by = answer["by"]
    keys = ("agent_id", "name") if by == "agent" else (by,)
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow([*keys, *COSTS, *UNITS])
    for row in answer[f"{by}s"]:
        writer.writerow([*(_cell(row[key]) for key in keys), *(row[cost] for cost in (*COSTS, *UNITS))])
    return file.getvalue().rstrip("\n")


def _cell(value: str | int | None) -> str:
    text = "" if value is None else one_line(str(value))
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text
