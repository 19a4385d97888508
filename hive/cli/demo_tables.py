"""The words of the guided tour: what is shown of each step's figures. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hive.cli.text import harmless, milliseconds, number, one_line, size, span, table
from hive.terminal_text import counted

Figures = Mapping[str, Any]
MESSAGE_MAX = 32
"""Characters of an error's message in a table of 80 columns."""


class StepTable(NamedTuple):
    """The table of one step, and sentences below it."""

    headers: Sequence[str]
    rows: Sequence[Sequence[str]]
    notes: Sequence[str] = ()


def up_line(health: Figures, took_s: float) -> str:
    """One sentence about the Hive that is up.

    >>> up_line({"isolation": "uid", "backend": {"label": "demo backend at /r/demo.sock"}}, 2.04)
    'A Hive of its own is up after 2.0 s (isolation uid, demo backend). No other Hive is touched.'
    """
    label = str(health["backend"]["label"]).partition(" at ")[0]
    about = f"isolation {health['isolation']}, {one_line(label)}"
    return f"A Hive of its own is up after {took_s:.1f} s ({about}). No other Hive is touched."


def agents(figures: Figures) -> StepTable:
    rows = [
        [
            row["name"],
            str(row["pid"]),
            "yours" if row["uid"] is None else str(row["uid"]),
            size(row["ram_bytes"]),
            milliseconds(row["first_turn_ms"]),
            f"{number(row['tokens_in'])} / {number(row['tokens_out'])}",
        ]
        for row in figures["agents"]
    ]
    ram = size(sum(row["ram_bytes"] for row in figures["agents"]))
    note = f"{counted(len(rows), 'agent')} up after {figures['up_ms'] / 1e3:.1f} s; together they hold {ram}."
    return StepTable(["AGENT", "PID", "UID", "RAM", "FIRST TURN", "TOKENS IN / OUT"], rows, [note])


def sleep(figures: Figures) -> StepTable:
    rows = [
        [
            row["name"],
            row["depth"],
            f"{row['asleep_after_ms'] / 1e3:.1f} s",
            milliseconds(row["cpu_ms"]),
            "answers" if row["answers_past_hive"] else "silence",
            size(row["ram_awake_bytes"]),
            size(row["ram_asleep_bytes"]),
        ]
        for row in figures["agents"]
    ]
    deep = [row for row in figures["agents"] if row["depth"] == "deep"]
    notes = [
        f"{row['name']} sleeps deep: {size(row['swap_bytes'])} of it are in swap, and its RAM is free for others."
        for row in deep
    ]
    if ordered := [row["name"] for row in figures["agents"] if row["by_order"]]:
        notes.append(f"Put to sleep by order, as they were not quiet: {', '.join(ordered)}.")
    if figures["deep_note"]:
        notes.append(f"None sleeps deep: {harmless(figures['deep_note'])}.")
    return StepTable(
        ["AGENT", "SLEEP", "ASLEEP AFTER", "CPU IN 1 s", "PAST HIVE", "RAM AWAKE", "RAM ASLEEP"], rows, notes
    )


def wake(figures: Figures) -> StepTable:
    rows = [
        [
            row["name"],
            row["depth"],
            milliseconds(row["wake_ms"]),
            milliseconds(row["asleep_ms"]),
            milliseconds(row["awake_ms"]),
            str(row["turn"]),
            "whole" if row["memory_whole"] else "DAMAGED",
        ]
        for row in figures["agents"]
    ]
    note = "WAKE: the part of ASLEEP in which Hive woke the agent."
    return StepTable(["AGENT", "SLEPT", "WAKE", "ASLEEP", "AWAKE", "TURN", "MEMORY"], rows, [note])


