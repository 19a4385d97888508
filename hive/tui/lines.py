"""Lines of text with the meaning of each part: shown in a pane, and printed by `--once`. Pure, without colours."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from hive.tui.cells import fit, one_line

Role = Literal["", "dim", "bold", "mark", "good", "warn", "bad", "going", "rule"]
"""`going`: on its way from one state to another; `mark`: not to be overlooked, without any colour either."""


ROLES: Mapping[str, Role] = {
    "running": "good",
    "paused": "warn",
    "error": "bad",
    "stopped": "dim",
    "created": "dim",
}
"""Of an agent's state; all others are `going`."""


class LinePart(NamedTuple):
    text: str
    role: Role = ""


Line = tuple[LinePart, ...]


def line(*parts: LinePart | str) -> Line:
    """
    >>> line("a", LinePart("b", "bad"))
    (LinePart(text='a', role=''), LinePart(text='b', role='bad'))
    """
    return tuple(LinePart(part) if isinstance(part, str) else part for part in parts)


def text_of(lines: Iterable[Line]) -> str:
    return "\n".join("".join(part.text for part in parts) for parts in lines)


def joined(parts: Iterable[Sequence[LinePart]], between: str = " · ") -> Line:
    """
    >>> text_of([joined([line("a"), (), line("b", "c")])])
    'a · bc'
    """
    found: list[LinePart] = []
    for some in parts:
        if some:
            found += [LinePart(between, "dim"), *some] if found else some
    return tuple(found)


def cut(parts: Line, width: int, *, unicode: bool = True) -> Line:
    """On one line of this width, and as safe to print as `one_line` makes it.

    >>> cut(line("GPU 0", LinePart(" lost", "bad")), 8)
    (LinePart(text='GPU 0', role=''), LinePart(text=' l…', role='bad'))
    """
    found, left = [], width
    for text, role in parts:
        if left <= 0:
            break
        text = fit(one_line(text, unicode=unicode), left, unicode=unicode)
        found.append(LinePart(text, role))
        left -= len(text)
    return tuple(found)


def wrapped(text: str, width: int, *, role: Role, most: int) -> list[Line]:
    """At most `most` lines of a text.

    >>> text_of(wrapped("the daemon is down", 10, role="bad", most=2))
    'the daemon\\nis down'
    """
    found = textwrap.wrap(text, max(1, width)) or [""]
    if len(found) > most:
        found = [*found[: most - 1], " ".join(found[most - 1 :])]
    return [line(LinePart(some, role)) for some in found]


def rule(title: str, width: int, *, unicode: bool = True) -> Line:
    """A pane's first line.

    >>> text_of([rule("queue", 14)]), text_of([rule("queue: 10 wait", 9, unicode=False)])
    ('─ queue ──────', '- queue~ ')
    """
    stroke = "─" if unicode else "-"
    said = fit(one_line(title, unicode=unicode), max(0, width - 3), unicode=unicode)
    return line(
        LinePart(f"{stroke} ", "rule"), LinePart(said, "bold"), LinePart(f" {stroke * (width - len(said) - 3)}", "rule")
    )
