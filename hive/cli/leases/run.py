"""`hive lease run`: waits in line for memory of the pool, then becomes the program that holds it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn
from urllib.parse import quote

import typer

from hive.cli.amounts import mib_in, seconds_in
from hive.cli.call import Answer, CommandCall, flush
from hive.cli.op_options import BreakGlass, OpToken, headers_of
from hive.cli.text import harmless, one_line, size, span
from hive.errors import DependencyDown, HiveError, NotFound, NotPermitted, by_code

NOT_EXECUTED, NOT_FOUND = 126, 127
"""Exit codes of a program that may not be run, and of one that is not there, as shells have them."""
FOR_EVER_S = 31_536_000.0
DAEMON_WITHIN_S = 120.0
"""A daemon that ends while one waits is started again and knows its line: a restart in an upgrade takes a minute."""
AGAIN_S = 0.5
SILENCE_S = 60.0
"""Twelve lines of the daemon's that did not come."""
LABEL_MAX = 200

Vram = Annotated[str, typer.Option("--vram", metavar="SIZE", help="Memory on each GPU, as 8G or 700M.")]
Gpus = Annotated[int, typer.Option("--gpus", metavar="N", min=1, help="So many, all of them at once.")]
BandOption = Annotated[str, typer.Option("--band", metavar="low|normal|high", help="Its place in the line.")]
Wait = Annotated[str, typer.Option("--wait", metavar="TIME", help="It leaves the line after that, as 90s or 1h.")]
NoWait = Annotated[bool, typer.Option("--no-wait", help="Now, or not at all.")]
Longest = Annotated[
    str, typer.Option("--max", metavar="TIME", help="The program is ended after that.", show_default=False)
]
Preemptible = Annotated[bool, typer.Option("--preemptible", help="It may be ended for what is more urgent.")]
Grace = Annotated[
    str, typer.Option("--grace", metavar="TIME", help="From SIGTERM to SIGKILL.", show_default="[lease] grace_s")
]
Whole = Annotated[bool, typer.Option("--all", help="More of a GPU than [lease] share.")]
Label = Annotated[
    str,
    typer.Option(
        "--label", metavar="TEXT", help="Its name in lists, for all to see.", show_default="CMD and a first argument"
    ),
]
Command = Annotated[
    list[str], typer.Argument(metavar="-- CMD...", help="The program and its arguments.", show_default=False)
]


def run(
    call: CommandCall,
    command: Command,
    vram: Vram,
    gpus: Gpus = 1,
    band: BandOption = "normal",
    wait: Wait = "1h",
    no_wait: NoWait = False,
    longest: Longest = "",
    preemptible: Preemptible = False,
    grace: Grace = "",
    whole: Whole = False,
    label: Label = "",
    op_token: OpToken = None,
    break_glass: BreakGlass = "",
) -> None:
    """Waits for memory of the pool, then becomes a program that uses it.

    Models that are not busy leave for it. Meanwhile it says on stderr which place it has, what it waits for, and how
    long; Ctrl-C leaves the line.

    Granted, this process itself becomes CMD: same terminal, directory, user and environment, and CUDA_VISIBLE_DEVICES,
    HIVE_LEASE and HIVE_LEASE_TOKEN in it. It holds the memory until it and all that came of it have ended. Where
    Hive ends it (--max, --preemptible, an operator) it gets SIGTERM, and SIGKILL after the grace.

    The exit code is CMD's own; 126 where it may not be run, 127 where it is not there; 7: there was no room in time,
    4: not permitted, 2: it can never fit.

    Examples:
      hive lease run --vram 8G -- python train.py
      hive lease run --vram 20G --gpus 2 --band low --preemptible --grace 5m -- ./finetune
      hive lease run --vram 4G --no-wait --max 10m -- ./render || echo "no room now"
    """
    program = found(command[0])
    wait_s = 0.0 if no_wait else min(seconds_in(wait, "--wait"), FOR_EVER_S)
    order = {
        "mb": mib_in(vram, "--vram"),
        "gpus": gpus,
        "band": band,
        "wait_s": wait_s,
        "max_s": seconds_in(longest, "--max") if longest else None,
        "preemptible": preemptible,
        "grace_s": seconds_in(grace, "--grace") if grace else None,
        "all": whole,
        "kind": "job",
        "label": one_line(label or label_of(command))[:LABEL_MAX],
    }
    lease = call.client.post("/api/leases", order, headers=headers_of(op_token, break_glass))
    lease = waited_for(call, lease)
    become(call, lease, [program, *command[1:]])


def label_of(command: list[str]) -> str:
    """The name of a program in lists: itself, and its first argument unless that is an option. What comes after an
    option may be a secret.

    >>> label_of(["/usr/bin/python", "train.py", "--token", "s3cret"]), label_of(["./render", "--key", "s3cret"])
    ('python train.py', 'render')
    """
    first = [word for word in command[1:2] if not word.startswith("-")]
    return " ".join([os.path.basename(command[0]), *first])


def found(program: str) -> str:
    """The file of this program, before anything is asked for it. Raises NotFound (127), NotPermitted (126)."""
    if path := shutil.which(program):
        return os.path.abspath(path) if "/" in program else path
    is_there = os.path.exists(program) if "/" in program else shutil.which(program, mode=os.F_OK) is not None
    error: HiveError = (
        NotPermitted(f"not executable: {program}") if is_there else NotFound(f"no such command: {program}")
    )
    error.exit_code = NOT_EXECUTED if is_there else NOT_FOUND
    raise error


