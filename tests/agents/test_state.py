"""An agent's state is written in one file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hive import agents

ROOM = Path(agents.__file__).parent
OTHERS = sorted(path for path in ROOM.glob("*.py") if path.name != "state.py")


def is_state(node: ast.expr) -> bool:
    """Whether this is `state` or `self._state`."""
    return (isinstance(node, ast.Name) and node.id == "state") or (
        isinstance(node, ast.Attribute) and node.attr == "_state"
    )


def written(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each write to a LifecycleState, or to the record."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and is_state(node.value):
            yield node.lineno, ast.unparse(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if called.endswith(("effects.save", ".waiting.append")):
                yield node.lineno, called


@pytest.mark.parametrize("path", OTHERS, ids=lambda path: path.stem)
def test_only_state_py_changes_an_agents_state(path: Path) -> None:
    assert list(written(ast.parse(path.read_text(encoding="utf-8")))) == []


def test_a_write_is_seen() -> None:
    assert len(list(written(ast.parse("state.gone, self._state.pid = True, 1\nawait self._effects.save(agent)")))) == 3
