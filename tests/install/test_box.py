"""A whole box: a clean Debian 12 becomes a Hive, is used, rebooted, switched, brought up to date, and given back.

The machine is a Debian with systemd as PID 1 (tests/host/systemd_machine.py) in a root of its own that outlives its
reboots; it has this machine's network where packages are fetched, and else none. llama-server and vLLM are real with
tiny models; Ollama is Hive's own demo backend, which speaks its protocol and stands in for it here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from hive.install.step_list import STEPS
from tests import llama, vllm
from tests.host import systemd_machine
from tests.install.box import BROUGHT, LIBRARIES, Box, Seen, box_of

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    if reason := systemd_machine.why_not():
        pytest.skip(reason)
    with box_of("box_inside.py", is_installed=False) as box:
        yield box


@pytest.fixture(scope="module")
def installed(box: Box) -> Seen:
    return box.boot("install", online=True)


@pytest.fixture(scope="module")
def documents(box: Box, installed: Seen) -> Seen:
    return box.boot("documents")


@pytest.fixture(scope="module")
def servers(box: Box, installed: Seen) -> list[str]:
    if (
        llama.program() is None
        or vllm.environment() is None
        or not all((LIBRARIES / name).exists() for name in BROUGHT)
    ):
        pytest.skip("needs llama-server and vLLM (tests/tools) and libnuma1")
    return box.bring_servers()


@pytest.fixture(scope="module")
def first_day(box: Box, servers: list[str]) -> Seen:
    return box.boot("first_day", *servers)


@pytest.fixture(scope="module")
def second_boot(box: Box, first_day: Seen, servers: list[str]) -> Seen:
    return box.boot("second_boot", *servers)


@pytest.fixture(scope="module")
def switched(box: Box, second_boot: Seen, servers: list[str]) -> Seen:
    return box.boot("switches", *servers)


@pytest.fixture(scope="module")
def left(box: Box, switched: Seen, servers: list[str]) -> Seen:
    return box.boot("leave", *servers, online=True)


def lines_told(text: str) -> list[tuple[str, str]]:
    """Step and what it does, line by line, of a dry run; no notes."""
    found, step = [], ""
    for line in text.splitlines():
        if line.startswith("    "):
            found.append((step, line.strip()))
        else:
            step = line
    return [line for line in found if not line[1].startswith("note: ")]


def lines_said(text: str) -> list[tuple[str, str]]:
    """The same of a run, of all that it prints."""
    steps = {*STEPS, "packages", "environment", "code"}
    lines = [line.removeprefix("install.sh: ").partition(": ") for line in text.splitlines()]
    return [(step, words) for step, _, words in lines if step in steps and not words.startswith("note: ")]


# --- installing ----------------------------------------------------------------------------------------------------


def test_a_clean_debian_becomes_a_hive_with_one_command(installed: Seen) -> None:
    code, said = installed["first"]
    assert code == 0, said
    assert installed["active"] == "active"
    assert installed["failed"] == ""
    print(f"installed in {installed['took_s']:.0f} s, packages and environment with it")


def test_without_an_inference_server_status_says_one_command_that_gives_it_one(installed: Seen) -> None:
    """A new box ended with `Status: degraded`, and what it said to type listed three servers that were not there."""
    seen = installed["next"]
    assert len(seen["problems"]) == 1
    assert "none is installed where hive.conf says" in seen["problems"][0]
    assert (seen["ran"], seen["status"], seen["next"]) == (0, "ok", [])


def test_the_same_command_again_changes_nothing(installed: Seen) -> None:
    code, said = installed["again"]
    assert code == 0
    assert not re.search(r": (write|create|make|generate|link|replace) ", said), said


def test_a_dry_run_changes_nothing_and_tells_every_step_that_is_taken(installed: Seen) -> None:
    assert installed["changed_by_dry_run"] == []
    code, told = installed["dry"]
    assert code == 0, told
    # There is no Python with venv yet, so it tells what each step does at most.
    steps = {step for step, _ in lines_told(told)}
    taken = lines_said(installed["first"][1])
    assert {step for step, _ in taken} <= steps
    shell = ("packages", "environment")
    assert [line for line in lines_told(told) if line[0] in shell] == [line for line in taken if line[0] in shell]


# --- what the documents tell to type -------------------------------------------------------------------------------


def test_the_agents_of_the_documents_run_on_an_installed_hive_and_are_reached_through_it_alone(documents: Seen) -> None:
    """The README's was refused (exit 4): the policy took it for one in the host's network, which no unit is in."""
    assert documents["readme"][0] == 0, documents["readme"]
    assert (documents["described"][0], documents["described"][2]) == (0, 0), documents["described"]
    assert documents["echo without a token"] == documents["reporter without a token"] == 401
    assert documents["on the host"] == []


def test_a_program_is_run_inside_an_agent_of_an_installed_hive_within_its_policy(documents: Seen) -> None:
    inside = documents["inside"]
    code, out, err = inside["told"]
    assert code == 7, err
    assert out.startswith(f"{inside['uid']} ")
    assert "/hive-agent@" in out
    code, err = inside["refused"]
    assert code == 126
    assert "is not permitted by the policy" in err
    assert inside["units"] == ""


# --- the first day -------------------------------------------------------------------------------------------------


def test_doctor_finds_nothing_that_fails(first_day: Seen) -> None:
    """A check that has no answer in its time says so, and nothing of Hive: the machine of the tests is busy."""
    checks = first_day["doctor"]["checks"]
    assert [check["name"] for check in checks if check["status"] == "fail"] == []
    # This machine in a machine has no swap, no limits (hybrid control groups outside) and nobody who sets its clock.
    warned = {check["name"] for check in checks if check["status"] == "warn" and check["code"] != "check_late"}
    assert warned <= {"memory.swap", "host.cgroup", "host.clock"}


def test_the_target_is_reached_and_how_long_after_the_system_is_printed(first_day: Seen, second_boot: Seen) -> None:
    for name, seen in (("none", first_day), ("fifty", second_boot)):
        beyond = seen["boot"]["hive.target"] - seen["boot"]["basic.target"]
        print(f"hive.target {beyond:.1f} s after basic.target, {name} of the agents asleep at the shutdown before")
        assert beyond > 0


def test_an_agent_sleeps_and_a_call_wakes_it(first_day: Seen) -> None:
    assert first_day["paused"] == "paused"
    assert first_day["woken by a call"][0] == 200
    assert first_day["after the call"] == "running"
    assert '{"ready": true}' in first_day["logs"]


def test_who_is_in_no_group_reaches_nothing(first_day: Seen) -> None:
    people = first_day["people"]
    assert len(people["sockets"]) >= 6
    assert people["ann reaches"] == []
    assert people["ann operates"] == 4


def test_operators_operate_and_admins_administer(first_day: Seen) -> None:
    people = first_day["people"]
    assert (people["ben operates"], people["ben resumes"], people["ben administers"]) == (0, 0, 4)
    assert people["cid operates"] == 0


def test_the_api_on_tcp_lets_in_who_has_a_token(first_day: Seen) -> None:
    """Under what the daemon's unit permits it."""
    assert first_day["api"] == {
        "api-token": [200, 200],
        "internal-token": [200, 403],
        "made": [200, 403],
        "revoked": [401, 401],
        "ben makes one": 4,
        "where": {"listen": "127.0.0.1", "port": 3000},
    }


