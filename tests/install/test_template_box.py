"""Templates on a whole box: an installed Hive forks agents into their units, and keeps them through ends and a reboot.

See test_box.py for the machine.
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
    with box_of("template_box_inside.py") as box:
        yield box


@pytest.fixture(scope="module")
def seen(box: Box) -> Seen:
    return box.boot("work")


@pytest.fixture(scope="module")
def second_boot(box: Box, seen: Seen) -> Seen:
    return box.boot("second_boot")


def test_an_agent_of_a_template_is_the_main_process_of_its_unit(seen: Seen) -> None:
    one = seen["one"]
    assert one["shown"] == {
        "MainPID": str(one["pid"]),
        "ActiveState": "active",
        "Slice": "hive-agents.slice",
        "Type": "notify",
        "Result": "success",
        "ExecMainStatus": "0",
    }, seen["helper's log"]
    lines = dict(line.split(":\t", 1) for line in seen["status of one"].splitlines() if ":\t" in line)
    assert (lines["PPid"], lines["NoNewPrivs"], lines["Seccomp"]) == ("1", "1", "2")
    assert {int(lines[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {0}


def test_its_journal_has_its_lines(seen: Seen) -> None:
    assert "began True 1 ['a']" in seen["one"]["logs"]
    assert "hive: " not in seen["one"]["logs"]


def test_its_template_is_a_unit_without_a_network(seen: Seen) -> None:
    assert seen["template"]["shown"]["ActiveState"] == "active"
    assert seen["template"]["shown"]["Slice"] == "hive-agents.slice"
    (row,) = [row for row in seen["template"]["listed"]["templates"] if row["name"] == "lib"]
    assert row["state"] == "ready"


def test_it_sleeps_and_wakes(seen: Seen) -> None:
    assert seen["slept"] == ["paused", "running"]


def test_its_exit_code_is_kept(seen: Seen) -> None:
    assert seen["ended"]["codes"]["reason"] == "exited with 7"
    # It wrote nothing: what systemd says of its unit is not its last line.
    assert seen["ended"]["said of codes"].startswith("hive: codes ended at once: exited with 7  [agent_failed]\n")


def test_it_is_killed_for_its_own_memory_and_told_so(seen: Seen) -> None:
    if not seen["ended"]["has memory"]:
        pytest.skip("this machine has no memory controller")
    assert "out of memory" in str(seen["ended"]["greedy"])


def test_a_template_that_cannot_start_means_an_ordinary_program_and_a_line(seen: Seen) -> None:
    assert "hive: started as a program of its own, not from template broken: " in seen["broken"]["logs"]
    assert seen["broken"]["shown"]["Type"] == "exec"
    assert '"template_not_used"' in seen["killed"]["helper's log"]


def test_the_end_of_a_template_ends_no_agent(seen: Seen) -> None:
    assert seen["killed"]["after template"] == [True, "running"]
    assert seen["killed"]["template anew"]


@pytest.mark.parametrize("what", ["hive-sandbox", "hive-daemon", "daemon-reload", "daemon-reexec"])
def test_it_lives_through_the_end_of(seen: Seen, what: str) -> None:
    assert seen["killed"][f"after {what}"] == [True, True]


def test_its_exit_code_is_kept_across_helpers(seen: Seen) -> None:
    assert "code=exited, status=5" in seen["killed"]["two"]


def test_it_is_forked_again_at_the_next_boot(second_boot: Seen) -> None:
    assert second_boot["shown"]["Type"] == "notify", second_boot["logs"]
    assert second_boot["template"]["ActiveState"] == "active"
