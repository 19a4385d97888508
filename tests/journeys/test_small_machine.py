"""More agents than memory on a machine of its own: Debian's kernel, unified control groups and nothing else, swap.

A whole Hive runs there as root. Hive and the guest's program (small_machine_guest.py) are carried in, and what that
saw out. (Without KVM everything there takes ten times as long, so no time is asserted.)
"""

from __future__ import annotations

import compileall
import json
import shutil
import tempfile
from pathlib import Path
from py_compile import PycInvalidationMode
from typing import Any

import pytest

from tests import virtual_machine
from tests.host import systemd_machine
from tests.journeys import small_machine_guest as guest

PACKAGES = "systemd,systemd-sysv,dbus,python3,redis-server,linux-image-cloud-amd64,kmod"
MEMORY_MB = 640
MIB = 1 << 20
ENDS_WITHIN_S = 1380
"""It took 200 to 240 s where it had two cores for itself."""

UNIT = """[Unit]
After=multi-user.target
[Service]
Type=oneshot
OOMPolicy=continue
ExecStartPre=/bin/mount /dev/vdb /mnt
ExecStart=/bin/sh -c 'sh /mnt/job >/mnt/console.txt 2>&1'
ExecStopPost=-+/bin/umount /mnt
ExecStopPost=+/bin/systemctl --no-block --force poweroff
[Install]
WantedBy=multi-user.target
"""
JOB = """
fallocate -l 1200M /swap
chmod 600 /swap
mkswap /swap
swapon /swap
export PYTHONPATH=/mnt/packages:/mnt:/mnt/tests
timeout 1300 python3 /mnt/tests/journeys/small_machine_guest.py /mnt/results.json
dmesg | grep -i -e 'killed process' -e error -e zram
"""

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.timeout(1500)]
Told = dict[str, Any]


@pytest.fixture(scope="module")
def system() -> Path:
    return virtual_machine.system("small-machine", PACKAGES, size_mb=2200, prepare=_prepare)


def _prepare(root: Path) -> None:
    """The Redis there is only ever Hive's own."""
    systemd_machine.add_job(root, UNIT)
    (root / "etc/systemd/system/redis-server.service").symlink_to("/dev/null")


@pytest.fixture(scope="module")
def results(system: Path) -> Told:
    """The findings of the guest's program."""
    with tempfile.TemporaryDirectory(prefix="hive-vm-") as name:
        content = Path(name) / "content"
        _fill(content)
        console, found = virtual_machine.run(
            system, content, size_mb=300, append="rw", limit_s=ENDS_WITHIN_S, memory_mb=MEMORY_MB, cores=2
        )
        print(console)
    assert found, console
    told: Told = json.loads(found)
    return told


def _fill(content: Path) -> None:
    """Compiled here: there it would take a minute."""
    virtual_machine.copy_packages(content / "packages")
    journeys = content / "tests/journeys"
    journeys.mkdir(parents=True)
    for name in ("stack.py", "small_machine_guest.py"):
        shutil.copy(Path(__file__).with_name(name), journeys)
    shutil.copy(Path(__file__).parents[1] / "ports.py", journeys.parent)
    shutil.copytree(Path(__file__).with_name("programs"), journeys / "programs")
    (content / "job").write_text(JOB)
    mode = PycInvalidationMode.UNCHECKED_HASH
    compileall.compile_dir(content, quiet=2, stripdir=str(content), prependdir="/mnt", invalidation_mode=mode)


def states(told: Told) -> set[tuple[str, str, bool]]:
    """(status, depth, frozen by the kernel) there were."""
    return {(state["status"], state["depth"], state["frozen"]) for state in told["states"].values()}


def swapped(told: Told) -> int:
    return sum(state["swap_bytes"] for state in told["states"].values())


def test_the_machine_has_unified_control_groups_only(results: Told) -> None:
    assert results["mounts"] == ["cgroup2"]
    assert {"memory", "cpu", "pids"} <= set(results["controllers"])


@pytest.mark.parametrize("when", ["asleep", "asleep_again"])
def test_sleepers_whose_heaps_do_not_fit_into_the_memory_together_are_all_deep_asleep(results: Told, when: str) -> None:
    """At first because somebody said so, later by Hive's own rules."""
    told = results[when]
    assert states(told) == {("paused", "deep", True)}
    assert swapped(told) > told["memory"]["total_bytes"]


