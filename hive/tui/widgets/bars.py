"""Scroll bars with ends that are whole cells: for a terminal that has ASCII only."""

from __future__ import annotations

from typing import ClassVar

from textual.scrollbar import ScrollBarRender
from textual.widget import Widget


class WholeCells(ScrollBarRender):
    VERTICAL_BARS: ClassVar[list[str]] = [" "]
    HORIZONTAL_BARS: ClassVar[list[str]] = [" "]


def use_whole_cells(widget: Widget) -> None:
    """Sets the renderer of one widget's bars, as Textual's ScrollBar documents it."""
    for bar in (widget.vertical_scrollbar, widget.horizontal_scrollbar):
        bar.renderer = WholeCells  # type: ignore[misc]
