"""Programs of other packages than those Hive's tests are installed with, each in an environment of its own.

tests/tools/setup_clients.sh makes it: a Python environment, and `node_modules`. Skipped with the reason without.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

PROGRAMS = Path(__file__).parent / "responses_clients"
RUNS_S = 300.0
MISSING = "no {}: run tests/tools/setup_clients.sh or set HIVE_CLIENTS"


def folder() -> Path:
    """`HIVE_CLIENTS`, else what the script left in its cache."""
    cache = os.environ.get("HIVE_CI_CACHE", "/var/cache/hive-ci")
    return Path(os.environ.get("HIVE_CLIENTS", f"{cache}/clients"))


def python_client(
    name: str, base_url: str, token: str, model: str, *, is_random: bool = True, **more: str
) -> dict[str, Any]:
    """Words of a program that uses this package. `is_random`: no answer of the model's ends but by its limit. `more`:
    variables of its environment."""
    python = folder() / "venv" / "bin" / "python"
    if not os.access(python, os.X_OK):
        pytest.skip(MISSING.format(name))
    command = [str(python), "-P", str(PROGRAMS / f"{_file(name)}.py")]
    return _told(command, base_url, token, model, is_random, more=more)


def node_client(
    name: str, base_url: str, token: str, model: str, *, is_random: bool, which: str = ""
) -> dict[str, Any]:
    """The same in JavaScript. Node looks for packages beside the program, so it is copied there. `which`: of several
    programs that use this package."""
    node, modules = shutil.which("node"), folder() / "node_modules"
    if node is None or not (modules / name).is_dir():
        pytest.skip(MISSING.format(f"npm package {name}"))
    program = (PROGRAMS / f"{_file(name)}{which}.mjs").read_text()
    command = [node, "--input-type=module", "--eval", program]
    return _told(command, base_url, token, model, is_random, cwd=modules.parent)


def _file(name: str) -> str:
    return name.strip("@").replace("/", "_").replace("-", "_")


def _told(
    command: list[str],
    base_url: str,
    token: str,
    model: str,
    is_random: bool,
    cwd: Path | None = None,
    more: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, Any]:
    env = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", "BASE_URL": base_url, "TOKEN": token, "MODEL": model}
    env |= {"RANDOM_MODEL": "1" if is_random else "", **more}
    ran = subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=RUNS_S, check=False)
    assert ran.returncode == 0, f"{ran.stdout[-2000:]}\n{ran.stderr[-4000:]}"
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told
