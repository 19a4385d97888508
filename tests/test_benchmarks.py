"""Imports of the benchmarks: they run in CI only after everything else, and some stand in functions that come last. And
what CI asks of two of them."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import json
import os
import re
import shlex
from pathlib import Path

import pytest

from hive.cli.main import main

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))


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


@pytest.mark.parametrize(
    ("hive_ms", "nginx_ms", "kept"),
    [
        (0.15, 0.09, ["kept", "kept"]),
        (0.20, 0.09, ["NOT KEPT", "NOT KEPT"]),  # 0.15 ms at all percentiles, 3.75 of nginx's
        (0.14, 0.05, ["kept", "NOT KEPT"]),  # nginx adds nothing that could be measured
    ],
)
def test_what_hive_adds_is_judged_by_the_median_run(
    hive_ms: float, nginx_ms: float, kept: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three runs of seven with something else on the machine count for nothing."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    spec = importlib.util.spec_from_file_location("proxy_benchmark", ROOT / "benchmarks/proxy.py")
    assert spec is not None
    assert spec.loader is not None
    proxy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(proxy)
    quiet = {"direct": [0.05] * 100, "nginx": [nginx_ms] * 100, "hive": [hive_ms] * 100}
    lines = proxy.judge_latency([quiet] * 4 + [quiet | {"hive": [9.0] * 100}] * 3)
    assert [line.rpartition(": ")[2] for line in lines] == kept


@pytest.mark.parametrize("kind", ["own", "openai"])
def test_the_density_run_of_ci_is_one_that_the_command_takes(
    kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In no more than six minutes. Here it is refused for the user, which comes after all that it was asked for."""
    (line,) = re.findall(r"beside benchmark-density timeout (\d+ .*)", (ROOT / ".ci/run").read_text())
    limit_s, program, *words = shlex.split(line.replace('"${density[@]}"', f"--agents {kind}"))
    assert (int(limit_s) <= 360, program) == (True, ".venv/bin/hive")
    assert {"--quick", "200M", kind} <= set(words)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(words) == 4
    assert "only root may" in capsys.readouterr().err


def test_the_changelog_says_what_the_instructions_of_the_baseline_are_for() -> None:
    told = " ".join((ROOT / "CHANGELOG.md").read_text().split())
    assert json.loads((ROOT / "benchmarks/instructions.json").read_text())["why"] in told


def names_of(path: Path) -> set[str]:
    """Names that a module has at its top, also by imports of its own."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.alias(name=name, asname=asname):
                found.add(asname or name)
    return found


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_what_a_benchmark_imports_of_the_tests_is_there(script: Path) -> None:
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            file = node.module.removeprefix("tests.").replace(".", "/") + ".py"
            places = [ROOT / part / file for part in ("benchmarks", "tests", "tests/fakes", "tests/proxy")]
            for place in [place for place in places if place.exists()][:1]:
                assert {alias.name for alias in node.names} <= names_of(place), f"{place}, from {script}"
