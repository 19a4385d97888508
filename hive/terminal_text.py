"""Signs that steer a terminal or mislead its reader, and their visible replacements; colour, counts in words, and the
cells of a bar.

Standard library only: every command pays for what this module imports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

MASK = "****"
"""Text in place of a value that the caller may not see."""

_STEERING = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff\U000e0000-\U000e007f]"
)
"""Signs that steer a terminal; signs that hide or turn round the letters beside them (Unicode TR 36); and halves of a
surrogate pair, which no terminal can be sent: a path whose bytes are no UTF-8 has them."""


def escaped(text: str) -> str:
    r"""The text with each such sign as Python writes it. Tabs and line feeds stay: they are the caller's to decide on.

    >>> escaped("a\x1b[2Jb\n"), escaped("\u202eevil\u200b"), escaped("\U000e0041\udcff"), escaped("é 模型")
    ('a\\x1b[2Jb\n', '\\u202eevil\\u200b', '\\U000e0041\\udcff', 'é 模型')
    """
    return _STEERING.sub(_escape, text)


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def wants_colour(*, is_terminal: bool, env: Mapping[str, str]) -> bool:
    """Whether to colour (no-color.org: NO_COLOR set and not empty says no).

    >>> wants_colour(is_terminal=True, env={}), wants_colour(is_terminal=True, env={"NO_COLOR": "1"})
    (True, False)
    """
    return is_terminal and not env.get("NO_COLOR") and env.get("TERM") != "dumb"


def counted(number: int, noun: str, nouns: str = "") -> str:
    """The number with its noun; `nouns` where more than one is not the noun and an s.

    >>> counted(1, "wake"), counted(0, "wake"), counted(1200, "agent is kept", "agents are kept")
    ('1 wake', '0 wakes', '1,200 agents are kept')
    """
    return f"{number:,} {noun if number == 1 else nouns or f'{noun}s'}"


def shares(parts: Sequence[float], whole: float, width: int) -> list[int]:
    """Number of `width` cells for each part of `whole`; a part above 0 has one, as long as there is room.

    >>> shares([80, 12], 140, 20), shares([1, 0, 99], 100, 10), shares([300], 100, 4), shares([1], 0, 4)
    ([11, 2], [1, 0, 9], [4], [0])
    """
    left, cells, seen, drawn = width, [], 0.0, 0
    for part in parts:
        seen += part
        upto = round(width * seen / whole) if whole > 0 else 0
        count = min(left, max(upto - drawn, 1 if part > 0 and whole > 0 else 0))
        cells.append(count)
        drawn += count
        left -= count
    return cells
