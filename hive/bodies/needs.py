"""The abilities and the context that a request needs of a model, by its body, before a model is chosen. Pure.

Looked for in the text as it stands, as to decode a long body takes milliseconds. Inside a JSON string every quote is
escaped, so that no prompt can look like a field.
"""

from __future__ import annotations

import re

import msgspec

TOOLS, VISION = "tools", "vision"
BYTES_A_TOKEN_AT_MOST = 8
"""Bytes of a prompt for each token at most; runs of blanks have more. English has 4, source code 3."""
_TOOLS = re.compile(rb'"tools"\s*:\s*\[\s*\{')
_IMAGE = re.compile(rb'"type"\s*:\s*"(?:image_url|image|input_image)"|"images"\s*:\s*\[\s*"')


class BodyNeeds(msgspec.Struct, frozen=True):
    """`abilities`: of TOOLS and VISION those it asks for; `tokens`: its prompt has so many at least."""

    abilities: tuple[str, ...] = ()
    tokens: int = 0


def needs_of(text: bytes) -> BodyNeeds:
    """
    >>> needs_of(b'{"tools": [{"type":"function"}], "messages": [{"content":"\\\\"type\\\\":\\\\"image\\\\""}]}')
    BodyNeeds(abilities=('tools',), tokens=10)
    >>> needs_of(b'{"messages":[{"role":"user","content":"x","images":["aGk="]}]}').abilities
    ('vision',)
    """
    sees = _IMAGE.search(text) is not None
    abilities = ((TOOLS,) if _TOOLS.search(text) else ()) + ((VISION,) if sees else ())
    return BodyNeeds(abilities, 0 if sees else len(text) // BYTES_A_TOKEN_AT_MOST)  # a picture is long and costs little
