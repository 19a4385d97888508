"""schemathesis asks a live daemon whatever its description allows, and much that it does not: every phase (examples,
coverage, fuzzing, stateful along the links) and every check, with the exceptions that api_fuzzing.toml gives reasons
for. Nothing that it makes up can be run, opened or reached (populated.py).

A few examples of each here, always the same; fewer, and no `coverage`, where HIVE_EXAMPLES is not `all`.
HIVE_API_FUZZ_S=600 gives each of the two runs so many seconds, and other examples each time.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.api.populated import Where, running
from tests.examples import is_all, stride

if TYPE_CHECKING:
    from tests.conftest import RedisServer

HERE = Path(__file__).parent
CONFIG = HERE / "api_fuzzing.toml"
PHASES = "examples,coverage,fuzzing,stateful" if is_all() else "examples,fuzzing,stateful"
LONG_S = int(os.environ.get("HIVE_API_FUZZ_S", "0"))
EXAMPLES = 6 // stride(3)
QUICK = """
[[operations]]
# Hundreds of cases each, or a process for each case.
include-operation-id = ["create", "apply", "change_config", "query_database"]
phases.coverage.enabled = false
"""


@pytest.fixture
def directory(short_path: Path) -> Path:
    for name in ("s", "r"):
        (short_path / name).mkdir()
    return short_path


@pytest.fixture
def with_redis(redis_server: RedisServer, directory: Path) -> Iterator[Where]:
    (directory / "r" / "redis.sock").symlink_to(redis_server.socket)
    with running(directory) as where:
        yield where


@pytest.fixture
def without_redis(directory: Path) -> Iterator[Where]:
    with running(directory) as where:
        yield where


def asked(where: Where, directory: Path, phases: str = PHASES) -> subprocess.CompletedProcess[str]:
    """schemathesis, when it is through: what it says."""
    config = directory / "schemathesis.toml"
    config.write_text(CONFIG.read_text() + ("" if LONG_S else QUICK))
    command = [str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(config), "run"]
    command += [f"{where.url}/api/openapi.json", "--header", f"Authorization: Bearer {where.token}", "--no-color"]
    command += ["--max-examples", str(EXAMPLES), "--phases", PHASES if LONG_S else phases]
    command += ["--max-time", str(LONG_S)] if LONG_S else ["--seed", "6"]
    environment = {**os.environ, "PYTHONPATH": f"{HERE.parent}:{HERE.parents[1]}"}
    return subprocess.run(command, capture_output=True, text=True, cwd=directory, env=environment, check=False)


@pytest.mark.redis
@pytest.mark.timeout(LONG_S + 400)
def test_nothing_that_is_asked_ends_in_a_5xx_or_in_another_shape(with_redis: Where, directory: Path) -> None:
    ran = asked(with_redis, directory)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.wide
@pytest.mark.timeout(LONG_S + 400)
def test_nor_does_it_while_redis_is_down(without_redis: Where, directory: Path) -> None:
    # What is wrong with a request is found before Redis is asked, so `coverage`, mostly that, is left to the other run.
    ran = asked(without_redis, directory, "examples,fuzzing,stateful")
    assert ran.returncode == 0, ran.stdout + ran.stderr
