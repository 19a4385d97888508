"""What of a Snapshot stands where, in how many columns. Pure; colours are the widgets' business."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from hive.tui.snapshot import AgentRow, BackendRow, Queue, Snapshot

UNKNOWN = "-"
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_ASCII = str.maketrans({"→": ">", "●": "*", "–": "-", "·": "|", "…": "~"})


class Column(NamedTuple):
    """`from_width`: columns a terminal has to have for it to be shown; a width of 0 takes what is left."""

    head: str
    width: int
    cell: Callable[[AgentRow], str]
    key: Callable[[AgentRow], float | str]
    is_number: bool = False
    from_width: int = 0


def size(count: int | None) -> str:
    """Bytes in at most five columns, in powers of 1024.

    >>> size(None), size(0), size(9437184), size(1610612736), size(1023 << 20)
    ('-', '0', '9.0M', '1.5G', '1.0G')
    """
    if count is None:
        return UNKNOWN
    left, units = float(count), iter("KMGTP")
    unit = ""
    while left >= 999.5:
        left, unit = left / 1024, next(units)
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
    r"""Text an agent may have chosen, without what would steer the terminal or break the row.

    >>> one_line("a\nb\x1b[2J"), one_line("a → b", unicode=False)
    ('a b\\x1b[2J', 'a > b')
    """
    text = _CONTROL.sub(lambda found: " " if found[0] in "\n\t\r" else f"\\x{ord(found[0]):02x}", text)
    return text if unicode else text.translate(_ASCII).encode("ascii", "replace").decode()


def _known(value: float | None) -> float:
    return -1.0 if value is None else value


COLUMNS: tuple[Column, ...] = (
    Column("AGENT", 14, lambda row: row.name, lambda row: row.name),
    Column("STATE", 10, lambda row: f"● {row.status}", lambda row: row.status),
    Column("DEPTH", 5, lambda row: row.depth, lambda row: row.depth),
    Column("TIER", 6, lambda row: row.tier, lambda row: row.tier, from_width=120),
    Column("TENANT", 10, lambda row: row.tenant, lambda row: row.tenant, from_width=120),
    Column("MODEL", 14, lambda row: row.model or UNKNOWN, lambda row: row.model or "", from_width=120),
    Column("REQ", 3, lambda row: _count(row.in_flight), lambda row: _known(row.in_flight), is_number=True),
    Column("TOK/S", 5, lambda row: _count(row.tokens_per_s), lambda row: _known(row.tokens_per_s), is_number=True),
    Column("RAM", 5, lambda row: size(row.rss_bytes), lambda row: _known(row.rss_bytes), is_number=True),
    Column("SAVED", 5, lambda row: size(row.saved_bytes), lambda row: _known(row.saved_bytes), is_number=True),
    Column("IDLE", 5, lambda row: span(row.idle_s), lambda row: _known(row.idle_s), is_number=True),
    Column("WHY", 0, lambda row: row.why, lambda row: row.why),
)
"""REQ counts the requests in flight."""


def _count(count: float | None) -> str:
    """
    >>> _count(None), _count(3), _count(12.5), _count(1234.5)
    ('-', '3', '12.5', '1234')
    """
    if count is None:
        return UNKNOWN
    return f"{count:.1f}" if isinstance(count, float) and count < 100 else f"{count:.0f}"


def shown(width: int) -> list[Column]:
    """The columns a terminal of this width has.

    >>> len(shown(80)), len(shown(120))
    (9, 12)
    """
    return [column for column in COLUMNS if width >= column.from_width]


def line_of(texts: Sequence[str], columns: Sequence[Column], width: int) -> str:
    """Cells beside each other, cut to their columns, one space apart, `width` columns in all.

    >>> line_of(["alice", "deep"], [Column("A", 4, str, str), Column("B", 0, str, str)], 12)
    'alic deep   '
    """
    cells = []
    for text, column in zip(texts, columns, strict=True):
        room = column.width or max(3, width - sum(other.width + 1 for other in columns if other.width))
        cells.append(f"{text[:room]:>{room}}" if column.is_number else f"{text[:room]:<{room}}")
    return f"{' '.join(cells)[:width]:<{width}}"


def row_line(row: AgentRow, columns: Sequence[Column], width: int, *, unicode: bool) -> str:
    return line_of([one_line(column.cell(row), unicode=unicode) for column in columns], columns, width)


def matches(row: AgentRow, wanted: str) -> bool:
    """Whether a part of its name, state, depth, tenant, tier or model is `wanted`; `!` before it turns it round."""
    text = " ".join((row.name, row.status, row.depth, row.tenant, row.tier, row.model or "")).casefold()
    inverse, wanted = wanted.startswith("!"), wanted.removeprefix("!").strip().casefold()
    return not wanted or (wanted in text) is not inverse


def ordered(rows: Sequence[AgentRow], column: Column, *, descending: bool) -> list[AgentRow]:
    """By this column; rows alike in it by name, whichever way it goes."""
    by_name = sorted(rows, key=lambda row: row.name)
    return sorted(by_name, key=column.key, reverse=descending)


# --- the lines above ---------------------------------------------------------------------------------------------


def head_lines(snapshot: Snapshot) -> list[str]:
    """The backend, the queue and what it all costs: two lines."""
    states: dict[str, int] = {}
    for row in snapshot.agents:
        states[row.status] = states.get(row.status, 0) + 1
    counts = " ".join(f"{count} {status}" for status, count in sorted(states.items()))
    first = [f"Hive {snapshot.hive_version}".strip(), counts or "no agents", backend_text(snapshot.backend)]
    second = [queue_text(snapshot.queue), *_memory_texts(snapshot)]
    if snapshot.wakes is not None:
        p50 = "" if snapshot.wake_ms is None else f", p50 {snapshot.wake_ms:.1f} ms"
        second.append(f"{snapshot.wakes} wakes{p50}")
    return [" · ".join(filter(None, first)), " · ".join(filter(None, second))]


def backend_text(backend: BackendRow | None) -> str:
    if backend is None:
        return "backend unknown"
    if backend.switching:
        return f"switching: {backend.switching}"
    slots = "" if backend.slots is None else f", {backend.slots} at once"
    name = backend.label.partition(" at ")[0]
    return f"backend {'up' if backend.up else 'DOWN'}: {name}{slots}"


def queue_text(queue: Queue | None) -> str:
    """
    >>> from hive.tui.snapshot import TenantQueue
    >>> queue_text(Queue(2, 3, 4, [TenantQueue("a", 1, 3), TenantQueue("b", 1, 0)]))
    'queue 3 waiting (a 3), 2 running'
    """
    if queue is None:
        return "queue unknown"
    tenants = ", ".join(f"{row.tenant} {row.waiting}" for row in queue.tenants if row.waiting)
    return f"queue {queue.waiting} waiting{f' ({tenants})' if tenants else ''}, {queue.running} running"


def _memory_texts(snapshot: Snapshot) -> list[str]:
    memory = snapshot.memory
    if memory is None:
        return []
    used, swap = memory.total_bytes - memory.available_bytes, memory.swap_total_bytes - memory.swap_free_bytes
    saved = sum(row.saved_bytes or 0 for row in snapshot.agents)
    texts = [f"RAM {size(used)}/{size(memory.total_bytes)}"]
    if memory.swap_total_bytes:
        texts.append(f"swap {size(swap)}/{size(memory.swap_total_bytes)}")
    return [*texts, f"saved {size(saved)}"]


def event_line(at: float, kind: str, text: str) -> str:
    """In local time."""
    return f"{time.strftime('%H:%M:%S', time.localtime(at))} {kind:<16} {text}"


def plain(snapshot: Snapshot, width: int, *, unicode: bool) -> str:
    """The whole screen as text: what `--once` prints."""
    columns = shown(width)
    lines = [one_line(line, unicode=unicode) for line in (*head_lines(snapshot), *snapshot.problems)]
    lines += ["", line_of([column.head for column in columns], columns, width).rstrip()]
    lines += [
        row_line(row, columns, width, unicode=unicode).rstrip()
        for row in ordered(snapshot.agents, COLUMNS[0], descending=False)
    ]
    return "\n".join(lines)
