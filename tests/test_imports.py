"""Modules that each process of Hive does without: what one import brings stays as long as the process lives.

`python benchmarks/memory.py --modules daemon` says what each import of a process costs.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

CONTROL = {"httpx", "prometheus_client", "pydantic", "rich", "textual", "yaml", "sqlite_utils", "pynvml", "mcp"}
"""Some 2 to 12 MB each; what is needed now and then is imported then."""
DATA = CONTROL | {"redis", "starlette", "uvicorn", "sqlite3", "http.client", "urllib.request", "html", "statistics"}


@pytest.mark.parametrize(
    ("module", "without"),
    [
        ("hive.up.up", DATA - {"sqlite3"}),
        ("hive.daemon", CONTROL | {"urllib.request", "http.cookiejar", "wsgiref"}),
        ("hive.proxy.server", DATA),
        ("hive.sandbox.server", DATA),
        ("hive.bodies.body_worker", DATA | {"asyncio", "ssl"}),
        ("hive.runtimes.log_process", DATA | {"asyncio", "ssl", "msgspec"}),
    ],
)
def test_a_process_does_without_what_it_does_not_need(module: str, without: set[str]) -> None:
    program = f"import sys, {module}; print(*sorted({without!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
