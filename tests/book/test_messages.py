"""Every message that docs/troubleshooting.md quotes has its words in the code.

A message is a line of a block marked `text`. Values in it may be any: what is compared is what a string of the code has
between its values, 8 characters at least.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.book.blocks import blocks
from tests.source_trees import source_trees

PAGE = "docs/troubleshooting.md"
LEAST = 8
VALUE = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
"""A value in a template that is no f-string: `{path}`, `{more:? (and * more)}`."""


def fragments_of(node: ast.expr) -> Iterator[str]:
    """The parts of a string of the code that stand between its values."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield from VALUE.split(node.value)
    elif isinstance(node, ast.JoinedStr):
        for part in node.values:
            if isinstance(part, ast.Constant):
                yield str(part.value)


@cache
def fragments() -> frozenset[str]:
    """All of `hive/`, those that are long enough to say something."""
    found = set()
    for tree in source_trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant | ast.JoinedStr):
                found |= {text.partition("\n")[0].strip(" .,:;") for text in fragments_of(node)}
    return frozenset(text for text in found if len(text) >= LEAST)


MESSAGES = [
    (block.line + number, line)
    for block in blocks(PAGE)
    if block.kind == "text"
    for number, line in enumerate(block.text.splitlines(), start=1)
]


@pytest.mark.parametrize(("number", "message"), MESSAGES, ids=[message[:60] for _, message in MESSAGES])
def test_every_message_that_is_quoted_is_one_of_the_code(number: int, message: str) -> None:
    """A quoted message that nobody prints any more is found by nobody."""
    told = message.strip().removesuffix("…").strip()
    assert any(fragment in told for fragment in fragments()), f"{PAGE}:{number}: {message!r}"


def test_a_message_of_nobody_is_noticed() -> None:
    assert not any(fragment in "the moon is made of green cheese" for fragment in fragments())