def test_secrets_are_read_by_nobody_and_stand_nowhere_else(first_day: Seen) -> None:
    assert first_day["people"]["read secrets"] == []
    assert first_day["leaks"] == []


def test_each_daemon_that_is_killed_comes_back_and_no_agent_dies(first_day: Seen) -> None:
    assert set(first_day["unkillable"]["s"]) == {"hive-proxy", "hive-daemon", "hive-sandbox", "hive-redis"}
    assert first_day["unkillable"]["the agent lives"]


# --- a reboot ------------------------------------------------------------------------------------------------------


def test_fifty_that_slept_at_the_shutdown_are_back_after_the_boot(first_day: Seen, second_boot: Seen) -> None:
    assert first_day["asleep"] == 50
    print(f"all were running {second_boot['all_up_s']:.1f} s after the first look")
    assert second_boot["s7 answers"] == 200


def test_what_has_no_restart_policy_ran_before_the_reboot_and_runs_after_it(second_boot: Seen) -> None:
    """In a container the boot id is the host's: it ended as `error: ended, how is unknown`."""
    assert second_boot["statuses"]["plain"] == "running"


def test_the_inference_server_that_was_chosen_is_started_again(first_day: Seen, second_boot: Seen) -> None:
    assert first_day["chosen"] == [0, ["hive-inference-llama"]]
    assert second_boot["backend"] == ["hive-inference-llama"]


