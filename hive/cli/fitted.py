"""Tables as wide as the terminal in front of which somebody sits; complete for a file or a pipe."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence

from hive.cli.text import narrowed, table
from hive.terminal_text import wants_colour

Colour = Callable[[str, str], str]


def fitted(
    headers: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    drop: Sequence[str] = (),
    prose: str = "",
    colour: Colour | None = None,
) -> str:
    """`table`; on a terminal `narrowed` to it and with `colour`. Columns in neither `drop` nor `prose` always stay."""
    if not sys.stdout.isatty():
        return table(headers, rows)
    width = shutil.get_terminal_size().columns
    kept, cut = narrowed(headers, rows, columns=width, drop=drop, prose=prose)
    if colour is None or not wants_colour(is_terminal=True, env=os.environ):
        return table(kept, cut)
    return table(kept, cut, colour=colour)
