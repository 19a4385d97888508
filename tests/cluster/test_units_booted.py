"""Units of conf/cluster on a real systemd, as users of their own: started, killed, started again."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.cluster.ray_cluster import environment
from tests.cluster.vllm_router import program
from tests.host import systemd_machine
from tests.host.systemd_machine import HIVE_THERE, PACKAGES_THERE

pytestmark = [pytest.mark.ray, pytest.mark.root]
JOB = f"PYTHONPATH={HIVE_THERE}:{PACKAGES_THERE} python3 {HIVE_THERE}/tests/cluster/machine_inside.py"
LIMIT_S = 600.0
DYNAMIC_UIDS = range(61184, 65520)
"""Those of DynamicUser= (systemd.exec(5))."""


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Any:
    if reason := systemd_machine.why_not():
        pytest.skip(reason)
    packages = {"/opt/vllm-router": program().parents[1], "/opt/ray": environment()}
    systemd_machine.make_root()
    binds = [
        f"--bind-ro={next(venv.glob('lib/python3*/site-packages'))}:{place}/lib/python3.11/site-packages"
        for place, venv in packages.items()
    ]
    out = tmp_path_factory.mktemp("out")
    print(systemd_machine.run(JOB, out, *binds, limit_s=LIMIT_S))
    return json.loads((out / "seen.json").read_text())


def test_the_router_runs_as_a_user_of_its_own_and_comes_back_after_a_kill(seen: Any) -> None:
    found = seen["router"]
    assert found["up_s"] >= 0
    assert found["owner"] in DYNAMIC_UIDS
    assert found["one_lost_s"] >= 0
    assert found["again_s"] >= 0
    assert found["unit"] == {"ActiveState": "active", "NRestarts": "1"}


def test_rays_head_asks_for_its_token_and_comes_back_with_its_application_after_a_kill(seen: Any) -> None:
    found = seen["ray"]
    assert found["up_s"] >= 0
    assert found["owner"] in DYNAMIC_UIDS
    assert (found["without_token"], found["with_token"]) == (401, 200)
    assert found["again_s"] >= 0
    assert found["unit"] == {"ActiveState": "active", "NRestarts": "1"}
    assert found["stopped"] in ("inactive", "failed")  # failed: some of it had to be killed
    assert found["left"] == []