def test_who_was_stopped_by_hand_stays_stopped(second_boot: Seen) -> None:
    assert second_boot["statuses"]["stopped-by-hand"] == "stopped"


# --- inference servers ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "unit"),
    [("vllm", "hive-inference-vllm"), ("llama", "hive-inference-llama"), ("ollama", "hive-inference")],
)
def test_a_switch_ends_with_one_server_that_answers(switched: Seen, target: str, unit: str) -> None:
    for code, active, answered in switched[target]:
        assert (code, active, answered) == (0, [unit], 200)


def test_a_switch_that_fails_is_rolled_back_and_says_why(switched: Seen) -> None:
    code, said, active, answered = switched["failing"]
    assert (code, active, answered) == (6, ["hive-inference-llama"], 200)
    assert "there is no /var/lib/hive/models/default" in said


def test_a_rotated_password_is_taken_up(switched: Seen) -> None:
    assert switched["rotated"]["ran"] == {"redis-daemon": 0}
    assert switched["rotated"]["chat"] == 200


# --- up to date, and away ------------------------------------------------------------------------------------------


def test_an_upgrade_keeps_every_agent(left: Seen) -> None:
    code, said = left["upgrade"]
    assert code == 0, said
    assert left["version"].startswith("9.")
    assert left["agents after"]["eve"] == "running"


def test_a_dry_run_of_an_upgrade_tells_line_by_line_what_it_does(left: Seen) -> None:
    """It omitted the new version's link, the restart of Hive and the removal of what was before."""
    code, told = left["dry upgrade"]
    assert code == 0, told
    assert lines_told(told) == lines_said(left["upgrade"][1])


def test_a_dry_run_of_a_purge_tells_line_by_line_what_goes(left: Seen) -> None:
    code, told = left["dry purge"]
    assert code == 0, told
    assert lines_told(told) == lines_said(left["purge"][1])


def test_an_upgrade_wakes_nobody(left: Seen) -> None:
    """A helper that was ended to be started again thawed everybody, as one that is stopped has to."""
    before, after = left["asleep"]
    assert {status for status, *_ in before.values()} == {"paused"}
    for name, (status, depth, generation, pid) in before.items():
        assert after[name] in ([status, depth, generation, pid], [status, "deep", generation, pid])  # deeper is no wake
    assert after.keys() == before.keys()
    assert left["frozen after a stop"] == []


def test_an_upgrade_that_does_not_come_up_is_taken_back(left: Seen) -> None:
    code, said = left["failed upgrade"]
    assert code == 6, said
    assert left["version then"] == left["version"]
    assert left["works then"] == 200


def test_without_purge_configuration_state_and_secrets_stay(left: Seen) -> None:
    assert left["uninstall"][0] == 0, left["uninstall"][1]
    assert left["kept"]
    tests_own = ("/srv/hive", "/etc/systemd/system/hive-test", "/etc/systemd/system/multi-user.target.wants/hive-test")
    elsewhere = [path for path in left["kept"] if not path.startswith(("/etc/hive", "/var/lib/hive", *tests_own))]
    assert elsewhere == []
    assert left["kept users"] == []
    assert left["back"][0] == 0, left["back"][1]
    assert len(left["agents back"]) == 54


@pytest.mark.parametrize(
    "what", ["files", "users", "groups", "units", "swaps", "groups of control", "runtime", "packages"]
)
def test_after_a_purge_the_machine_is_as_it_was(installed: Seen, left: Seen, what: str) -> None:
    assert left["purge"][0] == 0, left["purge"][1]
    before, after = set(installed["before"][what]), set(left["after"][what])
    brought = ("/usr/local/bin/llama-server", "/usr/local/bin/ollama", "/opt/vllm", "/srv/agents", "/usr/lib/x86_64")
    ours = {path for path in after - before if not path.startswith(brought)}
    assert ours == set()
    assert before - after == set()
