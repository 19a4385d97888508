"""Parked slots on a whole box, where servers are another user than the daemon. Real llama-servers, of the pool and the
one in use. See test_box.py for the machine.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests import llama
from tests.host import systemd_machine
from tests.install.box import LIBRARIES, Box, Seen, box_of, installation
from tests.install.test_pool_box import BROUGHT

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.llama, pytest.mark.timeout(900)]

IN_USE = "default"
KEPT, ENGINE = ["kept", "hive", "hive", "0o700"], ["engine", "hive", "hive-inference", "0o1730"]
"""Owner, group and mode of the two directories."""


def bring(box: Box) -> list[str]:
    """Makes the model, and returns what systemd-nspawn is told so that llama-server is there."""
    path = box.root / "var/lib/hive/models/alpha.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(llama.MAKE_MODEL), str(path)], check=True, stdout=subprocess.DEVNULL)
    path.chmod(0o644)
    libraries = [f"--bind-ro={LIBRARIES / name}" for name in BROUGHT]
    return [f"--bind-ro={llama.program()}:/usr/local/bin/llama-server", *libraries]


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    if reason := systemd_machine.why_not():
        pytest.skip(reason)
    if llama.program() is None or not all((LIBRARIES / name).exists() for name in BROUGHT):
        pytest.skip("needs llama-server (tests/tools/build_llama_server.sh) and what it is linked to")
    with box_of("parking_box_inside.py") as box:
        yield box


@pytest.fixture(scope="module")
def installed(box: Box) -> Seen:
    return installation().seen


@pytest.fixture(scope="module")
def servers(box: Box) -> list[str]:
    return bring(box)


@pytest.fixture(scope="module")
def parked(box: Box, servers: list[str]) -> Seen:
    return box.boot("park", *servers)


@pytest.fixture(scope="module")
def off(box: Box, parked: Seen, servers: list[str]) -> Seen:
    return box.boot("off", *servers)


@pytest.fixture(scope="module")
def left(box: Box, off: Seen, servers: list[str]) -> Seen:
    return box.boot("leave", *servers, online=True)


def is_kept(told: list[int]) -> bool:
    tokens, reused = told
    return reused >= 0.95 * tokens


def is_cold(told: list[int]) -> bool:
    tokens, reused = told
    return reused < tokens / 2


def test_an_installed_hive_is_told_of_no_setting_in_vain(parked: Seen) -> None:
    assert "llama_slot_dir" not in parked["checked"]
    [check] = parked["doctor"]["checks"]
    assert (check["status"], check["reason"]) == ("pass", "slots are kept in /var/lib/hive/slots")


@pytest.mark.parametrize("model", ["alpha", IN_USE])
def test_the_first_request_after_a_sleep_reuses_what_another_agent_has_displaced(parked: Seen, model: str) -> None:
    assert parked["switched"][0] == 0, parked["switched"][1]
    found = parked[model]
    assert is_cold(found["other"]), "the slot is another's"
    assert found["again"][0] == found["first"][0]
    assert is_kept(found["again"]), (found, parked["log"])
    assert (found["restored"], found["left"]) == (1, [])


@pytest.mark.parametrize("model", ["alpha", IN_USE])
def test_what_is_kept_is_the_daemons_alone(parked: Seen, model: str) -> None:
    (kept, engine, group, file) = parked[model]["there"]
    assert [kept, engine] == [KEPT, ENGINE]
    assert (group[1:], file[1:]) == (["hive", "hive", "0o700"], ["hive", "hive", "0o600"])


@pytest.mark.parametrize("spoiled", ["tampered", "another's"])
def test_a_file_that_is_not_as_it_was_written_is_never_given_to_the_server(parked: Seen, spoiled: str) -> None:
    assert is_cold(parked[spoiled]["again"])
    assert parked[spoiled]["refused"] >= 1


def test_what_is_kept_outlives_kill_9_of_its_server_and_of_the_daemon(parked: Seen) -> None:
    assert is_kept(parked["killed"]["server"]), parked["log"]
    assert is_kept(parked["killed"]["daemon"]), parked["log"]
    assert parked["killed"]["swept"] == []


def test_a_server_can_neither_change_nor_replace_what_the_daemon_handed_it_nor_list_what_is_others(
    parked: Seen,
) -> None:
    found = parked["tried"]["hive-inference"]
    assert {what for what, outcome in found.items() if outcome == "done"} == {"read", "make", "own"}
    assert set(parked["tried"]["hive-proxy"].values()) <= {"PermissionError", "FileNotFoundError"}


def test_what_is_kept_outlives_a_reboot_and_goes_with_the_setting(parked: Seen, off: Seen) -> None:
    assert (off["kept"], len(off["kept"])) == (parked["slept"], 1)
    assert is_kept(off["again"])
    why = "an installed Hive keeps them in /var/lib/hive/slots and nowhere else"
    assert f"[inference] llama_slot_dir has no effect: {why}" in off["elsewhere"]
    assert off["off"] == []
    assert off["on again"] == 1


def test_an_uninstall_removes_what_was_kept_and_a_purge_everything(installed: Seen, left: Seen) -> None:
    assert left["kept"] == 1
    assert "remove what is in /var/lib/hive/slots/kept" in left["told"]
    assert left["uninstalled"] == [0, []]
    assert left["back"] == [0, [KEPT, ENGINE]]
    assert left["purged"][0] == 0, left["purged"][1]
    brought = ("/usr/local/bin/llama-server", "/usr/lib/x86_64")
    more = set(left["after"]["files"]) - set(installed["before"]["files"])
    assert {path for path in more if not path.startswith(brought)} == set()
    assert set(left["after"]["runtime"]) == set(installed["before"]["runtime"])
