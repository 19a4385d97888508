"""Not one packet leaves that was not asked for: real servers, and a network namespace with a counter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import llama

pytestmark = [
    pytest.mark.redis,
    pytest.mark.engines,
    pytest.mark.llama,
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="a network of its own takes root"),
]


@pytest.fixture(scope="module")
def told() -> Any:
    if llama.program() is None:
        pytest.skip("no llama-server: run tests/tools/build_llama_server.sh or set HIVE_LLAMA_SERVER")
    command = ["unshare", "-n", sys.executable, "-m", "tests.journeys.cloud_story"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_remote_model_is_asked_nothing_by_hive_itself(told: Any) -> None:
    assert told["idle"] == 0
    assert told["near"] == [200, ""]


def test_with_a_killed_local_server_not_one_packet_leaves(told: Any) -> None:
    """`plan` is an alias of the local model first, `best` of one that is not there, the task's second rung is far: a
    fallback would serve all of them."""
    assert told["killed"] == 1
    assert all(status in (502, 503) for status, _ in told["down"]), told["down"]
    assert told["task"][0] in (502, 503), told["task"]
    assert told["stand_in"] == told["local_only"] == (refused := [403, "cloud_not_permitted"])
    assert (told["local_only_background"], told["local_only_job"]) == (refused, refused[1])
    assert told["asked_stays"] == 0


def test_what_asks_for_it_by_name_leaves_and_under_never_nothing_does(told: Any) -> None:
    """By that the counter is seen to count: nobody answers, so it ends with 504."""
    assert told["by_name"] == [504, "backend_timeout"]
    assert told["left"] > 0
    assert told["fallback"], "the same task goes on to its far rung where that is permitted"
    assert told["never"] == [403, "cloud_not_permitted"]
    assert told["never_stays"]
