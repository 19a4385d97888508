"""Signs that steer a terminal or mislead its reader, and their visible replacements, for text of strangers.

Standard library only: every command pays for what this module imports.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

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
