"""Model jobs on a whole box: their process is started by a socket of systemd, locked up, killed, and started again.

See test_box.py for the machine. The model is the demo backend's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.host import systemd_machine
from tests.install.box import Box, Seen, box_of

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    if reason := systemd_machine.why_not():
        pytest.skip(reason)
    with box_of("job_box_inside.py") as box:
        yield box


@pytest.fixture(scope="module")
def seen(box: Box) -> Seen:
    return box.boot("work")


@pytest.fixture(scope="module")
def left(box: Box, seen: Seen) -> Seen:
    return box.boot("leave")


def test_the_first_job_starts_their_process_and_has_a_result(seen: Seen) -> None:
    assert seen["before"]["ActiveState"] == "inactive"
    assert seen["first"]["status"] == "completed", seen["logs"]
    assert seen["first"]["answer"]
    assert (seen["running"]["ActiveState"], seen["running"]["User"]) == ("active", "hive-jobs")
    print(f"PSS of the process of jobs: {seen['pss_kb'] / 1000:.1f} MB")


def test_it_has_no_capability_no_network_and_its_own_sockets_only(seen: Seen) -> None:
    fields = dict(line.split(":", 1) for line in seen["status"].splitlines())
    assert {fields[name].strip() for name in ("CapEff", "CapPrm", "CapBnd")} == {"0000000000000000"}
    assert (fields["NoNewPrivs"].strip(), fields["Seccomp"].strip()) == ("1", "2")
    assert seen["network"]
    assert seen["sockets"] == {
        "/run/hive/proxy/jobs.sock": "hive-proxy hive-jobs 660",
        "/run/hive-jobs/link.sock": "hive hive 600",
    }


def test_killed_it_is_started_by_the_next_job_also_for_another_daemon(seen: Seen) -> None:
    assert [seen[name]["status"] for name in ("second", "third")] == ["completed", "completed"], seen["logs"]
    assert seen["after kill"]["ActiveState"] == "active"
    assert seen["stopped"][0] == 0
    assert seen["stopped"][1] != "active"


def test_doctor_finds_nothing_wrong_with_it(seen: Seen) -> None:
    checks = seen["doctor"]["checks"]
    about = [check for check in checks if check["name"].startswith(("units", "files"))]
    assert about
    assert [check for check in about if check["status"] == "fail"] == []


def test_nothing_of_it_is_left(left: Seen) -> None:
    code, said = left["ran"]
    assert (code, left["left"]) == (0, []), said
    assert "hive-jobs" not in left["users"]
