"""The syntax trees of Hive's sources, parsed once for all tests that read them.

Files that import this are one piece of work for the processes of a run (tests/workers.py): they share what is parsed.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[1]
HIVE = ROOT / "hive"


@cache
def source_trees() -> Mapping[Path, ast.Module]:
    """Path of each module of `hive/` → its tree, by path."""
    gc.disable()  # it would look through all of them a hundred times
    try:
        return MappingProxyType({path: ast.parse(path.read_text(), str(path)) for path in sorted(HIVE.rglob("*.py"))})
    finally:
        gc.enable()
        gc.freeze()
