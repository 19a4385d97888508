"""`hive doctor` beside a Hive that was started by hand with a configuration of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.journeys.stack import Stack, stack

pytestmark = [pytest.mark.redis]


def examined(hive: Stack, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "hive", "doctor", "hive.config", "--state-dir", str(hive.state), "--json", *words]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    (check,) = json.loads(ran.stdout)["checks"]
    return dict(check)


def test_it_reads_the_configuration_that_is_in_force(tmp_path: Any) -> None:
    """With `hive up --config FILE` it read /etc/hive/hive.conf, and found that to be right, whatever FILE had."""
    with stack(config="[tenant acme]\nweight = 2\n") as hive:
        file = str(hive._config)
        assert hive.health()["config_file"] == file
        found = examined(hive)
        assert (found["status"], file in found["reason"]) == ("pass", True), found
        hive._config.write_text(hive._config.read_text() + "[tenant other]\nwieght = 2\n")
        found = examined(hive)
        assert (found["status"], "did you mean" in json.dumps(found)) == ("fail", True), found
        assert file in json.dumps(found)
        another = tmp_path / "another.conf"
        another.write_text("[proxy]\nqueue_depth = 3\n")
        found = examined(hive, "--config", str(another))
        assert (found["status"], str(another) in found["reason"]) == ("pass", True), found
