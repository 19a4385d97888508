"""Imports of the benchmarks: they run in CI only after everything else, and some stand in functions that come last."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

SCRIPTS = sorted((Path(__file__).parents[1] / "benchmarks").glob("*.py"))


def imported(script: Path) -> set[tuple[str, str]]:
    """Pairs (module, name) of each `from hive… import name`, wherever it stands."""
    tree = ast.parse(script.read_text())
    nodes = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {(node.module, one.name) for node in nodes if node.module and "hive" in node.module for one in node.names}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_a_benchmark_imports_is_there(script: Path) -> None:
    for module, name in imported(script):
        if module.split(".")[0] == "hive":
            found = importlib.import_module(module)
            assert hasattr(found, name) or importlib.import_module(f"{module}.{name}")
