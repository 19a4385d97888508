"""Where `hive up` writes: lines and tables for people, at the end one JSON object for programs."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import TextIO, cast

import msgspec
from rich.console import Console
from rich.live import Live
from rich.text import Text

from hive.appliance.lines import Terminal, prefixed, wants_colour
from hive.appliance.log_file import LogFile
from hive.appliance.table import Row, live_table, plain_table

PLAIN_EVERY_S = 10.0
STDOUT, STDERR = 1, 2


class Screen:
    """stdout is the result, stderr the talk. With `json` the only result is the object at the end."""

    def __init__(self, *, json: bool) -> None:
        self._out = Terminal(STDERR if json else STDOUT)
        self._err = Terminal(STDERR)
        self._coloured = wants_colour(is_terminal=self._err.isatty(), env=os.environ)
        self._is_live = not json and self._out.isatty() and os.environ.get("TERM") != "dumb"
        self._live: Live | None = None
        self._plain_shown_at: float | None = None
        self._kept: LogFile | None = None

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
        """One line of one process; above the live table where there is one on the same terminal."""
        if self._kept is not None:
            self._kept.write(name, text, at=time.time())
        line = prefixed(name, text, coloured=self._coloured)
        if self._live is not None and self._err.isatty():
            self._live.console.print(Text.from_ansi(line), soft_wrap=True)
        else:
            self._err.line(line)

    def tell(self, text: str) -> None:
        """Text for the person who started it."""
        self._out.line(text)

    def show(self, views: Sequence[Row], *, now: float) -> None:
        """The agents as they are now; on something else than a terminal every PLAIN_EVERY_S only."""
        if self._is_live:
            if self._live is None:
                console = Console(file=cast(TextIO, self._out), no_color=not self._coloured)
                self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
                self._live.start()
            self._live.update(live_table(views), refresh=True)
        elif self._plain_shown_at is None or now - self._plain_shown_at >= PLAIN_EVERY_S:
            self._plain_shown_at = now
            self._err.line(plain_table(views))

    def result(self, summary: Mapping[str, object]) -> None:
        """The one JSON object, on stdout."""
        Terminal(STDOUT).line(msgspec.json.encode(summary).decode())

    def close(self) -> None:
        """Leaves the table as it stands and gives the cursor back."""
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
