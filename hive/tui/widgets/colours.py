"""The colours of states and of what a line's parts mean. Without colours all of it can be read as well.

Without (NO_COLOR) Textual turns each colour into its grey, and red into one of the darkest: what is worst would be seen
least. So there nothing has a colour but what is dim.
"""

from __future__ import annotations

from collections.abc import Mapping

from rich.style import Style

from hive.tui.lines import Role

YELLOW, RED, GREEN, GREY, CYAN = "#EAB308", "#EF4444", "#22C55E", "#9CA3AF", "#22D3EE"
PAUSED_BEHIND = "#EAB3081A"
"""The paused badge: this yellow, a tenth of it behind."""
_STYLES: Mapping[Role, Style] = {
    "": Style(),
    "dim": Style(color=GREY),
    "bold": Style(bold=True),
    "mark": Style(bold=True, reverse=True),
    "good": Style(color=GREEN),
    "warn": Style(color=YELLOW),
    "bad": Style(color=RED, bold=True),
    "going": Style(color=CYAN),
    "rule": Style(color="#6B7280"),
}
_WITHOUT_COLOURS: Mapping[Role, Style] = {
    **dict.fromkeys(_STYLES, Style()),
    "dim": _STYLES["dim"],
    "rule": _STYLES["rule"],
    "bold": _STYLES["bold"],
    "mark": _STYLES["mark"],
    "bad": Style(bold=True),
}


def styles(*, with_colours: bool) -> Mapping[Role, Style]:
    return _STYLES if with_colours else _WITHOUT_COLOURS