@pytest.mark.parametrize("when", ["asleep", "asleep_again"])
def test_what_was_written_to_swap_counts_as_available_although_the_kernel_has_not_dropped_it_yet(
    results: Told, when: str
) -> None:
    """And is: that much could be taken with next to nothing swapped out for it."""
    told = results[when]
    assert told["kernel_available_bytes"] < guest.TAKEN_BYTES
    assert told["memory"]["available_bytes"] > 2 * guest.TAKEN_BYTES
    assert told["swapped_out_bytes"] < guest.TAKEN_BYTES // 2


def assert_all_were_answered_in_the_end(told: Told) -> None:
    for answer in told["first"].values():
        if answer["status"] == 503:
            assert json.loads(answer["body"])["error"]["code"] == "not_awake"
            assert int(answer["retry_after"]) >= 1
        else:
            assert (answer["status"], answer["body"]) == (200, "whole")
    assert 200 in {answer["status"] for answer in told["first"].values()}
    assert set(told["answers"].values()) == {"whole"}
    assert (told["oom_kills"], told["same_agents"], told["same_hive"]) == (0, True, True)
    assert states(told) <= {("running", "awake", False), ("paused", "light", True), ("paused", "deep", True)}


def test_twenty_deep_sleepers_woken_at_once_are_answered_or_refused_and_nobody_dies(results: Told) -> None:
    told = results["woken_at_once"]
    assert len(told["first"]) == guest.AGENTS == 20
    assert_all_were_answered_in_the_end(told)


def test_most_of_them_waited_for_memory_and_hive_said_so(results: Told) -> None:
    """In the log: how long one waits, and so whether a look meets it, depends on the machine."""
    waited = results["woken_at_once"]["waited"]
    assert len(waited) > guest.AGENTS // 2
    assert all(int(need_mb) >= guest.HEAP_MIB for need_mb in waited.values())


@pytest.mark.parametrize("process", ["sandbox", "daemon", "proxy"])
def test_no_agent_dies_of_a_kill_and_sleepers_wake_with_all_they_had(results: Told, process: str) -> None:
    told = results["killed"][process]
    assert told["answers"] == ["whole", "whole"]
    assert told["same_agents"]
    assert all(state["frozen"] is (state["status"] == "paused") for state in told["states"])


def test_who_takes_more_memory_than_it_may_is_killed_told_why_and_nobody_else_is(results: Told) -> None:
    told = results["limits"]
    assert (told["hog"]["status"], told["hog"]["reason"]) == ("error", "exited with 137: out of memory")
    assert told["hog_log"].startswith("hive: it used more memory than it may (limits.memory_mb = 48)")
    assert (told["oom_kills"], told["same_agents"]) == (1, True)


def test_who_forks_without_end_gets_no_further_than_it_may(results: Told) -> None:
    told = results["limits"]
    assert told["bomb_made"] == told["bomb_holds"] == 16
    assert told["bomb_refused"] == "max 1\n"


def test_who_spins_gets_about_the_share_it_may_have(results: Told) -> None:
    told = results["limits"]
    assert guest.CPU_SHARE / 3 < told["cores"] < guest.CPU_SHARE * 1.5
    assert (told["not_enforced"], told["left"]) == (["", ""], [])


def test_agents_of_a_template_are_charged_only_what_is_their_own(results: Told) -> None:
    """By the kernel's memory controller: what they share is the template's, once, and Hive shows it so."""
    told = results["templated"]
    assert told["notes"] == ["", ""]
    assert len(set(told["said"])) == 1
    assert min(told["resident_bytes"]) > (guest.SHARED_MIB + guest.OWN_MIB) * MIB
    assert all(guest.OWN_MIB * MIB < charged < guest.SHARED_MIB * MIB for charged in told["charged_bytes"])
    for charged, shown in zip(told["charged_bytes"], told["shown_bytes"], strict=True):
        assert abs(shown - charged) < 2 * MIB
    assert told["template"]["agents"] == ["forked0", "forked1"]
    assert told["template"]["held_bytes"] > told["template"]["shared_bytes"] > guest.SHARED_MIB * MIB // 2


def test_zram_compresses_as_zstd_where_the_kernel_can(results: Told) -> None:
    """Debian's can; a kernel that cannot is told by `hive doctor memory.swap`."""
    assert "[zstd]" in results["on_zram"]["algorithms"]


def test_a_root_that_may_not_advise_others_has_their_groups_reclaimed_to_zram(results: Told) -> None:
    """All of what they had is in zram, which takes about half of it."""
    told = results["on_zram"]
    assert told["how"] == "reclaim"
    assert states(told["asleep"]) == {("paused", "deep", True)}
    assert all(state["ram_bytes"] < 4 * MIB for state in told["asleep"]["states"].values())
    assert told["zram_bytes"] < 0.8 * swapped(told["asleep"])
    assert_all_were_answered_in_the_end(told["woken_at_once"])