# --- the wait ----------------------------------------------------------------------------------------------------


def waited_for(call: CommandCall, lease: Answer, *, granted: str = "granted") -> Answer:
    """The lease, in the state `granted`. Raises what ended the wait; after Ctrl-C it has left the line."""
    line, now = WaitLine(call), lease
    try:
        for now in _followed(call, lease):
            if now["state"] == "waiting":
                line.show(now)
    except KeyboardInterrupt:
        line.end()
        give_back(call, lease)
        raise
    line.end()
    if now["state"] != granted:
        raise ended_of(now)
    return now


def _followed(call: CommandCall, lease: Answer) -> Iterator[Answer]:
    """The lease at each change, until it waits no more: also over a restart of the daemon."""
    yield lease
    until = time.monotonic() + DAEMON_WITHIN_S
    while lease["state"] == "waiting":
        try:
            for row in call.client.lines(f"/api/leases/{quote(lease['id'])}/wait", silence_s=SILENCE_S):
                lease = json.loads(row)
                until = time.monotonic() + DAEMON_WITHIN_S
                yield lease
                if lease["state"] != "waiting":
                    return
        except DependencyDown:
            if time.monotonic() > until:
                raise
        time.sleep(AGAIN_S)


def give_back(call: CommandCall, lease: Answer) -> None:
    """Nobody waits for it here any more. Where this cannot be said, Hive finds out by itself some seconds later."""
    with suppress(HiveError):
        call.client.delete(f"/api/leases/{quote(lease['id'])}", token=lease["token"], timeout_s=5.0)


def ended_of(lease: Answer) -> HiveError:
    """The error that a wait ended with, as its class."""
    code, why = lease.get("code") or "", lease.get("why") or ""
    error = (by_code(code) if code else HiveError)(one_line(why) or f"lease {lease['id']} is {lease['state']}")
    error.code = code or error.code
    return error


class WaitLine:
    """The line about a wait: rewritten on a terminal, else a new one where something of it is new."""

    def __init__(self, call: CommandCall) -> None:
        self._call = call
        self._on_terminal = sys.stderr.isatty() and not call.as_json
        self._said = ""
        self._is_drawn = False

    def show(self, lease: Answer) -> None:
        if self._on_terminal:
            width = shutil.get_terminal_size().columns - 1
            self._is_drawn = True  # first: Ctrl-C may come while it is written
            sys.stderr.write("\r\x1b[K" + harmless(told_of(lease, with_time=True))[:width])
            sys.stderr.flush()
        elif (text := told_of(lease, with_time=False)) != self._said and not _is_at_once(lease):
            self._said = text
            self._call.say(told_of(lease, with_time=True))

    def end(self) -> None:
        """The terminal's line is free again."""
        if self._is_drawn:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._is_drawn = False


def _is_at_once(lease: Answer) -> bool:
    """Whether it is granted before anybody has read that it waits."""
    return lease["ready_in_s"] is not None and lease["ready_in_s"] < 1 and not lease["before"]


def told_of(lease: Answer, *, with_time: bool) -> str:
    """One line about a lease that waits. `with_time`: also in how long it is expected, which is new every second.

    >>> lease = {"id": "l-2", "mb": 8192, "wanted_gpus": 2, "place": 2, "ready_in_s": 34.2, "before": ["l-1 train"]}
    >>> told_of(lease | {"why": ""}, with_time=True)
    'lease l-2 waits for 8.0 GiB on 2 GPUs: place 2, in about 34s, after l-1 train'
    >>> told_of(lease | {"before": [], "why": "coder has its turn", "wanted_gpus": 1}, with_time=False)
    'lease l-2 waits for 8.0 GiB: place 2, coder has its turn'
    """
    where = f" on {lease['wanted_gpus']} GPUs" if lease["wanted_gpus"] > 1 else ""
    parts = [] if lease["place"] is None else [f"place {lease['place']}"]
    if with_time and lease["ready_in_s"] is not None:
        parts.append(f"in about {span(lease['ready_in_s'])}")
    if lease["before"]:
        parts.append(f"after {', '.join(lease['before'])}")
    elif lease["why"]:
        parts.append(lease["why"])
    return one_line(f"lease {lease['id']} waits for {size(lease['mb'] << 20)}{where}: {', '.join(parts)}")


# --- granted -----------------------------------------------------------------------------------------------------


def become(call: CommandCall, lease: Answer, command: list[str]) -> NoReturn:
    """This process comes in at the helper's socket, and goes on as `command`. Raises HiveError: it was given back."""
    from hive.client.lease_entry import enter
    from hive.host.process import replace  # 20 ms that only what was granted pays

    try:
        answer = enter(Path(lease["socket"]), lease["nonce"])
    except BaseException:
        give_back(call, lease)
        raise
    if answer["held_by"] == "session":
        call.say(f"lease {lease['id']} is held by a session: there is no control group here")
    environment = {**os.environ, **lease["environment"], **answer["environment"]}
    flush()
    sys.stderr.flush()
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores them, and what is executed would go on to
    try:
        replace(command, env=environment)
    except OSError as error:
        failed = NotPermitted(f"cannot execute {command[0]}: {error.strerror}")
        failed.exit_code = NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTED
        failed.hint = "its interpreter is missing" if isinstance(error, FileNotFoundError) else ""
        raise failed from error  # with this process the lease ends