def share(figures: Figures) -> StepTable:
    rows = [
        [
            row["tenant"],
            str(row["asked"]),
            str(row["at_once"]),
            milliseconds(row["first_word_ms"]["median"]),
            milliseconds(row["first_word_ms"]["longest"]),
            f"{row['whole']} whole",
        ]
        for row in figures["tenants"]
    ]
    took = f"All of it took {figures['all_ms'] / 1e3:.1f} s, {figures['places']} answers at a time."
    crowd, guest = (row["first_word_ms"]["median"] for row in figures["tenants"])
    if crowd and guest:
        took += f" Crowd waited {crowd / guest:.1f} times as long for a first word as guest."
    headers = ["TENANT", "ASKED", "AT ONCE", "FIRST WORD, MEDIAN", "LONGEST", "ANSWERS"]
    return StepTable(headers, rows, [took])


def outage(figures: Figures) -> StepTable:
    rows = [[row["when"], str(row["words"]), str(row["status"]), _told(row)] for row in figures["callers"]]
    notes = [
        f"The server with pid {figures['killed_pid']} was killed. {figures['back_ms'] / 1e3:.1f} s later a new one, "
        f"pid {figures['new_pid']}, answered; meanwhile "
        f"{counted(figures['refused'], 'question was', 'questions were')} refused."
    ]
    notes += [
        f"{row['code'] or 'without a code'}: {harmless(row['message'])}"
        for row in {row["code"]: row for row in figures["callers"] if row["message"]}.values()
    ]
    return StepTable(["CALLER", "WORDS", "STATUS", "WHAT IT IS TOLD"], rows, notes)


def _told(row: Figures) -> str:
    if not row["message"]:
        return "a whole answer"
    return str(row["code"]) or one_line(str(row["message"]))[:MESSAGE_MAX]


def usage(figures: Figures) -> StepTable:
    rows = [[str(row["name"] or row["agent_id"]), *_costs(row)] for row in figures["agents"]]
    rows += [[f"tenant {row['tenant']}", *_costs(row)] for row in figures["tenants"]]
    rows.append(["all", *_costs(figures["totals"])])
    told = figures["told"]
    notes = [
        f"To compare: {counted(told['answers'], 'whole answer')} told the callers of {number(told['tokens_in'])} "
        f"tokens in and {number(told['tokens_out'])} out. {counted(told['not_whole'], 'more request')} ended in an "
        "error; what they used is counted above, too."
    ]
    return StepTable(["OF", "REQUESTS", "TOKENS IN", "TOKENS OUT", "UNKNOWN", "CUT"], rows, notes)


def _costs(row: Figures) -> list[str]:
    return [number(row[cost]) for cost in ("requests", "tokens_in", "tokens_out", "unknown", "cut")]


TABLES: Mapping[str, Callable[[Figures], StepTable]] = {
    "agents": agents,
    "sleep": sleep,
    "wake": wake,
    "share": share,
    "outage": outage,
    "usage": usage,
}
"""Name of a step → what is shown of its figures."""


def shown(step: str, figures: Figures, *, width: int) -> str:
    """The table of a step, and the sentences below it wrapped to `width` columns."""
    found = TABLES[step](figures)
    return "\n".join([table(found.headers, found.rows), *(wrapped(note, width) for note in found.notes)])


def heading(number: int, count: int, title: str) -> str:
    """
    >>> heading(2, 6, "Sleep")
    '2/6  Sleep'
    """
    return f"{number}/{count}  {title}"


def wrapped(text: str, width: int, *, indent: str = "") -> str:
    """
    >>> wrapped("one two three four five", 20, indent="  ")
    '  one two three four\\n  five'
    """
    lines = textwrap.wrap(text, max(20, width), initial_indent=indent, subsequent_indent=indent)
    return "\n".join(lines)


def over_line(took_s: float) -> str:
    """The last sentence.

    >>> over_line(72.4)
    'The tour is over after 1m 12s. Its Hive, its agents and its directory are gone.'
    """
    return f"The tour is over after {span(took_s)}. Its Hive, its agents and its directory are gone."
