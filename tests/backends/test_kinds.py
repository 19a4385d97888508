"""The registered kinds: the names of the contract, and nothing but data and pure functions."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from hive.backends import kinds
from hive.backends.kinds import SPECS
from hive.domain import BackendKind
from hive.settings.table import Settings

ROOM = Path(kinds.__file__).parent
ASKING = {"ask", "backend", "one_token", "pulling", "recognise"}
"""Modules that send something to a server."""
LOADED = """
import sys
import hive.settings.table, hive.domain, hive.errors
import hive.models.adapter_names, hive.models.cache_epochs, hive.models.capabilities, hive.models.salts
import hive.models.whereabouts
before = set(sys.modules)
import hive.backends.kinds
print(*sorted(set(sys.modules) - before))
import hive.proxy.server
print(*sorted(name for name in sys.modules if name.startswith("hive.")))
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def loaded() -> list[set[str]]:
    """By the kinds alone, besides what they stand on; by the proxy of Hive's own; by it of all, by package."""
    done = subprocess.run([sys.executable, "-c", LOADED], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_each_name_of_the_contract_is_a_kind_and_each_kind_has_one() -> None:
    assert list(SPECS) == [str(kind) for kind in BackendKind]
    assert all(spec.kind == name for name, spec in SPECS.items())


def test_the_proxy_loads_the_kinds_and_nothing_that_asks() -> None:
    by_kinds, hives, packages = loaded()
    standard = {name for name in by_kinds if name.partition(".")[0] in sys.stdlib_module_names}
    assert all(name.startswith("hive.backends.") for name in by_kinds - standard - {"hive.backends"}), by_kinds
    assert not {name for name in standard if name.partition(".")[0] in ("asyncio", "socket", "ssl", "subprocess")}
    asking = {f"hive.backends.{name}" for name in ASKING}
    assert "hive.backends.vllm" in hives
    assert not hives & asking
    assert not packages & {"httpx", "httpcore"}


def test_the_proxy_loads_no_client_of_redis() -> None:
    _, hives, packages = loaded()
    assert not packages & {"redis", "hiredis"}
    assert "hive.metering.usage_spool" in hives
    assert not hives & {"hive.store.live", "hive.store.redis_at", "hive.store.viewer"}


@pytest.mark.parametrize("kind", SPECS)
def test_a_kinds_file_does_nothing_itself(kind: str) -> None:
    """Functions without await, and no import of what does something."""
    tree = ast.parse((ROOM / f"{kind}.py").read_text())
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert not imported & {f"hive.backends.{name}" for name in ASKING}
    assert not imported & {"asyncio", "os", "socket", "subprocess", "time"}
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.AsyncFunctionDef | ast.Await)]


@pytest.mark.parametrize("kind", SPECS)
def test_its_limits_of_grammars_are_in_the_settings(kind: str) -> None:
    assert hasattr(Settings(), SPECS[kind].requests.grammar)
