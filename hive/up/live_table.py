"""The table of `hive up --demo` on a terminal: with Rich, 2 MB that no other `hive up` needs, so imported late."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TextIO, cast

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from hive.up.lines import TerminalWriter
from hive.up.table import HEADS, STYLES, Row, cells, shown


class LiveTable:
    """A table that stays below the lines which are written above it."""

    def __init__(self, out: TerminalWriter, *, coloured: bool) -> None:
        console = Console(file=cast(TextIO, out), no_color=not coloured)
        self._live = Live(console=console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    @property
    def height(self) -> int:
        """Rows of the terminal."""
        return self._live.console.size.height

    def draw(self, views: Sequence[Row], lines: Sequence[str], *, head: str) -> None:
        """The lines, and below them the table: one drawing for all of them."""
        console = self._live.console
        self._live.update(live_table(views, head=head, rows=console.size.height * 2 // 3))
        if lines:
            console.print(Text.from_ansi("\n".join(lines)), soft_wrap=True)  # draws the table below them too
        else:
            self._live.refresh()

    def close(self) -> None:
        self._live.stop()


def live_table(views: Sequence[Row], *, head: str = "", rows: int = 1 << 16) -> Group:
    """For a terminal: `head`, and the agents that fit into `rows` lines with it."""
    views, others = shown(views, max(rows - 2, 2))
    parts = [Text(head, "bold", no_wrap=True, overflow="ellipsis")] if head else []
    ends = [Text(others, "dim")] if others else []
    return Group(*parts, _table(views), *ends)


def _table(views: Sequence[Row]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", expand=True)
    for number, head in enumerate(HEADS):
        # The reason takes what room is left, the figures keep theirs.
        ratio = 1 if head == "why" else None
        table.add_column(
            head, justify="right" if number > 3 else "left", no_wrap=True, overflow="ellipsis", ratio=ratio
        )
    for view in views:
        name, state, *rest = cells(view)
        table.add_row(Text(name), Text(state, STYLES.get(state, "yellow")), *(Text(cell) for cell in rest))
    return table
