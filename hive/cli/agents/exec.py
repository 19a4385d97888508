"""`hive agent exec`: a program inside an agent, at this terminal or in a pipe."""

from __future__ import annotations

import os
import signal
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from threading import Thread
from typing import TYPE_CHECKING, Annotated

import typer

from hive.cli.call import AgentName, CommandCall
from hive.client.client import error_of
from hive.errors import HiveError, NotFound, NotPermitted, UsageError

if TYPE_CHECKING:
    from hive.client.exec_caller import ExecCaller

READ_BYTES = 65536
FAILED, NOT_EXECUTED, NOT_FOUND = 125, 126, 127
"""Exit codes of what is no end of the program, as `docker exec` has them: Hive's own failure, a program that may not be
run, one that is not there."""


def exec_(
    call: CommandCall,
    name: AgentName,
    command: Annotated[
        list[str], typer.Argument(metavar="-- CMD...", help="The program and its arguments.", show_default=False)
    ],
    interactive: Annotated[
        bool, typer.Option("--interactive", "-i", help="Its stdin is this command's; without it, at its end.")
    ] = False,
    terminal: Annotated[bool, typer.Option("--tty", "-t", help="Give it a terminal.")] = False,
) -> None:
    """Runs a program inside an agent.

    It has the user, limits, network and files of the agent, and no more rights.

    A sleeping agent is woken, and kept awake while it runs. The program, and all it started, ends with this command.
    Its exit code is this command's (128 and the signal where one ended it); 125 is a failure of Hive's own, 126 a
    program that may not be run, 127 one that is not there. Which programs there may be says the policy of the host.

    Examples:
      hive agent exec alice -- ls -la
      hive agent exec alice -it -- /bin/sh
      tar -c notes | hive agent exec alice -i -- tar -x
    """
    try:
        code = _run(call, name, command, has_input=interactive, has_terminal=terminal)
    except HiveError as error:
        error.exit_code = _code_of(error)
        raise
    raise typer.Exit(code)


def _code_of(error: HiveError) -> int:
    if isinstance(error, NotFound) and error.message.startswith("no such command"):
        return NOT_FOUND
    return NOT_EXECUTED if isinstance(error, NotPermitted) else FAILED


def _run(call: CommandCall, name: str, command: list[str], *, has_input: bool, has_terminal: bool) -> int:
    if has_terminal and has_input and not sys.stdin.isatty():
        raise UsageError("--tty wants a terminal, and stdin is none", hint="leave out -t")
    query: dict[str, str | int] = {"stdin": int(has_input), "tty": int(has_terminal)}
    if has_terminal:
        rows, columns = _size()
        query |= {"rows": rows, "columns": columns}
        query["term"] = os.environ.get("TERM", "xterm")
    with call.about(name):
        caller = call.client.execute(name, command, **query)
    is_raw = has_terminal and has_input
    with caller, _raw() if is_raw else nullcontext(), _resized(caller) if has_terminal else nullcontext():
        if has_input:
            Thread(target=_send_input, args=[caller], daemon=True).start()
        return _told(call, caller)


def _told(call: CommandCall, caller: ExecCaller) -> int:
    """Its output, as it comes; its exit code. Raises HiveError."""
    for stream, piece in caller.pieces():
        if isinstance(piece, dict):
            return _ended(call, piece)
        if call.as_json:
            call.line("agent.exec", {"stream": stream, "text": piece.decode(errors="replace")}, str)
        else:
            _write(sys.stdout.fileno() if stream == "stdout" else sys.stderr.fileno(), piece)
    raise HiveError("the program ended without a word of how")


def _ended(call: CommandCall, told: dict[str, object]) -> int:
    if "code" in told:
        raise error_of(told)
    code = told["exit_code"]
    if call.as_json:
        call.line("agent.exec", {"exit_code": code}, str)
    if not isinstance(code, int):
        raise HiveError("nobody knows how the program ended", hint="its agent may have been stopped: hive agent show")
    return code


def _write(descriptor: int, data: bytes) -> None:
    """All of it, past Python's own buffers. Raises BrokenPipeError where no reader is left."""
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _send_input(caller: ExecCaller) -> None:
    """Sends the input to its end, or until the program is gone; a thread that ends with this process."""
    with suppress(OSError):  # a terminal that is gone
        while data := os.read(sys.stdin.fileno(), READ_BYTES):
            if not caller.send(data):
                return
    caller.end_input()


def _size() -> tuple[int, int]:
    """Rows and columns of this terminal itself, whatever the environment says."""
    for stream in (sys.stdout, sys.stdin):
        with suppress(OSError):
            size = os.get_terminal_size(stream.fileno())
            if size.lines and size.columns:
                return size.lines, size.columns
    return 24, 80


@contextmanager
def _raw() -> Iterator[None]:
    """Every key goes to the program as it is, Ctrl-C too; the terminal is as it was afterwards."""
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setraw(descriptor)
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


@contextmanager
def _resized(caller: ExecCaller) -> Iterator[None]:
    """The program's terminal has the size of this one, whenever that changes."""

    def tell(*_: object) -> None:
        Thread(target=caller.resize, args=_size(), daemon=True).start()  # never in a signal's way

    before = signal.signal(signal.SIGWINCH, tell)
    try:
        yield
    finally:
        signal.signal(signal.SIGWINCH, before)
