"""Curves and bars out of characters: one line or several, with block elements or in ASCII. Pure."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS, ASCII = " ▁▂▃▄▅▆▇█", " .:-=+*##"
"""Ninths of a cell, from none to all of it."""
EIGHTHS = 8
SCALE = 6
"""Columns before a chart for its scale."""


def spark(values: Sequence[float | None], width: int, *, top: float | None = None, unicode: bool = True) -> str:
    """The last `width` values as a line, the newest at its end. `top`: what fills a cell, else the highest of them.

    A value that is unknown, or was before the first, is a blank; 0 is the lowest line.

    >>> spark([None, 0, 1, 4, 8], 6), spark([50.0], 3, top=100), spark([1, 8], 2, unicode=False)
    ('  ▁▁▄█', '  ▄', '.#')
    """
    return chart(values, width, 1, top=top, unicode=unicode)[0]


def chart(
    values: Sequence[float | None], width: int, height: int, *, top: float | None = None, unicode: bool = True
) -> list[str]:
    """A chart as of `spark`, `height` lines high, the uppermost first.

    >>> chart([0, 1, 2, 4], 4, 2)
    ['   █', '▁▄██']
    """
    seen = list(values[-width:]) if width > 0 else []
    highest = max((value for value in seen if value is not None), default=0.0) if top is None else top
    levels = [None] * (width - len(seen)) + [_level(value, highest, height * EIGHTHS) for value in seen]
    signs = BLOCKS if unicode else ASCII
    lines = []
    for floor in range((height - 1) * EIGHTHS, -1, -EIGHTHS):
        lines.append("".join(" " if level is None else signs[max(0, min(EIGHTHS, level - floor))] for level in levels))
    return lines


def with_scale(values: Sequence[float | None], width: int, height: int, *, unicode: bool = True) -> list[str]:
    """A chart as of `chart`, with the values of its top and bottom before it.

    >>> with_scale([1, 2, 4], 9, 2)
    ['    4   █', '    0 ▄██']
    """
    shown = values[-max(1, width - SCALE) :]
    top = max((value for value in shown if value is not None), default=0.0)
    marks = [short(top) if top else ""] + [""] * (height - 1)
    marks[-1] = marks[-1] or "0"
    curve = chart(values, width - SCALE, height, unicode=unicode)
    return [f"{mark:>{SCALE - 1}} {text}" for mark, text in zip(marks, curve, strict=True)]


def short(number: float) -> str:
    """A count in at most five columns, in powers of 1000.

    >>> short(0.4), short(98.0), short(98.25), short(812), short(121510), short(9999.6), short(1e15), short(1e21)
    ('0.4', '98', '98.2', '812', '122k', '10.0k', '1P', '1000E')
    """
    units = iter("kMGTPE")
    unit = ""
    while number >= 999.5 and (larger := next(units, "")):
        number, unit = number / 1000, larger
    return f"{number:.1f}{unit}" if number < 99.95 and number % 1 else f"{number:.0f}{unit}"


def _level(value: float | None, highest: float, most: int) -> int | None:
    """Eighths of a cell, at least one."""
    if value is None:
        return None
    return max(1, min(most, round(most * value / highest))) if highest > 0 else 1


def stretched(values: Sequence[float], width: int) -> list[float]:
    """Each value in as many columns as fit, so that few of them fill a wide chart.

    >>> stretched([1, 2], 5)
    [1, 1, 2, 2]
    """
    columns = max(1, width // max(1, len(values)))
    return [value for value in values for _ in range(columns)]
