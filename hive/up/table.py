"""The table of `hive up --demo`: every agent, how it is and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hive.terminal_text import counted

Row = Mapping[str, object]
HEADS = ("agent", "state", "depth", "why", "reqs", "tokens", "RAM", "last wake")
STYLES = {"running": "green", "paused": "blue", "error": "red", "stopped": "dim"}
PLAIN_WIDTHS = (12, 9, 6, 44, 6, 9, 9, 9)
PLAIN_ROWS = 20
RANKS = {"error": 0, "running": 2, "paused": 3, "created": 4, "stopped": 4}
"""Order of the agents where not all fit: smaller first; those that change just now come after `error`."""


def cells(view: Row) -> tuple[str, ...]:
    """The cells of one agent, in the order of HEADS; a dash for what is not known.

    >>> cells({"name": "ann", "status": "paused", "depth": "light", "brief": "deep in 9 s", "held_bytes": 3 << 20})
    ('ann', 'paused', 'light', 'deep in 9 s', '0', '0', '3 MiB', '–')
    """
    held, wake = _number(view, "held_bytes"), view.get("last_wake_ms")
    return (
        str(view.get("name", "?")),
        str(view.get("status", "?")),
        str(view.get("depth", "?")),
        str(view.get("brief") or ""),
        f"{_number(view, 'requests'):.0f}",
        f"{_number(view, 'tokens_in') + _number(view, 'tokens_out'):.0f}",
        f"{held / (1 << 20):.0f} MiB" if held else "–",
        f"{wake:.1f} ms" if isinstance(wake, int | float) else "–",
    )


def shown(views: Sequence[Row], rows: int) -> tuple[Sequence[Row], str]:
    """The agents that fit into so many rows, and a sentence about the others; empty where all of them fit.

    >>> agents = [{"name": "a", "status": "paused"}, {"name": "b", "status": "error"}]
    >>> [view["name"] for view in shown(agents, 2)[0]], shown(agents, 2)[1]
    (['a', 'b'], '')
    >>> [view["name"] for view in shown(agents, 1)[0]], shown(agents, 1)[1]
    (['b'], '… 1 agent more: hive ps')
    """
    if len(views) <= rows:
        return views, ""
    first = sorted(views, key=lambda view: RANKS.get(str(view.get("status")), 1))[: max(rows - 1, 1)]
    return first, f"… {counted(len(views) - len(first), 'agent')} more: hive ps"


def plain_table(views: Sequence[Row]) -> str:
    """For a file or a pipe: one line per agent, fixed columns; PLAIN_ROWS of them."""
    views, others = shown(views, PLAIN_ROWS)
    rows = [HEADS, *(cells(view) for view in views)]
    lines = [
        "  ".join(f"{cell[:width]:<{width}}" for cell, width in zip(row, PLAIN_WIDTHS, strict=True)).rstrip()
        for row in rows
    ]
    return "\n".join([*lines, others] if others else lines)


def _number(view: Row, key: str) -> float:
    value = view.get(key)
    return value if isinstance(value, int | float) else 0
