"""The keys that do something here, read from the bindings themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

_NAMES = {
    "slash": "/",
    "question_mark": "?",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "escape": "esc",
}

_OF_TEXTUAL = "command_palette"
"""The one thing of Textual's own that is worth telling; the rest scrolls and moves the focus."""


class Keys(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "dismiss", "Back")]

    def __init__(self, active: Mapping[str, ActiveBinding]) -> None:
        super().__init__()
        self._active = dict(active)

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="box"):
            yield Static("\n".join(key_lines(self._active)), markup=False)


def key_lines(active: Mapping[str, ActiveBinding]) -> list[str]:
    """`p  Pause`: each thing that can be done once, with all its keys."""
    keys: dict[str, list[str]] = {}
    for key, found in active.items():
        if found.enabled and _is_ours(found):
            keys.setdefault(found.binding.description, []).append(_NAMES.get(key, key))
    shown = {what: ", ".join(names) for what, names in keys.items()}
    width = max((len(names) for names in shown.values()), default=0)
    return [f"{names:>{width}}  {what}" for what, names in shown.items()]


def _is_ours(found: ActiveBinding) -> bool:
    if not type(found.node).__module__.startswith("hive."):
        return False
    own = {binding.action for binding in type(found.node).BINDINGS if isinstance(binding, Binding)}
    return found.binding.action in own | {_OF_TEXTUAL}
