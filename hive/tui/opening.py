"""The first picture of `hive top`, on the screen before the application is loaded."""

from __future__ import annotations

import gc
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TextIO

from hive.tui.panes import plain
from hive.tui.snapshot import Snapshot
from hive.tui.source import Source

if TYPE_CHECKING:
    from hive.tui.app import Top

SHOW, LEAVE = "\x1b[?1049h\x1b[?25l\x1b[?7l\x1b[H", "\x1b[?7h\x1b[?25h\x1b[?1049l"
"""The alternate screen, neither cursor nor wrapped lines; and back. Textual enters it again, which changes nothing."""


def load(source: Source, terminal: TextIO, *, unicode: bool) -> tuple[type[Top], Snapshot]:
    """The application, and what a first look saw. That look stands on the terminal as text meanwhile.

    Half of the time from the key to the application goes into loading it. Raises what the look raises.
    """
    is_shown = False

    def look() -> Snapshot:
        nonlocal is_shown
        first = source.look()
        columns, rows = shutil.get_terminal_size((120, 40))
        picture = plain(first, columns, unicode=unicode, rows=rows)
        is_shown = True
        terminal.write(SHOW + picture.replace("\n", "\r\n"))
        terminal.flush()
        return first

    switch_s = sys.getswitchinterval()
    sys.setswitchinterval(0.0005)  # the look waits for the interpreter some fifty times, 5 ms each without
    gc.disable()  # what is loaded stays: to look for garbage in it is a tenth of the time
    try:
        with ThreadPoolExecutor(1) as beside:
            looking = beside.submit(look)
            from hive.tui.app import Top

            first = looking.result()
    except BaseException:
        if is_shown:
            terminal.write(LEAVE)
            terminal.flush()
        raise
    finally:
        gc.freeze()
        gc.enable()
        sys.setswitchinterval(switch_s)
    return Top, first
