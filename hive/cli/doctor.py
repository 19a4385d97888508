"""`hive doctor`: what is wrong here, why, and the command that changes it."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from hive.cli.call import CommandCall, flush
from hive.cli.terminal import fitted
from hive.cli.text import one_line
from hive.errors import with_code

Result = Any
"""hive.doctor.doctor.Result: what starts the rest is loaded when a command runs."""
WIDTH = 80
NAME_COLUMNS = 19
INDENT = 6 + NAME_COLUMNS + 2
STYLES = {"pass": "green", "warn": "yellow", "fail": "bold red", "skip": "dim"}
SHOWN = ("pass", "skip", "warn", "fail")
"""The order on the screen: what is wrong stands last, next to the cursor."""


def doctor(
    call: CommandCall,
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[CHECK]...", help="Checks or groups of them; if none is named all that are quick."),
    ] = None,
    every: Annotated[bool, typer.Option("--all", "-a", help="Tell what was skipped, too, and why.")] = False,
    list_: Annotated[bool, typer.Option("--list", "-l", help="Only say which checks there are.")] = False,
    strict: Annotated[bool, typer.Option("--strict", help="A warning is a failure, too.")] = False,
    fix: Annotated[bool, typer.Option("--fix", help="Mend what can be mended safely, then look again.")] = False,
    config: Annotated[
        Path | None, typer.Option("--config", metavar="FILE", help="Instead of /etc/hive/hive.conf.")
    ] = None,
) -> int:
    """Checks this host and the Hive on it: what is wrong, why, what changes it.

    Takes less than 2 seconds, needs no root (it says what it may not see), and no Hive has to run. What is wrong stands
    last, each with its cure; checks that were skipped are counted, and told with --all, with --json, and where they are
    named. A check that is named may take as long as it needs. --fix sets up zram, turns KSM off, and puts right owners
    and modes; no more. Exit code 1 where a check failed.

    Examples:
      hive doctor
      hive doctor --all
      hive doctor redis.acl memory
      sudo hive doctor memory.swap --fix
      hive doctor --strict --json | jq -r '.checks[] | select(.status == "fail") | .fix'
    """
    from hive.doctor.checks.target import find
    from hive.doctor.doctor import ALONE_S, LIMIT_S, choose, examine, is_well, mend

    checks = choose(names or [])
    if list_:
        return _list(call, names or [])
    began = time.monotonic()
    subject = find(
        socket=call.socket,
        state_dir=call.state_dir,
        config=config,
        uid=os.geteuid(),
        env=os.environ,
        limit_s=ALONE_S if names else LIMIT_S,
    )
    results = examine(subject, checks)
    if fix:
        results = mend(subject, results)
    answer = {
        "hive": {
            "kind": str(subject.kind),
            "socket": None if subject.socket is None else str(subject.socket),
            "state_dir": None if subject.paths is None else str(subject.paths.state),
        },
        "ok": is_well(results, strict=strict),
        "counts": _counts(results),
        "checks": [_shown(result) for result in results],
    }
    took_s, every = time.monotonic() - began, every or bool(names)
    if sys.stdout.isatty() and not call.as_json:
        _print_coloured(results, took_s, every=every)
    else:
        call.show("doctor", answer, lambda: as_text(results, took_s, every=every))
    return 0 if answer["ok"] else 1


def _list(call: CommandCall, names: Sequence[str]) -> int:
    from hive.doctor.doctor import CHECKS, choose

    rows = choose(names) if names else CHECKS
    answer = {
        "checks": [
            {"name": check.name, "help": check.sentence, "by_default": check.by_default, "fixable": bool(check.repair)}
            for check in rows
        ]
    }
    lines = [[check.name, check.sentence, "--fix" if check.repair else ""] for check in rows]
    call.show("doctor.list", answer, lambda: fitted(["CHECK", "WHAT IT LOOKS AT", ""], lines, prose="WHAT IT LOOKS AT"))
    return 0


def _shown(result: Result) -> dict[str, Any]:
    return {
        "name": result.name,
        "status": str(result.status),
        "reason": result.reason,
        "fix": result.fix,
        "fixed": result.fixed,
        "ms": result.ms,
        "code": "" if result.found is None else result.found.code,
        "facts": {} if result.found is None else result.found.facts,
    }


def _counts(results: Sequence[Result]) -> dict[str, int]:
    found = Counter(str(result.status) for result in results)
    return {status: found[status] for status in STYLES}


def as_text(results: Sequence[Result], took_s: float, *, every: bool) -> str:
    """All that passed, then what was skipped (without `every` only how much), then what is wrong, a line between them.

    In 80 columns; a command to type is never broken.
    """
    blocks = []
    for status in SHOWN:
        found = [result for result in results if result.status == status]
        if status == "skip" and not every:
            blocks.append(skipped_line(sum(one.is_unseen for one in found), sum(not one.is_unseen for one in found)))
        else:
            blocks.append("\n".join(line for result in found for line in _lines(result)))
    return "\n\n".join([*filter(None, blocks), _summary(results, took_s)])


def skipped_line(unseen: int, rest: int) -> str:
    """The number of checks that were skipped, by the reason.

    >>> skipped_line(0, 32), skipped_line(1, 1), skipped_line(0, 0)
    ('32 checks do not apply here; --all lists them', '1 check needs root, 1 does not apply here; --all lists them', '')
    """
    told = []
    if unseen:
        told.append(f"{unseen} check{'' if unseen == 1 else 's'} {'needs' if unseen == 1 else 'need'} root")
    if rest:
        checks = "" if unseen else " check" if rest == 1 else " checks"
        told.append(f"{rest}{checks} {'does' if rest == 1 else 'do'} not apply here")
    return f"{', '.join(told)}; --all lists {'it' if unseen + rest == 1 else 'them'}" if told else ""


def _lines(result: Result) -> list[str]:
    """
    >>> from hive.doctor.doctor import Result
    >>> print("\\n".join(_lines(Result(name="a.b", status="warn", reason="it is so", fix="do it"))))
    warn  a.b                  it is so
                               fix: do it
    """
    head = f"{result.status:<6}{result.name:<{NAME_COLUMNS}}  "
    said = one_line(f"{result.reason} (fixed: {result.fixed})" if result.fixed else result.reason)
    if result.found is not None and result.status != "pass":
        said = with_code(said, result.found.code)
    lines = textwrap.wrap(
        said,
        WIDTH,
        initial_indent=head,
        subsequent_indent=" " * INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )
    if result.fix and result.status != "pass":
        fix = f"fix: {one_line(result.fix)}"
        lines.append(" " * (INDENT if INDENT + len(fix) <= WIDTH else 6) + fix)
    return lines


def _summary(results: Sequence[Result], took_s: float) -> str:
    words = {"pass": "passed", "warn": "warned", "fail": "failed", "skip": "skipped"}
    counts = ", ".join(f"{count} {words[status]}" for status, count in _counts(results).items() if count)
    return f"{counts} in {took_s:.1f} s"


def _print_coloured(results: Sequence[Result], took_s: float, *, every: bool) -> None:
    """rich minds NO_COLOR and TERM; it is loaded for a terminal only."""
    from rich.console import Console
    from rich.text import Text

    flush()
    console = Console(highlight=False)
    style = ""
    for line in as_text(results, took_s, every=every).splitlines():
        status, _, rest = line.partition(" ")
        quiet = "dim" if status == "skip" or (style == "dim" and line.startswith(" ")) else ""
        if status in STYLES:
            console.print(Text(status, STYLES[status]).append(f" {rest}", quiet), soft_wrap=True)
        else:
            is_fix = line.lstrip().startswith("fix: ")
            console.print(Text(line, "cyan" if is_fix else quiet), soft_wrap=True)
        style = quiet
