"""How results are written for people: aligned columns, human units, nothing a terminal would obey. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hive.terminal_text import escaped

UNKNOWN = "-"
AT_REST = frozenset({"created", "stopped", "error"})
"""`hive.domain.AT_REST`, whose import would cost every command 20 ms."""
_COLOUR = re.compile(r"(\x1b\[[0-9;]{0,32}m)")


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns two spaces apart, without a trailing one; just the headers where there are no rows.

    >>> print(table(["NAME", "STATUS"], [["alice", "running"]]))
    NAME   STATUS
    alice  running
    """
    lines = [list(headers), *([one_line(cell) for cell in row] for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def fields(pairs: Sequence[tuple[str, str]]) -> str:
    """`name: value` lines, right-aligned like `systemctl status`; pairs without a value are left out.

    >>> print(fields([("Status", "running"), ("Port", ""), ("RAM", "9 MB")]))
    Status: running
       RAM: 9 MB
    """
    kept = [(name, one_line(value)) for name, value in pairs if value]
    width = max((len(name) for name, _ in kept), default=0)
    return "\n".join(f"{name:>{width}}: {value}" for name, value in kept)


def size(count: float | None) -> str:
    """Bytes for people, in powers of 1024 as `ps` and `free -h` count.

    >>> size(None), size(512), size(94371840), size(1610612736)
    ('-', '512 B', '90 MiB', '1.5 GiB')
    """
    if count is None:
        return UNKNOWN
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while count >= 1000 and power < len(units) - 1:
        count /= 1024
        power += 1
    return f"{count:.1f} {units[power]}" if power and count < 10 else f"{count:.0f} {units[power]}"


def number(count: float | None) -> str:
    """A count; what is unknown is not 0.

    >>> number(None), number(1234567)
    ('-', '1,234,567')
    """
    return UNKNOWN if count is None else f"{count:,}"


def span(seconds: float | None) -> str:
    """A length of time, in its two largest units.

    >>> span(0.4), span(59), span(3700), span(90000), span(None)
    ('0s', '59s', '1h 1m', '1d 1h', '-')
    """
    if seconds is None:
        return UNKNOWN
    left = int(max(0.0, seconds))
    parts: list[str] = []
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60), ("s", 1)):
        if left >= length or (unit == "s" and not parts):
            parts.append(f"{left // length}{unit}")
            left %= length
    return " ".join(parts[:2])


def ago(then: float | None, now: float) -> str:
    """How long ago a Unix time was.

    >>> ago(100.0, 165.0), ago(None, 0.0)
    ('1m 5s ago', '-')
    """
    return UNKNOWN if then is None else f"{span(now - then)} ago"


def milliseconds(ms: float | None) -> str:
    """
    >>> milliseconds(2.53), milliseconds(1234.0), milliseconds(None)
    ('2.5 ms', '1,234 ms', '-')
    """
    if ms is None:
        return UNKNOWN
    return f"{ms:.1f} ms" if ms < 100 else f"{ms:,.0f} ms"


def status(found: str) -> str:
    """What an agent is, to go into a sentence.

    >>> status("stopped"), status("error")
    ('stopped', 'in error')
    """
    return "in error" if found == "error" else found


def one_line(text: str) -> str:
    r"""`harmless`, and on one line: a line break in what an agent said would forge a row.

    >>> one_line("multi\nline\t1")
    'multi line 1'
    """
    return harmless(" ".join(text.split()) if "\n" in text or "\t" in text else text)


def harmless(text: str, *, colours: bool = False) -> str:
    r"""Text an agent chose, without what would steer the terminal; with `colours` those are kept.

    >>> harmless("a\x1b]0;title\x07b\nc"), harmless("\x1b[31mred\x1b[2J", colours=True), harmless("\u202eevil")
    ('a\\x1b]0;title\\x07b\nc', '\x1b[31mred\\x1b[2J', '\\u202eevil')
    """
    pieces = _COLOUR.split(text) if colours else [text]
    return "".join(piece if colours and _COLOUR.fullmatch(piece) else escaped(piece) for piece in pieces)
