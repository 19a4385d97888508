"""Commands of the audit log: its rows, and a check that it is whole."""

from __future__ import annotations

import csv
import io
import json
import os
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from hive.cli.call import Answer, CommandCall, Prefix, StateDir, out
from hive.cli.terminal import fitted
from hive.cli.text import number, one_line
from hive.errors import UsageError
from hive.terminal_text import counted

PAGE = 1000
OWN = ("hive", "idle", "proxy", "helper", "internal", "api-token")
"""Actors that are no users."""
DROPPED = ("ORIGIN", "ID", "WHY", "OUTCOME", "AT")
"""Columns that give way where the terminal is narrow, the first one first."""
COLUMNS = ("id", "at", "actor", "origin", "act", "target", "name", "outcome", "detail", "user")


def list_rows(
    call: CommandCall,
    agent: Annotated[str | None, typer.Option(metavar="NAME", help="What was done to this agent.")] = None,
    actor: Annotated[str | None, typer.Option(metavar="WHO", help="What this one did: ann, uid:1000, idle.")] = None,
    act: Annotated[str | None, typer.Option(metavar="ACT", help="Only this act; * stands for anything.")] = None,
    since: Annotated[str | None, typer.Option(metavar="N(s|m|h|d)", help="How far back.")] = None,
    tail: Annotated[int, typer.Option("--tail", "-n", metavar="N", min=1, help="So many rows, the last ones.")] = 50,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values.")] = False,
) -> None:
    """Lists who did what, to whom, and how it ended. It takes an operator.

    An act that begins with order. is what a person asked for, refused or not; the others are what came of it.

    Examples:
      hive audit list --agent alice --since 1d
      hive audit list --act 'order.*' --csv > orders.csv
      hive audit list --json | jq -r '.rows[] | select(.outcome != "ok") | .act'
    """
    if as_csv and call.as_json:
        raise UsageError("--csv or --json, not both", hint="hive audit list --help")
    rows = _rows(call, tail, agent=agent, actor=actor, act=act, since=since)
    if as_csv:
        out(_csv(rows), end="")
        return
    call.show("audit.list", {"rows": rows}, lambda: _table(rows))


def verify(
    call: CommandCall,
    head: Annotated[
        list[str] | None,
        typer.Option("--head", metavar="ID:HASH", help="A row that was noted elsewhere (again and again)."),
    ] = None,
    state_dir: StateDir = None,
    prefix: Prefix = Path("/"),
) -> int:
    """Checks that no row of the audit table was changed, removed or moved. Exit code 1 names the first that was.

    It reads the file, whether or not Hive runs, so it takes the user Hive's daemon runs as, or root.

    Examples:
      hive audit verify --state-dir /srv/hive --json | jq .unanchored
      sudo hive audit verify --head 100:27ad3ac6fb97c64b27ad3ac6fb97c64b27ad3ac6fb97c64b27ad3ac6fb97c64b
    """
    from hive.files import audit_check
    from hive.files.backup_contents import place_of

    known = [audit_check.head_of(text) for text in head or []]
    if None in known:
        raise UsageError(
            "--head: expected ID:HASH, a row's number and its 64 hex digits", hint="hive audit verify --help"
        )
    place = place_of(state_dir=state_dir, prefix=prefix.resolve(), uid=os.geteuid(), env=os.environ)
    began = time.perf_counter()
    checked = audit_check.verify(place, [one for one in known if one is not None])
    answer = _answer(checked, time.perf_counter() - began)
    call.show("audit.verify", answer, lambda: _said(answer))
    return 0 if answer["ok"] else 1


def _rows(call: CommandCall, tail: int, **asked: Any) -> list[Answer]:
    """The last `tail` of them, oldest first."""
    client, before = call.client, None
    rows: list[Answer] = []
    while len(rows) < tail:
        page = client.get("/api/audit", limit=min(PAGE, tail - len(rows)), before=before, **asked)
        rows += page["rows"]
        before = page["next"]
        if before is None:
            break
    return rows[::-1]


