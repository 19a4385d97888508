"""The output of `hive up`: lines and tables for people, at the end one JSON object for programs."""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from hive.files.log_file import LogFile
from hive.log_lines import PROBLEM, without_priority
from hive.terminal_text import counted, wants_colour
from hive.up.lines import TerminalWriter, is_routine, prefixed
from hive.up.table import Row, plain_table

if TYPE_CHECKING:
    from hive.up.live_table import LiveTable

PLAIN_EVERY_S = 10.0
PAINT_EVERY_S = 0.25
"""The live table is drawn no more often, however many lines come meanwhile."""
UNPAINTED_MAX = 500
"""Lines that wait to be drawn; of more than a terminal has rows only the last are."""
STDOUT, STDERR = 1, 2
CLEAR_LINE = "\r\x1b[K"


class Screen:
    """stdout is the result, stderr the talk. With `json` the only result is the object at the end.

    A terminal gets the lines that tell of something wrong, as it does of `docker compose up -d` and systemd: there the
    addresses stay to be read. A file or a pipe gets all lines but the routine ones, the kept file every one.
    """

    def __init__(self, *, json: bool) -> None:
        self._out = TerminalWriter(STDERR if json else STDOUT)
        self._err = TerminalWriter(STDERR)
        self._coloured = wants_colour(is_terminal=self._err.isatty(), env=os.environ)
        self._is_live = not json and self._out.isatty() and os.environ.get("TERM") != "dumb"
        self._live: LiveTable | None = None
        self._head = ""
        self._views: Sequence[Row] = ()
        self._unpainted: deque[str] = deque(maxlen=UNPAINTED_MAX)
        self._said = 0
        """Lines since the last drawing, those no longer in `_unpainted` too."""
        self._painted_at = 0.0
        self._painting: asyncio.TimerHandle | None = None
        self._plain_shown_at: float | None = None
        self._kept: LogFile | None = None
        self._is_leaving = False
        self._goes_on = False
        """A line of `goes_on` is the last thing on the terminal."""

    def __repr__(self) -> str:
        return f"<Screen {'live' if self._live else 'lines'}>"

    @property
    def width(self) -> int | None:
        """Columns of the terminal people read on, None where it is none."""
        try:
            return os.get_terminal_size(self._out.fileno()).columns
        except OSError:
            return None

    def keep(self, file: LogFile) -> None:
        """Every line from now on is written there, too; it stays the caller's to close."""
        self._kept = file

    def say(self, name: str, text: str) -> None:
        """One line of one process, with its priority; above the live table where there is one on the same terminal."""
        if self._kept is not None:
            self._kept.write(name, text, at=time.time())
        priority, words = without_priority(text)
        # At the end each part loses the others, and says so: that is as it should be.
        most = PROBLEM - 1 if self._is_leaving and name != "up" else PROBLEM
        is_terminal = self._err.isatty()
        if is_routine(words) or (is_terminal and priority > most):
            return
        line = prefixed(name, words, coloured=self._coloured)
        if self._live is not None and is_terminal:
            self._unpainted.append(line)
            self._said += 1
            self._paint_in_time()
        else:
            self._wipe()
            self._err.line(line)

    def tell(self, text: str) -> None:
        """Writes a text for the person that started it."""
        self._wipe()
        self._out.line(text)

    def goes_on(self, text: str) -> None:
        """Something of interest only as long as it goes on: a line of a terminal that what is said next replaces."""
        if self._is_live and self._live is None:
            self._out.write(f"{CLEAR_LINE}{text[: (self.width or 80) - 1]}")
            self._out.flush()
            self._goes_on = True

    def leaves(self) -> None:
        """Hive ends from now on: a terminal gets no more warnings of its parts, only their errors."""
        self._is_leaving = True

    def _wipe(self) -> None:
        if self._goes_on:
            self._goes_on = False
            self._out.write(CLEAR_LINE)
            self._out.flush()

    def show(self, views: Sequence[Row], *, now: float, head: str = "") -> None:
        """The agents as they are now; on something else than a terminal every PLAIN_EVERY_S only.

        `head`: a line that stays above the table, whatever scrolls by.
        """
        self._wipe()
        if self._is_live:
            if self._live is None:
                from hive.up.live_table import LiveTable

                self._live = LiveTable(self._out, coloured=self._coloured)
            self._views, self._head = views, head
            self._paint_in_time()
        elif self._plain_shown_at is None or now - self._plain_shown_at >= PLAIN_EVERY_S:
            self._plain_shown_at = now
            self._err.line(plain_table(views))

    def _paint_in_time(self) -> None:
        """Draws now where the last drawing is PAINT_EVERY_S ago, else then."""
        if self._painting is not None:
            return
        wait_s = self._painted_at + PAINT_EVERY_S - time.monotonic()
        if wait_s <= 0:
            self._paint()
            return
        try:
            self._painting = asyncio.get_running_loop().call_later(wait_s, self._paint)
        except RuntimeError:
            return  # no loop runs: the next call draws it, or `close`

    def _paint(self) -> None:
        """The lines that came since the last time, and below them the table: one drawing for all of them."""
        if self._painting is not None:
            self._painting.cancel()
            self._painting = None
        if self._live is None:
            return
        self._painted_at = time.monotonic()
        lines = list(self._unpainted)[-self._live.height :]
        if self._said > len(lines):
            lines.insert(0, f"… {counted(self._said - len(lines), 'line')} more: hive logs")
        self._unpainted.clear()
        self._said = 0
        self._live.draw(self._views, lines, head=self._head)

    def result(self, summary: Mapping[str, object]) -> None:
        """The one JSON object, on stdout."""
        TerminalWriter(STDOUT).line(msgspec.json.encode(summary).decode())

    def close(self) -> None:
        """Leaves the table as it stands and gives the cursor back."""
        self._wipe()
        if self._live is not None:
            self._paint()
            live, self._live = self._live, None
            live.close()
