"""A screen of a command that draws it again and again on a terminal, until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Callable

from hive.cli.call import flush, out
from hive.errors import DependencyDown, TimedOut


def drawn_again(screen: Callable[[], str], *, every_s: float) -> None:
    """Draws what `screen` says; the terminal is afterwards as it was.

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
                text = f"hive: {error.message}"
    finally:
        out("\x1b[?25h\x1b[?1049l", end="")
        flush()
