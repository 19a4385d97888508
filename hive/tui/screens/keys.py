"""The keys that do something here, read from the bindings themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import ActiveBinding, Binding, BindingType
from textual.containers import Container, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Static

_NAMES = {
    "slash": "/",
    "question_mark": "?",
    "less_than_sign": "<",
    "greater_than_sign": ">",
    "escape": "esc",
}

_OF_TEXTUAL = {"command_palette": "Command palette"}
"""The one thing of Textual's own that is worth telling; the rest scrolls and moves the focus."""


class Keys(ModalScreen[None]):
    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,question_mark,q", "dismiss", "Back")]

    def __init__(self, active: Mapping[str, ActiveBinding]) -> None:
        super().__init__()
        self._active = dict(active)

    def compose(self) -> ComposeResult:
        lines = key_lines(self._active)
        half = (len(lines) + 1) // 2
        with VerticalScroll(classes="box"), Container(id="keys"):
            yield Static("\n".join(lines[:half]), markup=False)
            yield Static("\n".join(lines[half:]), markup=False)


def told(active: Mapping[str, ActiveBinding]) -> Iterator[tuple[str, str, ActiveBinding]]:
    """Each thing that can be done here once: in words, by which keys, and how."""
    keys: dict[str, list[str]] = {}
    first: dict[str, ActiveBinding] = {}
    for key, found in active.items():
        if found.enabled and _is_ours(found):
            what = _OF_TEXTUAL.get(found.binding.action, found.binding.description)
            keys.setdefault(what, []).append(_NAMES.get(key, key))
            first.setdefault(what, found)
    for what, names in keys.items():
        yield what, ", ".join(names), first[what]


def key_lines(active: Mapping[str, ActiveBinding]) -> list[str]:
    """`p  Pause`, for all there is."""
    shown = [(what, keys) for what, keys, _ in told(active)]
    width = max((len(keys) for _, keys in shown), default=0)
    return [f"{keys:>{width}}  {what}" for what, keys in shown]


def _is_ours(found: ActiveBinding) -> bool:
    if not type(found.node).__module__.startswith("hive."):
        return False
    own = {binding.action for binding in type(found.node).BINDINGS if isinstance(binding, Binding)}
    return found.binding.action in own | _OF_TEXTUAL.keys()
