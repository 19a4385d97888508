"""The table of agents: draws what is on the screen straight from the rows, so that a thousand cost what twenty do.

Textual's DataTable keeps every cell and measures it again when it changes: with a column that counts seconds that is
every row once a second.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.color import Color
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from hive.tui import cells
from hive.tui.cells import COLUMNS, Column
from hive.tui.lines import ROLES
from hive.tui.snapshot import AgentLine
from hive.tui.widgets.bars import use_whole_cells
from hive.tui.widgets.colours import PAUSED_BEHIND, styles

HEAD_LINES = 1


class AgentTable(ScrollView, can_focus=True):
    """One row is selected, by the agent's id: it stays selected, and where it was on the screen, while agents come,
    go and change places. Where it goes itself, the next one is."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up,k", "move(-1)", "Up", show=False),
        Binding("down,j", "move(1)", "Down", show=False),
        Binding("pageup", "move_page(-1)", "Page up", show=False),
        Binding("pagedown", "move_page(1)", "Page down", show=False),
        Binding("home,g", "move(-1000000)", "First", show=False),
        Binding("end,G", "move(1000000)", "Last", show=False),
        Binding("enter", "open", "Agent"),
        Binding("less_than_sign", "sort(-1)", "Sort by left column", show=False),
        Binding("greater_than_sign", "sort(1)", "Sort by right column", show=False),
        Binding("o", "turn", "Turn the order round", show=False),
    ]
    DEFAULT_CSS = "AgentTable { height: 1fr; overflow-x: hidden; }"

    class Opened(Message):
        """An agent's page is asked for."""

        def __init__(self, row: AgentLine) -> None:
            super().__init__()
            self.row = row

    def __init__(self, *, unicode: bool, id: str | None = None) -> None:
        super().__init__(id=id)
        self._unicode = unicode
        self._all: Sequence[AgentLine] = ()
        self._rows: list[AgentLine] = []
        self._index = 0
        self._column: Column = COLUMNS[0]
        self._descending = False
        self._wanted = ""
        self._plain: Style | None = None

    def on_mount(self) -> None:
        if not self._unicode:
            use_whole_cells(self)

    def __repr__(self) -> str:
        selected = self.selected.name if self.selected else None
        return f"<AgentTable {len(self._rows)} rows, {selected} selected, by {self._column.head}>"

    @property
    def selected(self) -> AgentLine | None:
        return self._rows[self._index] if self._rows else None

    @property
    def rows(self) -> Sequence[AgentLine]:
        """The rows as they stand, top to bottom."""
        return self._rows

    @property
    def in_sight(self) -> Sequence[AgentLine]:
        """The rows on the screen."""
        return self._rows[self.scroll_offset.y : self.scroll_offset.y + self._room]

    @property
    def screen_line(self) -> int:
        """The line of the screen with the selected row: 0 is the first line below the heads."""
        return self._index - self.scroll_offset.y

    @property
    def sorted_by(self) -> str:
        return self._column.head

    @property
    def is_descending(self) -> bool:
        return self._descending

    def show(self, rows: Sequence[AgentLine]) -> None:
        self._all = rows
        self._arrange()

    def filter(self, wanted: str) -> None:
        self._wanted = wanted
        self._arrange()

    def _arrange(self) -> None:
        selected, line = self.selected, self.screen_line
        kept = [row for row in self._all if cells.matches(row, self._wanted)] if self._wanted else self._all
        self._rows = cells.ordered(kept, self._column, descending=self._descending)
        found = next((n for n, row in enumerate(self._rows) if selected is not None and row.id == selected.id), None)
        self._index = max(0, min(self._index, len(self._rows) - 1)) if found is None else found
        self.virtual_size = Size(self.size.width, len(self._rows) + HEAD_LINES)
        if 0 <= line < self._room:
            self._scroll_to_line(self._index - line)
        self.refresh()

    @property
    def _width(self) -> int:
        """Without the scroll bar."""
        return self.scrollable_content_region.width

    @property
    def _columns(self) -> tuple[Column, ...]:
        """The columns of a terminal of this width: none goes because a scroll bar came."""
        return cells.shown(self.size.width)

    @property
    def _room(self) -> int:
        return max(1, self.size.height - HEAD_LINES)

    def _scroll_to_line(self, first: int) -> None:
        self.scroll_to(y=max(0, min(first, len(self._rows) - self._room)), animate=False, force=True)

    def _select(self, index: int) -> None:
        self._index = max(0, min(index, len(self._rows) - 1))
        first = self.scroll_offset.y
        self._scroll_to_line(min(max(first, self._index - self._room + 1), self._index))
        self.refresh()

    # --- keys and mouse ------------------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        self._select(self._index + by)

    def action_move_page(self, by: int) -> None:
        self._select(self._index + by * self._room)

    def action_open(self) -> None:
        if self.selected is not None:
            self.post_message(self.Opened(self.selected))

    def action_sort(self, by: int) -> None:
        """The next column that is shown; numbers begin with the highest."""
        columns = self._columns
        here = next((n for n, column in enumerate(columns) if column.head == self._column.head), 0)
        self.sort_by(columns[(here + by) % len(columns)].head)

    def action_turn(self) -> None:
        self._descending = not self._descending
        self._arrange()

    def sort_by(self, head: str) -> None:
        self._column = next(column for column in COLUMNS if column.head == head)
        self._descending = self._column.is_number
        self._arrange()

    def on_click(self, event: events.Click) -> None:
        if event.y >= HEAD_LINES:
            self._select(self.scroll_offset.y + event.y - HEAD_LINES)
            if event.chain == 2:
                self.action_open()
            return
        column = cells.column_at(event.x, self._columns, self._width)
        if column is not None and column.head == self._column.head:
            self.action_turn()
        elif column is not None:
            self.sort_by(column.head)

    def on_resize(self) -> None:
        self.virtual_size = Size(self.size.width, len(self._rows) + HEAD_LINES)
        if self._rows:
            self._select(self._index)

    # --- drawing -------------------------------------------------------------------------------------------------

    def render_lines(self, crop: Region) -> list[Strip]:
        self._plain = self.rich_style  # as many microseconds as a line, and the same for all of them
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        width, columns = self._width, self._columns
        plain = self._plain or self.rich_style
        if y < HEAD_LINES:
            return Strip([Segment(self._heads(columns, width), plain + Style(bold=True, underline=True))], width)
        index = self.scroll_offset.y + y - HEAD_LINES
        if index >= len(self._rows):
            said = cells.fit(self._empty() if index == 0 else "", width, unicode=self._unicode)
            return Strip([Segment(f"{said:<{width}}", plain)], width)
        row = self._rows[index]
        line = cells.row_line(row, columns, width, unicode=self._unicode)
        if index == self._index:
            return Strip([Segment(line, plain + Style(reverse=True))], width)
        start = columns[0].width + 1
        end = start + columns[1].width
        badge = plain + self._badge(row.status)
        return Strip([Segment(line[:start], plain), Segment(line[start:end], badge), Segment(line[end:], plain)], width)

    def _empty(self) -> str:
        if not self._all:
            return "no agents: hive agent create starts one"
        return f"none of {len(self._all)} matches {cells.one_line(self._wanted, unicode=self._unicode)}"

    def _heads(self, columns: Sequence[Column], width: int) -> str:
        sign = ("▼" if self._descending else "▲") if self._unicode else ("v" if self._descending else "^")
        return cells.heads_line(columns, width, self._column.head, sign, unicode=self._unicode)

    def _badge(self, status: str) -> Style:
        style = styles(with_colours=not self.app.no_color)[ROLES.get(status, "going")]
        if status != "paused" or self.app.no_color:
            return style
        behind = self.background_colors[1] + Color.parse(PAUSED_BEHIND)
        return style + Style(bgcolor=behind.rich_color)
