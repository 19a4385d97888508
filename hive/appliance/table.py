"""The table of `hive up --demo`: every agent, how it is and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table
from rich.text import Text

Row = Mapping[str, object]
HEADS = ("agent", "state", "depth", "why", "reqs", "tokens", "RAM", "last wake")
STYLES = {"running": "green", "paused": "blue", "error": "red", "stopped": "dim"}
PLAIN_WIDTHS = (12, 9, 6, 44, 6, 9, 9, 9)


def cells(view: Row) -> tuple[str, ...]:
    """What is shown of one agent, in the order of HEADS; a dash for what is not known.

    >>> cells({"name": "ann", "status": "paused", "depth": "light", "brief": "deep in 9 s", "rss_bytes": 3 << 20})
    ('ann', 'paused', 'light', 'deep in 9 s', '0', '0', '3 MiB', '–')
    """
    rss, wake = _number(view, "rss_bytes"), view.get("last_wake_ms")
    return (
        str(view.get("name", "?")),
        str(view.get("status", "?")),
        str(view.get("depth", "?")),
        str(view.get("brief") or ""),
        f"{_number(view, 'requests'):.0f}",
        f"{_number(view, 'tokens_in') + _number(view, 'tokens_out'):.0f}",
        f"{rss / (1 << 20):.0f} MiB" if rss else "–",
        f"{wake:.1f} ms" if isinstance(wake, int | float) else "–",
    )


def live_table(views: Sequence[Row]) -> Table:
    """For a terminal."""
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


def plain_table(views: Sequence[Row]) -> str:
    """For a file or a pipe: one line per agent, fixed columns."""
    rows = [HEADS, *(cells(view) for view in views)]
    return "\n".join(
        "  ".join(f"{cell[:width]:<{width}}" for cell, width in zip(row, PLAIN_WIDTHS, strict=True)).rstrip()
        for row in rows
    )


def _number(view: Row, key: str) -> float:
    value = view.get(key)
    return value if isinstance(value, int | float) else 0
