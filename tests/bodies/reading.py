"""Both steps of reading a body, one after the other, as for a server that has the model by its name."""

from __future__ import annotations

from hive.bodies.body import Asked, Opening, Want, complete, open_body
from hive.settings.field_rules import FieldRules

ANY = Opening()


def read_body(text: bytes, rules: FieldRules, want: Want, opening: Opening = ANY, *, on_loop: bool = False) -> Asked:
    """Reads as both steps do: the body that goes upstream, and what is known of it. Raises what the two steps raise."""
    opened = open_body(text, rules, opening)
    return complete(opened, want, opened.named.model, on_loop=on_loop)
