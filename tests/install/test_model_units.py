"""Models of the pool as units, and leases as scopes, as a real systemd runs them for the helper.

The server of a model is a scripted one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host import systemd_machine

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.timeout(600)]

INSIDE = f"{systemd_machine.HIVE_THERE}/tests/install/model_units_inside.py"
PYTHONPATH = f"PYTHONPATH={systemd_machine.PACKAGES_THERE}:{systemd_machine.HIVE_THERE}"
JOB = f"{PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 timeout 350 python3 -P {INSIDE} /out/seen"
A, B, C = "model-a-00000001", "b-00000002", "c-00000003"


@pytest.fixture(scope="module")
def seen() -> Iterator[dict[str, Any]]:
    if reason := systemd_machine.why_not():
        pytest.skip(reason)
    systemd_machine.make_root()
    with tempfile.TemporaryDirectory(prefix="hive-models-") as name:
        console = systemd_machine.run(JOB, Path(name), limit_s=400)
        report = Path(name) / "seen"
        assert report.exists(), console
        found = json.loads(report.read_text())
        assert "no unit" in found, console + found["journal"]
        yield found


def test_a_model_begins_serves_and_is_looked_at(seen: dict[str, Any]) -> None:
    life = seen["life"]
    begun, serving, now = life["begun"], life["serving"], life["now"]
    assert begun["state"] in ("starting", "serving")
    assert (begun["pid"], begun["run"]) == (serving["pid"], serving["run"]) == (now["pid"], now["run"])
    assert (life["unit"], now["state"], now["grant"]) == ("active", "serving", {"cpu": 700})
    assert now["pid"] in now["pids"]
    assert len(now["pids"]) == 4, "supervisor, warden, server, its child"
    assert now["bytes"] > 1 << 20
    assert now["cpu_s"] > 0
    assert life["again"]["run"] == now["run"]


def test_its_log_is_its_own(seen: dict[str, Any]) -> None:
    assert seen["life"]["log"].splitlines()[0] == f"the supervisor of {A} begins with {{'cpu': 700}}"
    assert "Started" not in seen["life"]["log"]


def test_its_socket_is_for_the_group(seen: dict[str, Any]) -> None:
    assert seen["life"]["socket"].endswith("770")


def test_it_may_write_where_its_own_socket_is_and_nowhere_else_among_sockets(seen: dict[str, Any]) -> None:
    said = seen["life"]["writes"]
    assert said.pop(f"/run/hive-model/{A}") == "yes"
    assert set(said) == {"/run/hive-model/other", "/run/hive-model", "/run/hive-inference"}
    assert "yes" not in said.values(), said


def test_stopped_it_leaves_nothing(seen: dict[str, Any]) -> None:
    assert seen["life"]["left"] == [[], "inactive", []]
    assert seen["life"]["directories"] == []
    ended = seen["life"]["ended"]
    assert (ended["code"], ended["was_oom"], ended["pid"], ended["pids"]) == (0, False, 0, [])


def test_a_crash_is_told_with_the_supervisors_reason_and_nothing_is_started_again(seen: dict[str, Any]) -> None:
    assert (seen["crash"]["code"], seen["crash"]["was_oom"]) == (137, False)
    assert "exit code 137" in seen["crash"]["why"]
    assert (seen["crash"]["left"], seen["crash"]["restarts"]) == ([], "0")


def test_a_supervisor_that_is_killed_leaves_nothing(seen: dict[str, Any]) -> None:
    assert (seen["killed"]["code"], seen["killed"]["left"], seen["killed"]["restarts"]) == (137, [], "0")


def test_one_that_does_not_come_up_is_told_with_its_last_lines(seen: dict[str, Any]) -> None:
    assert seen["not up"]["states"] == ["ended"]
    assert seen["not up"]["code"] not in (0, None)
    assert any("refused: " in line for line in seen["not up"]["last"])


def test_what_ignores_sigterm_is_killed_with_all_that_came_of_it(seen: dict[str, Any]) -> None:
    assert seen["stubborn"][0] == []
    assert seen["stubborn"][1] in ("failed", "inactive")


def test_one_is_stopped_while_it_starts(seen: dict[str, Any]) -> None:
    left, state, states = seen["while it starts"]
    assert (left, states) == ([], ["stopping", "ended"])
    assert state in ("failed", "inactive")


def test_one_that_is_killed_for_memory_is_told_so(seen: dict[str, Any]) -> None:
    if seen["oom"] is None:
        pytest.skip("this host's memory controller is one of v1, which systemd in the machine does not have")
    assert (seen["oom"]["was_oom"], seen["oom"]["left"]) == (True, [])
    assert seen["oom"]["why"] == "the kernel killed it: out of memory"


def test_a_new_helper_finds_what_runs_what_loads_and_what_ended(seen: dict[str, Any]) -> None:
    adopted = seen["adopted"]
    assert {slot: str(adopted["found"][slot]["pid"]) for slot in (A, B)} == {
        slot: adopted["before"][slot] for slot in (A, B)
    }
    assert (adopted["found"][A]["state"], adopted["found"][B]["state"]) == ("serving", "starting")
    assert adopted["found"][A]["grant"] == {"cpu": 700}
    assert (adopted["C"]["state"], adopted["C"]["code"]) == ("ended", 137), adopted["C"]
    assert adopted["grants"] == sorted([f"{A}.json", f"{B}.json"])
    assert adopted["left"] == []


def test_one_that_waits_is_what_starts(seen: dict[str, Any]) -> None:
    found = seen["prepared"]
    waiting = found["waiting"]
    assert (waiting["unit"], waiting["grants"], waiting["told"]) == ("activating", [f"{A}.awaited"], [])
    assert found["pids"] == [waiting["pid"]] * 2
    assert found["grant"] == {"cpu": 700}
    assert found["log"].splitlines()[0] == f"the supervisor of {A} begins with {{'cpu': 700}}"
    assert found["left"] == [[], "inactive"]


def test_one_that_waits_in_vain_leaves_nothing(seen: dict[str, Any]) -> None:
    found = seen["prepared"]
    assert (found["replaced"], found["dropped"]) == ("inactive", ["inactive", []])
    assert found["ended"] == {"without its mark": "inactive", "killed": "inactive"}
    assert found["next helper"] == [[], "inactive", []]


def test_without_the_unit_it_says_so_and_leaves_nothing(seen: dict[str, Any]) -> None:
    name, message, grants = seen["no unit"]
    assert (name, grants) == ("NotFound", [])
    assert f"hive-model@{C}.service" in message


# --- leases as scopes (lease_scopes_inside.py) -------------------------------------------------------------------


def test_a_holder_of_the_group_comes_into_a_scope_of_its_own(seen: dict[str, Any]) -> None:
    found = seen["leases"]
    assert found["socket"] == ["660", True]
    assert (found["in"]["ok"], found["in"]["held_by"]) == (True, "scope")
    assert "0::/hive.slice/hive-lease.slice/hive-lease-l-1.scope" in found["in"]["group"]
    state, held_by, is_main, processes, held = found["running"]
    assert (state, held_by, is_main, processes) == ("active", "scope", True, 2)
    assert 20 << 20 < held < 80 << 20
    assert sorted(found["tasks"].split()) == ["Slice=hive-lease.slice", "TasksMax=infinity"]


def test_what_left_its_session_and_its_parent_holds_on_also_for_a_new_helper(seen: dict[str, Any]) -> None:
    assert seen["leases"]["left"] == 1
    assert seen["leases"]["adopted"] == [True, True]


def test_the_end_of_a_lease_is_that_of_its_scope(seen: dict[str, Any]) -> None:
    found = seen["leases"]
    assert found["ended"] == ["it is over", "inactive"], "what was left stood still"
    assert found["killed"] == [-9, "inactive"]
    assert found["stopped"] == [-15, ""], "systemctl stop"
    assert found["units"] == ""


def test_nobody_else_comes_in_and_no_scope_is_taken_over(seen: dict[str, Any]) -> None:
    found = seen["leases"]
    assert found["stranger"] == ["not_permitted", 9, "inactive"]
    assert found["outsider"] == ["not_permitted", 9]
    assert found["in the way"] == ["wrong_state", 9, None]
