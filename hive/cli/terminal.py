"""Output for the terminal that it goes to: tables as wide as it is, complete for a file or a pipe, and screens that are
drawn again and again."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence

from hive.cli.call import CommandCall, flush, out
from hive.cli.text import narrowed, table
from hive.errors import DependencyDown, TimedOut, with_code
from hive.terminal_text import wants_colour

Colour = Callable[[str, str], str]


def fitted(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    drop: Sequence[str] = (),
    prose: str = "",
    colour: Colour | None = None,
) -> str:
    """`table`; on a terminal `narrowed` to it and with `colour`. Columns in neither `drop` nor `prose` always stay."""
    if not sys.stdout.isatty():
        return table(headers, rows)
    width = shutil.get_terminal_size().columns
    kept, cut = narrowed(headers, rows, columns=width, drop=drop, prose=prose)
    if colour is None or not wants_colour(is_terminal=True, env=os.environ):
        return table(kept, cut)
    return table(kept, cut, colour=colour)


def legend(call: CommandCall, text: str) -> None:
    """A line under a table, for a person: a file, a pipe and `--json` get the table alone."""
    if text and sys.stdout.isatty():
        call.say(text)


def drawn_again(screen: Callable[[], str], *, every_s: float) -> None:
    """Draws what `screen` says until Ctrl-C; the terminal is afterwards as it was.

    A daemon that is gone is said, and looked for again. Raises what the first look raises.
    """
    text = screen()  # no Hive at all is an error, and not a screen
    out("\x1b[?1049h\x1b[?25l", end="")
    try:
        while True:
            out("\x1b[H" + text.replace("\n", "\x1b[K\n") + "\x1b[K\x1b[J", end="")
            flush()
            time.sleep(every_s)
            try:
                text = screen()
            except (DependencyDown, TimedOut) as error:
                text = f"hive: {with_code(error.message, error.code)}"
    finally:
        out("\x1b[?25h\x1b[?1049l", end="")
        flush()
