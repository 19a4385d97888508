"""`hive doctor` where systemd is PID 1 and the units, users and directories of an appliance are there."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.host import systemd_machine

JOB = f"""
export PYTHONPATH={systemd_machine.PACKAGES_THERE}:{systemd_machine.HIVE_THERE} PYTHONDONTWRITEBYTECODE=1
cd {systemd_machine.HIVE_THERE}
hive() {{ python3 -m hive "$@"; }}
python3 - <<'PLACE'
from pathlib import Path
from hive.files import share
for one in share.units(share.directory()):
    Path(one.path).parent.mkdir(parents=True, exist_ok=True)
    Path(one.path).write_bytes(one.content)
PLACE
systemd-sysusers
systemd-tmpfiles --create /etc/tmpfiles.d/hive.conf
systemctl daemon-reload
hive secrets generate
chmod 755 /etc/hive
hive doctor --json >/out/placed.json
setpriv --reuid=65534 --regid=65534 --clear-groups python3 -m hive doctor --json >/out/nobody.json

chmod 755 /var/lib/hive/daemon
chown hive:hive /run/hive/a
chmod 644 /etc/hive/secrets/box-key
echo '# mine' >>/etc/systemd/system/hive-redis.service
hive doctor files units --json >/out/faults.json
hive doctor files --fix --json >/out/fixed.json
hive doctor units.exposure --json >/out/exposure.json
printf '[inference]\nllama_slot_dir = /var/lib/hive-slots\n' >/etc/hive/hive.conf
chmod 644 /etc/hive/hive.conf
hive config check >/out/config.txt
hive doctor parking --json >/out/parking.json
printf '[inference]\nllama_slot_dir = /var/lib/hive/slots\n' >/etc/hive/hive.conf
hive config check >/out/kept.txt
hive doctor parking --json >/out/slots.json
chmod 770 /var/lib/hive/slots/engine
hive doctor parking --json >/out/slots_open.json
"""

pytestmark = [pytest.mark.systemd, pytest.mark.root, pytest.mark.timeout(600)]


TEXTS = ("config.txt", "kept.txt")


class Told:
    """The output of each run of doctor."""

    def __init__(self, console: str, out: Path) -> None:
        self.console = console
        self.runs: dict[str, Any] = {
            path.stem: {one["name"]: one for one in json.loads(path.read_text() or '{"checks": []}')["checks"]}
            for path in out.glob("*.json")
        }
        self.config, self.kept = ((out / name).read_text() if (out / name).exists() else "" for name in TEXTS)

    def of(self, run: str, name: str) -> Any:
        assert name in self.runs.get(run, {}), self.console
        return self.runs[run][name]


@pytest.fixture(scope="module")
def told() -> Iterator[Told]:
    if reason := systemd_machine.why_not():
        pytest.skip(reason)
    systemd_machine.make_root()
    with tempfile.TemporaryDirectory(prefix="hive-doctor-") as name:
        console = systemd_machine.run(JOB, Path(name), limit_s=450)
        print(console)
        yield Told(console, Path(name))


@pytest.mark.parametrize("name", ["host.systemd", "host.descriptors", "units.drift", "files.secrets", "files.state"])
def test_what_was_installed_passes(told: Told, name: str) -> None:
    one = told.of("placed", name)
    assert one["status"] == "pass", one


def test_control_groups_are_found(told: Told) -> None:
    """This machine may be one of a hybrid host, whose v2 has a freezer and nothing else."""
    one = told.of("placed", "host.cgroup")
    assert one["reason"].startswith("v2 at /sys/fs/cgroup"), one


def test_that_hive_is_stopped_is_told_once_and_not_unit_by_unit(told: Told) -> None:
    one = told.of("placed", "hive.answers")
    assert (one["status"], "hive.target is stopped" in one["reason"]) == ("fail", True), one
    assert told.of("placed", "units.active")["status"] == "skip"


def test_an_ordinary_user_is_told_what_takes_root(told: Told) -> None:
    one = told.of("nobody", "files.secrets")
    assert (one["status"], one["fix"]) == ("skip", "sudo hive doctor files.secrets"), one
    assert not [one for one in told.runs["nobody"].values() if "fault in this check" in one["reason"]]


def test_planted_faults_are_found_and_mended(told: Told) -> None:
    words = {"files.secrets": "box-key", "files.state": "/var/lib/hive/daemon", "files.sockets": "/run/hive/a"}
    for name, word in words.items():
        found = told.of("faults", name)
        assert (found["status"], word in found["reason"]) == ("fail", True), found
        mended = told.of("fixed", name)
        assert (mended["status"], mended["fixed"]) == ("pass", "owner and mode of 1 set"), mended


def test_a_changed_unit_is_found(told: Told) -> None:
    found = told.of("faults", "units.drift")
    assert (found["status"], "hive-redis.service" in found["reason"]) == ("fail", True), found


def test_the_units_have_the_scores_that_were_promised(told: Told) -> None:
    one = told.of("exposure", "units.exposure")
    assert one["status"] == "pass", one


def test_a_place_where_an_installed_hive_keeps_no_slots_is_told(told: Told) -> None:
    why = "an installed Hive keeps them in /var/lib/hive/slots and nowhere else"
    assert f"[inference] llama_slot_dir has no effect: {why}" in told.config, told.console
    found = told.of("parking", "parking.directory")
    assert (found["status"], why in found["reason"]) == ("warn", True), found


def test_the_place_where_an_installed_hive_keeps_slots_has_to_be_as_it_is_made(told: Told) -> None:
    assert "llama_slot_dir" not in told.kept, told.console
    assert told.of("slots", "parking.directory")["status"] == "pass"
    found = told.of("slots_open", "parking.directory")
    assert (found["status"], "/var/lib/hive/slots/engine" in found["reason"]) == ("warn", True), found
