"""The pages of the book, and the code blocks in them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    if "decisions" not in path.parts
)
FENCED = re.compile(
    r"^(?P<indent> *)```(?P<kind>[\w-]*)[^\n]*\n(?P<text>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)


class CodeBlock(NamedTuple):
    """A fenced block of a page. `kind`: the word behind the fence, empty for none; `line`: of its fence."""

    page: str
    line: int
    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def blocks(page: str) -> Iterator[CodeBlock]:
    """The fenced blocks of a page, in their order."""
    return blocks_in((ROOT / page).read_text(), page)


def blocks_in(text: str, page: str = "") -> Iterator[CodeBlock]:
    """The same of a text.

    >>> [(block.line, block.kind, block.text) for block in blocks_in("One:\\n\\n  ```sh\\n  ls\\n  ```\\n")]
    [(3, 'sh', 'ls\\n')]
    """
    for found in FENCED.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        yield CodeBlock(page, line, found["kind"], textwrap.dedent(found["text"]))


def blocks_of(*kinds: str) -> list[CodeBlock]:
    """The blocks of these kinds of all pages."""
    return [block for page in PAGES for block in blocks(page) if block.kind in kinds]
