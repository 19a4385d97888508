"""The table of agents as text: its columns, what stands in them, how wide they are. Pure; colours are the widgets'."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from hive.terminal_text import escaped
from hive.tui.snapshot import AgentLine

UNKNOWN = "-"
_BLANKS = str.maketrans("\n\t\r", "   ")
_ASCII = str.maketrans({"→": ">", "●": "*", "○": "o", "◌": "~", "–": "-", "·": "|", "…": "~", "×": "x"})
SIGNS = {"running": "●", "paused": "●", "stopped": "○", "created": "○", "error": "!"}
"""Before a state; all others are on their way from one of these to another: `◌`."""


class Column(NamedTuple):
    """`from_width`: columns a terminal has to have for it to be shown; a width of 0 takes what is left.

    `wide`: its width where a terminal has 160.
    """

    head: str
    width: int
    cell: Callable[[AgentLine], str]
    key: Callable[[AgentLine], float | str]
    is_number: bool = False
    from_width: int = 0
    wide: int = 0


def size(count: int | None) -> str:
    """Bytes in at most five columns, in powers of 1024.

    >>> size(None), size(0), size(9437184), size(1610612736), size(1023 << 20), size(1 << 60), size(1 << 70)
    ('-', '0', '9.0M', '1.5G', '1.0G', '1.0E', '1024E')
    """
    if count is None:
        return UNKNOWN
    left, units = float(count), iter("KMGTPE")
    unit = ""
    while left >= 999.5 and (larger := next(units, "")):
        left, unit = left / 1024, larger
    return f"{left:.1f}{unit}" if unit and left < 9.95 else f"{left:.0f}{unit}"


def span(seconds: float | None) -> str:
    """A length of time in at most five columns.

    >>> [span(s) for s in (None, 0.4, 59, 61, 3700, 90000, 8640000)]
    ['-', '0s', '59s', '1m1s', '1h1m', '1d1h', '100d']
    """
    if seconds is None:
        return UNKNOWN
    left = int(seconds)
    for (unit, length), (small, below) in pairwise(_UNITS):
        if left >= length:
            rest = left % length // below
            both = f"{left // length}{unit}{rest}{small}"
            return both if rest and len(both) <= 5 else f"{left // length}{unit}"
    return f"{left}s"


_UNITS = (("d", 86400), ("h", 3600), ("m", 60), ("s", 1))


def one_line(text: str, *, unicode: bool = True) -> str:
    r"""Text an agent may have chosen, without what would steer the terminal, mislead its reader or break the row.

    >>> one_line("a\nb\x1b[2J"), one_line("\u202ea"), one_line("a → b", unicode=False)
    ('a b\\x1b[2J', '\\u202ea', 'a > b')
    """
    text = escaped(text.translate(_BLANKS))
    return text if unicode else text.translate(_ASCII).encode("ascii", "replace").decode()


def fit(text: str, room: int, *, unicode: bool = True) -> str:
    """The part of a line that has room, with a sign where something is left out; each character one column wide.

    >>> fit("librarian", 5), fit("librarian", 5, unicode=False), fit("bob", 5), fit("模型", 5)
    ('libr…', 'libr~', 'bob', '??')
    """
    if not text.isascii():
        text = "".join(sign if _is_narrow(sign) else "?" for sign in text)
    if len(text) <= room:
        return text
    return text[: max(0, room - 1)] + ("…" if unicode else "~")[:room]


@lru_cache(1024)
def _is_narrow(sign: str) -> bool:
    return unicodedata.east_asian_width(sign) not in "WF" and unicodedata.category(sign) not in ("Mn", "Me", "Cf")


def _known(value: float | None) -> float:
    return -1.0 if value is None else value


def state(status: str) -> str:
    """
    >>> state("paused"), state("stopped"), state("error"), state("pausing")
    ('● paused', '○ stopped', '! error', '◌ pausing')
    """
    return f"{SIGNS.get(status, '◌')} {status}"


COLUMNS: tuple[Column, ...] = (
    Column("AGENT", 14, lambda row: row.name, lambda row: row.name, wide=24),
    Column("STATE", 10, lambda row: state(row.status), lambda row: row.status),
    Column("DEPTH", 5, lambda row: row.depth or UNKNOWN, lambda row: row.depth, from_width=56),
    Column("TIER", 6, lambda row: row.tier, lambda row: row.tier, from_width=100),
    Column("TENANT", 10, lambda row: row.tenant, lambda row: row.tenant, from_width=100, wide=16),
    Column("MODEL", 14, lambda row: row.model or UNKNOWN, lambda row: row.model or "", from_width=120, wide=28),
    Column("REQ", 3, lambda row: count(row.in_flight), lambda row: _known(row.in_flight), True, 50),
    Column("TOK/S", 5, lambda row: count(row.tokens_per_s), lambda row: _known(row.tokens_per_s), True, 64),
    Column("BUDGET", 6, lambda row: percent(row.budget_percent), lambda row: _known(row.budget_percent), True, 132),
    Column("RAM", 5, lambda row: size(row.rss_bytes), lambda row: _known(row.rss_bytes), True, 40),
    Column("SAVED", 5, lambda row: size(row.saved_bytes), lambda row: _known(row.saved_bytes), True, 72),
    Column("IDLE", 5, lambda row: span(row.idle_s), lambda row: _known(row.idle_s), True, 44),
    Column("WHY", 0, lambda row: row.why, lambda row: row.why),
)
"""REQ counts the requests in flight; BUDGET is the share that is spent of the budget of tokens that ends first."""
NARROW, WIDE = 28, 160


def count(number: float | None) -> str:
    """
    >>> count(None), count(3), count(0.0), count(12.5), count(1234.5)
    ('-', '3', '0', '12.5', '1234')
    """
    if number is None:
        return UNKNOWN
    return f"{number:.1f}" if isinstance(number, float) and 0 < number < 100 else f"{number:.0f}"


def percent(share: int | None) -> str:
    """
    >>> percent(None), percent(85)
    ('', '85%')
    """
    return "" if share is None else f"{share}%"


@lru_cache(64)
def shown(width: int) -> tuple[Column, ...]:
    """The columns a terminal of this width has.

    >>> [len(shown(width)) for width in (20, 80, 100, 120)]
    [3, 9, 11, 12]
    >>> [column.width for column in shown(200) if column.head in ("AGENT", "MODEL")]
    [24, 28]
    """
    columns = [column for column in COLUMNS if width >= column.from_width]
    if width >= WIDE:
        columns = [column._replace(width=column.wide or column.width) for column in columns]
    elif width < NARROW:
        columns[0] = columns[0]._replace(width=8)
    return tuple(columns)


def line_of(texts: Sequence[str], columns: Sequence[Column], width: int, *, unicode: bool = True) -> str:
    """Cells beside each other, cut to their columns, one space apart, `width` columns in all.

    >>> line_of(["alice", "deep"], [Column("A", 4, str, str), Column("B", 0, str, str)], 12)
    'ali… deep   '
    """
    cells = []
    for text, column in zip(texts, columns, strict=True):
        room = column.width or max(3, width - sum(other.width + 1 for other in columns if other.width))
        text = fit(text, room, unicode=unicode)
        cells.append(f"{text:>{room}}" if column.is_number else f"{text:<{room}}")
    return f"{' '.join(cells)[:width]:<{width}}"


def heads_line(columns: Sequence[Column], width: int, by: str, sign: str, *, unicode: bool = True) -> str:
    """The titles of the columns, whole, and `sign` beside the title of the one they are ordered by, in the blank
    between two columns where the title fills its own.

    >>> heads_line([Column("RAM", 5, str, str, True), Column("DEPTH", 5, str, str), Column("WHY", 0, str, str)], 20,
    ...            "DEPTH", "^")
    '  RAM DEPTH^WHY     '
    """
    line = line_of([column.head for column in columns], columns, width, unicode=unicode)
    end = 0
    for column in columns:
        start, end = end, end + column.width + 1
        if column.head == by:
            at = start + (column.width if column.is_number else len(fit(by, column.width or len(by), unicode=unicode)))
            return f"{line[:at]}{sign}{line[at + 1 :]}"[:width]
    return line


def row_line(row: AgentLine, columns: Sequence[Column], width: int, *, unicode: bool) -> str:
    texts = [one_line(column.cell(row), unicode=unicode) for column in columns]
    return line_of(texts, columns, width, unicode=unicode)


def column_at(x: int, columns: Sequence[Column], width: int) -> Column | None:
    """The one of these columns, drawn `width` wide, that is at `x`; a blank behind a column is its own.

    >>> [(found := column_at(x, shown(80), 80)) and found.head for x in (0, 14, 15, 79, 80)]
    ['AGENT', 'AGENT', 'STATE', 'WHY', None]
    """
    end = 0
    for column in columns:
        end = end + column.width + 1 if column.width else width
        if x < end:
            return column
    return None


def matches(row: AgentLine, wanted: str) -> bool:
    """Whether a part of its name, state, depth, tenant, tier or model is `wanted`; `!` before it turns it round."""
    text = " ".join((row.name, row.status, row.depth, row.tenant, row.tier, row.model or "")).casefold()
    inverse, wanted = wanted.startswith("!"), wanted.removeprefix("!").strip().casefold()
    return not wanted or (wanted in text) is not inverse


def ordered(rows: Sequence[AgentLine], column: Column, *, descending: bool) -> list[AgentLine]:
    """The rows by this column; rows alike in it by name, in either direction."""
    by_name = sorted(rows, key=lambda row: row.name)
    return sorted(by_name, key=column.key, reverse=descending)
