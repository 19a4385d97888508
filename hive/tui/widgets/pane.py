"""A few lines that are as high as what they say: drawn anew only where that has changed."""

from __future__ import annotations

from collections.abc import Callable

from rich.segment import Segment
from textual.geometry import Size
from textual.strip import Strip
from textual.widget import Widget

from hive.tui.lines import Line, cut, rule, text_of
from hive.tui.widgets.colours import styles

Make = Callable[[int], list[Line]]
"""The lines for a width."""


class Pane(Widget):
    """Without lines it is not there. A height that stays the same costs no layout: that of the whole screen."""

    DEFAULT_CSS = "Pane { height: auto; } Pane.empty { display: none; }"
    ALLOW_SELECT = False

    def __init__(self, *, unicode: bool, id: str) -> None:
        super().__init__(id=id, classes="empty")
        self._unicode = unicode
        self._title = ""
        self._make: Make = lambda _: []
        self._lines: list[Line] = []

    def __repr__(self) -> str:
        return f"<Pane {self.id} {len(self._lines)} lines>"

    @property
    def text(self) -> str:
        """Its text, without its title."""
        return text_of(self._lines[1:] if self._title else self._lines)

    @property
    def title(self) -> str:
        return self._title

    @property
    def height(self) -> int:
        """Lines, without its title."""
        return len(self._lines) - (1 if self._title and self._lines else 0)

    def show(self, lines: Make | list[Line], *, title: str = "") -> None:
        """Shows these lines; where their width matters they are asked for again whenever it changes."""
        self._make, self._title = lines if callable(lines) else lambda _: lines, title
        self._arrange()

    def _arrange(self) -> None:
        width = self.size.width or self.app.size.width
        lines = [cut(parts, width, unicode=self._unicode) for parts in self._make(width)]
        if self._title and lines:
            lines.insert(0, rule(self._title, width, unicode=self._unicode))
        if lines == self._lines:
            return
        has_grown = len(lines) != len(self._lines)
        self._lines = lines
        self.set_class(not lines, "empty")
        self.refresh(layout=has_grown)

    def on_resize(self) -> None:
        self._arrange()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:  # noqa: ARG002
        return len(self._lines)

    def render_line(self, y: int) -> Strip:
        plain, width = self.rich_style, self.size.width
        parts = self._lines[y] if y < len(self._lines) else ()
        of = styles(with_colours=not self.app.no_color)
        segments = [Segment(text, plain + of[role]) for text, role in parts]
        return Strip(segments).adjust_cell_length(width, plain)