def _cells(row: Answer) -> list[str]:
    detail = dict(row["detail"])
    known = {
        **row,
        "at": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(row["at"])),
        "name": detail.pop("name", ""),
    }
    known["detail"] = json.dumps(detail) if detail else ""
    return [one_line(str(known[column])) for column in COLUMNS]


def _csv(rows: list[Answer]) -> str:
    """With its header. What a spreadsheet would take for a formula gets a quote before it."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows([f"'{cell}" if cell[:1] in "=+-@" and cell else cell for cell in _cells(row)] for row in rows)
    return file.getvalue()


def _table(rows: list[Answer]) -> str:
    headers = ["ID", "AT", "ACTOR", "ORIGIN", "ACT", "AGENT", "OUTCOME", "WHY"]
    return fitted(headers, [_line(row) for row in rows], drop=DROPPED, prose="WHY")


def _line(row: Answer) -> list[str]:
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["at"]))
    detail = row["detail"]
    again = detail.get("refused_again")
    why = f"{counted(again, 'more time')}" if again else str(detail.get("error") or detail.get("reason") or "")
    whom = str(detail.get("name") or row["target"])
    return [str(row["id"]), at, who(row), row["origin"], row["act"], whom, row["outcome"], why]


def who(row: Answer) -> str:
    """The user's name at the time, and the login that acted as that user; else the actor.

    A user whose name is one of Hive's own words for itself stays a number.

    >>> who({"actor": "uid:1000", "detail": {"user": "ann"}}), who({"actor": "uid:1000", "detail": {}})
    ('ann', 'uid:1000')
    >>> who({"actor": "uid:0", "detail": {"user": "root", "login_user": "ann"}})
    'ann as root'
    >>> who({"actor": "uid:990", "detail": {"user": "hive"}})
    'uid:990'
    """
    actor, detail = str(row["actor"]), row["detail"]
    names = [detail.get("login_user"), detail.get("user")]
    if not actor.startswith("uid:") or names[1] in OWN or names[0] in OWN:
        return actor
    return " as ".join(str(name) for name in names if name) or actor


def _answer(checked: Any, took_s: float) -> Answer:
    verdict = checked.verdict
    return {
        "ok": verdict.bad is None,
        "rows": verdict.rows,
        "head": {"id": verdict.head.id, "hash": verdict.head.hash},
        "first_bad": None if verdict.bad is None else {"id": verdict.bad.id, "why": verdict.bad.why},
        "anchored_to": verdict.anchored,
        "unanchored": verdict.unanchored,
        "anchors": checked.noted,
        "anchors_file": None if checked.anchors is None else str(checked.anchors),
        "unreadable_anchors": checked.unreadable,
        "taken_in": verdict.taken_in,
        "begun_anew": verdict.begun_anew,
        "acts_waiting": checked.waiting,
        "database": str(checked.database),
        "took_s": round(took_s, 3),
    }


def _said(answer: Answer) -> str:
    if (bad := answer["first_bad"]) is not None:
        return (
            f"row {bad['id']} is the first that is not right: {bad['why']}\n"
            f"right before it: {number(answer['rows'])}, in {answer['database']}"
        )
    head = answer["head"]
    lines = [f"{counted(answer['rows'], 'row')}, each as it was written, up to {head['id']}:{head['hash']}"]
    if answer["unanchored"]:
        lines.append(
            f"the last {number(answer['unanchored'])} are in no anchor yet: "
            "nobody would see if they were replaced, or if more had followed them"
        )
    if answer["anchors_file"] is None:
        lines.append("there is no audit.heads beside it: it is new, was restored, or somebody removed that file")
    if answer["acts_waiting"]:
        lines.append(f"acts of the hive command that a daemon is still to take in: {number(answer['acts_waiting'])}")
    if answer["taken_in"]:
        lines.append(f"{number(answer['taken_in'])} were taken in from an older Hive: before that nothing kept them")
    if answer["begun_anew"]:
        lines.append(
            "it was begun anew after a damaged database: hive audit list --act audit.begun_anew names the file"
        )
    if answer["unreadable_anchors"]:
        lines.append(f"lines of the anchors that cannot be read: {number(answer['unreadable_anchors'])}")
    return "\n".join(lines)
